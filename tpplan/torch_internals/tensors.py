"""Tensors: storages, counts of in-place writes, hooks on gradients; parts of a DTensor without its dispatch;
and tensors that have memory only where something is written to them.

DTensor's public to_local and from_local are autograd functions. At every read of every parameter they would cost 20
times as much as reading the attribute.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tpplan.torch_internals import pytree
from tpplan.torch_internals.groups import mesh_of_one
from tpplan.torch_internals.probes import Probe

#: hooks by the number that torch gives each
Hooks = dict[int, Callable[..., Any]]


def storage_key(tensor: Tensor) -> int:
    """A number that is equal for tensors on one storage, meta tensors too, for as long as the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


class StorageRef:
    """The number of a tensor's storage, which is no other storage's while this object exists; the storage's memory is
    not kept."""

    __slots__ = ("_weak", "key")

    def __init__(self, tensor: Tensor) -> None:
        self.key = storage_key(tensor)
        refer: Callable[..., object] = StorageWeakRef
        self._weak = refer(tensor.untyped_storage())


def has_storage(tensor: Tensor) -> bool:
    """False for tensors of other memory than strided one, as oneDNN's."""
    return bool(torch._C._has_storage(tensor))


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to in place, through any of its views. Raises RuntimeError for an inference
    tensor, which does not count writes."""
    return int(tensor._version)


def gradient_hooks(tensor: Tensor) -> Hooks:
    """The hooks on a tensor's gradient (register_hook), not to be changed."""
    return tensor._backward_hooks or {}


def accumulated_hooks(tensor: Tensor) -> Hooks:
    """The hooks on a leaf's accumulated gradient (register_post_accumulate_grad_hook). Where there are any, this is the
    tensor's own table: removing an entry removes the hook."""
    hooks: Hooks | None = tensor._post_accumulate_grad_hooks
    return hooks if hooks is not None else {}


def is_of_functorch(tensor: Tensor) -> bool:
    """True for a wrapper tensor inside torch.vmap, torch.func.grad and the like."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def plain_calls() -> contextlib.AbstractContextManager[object]:
    """A context in which calls skip every TorchFunctionMode and every subclass's __torch_function__."""
    found: contextlib.AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return found


def local_part(tensor: DTensor) -> Tensor:
    """A DTensor's local tensor itself, not a view, without a node of autograd."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """A DTensor's DTensorSpec: mesh, placements, and the global shape and strides."""
    return tensor._spec


def labelled(local: Tensor, spec: Any) -> DTensor:
    """A DTensor of a local tensor and a spec, which are not checked against each other; without requires_grad."""
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def address_getters() -> frozenset[Any]:
    """The functions that a TorchFunctionMode sees where code asks a tensor for its address."""
    return frozenset({Tensor.data_ptr, inspect.getattr_static(Tensor, "_cdata").__get__})


def is_strided_shard(placement: Placement) -> bool:
    """True for the placement that FSDP2 gives a dim which tensor parallelism, on a later mesh axis, shards too."""
    return isinstance(placement, _StridedShard)


def without_modes() -> contextlib.AbstractContextManager[object]:
    """A context in which every dispatch mode is off."""
    found: contextlib.AbstractContextManager[object] = _disable_current_modes()
    return found


def until_written(tensor: Tensor) -> Tensor:
    """The tensor, whose elements share memory, as one that may be written to: it gets memory of its own then, and so do
    views of it, each for itself. Values are lost by that."""
    found: Tensor = Tensor._make_subclass(_Unwritten, tensor)  # no view, as a write would be its base's in autograd
    return found


class _Unwritten(Tensor):
    """Zeros that share memory until something is written to them; nobody reads their values."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            try:
                found = func(*args, **kwargs)
            except RuntimeError:  # as torch refuses writes to shared memory, before it writes
                shared = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _shares_memory(leaf)]
                if not shared:
                    raise
                for leaf in shared:
                    leaf.data = torch.zeros_like(leaf, memory_format=torch.contiguous_format)
                found = func(*args, **kwargs)
            return pytree.tree_map(_kept, found) if isinstance(found, Tensor | tuple | list) else found


def _shares_memory(leaf: Any) -> bool:
    return isinstance(leaf, _Unwritten) and leaf.untyped_storage().nbytes() < leaf.numel() * leaf.element_size()


def _kept(leaf: Any) -> Any:
    is_plain = type(leaf) is Tensor and not leaf.requires_grad
    is_view = is_plain and leaf.untyped_storage().nbytes() < leaf.numel() * leaf.element_size()
    return until_written(leaf) if is_view else leaf


# ---- probes


def _storages() -> bool:
    x = torch.empty(4, device="meta")
    y = torch.empty(4, device="meta")
    return storage_key(x) == storage_key(x.view(2, 2)) != storage_key(y)


def _versions() -> bool:
    x = torch.zeros(2)
    before = version_of(x)
    x.view(2, 1).add_(1)
    return version_of(x) == before + 1


def _hooks() -> bool:
    x = torch.zeros(2, requires_grad=True)
    is_empty = not gradient_hooks(x) and not accumulated_hooks(x)
    x.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    x.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    return is_empty and len(gradient_hooks(x)) == len(accumulated_hooks(x)) == 1


def _functorch() -> bool:
    seen: list[bool] = []

    def see(row: Tensor) -> Tensor:
        seen.append(is_of_functorch(row))
        return row

    torch.vmap(see)(torch.zeros(2, 2))
    return seen == [True] and not is_of_functorch(torch.zeros(2))


def _plain_calls() -> bool:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError("asked")

    with plain_calls():
        return torch.zeros(2).as_subclass(Loud).shape == (2,)


def _addresses() -> bool:
    asked: list[Any] = []

    class Asking(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with Asking():
        found = x.data_ptr(), x._cdata
    return len(found) == len(asked) == 2 and set(asked) == address_getters()


def _parts() -> bool:
    local = torch.ones(2, 2)
    given = DTensor.from_local(local, mesh_of_one(), run_check=False)
    again = labelled(local_part(given), spec_of(given))
    return local_part(again) is local_part(given) and again.placements == given.placements and not again.requires_grad


def _references() -> bool:
    """A storage's number is not given to another one while it is referred to, though its memory is."""
    x = torch.ones(1 << 16)
    key, own = storage_key(x), StorageRef(x)
    del x
    return (
        own.key == key and all(storage_key(torch.ones(1 << 16)) != key for _ in range(8)) and has_storage(torch.ones(1))
    )


def _modes_off() -> bool:
    class Loud(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("asked")

    x = torch.ones(2)
    loud: Any = Loud
    with loud(), without_modes():
        return torch.equal(x + x, torch.full((2,), 2.0))


def _written() -> bool:
    found = until_written(torch.zeros(()).expand(2, 3))
    found[:, 0].mul_(2.0)
    found += torch.ones(3, requires_grad=True)
    return found.requires_grad and found.untyped_storage().nbytes() == 24


PROBES = (
    Probe(
        name="addresses",
        uses="Tensor._cdata",
        needed_for="refusing code that depends on a tensor's address",
        works=_addresses,
    ),
    Probe(
        name="storages",
        uses="UntypedStorage._cdata",
        needed_for="knowing which values of a trace share memory",
        works=_storages,
    ),
    Probe(
        name="references to storages",
        uses="torch.multiprocessing.reductions.StorageWeakRef, torch._C._has_storage",
        needed_for="letting go of products under selective recomputation once they are summed over ranks",
        works=_references,
    ),
    Probe(
        name="counts of writes",
        uses="Tensor._version",
        needed_for="finding values that were written to",
        works=_versions,
    ),
    Probe(
        name="hooks on gradients",
        uses="Tensor._backward_hooks, Tensor._post_accumulate_grad_hooks",
        needed_for="refusing or moving hooks that would stay on replaced parameters",
        works=_hooks,
    ),
    Probe(
        name="tensors of torch.func",
        uses="torch._C._functorch.is_functorch_wrapped_tensor",
        needed_for="leaving code under torch.vmap whole",
        works=_functorch,
    ),
    Probe(
        name="calls past modes",
        uses="torch._C.DisableTorchFunction",
        needed_for="looking at tensors while a trace runs",
        works=_plain_calls,
    ),
    Probe(
        name="DTensor's parts",
        uses="DTensor._local_tensor, DTensor._spec, DTensor.__new__",
        needed_for="reading parameters at the speed of an attribute",
        works=_parts,
    ),
    Probe(
        name="switching modes off",
        uses="torch.utils._python_dispatch._disable_current_modes",
        needed_for="weights made anew by the constructor, checks in the first step",
        works=_modes_off,
    ),
    Probe(
        name="memory at the first write",
        uses="Tensor._make_subclass, torch._C.DisableTorchFunctionSubclass, and the refusal of writes to shared memory",
        needed_for="stages of models whose code writes to what another stage's module gives",
        works=_written,
    ),
)
