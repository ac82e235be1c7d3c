"""A model's tensors on the meta device get memory: of each parameter this rank's part alone.

What holds a parameter goes on holding it: the tensor object stays the same and its content is swapped, so that tied
weights stay tied, and an optimizer or FSDP2 that knows it needs nothing told.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.apply.model_match import modules_by_name, plan_name
from tpplan.core.errors import ModelError, TpplanError, WeightsError
from tpplan.torch_internals.modules import is_persistent, own_buffers
from tpplan.torch_internals.tensors import is_strided_shard, spec_of
from tpplan.torch_internals.tensors import local_part as local_tensor

#: a part of a tensor, a slice of each dim
Box = tuple[slice, ...]
#: of what an error lists, so many by name
LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parameter or a persistent buffer, and all names that state_dict has for it; tied weights have several."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def local(self) -> Tensor:
        """This rank's part, to be written to."""
        return local_part(self.tensor)


def targets_of(model: nn.Module) -> list[Target]:
    """What a state_dict of the model holds, each tensor once. Names are those without wrappers."""
    rest(model)
    found: dict[int, tuple[Tensor, dict[str, None]]] = {}
    for name, tensor in _stateful(model):
        found.setdefault(id(tensor), (tensor, {}))[1][name] = None
    return [Target(names=tuple(names), tensor=tensor) for tensor, names in found.values()]


def _stateful(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plan_name(name), parameter
    for module_name, module in modules_by_name(model).items():
        for name, buffer in own_buffers(module).items():
            if buffer is not None and is_persistent(module, name):
                yield f"{module_name}.{name}".removeprefix("."), buffer


def rest(model: nn.Module) -> None:
    """FSDP2 keeps the root's parameters gathered between a forward and its backward; at rest they are shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """The rank's own tensor, with no gradient to follow."""
    return (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def local_box(tensor: Tensor) -> Box:
    """Where this rank's part stands in the whole tensor; empty along a dim where it has none.

    Each axis cuts what those before it left into chunks of ceil(n / ranks), as torch.chunk does. Where FSDP2 cuts the
    dim that tensor parallelism cut, it comes later, though its axis is the outer one (_StridedShard).
    """
    starts, sizes = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "a rank outside the mesh of its model"
        axes = enumerate(tensor.placements)
        for axis, placement in sorted(axes, key=lambda found: is_strided_shard(found[1])):
            dim = _sharded_dim(placement)
            if dim is None:
                continue
            chunk = -(-sizes[dim] // tensor.device_mesh.size(axis))
            first = min(coordinate[axis] * chunk, sizes[dim])
            starts[dim] += first
            sizes[dim] = min(chunk, sizes[dim] - first)
        own = tuple(local_tensor(tensor).shape)
        assert tuple(sizes) == own, (sizes, own, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _sharded_dim(placement: Placement) -> int | None:
    match placement:
        case Replicate():
            return None
        case Shard():
            return int(placement.dim)
        case _ if is_strided_shard(placement):
            return int(placement.dim)  # type: ignore[attr-defined]
        case _:
            raise TpplanError(f"a parameter at rest is sharded or replicated, not {placement}")


def others_on_meta(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and tensors that are plain attributes of modules, without memory, by name."""
    return {
        f"{module_name}.{name}".removeprefix("."): tensor
        for module_name, module in modules_by_name(model).items()
        for name, tensor in _held(module).items()
        if tensor.is_meta
    }


def held_tensor(model: nn.Module, name: str) -> Tensor:
    """The buffer or attribute of that name. Raises ModelError where the model has none."""
    owner, _, attribute = name.rpartition(".")
    module = modules_by_name(model).get(owner)
    tensor = _held(module).get(attribute) if module is not None else None
    if tensor is None:
        raise ModelError(f"build_model makes a model without {name}, which the one to be filled has")
    return tensor


def _held(module: nn.Module) -> dict[str, Tensor]:
    own = {**vars(module), **own_buffers(module)}
    return {name: value for name, value in own.items() if isinstance(value, Tensor)}


@torch.no_grad()
def materialize(model: nn.Module) -> None:
    """Gives memory to every tensor of the model that has none. Its values are whatever lies there."""
    elsewhere = _device(model)
    for tensor in {id(found): found for found in (*model.parameters(), *others_on_meta(model).values())}.values():
        if tensor.device.type != "meta":
            continue
        device = _own_device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else elsewhere
        made: Tensor = torch.empty_like(local_part(tensor), device=device)
        if isinstance(tensor, DTensor):
            made = DTensor(made, copy.copy(spec_of(tensor)), requires_grad=False)  # type: ignore[no-untyped-call]
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def _device(model: nn.Module) -> torch.device:
    """Where tensors of the model that no mesh knows belong."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return _own_device(parameter.device_mesh.device_type)
        if not parameter.is_meta:
            return parameter.device
    is_nccl = dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    return _own_device("cuda" if is_nccl and torch.cuda.is_available() else "cpu")


def _own_device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)


# ---- ranks


def raise_together(error: Exception | None) -> None:
    """Raises on all ranks what one of them has found: there the error itself, elsewhere WeightsError with the rank."""
    problems = all_ranks("" if error is None else _description(error))
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem:
            raise WeightsError(f"rank {rank}: {problem}")


def _description(error: Exception) -> str:
    return str(error) if isinstance(error, TpplanError) else f"{type(error).__name__}: {error}"


def agree(what: str, value: str) -> None:
    """Raises WeightsError on all ranks where they have different values."""
    values = all_ranks(value)
    if others := [rank for rank, other in enumerate(values) if other != values[0]]:
        raise WeightsError(
            f"the ranks have different {what}: rank 0 has {values[0]}, rank {others[0]} has {values[others[0]]}"
        )


def all_ranks(value: str) -> list[str]:
    """Each rank's value; only the own one without a process group."""
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return [value]
    gathered = [""] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def listed(names: list[str]) -> str:
    """The first names, and how many there are besides."""
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + rest
