"""Checks in the first training forward that the ranks of each tensor-parallel group agree.

The ranks of a group split the layers of one model that reads one batch. If they read different batches, drew different
dropout masks for a value that all hold, or started from different copies of a replicated parameter, every rank would
go on and the result would be wrong without a sign. So the first forward with gradients compares checksums of its
inputs, of the random states, and of the parameters and buffers that each rank of a group holds whole.

The comparison is one all-gather of a few numbers per rank, over all ranks: where one group differs, all ranks raise and
none waits for another. Names are gathered only then. Different random states (torch's, NumPy's and Python's; the last
two are seeded differently in every process by default) are an error only if the forward has drawn from them.

Ranks must also reach their conversions in the same order, or collectives would mix unrelated tensors; code that
iterates over a set of strings has another order in each process. In this forward the ranks of a group compare the name
of each conversion before it, unless modules are compiled.

The hooks are removed after this forward, which also runs the checks of tpplan.apply.modules.stale_references.
Nothing is compared under torch.compile of the whole model, on a fake process group, or in later steps: there a shape
that does not divide raises in the conversion, before its collective, on every rank of the group, as all see the same
shapes.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from tpplan.apply.modules.applied_mesh import Applied, is_over_tp
from tpplan.apply.modules.local_modules import ModuleBinding
from tpplan.apply.modules.stale_references import Originals, check_hooks, stop_optimizers
from tpplan.core.errors import UsageError
from tpplan.core.mesh import Axis
from tpplan.plan.sections.ranks import RECEIVED
from tpplan.stages.stage_model import stage_of
from tpplan.torch_internals.modules import is_compiled
from tpplan.torch_internals.tensors import local_part, without_modes
from tpplan.trace.forward_arguments import bound_arguments, tensors_by_path
from tpplan.trace.hooks.generated_class import BINDING
from tpplan.trace.hooks.host_rng import states_outside_torch

#: number of elements that are widened to 64 bits at a time
_CHUNK = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: what is compared, in this order, and what the error advises
_REMEDIES = {
    "batch": "every rank of a group must read the same samples: plan.batch_for(rank) says which",
    "random state": "the forward draws from it (dropout): call torch.manual_seed(seed + plan.mesh.data_rank(rank))",
    "random state of NumPy": "the forward draws from it: call numpy.random.seed(seed + plan.mesh.data_rank(rank))",
    "random state of Python": "the forward draws from it: call random.seed(seed + plan.mesh.data_rank(rank))",
    "parameters": "load the same checkpoint on every rank, and change parameters and buffers alike everywhere",
}
_ORDER_REMEDY = (
    "their collectives would mix different tensors. Code that iterates over a set of strings has another order in "
    "every process: let it iterate over sorted(...), or start all ranks with the same PYTHONHASHSEED"
)
END_OF_FORWARD = "the end of the forward"
#: checksums by what is compared (a key of _REMEDIES), then by name
Checksums = dict[str, dict[str, int]]


def check_first_step(
    model: nn.Module, mesh: DeviceMesh, originals: Originals, group: dist.ProcessGroup | None = None
) -> None:
    """Installs hooks for the first forward with gradients, which raises UsageError on all ranks where tp ranks differ.

    That forward also raises for gradient hooks that FSDP2 never calls, and makes optimizers of the model's original
    parameters raise when they step. `group` has the ranks of the mesh: all ranks by default.
    """
    if dist.get_backend() == "fake" or (mesh[str(Axis.TP)].size() == 1 and not isinstance(model, FSDPModule)):
        return
    check = _FirstStep(Applied(mesh), originals, group)
    check.handles = (
        model.register_forward_pre_hook(check.before, prepend=True, with_kwargs=True),
        model.register_forward_hook(check.after),
    )


@final
class _FirstStep:
    """The forward pre-hook and forward hook of the model, and their state."""

    def __init__(self, applied: Applied, originals: Originals, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.applied = applied
        self.originals = originals
        self.has_begun = self.is_watching = False
        self.handles: tuple[RemovableHandle, ...] = ()
        #: checksums of the random states before the forward
        self.states: Checksums = {}
        #: error messages by random state that differs, raised if the forward draws from it
        self.complaints: dict[str, str] = {}

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares checksums in the first forward with gradients. Raises UsageError on every rank where batches or
        replicated parameters differ."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.has_begun = True
        stop_optimizers(model, self.originals)
        check_hooks(model)
        mesh = self.applied.mesh
        if mesh[str(Axis.TP)].size() == 1:
            return
        with torch.no_grad(), without_modes():
            self.states = _random_states(mesh.device_type)
            found: Checksums = {
                "batch": _checksums(_alike(model, tensors_by_path(bound_arguments(model, args, kwargs)))),
                **self.states,
                "parameters": _checksums(_replicated(model)),
            }
            complaints = _complaints(found, mesh, self.group)
        self.complaints = {what: complaints.pop(what) for what in self.states if what in complaints}
        for complaint in complaints.values():
            raise UsageError(complaint)
        self.is_watching = not any(map(is_compiled, model.modules()))
        if self.is_watching:
            _set_witness(model, self.meet)

    def meet(self, where: str) -> None:
        """Raises UsageError on every rank of the tp group where one is at another conversion than `where`."""
        with torch.no_grad(), without_modes():
            mesh = self.applied.mesh
            group = mesh[str(Axis.TP)].get_group()
            mine = torch.tensor([zlib.crc32(where.encode())], device=mesh.device_type)
            of_ranks = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(of_ranks, mine, group=group)
            if len(set(torch.cat(of_ranks).tolist())) == 1:
                return
            places: list[Any] = [None] * group.size()
            dist.all_gather_object(places, where, group=group)
        other = next(rank for rank, place in enumerate(places) if place != places[0])
        ranks = dist.get_process_group_ranks(group)
        raise UsageError(
            f"ranks {ranks[0]} and {ranks[other]} are of one tensor-parallel group and run in different order: one is "
            f"at {places[0]}, the other at {places[other]}; {_ORDER_REMEDY}"
        )

    def after(self, model: nn.Module, _args: object, _output: object) -> None:
        """Raises UsageError on every rank where the forward drew from random states that differ; removes the hooks."""
        if torch.compiler.is_compiling() or not self.has_begun:
            return
        if self.is_watching:
            self.meet(END_OF_FORWARD)
            _set_witness(model, None)
        now = _random_states(self.applied.mesh.device_type) if self.complaints else {}
        for what, complaint in self.complaints.items():
            if now[what] != self.states[what]:
                raise UsageError(complaint)
        for handle in self.handles:
            handle.remove()


def _set_witness(model: nn.Module, witness: Callable[[str], None] | None) -> None:
    for module in model.modules():
        site: ModuleBinding | None = module.__dict__.get(BINDING)
        for converter in site.converters() if site is not None else ():
            converter.witness = witness


def _complaints(found: Checksums, mesh: DeviceMesh, group: dist.ProcessGroup | None) -> dict[str, str]:
    """Returns error messages by what differs (a key of `found`), the same ones on every rank."""
    device = mesh.device_type
    mine = torch.tensor([zlib.crc32(repr(sorted(named.items())).encode()) for named in found.values()], device=device)
    ranks = dist.get_process_group_ranks(group)
    of_ranks = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(of_ranks, mine, group=group)
    sums = {
        what: dict(zip(ranks, sums, strict=True))
        for what, sums in zip(found, torch.stack(of_ranks).T.tolist(), strict=True)
    }
    groups: list[list[int]] = mesh.mesh.flatten(0, -2).tolist()
    pairs = {
        what: [(group[0], rank) for group in groups for rank in group if of_rank[rank] != of_rank[group[0]]]
        for what, of_rank in sums.items()
    }
    if not any(pairs.values()):
        return {}
    gathered: list[Any] = [None] * len(ranks)
    dist.all_gather_object(gathered, found, group=group)
    everything = dict(zip(ranks, gathered, strict=True))
    return {what: _complaint(what, different, everything) for what, different in pairs.items() if different}


def _complaint(what: str, pairs: Sequence[tuple[int, int]], everything: Mapping[int, Checksums]) -> str:
    first, other = pairs[0]
    here, there = everything[first][what], everything[other][what]
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    more = f", and so do {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
    return (
        f"ranks {first} and {other} are of one tensor-parallel group and differ in their {what} ({shown}){more}: "
        f"{_REMEDIES[what]}"
    )


def _alike(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that tp ranks must be given alike: without those that a stage receives as slices."""
    stage = stage_of(model)
    sliced = {f"{RECEIVED}.{i}" for i, one in enumerate(stage.receives if stage else ()) if one.sliced is not None}
    return {path: tensor for path, tensor in given.items() if path not in sliced}


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def _replicated(model: nn.Module) -> dict[str, Tensor]:
    """Returns buffers and parameters that are replicated over tp, by name: of parameters, this rank's FSDP shard."""
    replicated = {
        name: local_part(parameter)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and parameter.placements[-1] == Replicate() and not is_over_tp(parameter)
    }
    return replicated | {name: b for name, b in model.named_buffers() if not isinstance(b, DTensor)}


def _random_states(device_type: str) -> Checksums:
    """Returns checksums of the random states: torch's generators of CPU and GPU in one, then NumPy's and Python's."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device_type == "cuda" else [])
    outside = {f"random state of {name}": {"seed": zlib.crc32(state)} for name, state in states_outside_torch().items()}
    return {"random state": {device_type: checksum(torch.cat(states))}, **outside}


def checksum(tensor: Tensor) -> int:
    """Returns crc32(dtype, shape) XOR the sum over elements of bits_i * (2 i + 1) modulo 2^64, summed on its device.

    A change of one element always changes it, because odd factors are invertible modulo 2^64.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    header = zlib.crc32(f"{local.dtype} {list(local.shape)}".encode())
    if local.is_meta or local.layout is not torch.strided or not local.numel():
        return header
    plain = torch.view_as_real(local) if local.is_complex() else local
    bits = plain.detach().contiguous().flatten().view(_BITS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        total += (part * (2 * torch.arange(start, start + len(part), device=part.device) + 1)).sum()
    return header ^ int(total)
