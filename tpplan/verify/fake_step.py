"""Runs one rank's step of a plan on fake tensors: its collectives, local shapes of parameters, and peak memory.

Nothing is computed and nothing is sent: the process group and the tensors are fake. The tensors are CPU tensors, for
which torch would decompose attention and RMS norm; the kernels of a GPU run in their place, as tpplan prices them.
Memory is measured by torch's FSDPMemTracker, or MemTracker where no module is sharded by FSDP.

FSDPMemTracker reads high: its wrapper of a unit's post-backward holds the last parameter's gradient in a variable while
FSDP frees it. `Tracker` is FSDPMemTracker without that; both numbers are given.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tpplan.apply.apply import apply_plan, no_sync
from tpplan.apply.autocast import autocast_of
from tpplan.apply.collectives.dp_gradients import Averager
from tpplan.apply.model_match import plan_name
from tpplan.apply.modules import dropout_rng
from tpplan.core.errors import UsageError
from tpplan.core.mesh import AXES
from tpplan.costs.runs.gpu_kernels import fused_attention, fused_rms_norm
from tpplan.experts import exchange
from tpplan.plan.optimizers import optimizer_named
from tpplan.plan.plan import Pass, Plan
from tpplan.search.models.subject import BuildModel, in_precision
from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import FakeTensorMode
from tpplan.torch_internals.groups import fake_group
from tpplan.torch_internals.parallel import FSDPMemTracker, MemTracker, Tracker
from tpplan.torch_internals.tensors import local_part
from tpplan.trace.forward_arguments import Inputs, called_on
from tpplan.trace.trace import Loss
from tpplan.trace.whole.guessed_values import GuessedValues, is_question, most_asked
from tpplan.train.torch_optimizer import torch_optimizer
from tpplan.verify.collective_log import CollectiveLog, Issued
from tpplan.verify.fake_values import answered, answers_of

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Peak memory of a step: by the corrected tracker, in total and by part, and by torch's own tracker as it is (None
    without FSDP, where both are equal)."""

    peak_bytes: int
    as_it_is_bytes: int | None
    parts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStep:
    """A step on rank 0 of a fake group: collectives in order, local shapes of parameters (sharded by tp and FSDP), and
    the peak memory where the plan's optimizer can be tracked."""

    issued: tuple[Issued, ...]
    shapes: Mapping[str, tuple[int, ...]]
    tracked: Tracked | None


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Runs attention and RMS norm as one kernel each. Replaces what needs values, which fake tensors lack: seeds of a
    rank's own random state, what other ranks say of their gradients, and how rows are routed to experts."""
    attention = patch.object(F, "scaled_dot_product_attention", fused_attention)
    seed, alone = patch.object(dropout_rng, "_next_seed", lambda: 0), patch.object(Averager, "ranks_with", _as_this_one)
    even = patch.object(exchange, "_on_host", _evenly)
    with attention, patch.object(F, "rms_norm", fused_rms_norm), seed, alone, even:
        yield


def _as_this_one(averager: Averager, flags: list[list[bool]]) -> list[list[int]]:
    """Replaces Averager.ranks_with: all ranks have the gradients that this rank has."""
    averager.summed(flags)
    return [list(map(int, row)) for row in flags]


def _evenly(by_rank: Tensor, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Replaces exchange._on_host: this rank's rows go to all ranks evenly, and as many come from each."""
    ranks = by_rank.shape[1]
    each = tuple(rows // ranks + (rank < rows % ranks) for rank in range(ranks))
    return each, each


def track(build_model: Callable[[], nn.Module], inputs: Inputs, loss: Loss, plan: Plan) -> Tracked:
    """Peak memory of a step with the plan applied: equal micro-batches, then the optimizer. The step before it, in
    which the optimizer makes its states, does not count. Raises UsageError for an optimizer that torch's tracker
    measures wrong."""
    if not optimizer_named(plan.optimizer).is_tracked:
        raise UsageError(f"the optimizer {plan.optimizer} cannot be tracked: torch's tracker measures it wrong")
    tracked = fake_step(build_model, inputs, loss, plan).tracked
    assert tracked is not None
    return tracked


def fake_step(
    build_model: Callable[[], nn.Module], inputs: Inputs, loss: Loss, plan: Plan, *, is_tracked: bool = True
) -> FakeStep:
    """A step on rank 0 of the plan's own mesh, of any size: equal micro-batches, then the optimizer.

    Collectives are those of a first step, memory that of a second one: by then the optimizer has made its states, and
    DTensor has met every operator (at the first call of one it makes fake results as large as the full tensor).
    Raises what apply_plan raises. Code that asks for values which only training has runs as if all experts were chosen.
    """
    return guessing_where_asked(
        build_model, functools.partial(_fake_step, build_model, inputs, loss, plan, is_tracked=is_tracked)
    )


def guessing_where_asked(build_model: BuildModel, run: Callable[[AbstractContextManager[None]], Result]) -> Result:
    """What `run` returns under a context: under one that guesses values that only training has, where its code asks for
    such."""
    try:
        return run(contextlib.nullcontext())
    except Exception as error:
        if not is_question(error):
            raise
        with torch.device("meta"):
            most = most_asked(build_model().parameters())
        return run(GuessedValues(most).on())


def _fake_step(
    build_model: Callable[[], nn.Module],
    inputs: Inputs,
    loss: Loss,
    plan: Plan,
    guessing: AbstractContextManager[None],
    *,
    is_tracked: bool,
) -> FakeStep:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Parameters that must stay as they are may be captured when the model is built, so they are built as fakes.
    with fake_group(plan.mesh.num_gpus), gpu_kernels():
        with mode if plan.untouched is not None else torch.device("meta"):
            model = build_model()
        answers = answers_of(model, inputs, loss)
        mesh = mesh_of(plan, "cpu")
        model = apply_plan(model, plan, mesh=mesh)
        log = CollectiveLog(model, mesh)
        with mode:
            if plan.untouched is None:
                model.to_empty(device="cpu")
            faked = pytree.tree_map_only(Tensor, mode.from_tensor, in_precision(inputs, plan.precision))
            can_be_tracked = optimizer_named(plan.optimizer).is_tracked
            optimizer = torch_optimizer(plan.optimizer if can_be_tracked else "sgd", model.parameters())
            with guessing, answered(answers):
                with log.naming():
                    _step(model, faked, loss, plan, optimizer, log=log)
                return FakeStep(
                    issued=tuple(log.issued),
                    shapes={plan_name(name): local_shape_of(weight) for name, weight in model.named_parameters()},
                    tracked=_peak(model, faked, loss, plan, optimizer) if is_tracked and can_be_tracked else None,
                )


def mesh_of(plan: Plan, device_type: str) -> DeviceMesh:
    """The plan's mesh over all ranks of the default process group."""
    degrees = tuple(plan.mesh.size(axis) for axis in AXES)
    return init_device_mesh(device_type, degrees, mesh_dim_names=tuple(map(str, AXES)))


def local_shape_of(weight: Tensor) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter."""
    return tuple((local_part(weight) if isinstance(weight, DTensor) else weight).shape)


def _peak(model: nn.Module, inputs: Inputs, loss: Loss, plan: Plan, optimizer: torch.optim.Optimizer) -> Tracked:
    if not isinstance(model, FSDPModule):
        plain = MemTracker()
        plain.track_external(model, optimizer, *tensors_of(inputs))
        return _tracked(plain, None, model, inputs, loss, plan, optimizer)
    as_it_is = FSDPMemTracker(model, optimizer)
    tracker = Tracker(model, optimizer)
    for one in (as_it_is, tracker):
        one.track_inputs(tuple(tensors_of(inputs)))
    known = _tracked(as_it_is, None, model, inputs, loss, plan, optimizer).peak_bytes
    return _tracked(tracker, known, model, inputs, loss, plan, optimizer)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors among inputs."""
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
    for i in range(count):
        if tracker is not None:
            tracker.reset_mod_stats()  # without it a tracker takes one call of the model only
        with contextlib.nullcontext() if i == count - 1 else no_sync(model), log or contextlib.nullcontext():
            if log is not None:
                log.begin(Pass.FORWARD)
            with autocast_of(plan, "cpu"):
                outputs = called_on(model, inputs)
                scaled = loss(outputs, inputs) / count
            del outputs  # otherwise they would be alive throughout backward
            if log is not None:
                log.begin(Pass.BACKWARD)
            scaled.backward()  # type: ignore[no-untyped-call]
    for _ in range(1 if log is None else 2):  # the first step of all, which is logged, makes the optimizer's states
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
