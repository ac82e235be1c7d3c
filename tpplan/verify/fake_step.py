"""Runs one rank's step of a plan on fake tensors: what it issues, how its parameters lie, and its peak memory.

Nothing is computed and nothing is sent: the process group is fake, and so are the tensors. They stand for a CPU's, on
which torch would decompose attention and RMS norm; the kernels of a GPU run in their place, as tpplan prices them.
Memory is what torch's FSDPMemTracker says (MemTracker where nothing is FSDP's).

FSDPMemTracker reads high: its own wrapper of a unit's post-backward holds the last parameter's gradient in a variable
while FSDP frees it. `Tracker` is FSDPMemTracker without that; both numbers are given.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tpplan.apply.apply import apply_plan, no_sync
from tpplan.apply.collectives.dp_gradients import Averager
from tpplan.apply.model_match import plan_name
from tpplan.apply.modules import dropout_rng
from tpplan.core.mesh import Axis
from tpplan.costs.gpu_kernels import fused_attention, fused_rms_norm
from tpplan.plan.plan import Pass, Plan, Precision
from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import FakeTensorMode
from tpplan.torch_internals.fsdp import FSDPMemTracker, MemTracker, Tracker
from tpplan.torch_internals.groups import fake_group
from tpplan.torch_internals.tensors import local_part
from tpplan.trace.trace import Inputs, Loss, forward_inputs
from tpplan.verify.collective_log import CollectiveLog, Issued
from tpplan.verify.fake_values import answered, answers_of

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

#: those that torch has and the tracker counts right: it counts the fused AdamW's temporaries, which there are none of
OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "adamw": torch.optim.AdamW,
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Peaks of a step in bytes: the tracker's, and that of torch's own as it is (None without FSDP, where it is the
    same)."""

    peak_bytes: int
    as_it_is_bytes: int | None
    parts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStep:
    """A step on rank 0 of a fake group: collectives in order, local shapes of parameters under FSDP too, and the peak,
    where there is a tracker for the plan's optimizer."""

    issued: tuple[Issued, ...]
    shapes: Mapping[str, tuple[int, ...]]
    tracked: Tracked | None


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Attention and RMS norm as one kernel each; a rank's own random state needs a seed, which no fake tensor has."""
    attention = patch.object(F, "scaled_dot_product_attention", fused_attention)
    seed, alone = patch.object(dropout_rng, "_next_seed", lambda: 0), patch.object(Averager, "ranks_with", _as_this_one)
    with attention, patch.object(F, "rms_norm", fused_rms_norm), seed, alone:
        yield


def _as_this_one(averager: Averager, flags: list[list[bool]]) -> list[list[int]]:
    """What ranks that are not there say of their gradients, which no fake tensor knows: they are as this one."""
    averager.summed(flags)
    return [list(map(int, row)) for row in flags]


def track(build_model: Callable[[], nn.Module], inputs: Inputs, loss: Loss, plan: Plan) -> Tracked:
    """The peak of a step with the plan applied: its micro-batches, all alike, and the optimizer. A step before it, in
    which states are made, is not looked at. Raises KeyError for an optimizer that is none of OPTIMIZERS."""
    if plan.optimizer not in OPTIMIZERS:
        raise KeyError(plan.optimizer)
    tracked = fake_step(build_model, inputs, loss, plan).tracked
    assert tracked is not None
    return tracked


def fake_step(
    build_model: Callable[[], nn.Module], inputs: Inputs, loss: Loss, plan: Plan, *, is_tracked: bool = True
) -> FakeStep:
    """A step of the plan's mesh, whatever its size, seen from rank 0: micro-batches, all alike, and the optimizer.

    Collectives are those of a first step; memory is that of a second one. By then the optimizer has made its states and
    used them: of an operator that DTensor meets for the first time it makes fake results as large as the whole.
    Raises what applying the plan raises.
    """
    degrees = tuple(plan.mesh.size(axis) for axis in Axis)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # What must stay as it is was captured when the model was built: it is built as what it stays.
    with fake_group(plan.mesh.num_gpus), gpu_kernels():
        with mode if plan.untouched is not None else torch.device("meta"):
            model = build_model()
        answers = answers_of(model, inputs, loss)
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=tuple(map(str, Axis)))
        model = apply_plan(model, plan, mesh=mesh)
        log = CollectiveLog(model, mesh)
        with mode:
            if plan.untouched is None:
                model.to_empty(device="cpu")
            faked = pytree.tree_map_only(Tensor, lambda tensor: _given(tensor, plan, mode), inputs)
            optimizer = OPTIMIZERS.get(plan.optimizer, torch.optim.SGD)(model.parameters())
            is_tracked &= plan.optimizer in OPTIMIZERS
            with answered(answers):
                with log.naming():
                    _step(model, faked, loss, plan, optimizer, log=log)
                return FakeStep(
                    issued=tuple(log.issued),
                    shapes={plan_name(name): _local_shape(weight) for name, weight in model.named_parameters()},
                    tracked=_peak(model, faked, loss, plan, optimizer) if is_tracked else None,
                )


def _local_shape(weight: Tensor) -> tuple[int, ...]:
    return tuple((local_part(weight) if isinstance(weight, DTensor) else weight).shape)


def _peak(model: nn.Module, inputs: Inputs, loss: Loss, plan: Plan, optimizer: torch.optim.Optimizer) -> Tracked:
    if not isinstance(model, FSDPModule):
        plain = MemTracker()
        plain.track_external(model, optimizer, *_tensors(inputs))
        return _tracked(plain, None, model, inputs, loss, plan, optimizer)
    as_it_is = FSDPMemTracker(model, optimizer)
    tracker = Tracker(model, optimizer)
    for one in (as_it_is, tracker):
        one.track_inputs(tuple(_tensors(inputs)))
    known = _tracked(as_it_is, None, model, inputs, loss, plan, optimizer).peak_bytes
    return _tracked(tracker, known, model, inputs, loss, plan, optimizer)


def _given(tensor: Tensor, plan: Plan, mode: FakeTensorMode) -> Tensor:
    """An input as the plan's precision takes it."""
    is_cast = plan.precision is Precision.BF16 and tensor.dtype == torch.float32
    return mode.from_tensor(tensor.to(torch.bfloat16) if is_cast else tensor)


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _tracked(
    tracker: MemTracker,
    as_it_is_bytes: int | None,
    model: nn.Module,
    inputs: Inputs,
    loss: Loss,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
) -> Tracked:
    with tracker:
        _step(model, inputs, loss, plan, optimizer, tracker=tracker)
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    parts = {str(getattr(kind, "value", kind)): count for kind, count in snapshot.items() if count}
    return Tracked(peak_bytes=parts.pop("Total"), as_it_is_bytes=as_it_is_bytes, parts=parts)


def _step(
    model: nn.Module,
    inputs: Inputs,
    loss: Loss,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    *,
    log: CollectiveLog | None = None,
    tracker: MemTracker | None = None,
) -> None:
    count = plan.batch.accumulation_steps
    accepted = forward_inputs(model, inputs)
    for i in range(count):
        if tracker is not None:
            tracker.reset_mod_stats()  # it takes one call of the model otherwise
        with contextlib.nullcontext() if i == count - 1 else no_sync(model), log or contextlib.nullcontext():
            if log is not None:
                log.begin(Pass.FORWARD)
            outputs = model(**accepted) if isinstance(accepted, Mapping) else model(*accepted)
            scaled = loss(outputs, inputs) / count
            del outputs  # held on, they would be there throughout backward
            if log is not None:
                log.begin(Pass.BACKWARD)
            scaled.backward()  # type: ignore[no-untyped-call]
    for _ in range(1 if log is None else 2):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
