"""Gives memory to a model's tensors on the meta device: of each parameter to this rank's shard only.

The tensor objects stay the same and their content is swapped, so that tied weights stay tied, and an optimizer or FSDP2
that holds a parameter goes on holding it.
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
from tpplan.apply.rank_agreement import all_ranks, raise_on_all_ranks
from tpplan.core.errors import ModelError, TpplanError, WeightsError
from tpplan.core.graph import joined_name
from tpplan.torch_internals.modules import is_persistent, own_buffers
from tpplan.torch_internals.tensors import is_strided_shard, spec_of
from tpplan.torch_internals.tensors import local_part as local_tensor

#: a rectangular part of a tensor: one slice per dim
Box = tuple[slice, ...]
#: the most names that an error lists
LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parameter or persistent buffer to be filled, with all its names in state_dict; a tied weight has several."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def local(self) -> Tensor:
        """This rank's part of the tensor, detached; writing to it fills the tensor."""
        return local_part(self.tensor)


def targets_of(model: nn.Module) -> list[Target]:
    """Returns the tensors of the model's state_dict, each tensor once, by their names without wrappers."""
    reshard_fsdp(model)
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
                yield joined_name(module_name, name), buffer


def reshard_fsdp(model: nn.Module) -> None:
    """Makes FSDP2 free gathered parameters, so that modules hold the shards; it keeps the root's after a forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, detached: the local tensor of a DTensor, or the tensor itself."""
    return (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def local_box(tensor: Tensor) -> Box:
    """Returns the slice of the whole tensor, per dim, that this rank holds; an empty slice where it holds nothing.

    Mesh axes are applied in turn: each cuts the part that the axes before it left into chunks of ceil(n / ranks), as
    torch.chunk does. A _StridedShard axis comes last: there FSDP2 cuts a dim that tensor parallelism has cut already,
    though its axis is the outer one.
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
            raise TpplanError(
                f"expected a parameter that is sharded or replicated on each mesh axis, got {placement}: lay the model "
                "out by tpplan.apply_plan"
            )


def others_on_meta(model: nn.Module) -> dict[str, Tensor]:
    """Returns buffers and tensor attributes of modules that are on the meta device, by name; no parameters."""
    return {
        joined_name(module_name, name): tensor
        for module_name, module in modules_by_name(model).items()
        for name, tensor in _held(module).items()
        if tensor.is_meta
    }


def held_tensor(model: nn.Module, name: str) -> Tensor:
    """Returns the buffer or tensor attribute of that name. Raises ModelError where the model has none."""
    owner, _, attribute = name.rpartition(".")
    module = modules_by_name(model).get(owner)
    tensor = _held(module).get(attribute) if module is not None else None
    if tensor is None:
        raise ModelError(
            f"build_model makes a model without {name}, which the model to be filled has: pass the build_model that "
            "made this model"
        )
    return tensor


def _held(module: nn.Module) -> dict[str, Tensor]:
    own = {**vars(module), **own_buffers(module)}
    return {name: value for name, value in own.items() if isinstance(value, Tensor)}


@torch.no_grad()
def materialize(model: nn.Module) -> None:
    """Gives uninitialized memory to every tensor of the model that is on the meta device."""
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
    """Returns the device for tensors that are no DTensors: that of the mesh or parameters, else the process group's."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return _own_device(parameter.device_mesh.device_type)
        if not parameter.is_meta:
            return parameter.device
    is_nccl = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    return _own_device("cuda" if is_nccl and torch.cuda.is_available() else "cpu")


def _own_device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)


# ---- ranks


def raise_together(error: Exception | None) -> None:
    """Raises on every rank if any rank passes an error: its own error, else WeightsError that names the failed rank."""
    raise_on_all_ranks(error, WeightsError)


def check_same_on_ranks(what: str, value: str) -> None:
    """Raises WeightsError on all ranks where ranks pass different values; `what` names the values in the message."""
    values = all_ranks(value)
    if others := [rank for rank, other in enumerate(values) if other != values[0]]:
        raise WeightsError(
            f"the ranks have different {what}: rank 0 has {values[0]}, rank {others[0]} has {values[others[0]]}; pass "
            "the same on every rank"
        )


def listed(names: list[str]) -> str:
    """Returns the first LISTED names, and the number of further ones, as text."""
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + rest
