"""Compares a plan with what it does: on real ranks, beside one process, or on a fake group of the plan's real size.

    report = verify_plan("plan.json", "model.py", ranks=4)       # report.checks, report.is_right
    report = verify_plan("plan.json", "model.py", dry=True)      # 512 ranks on a laptop: all checks but those of values

    check        what is compared
    proof        the plan with the model's ops (tpplan.verify.prove_plan)
    parameters   full parameters after the plan is applied, bit by bit; before, all ranks but the first hold garbage
    loss         the mean over all micro-batches, with one process
    gradients    full gradients of every parameter, with one process
    collectives  those of a step, one by one, with the plan's list
    shapes       every parameter's local shape on a rank, with its placement (dry)
    memory       the peak of a step on fake tensors, by torch's tracker, with the plan's prediction

Values are compared in float32, whatever the plan's precision, as bfloat16 would hide errors below its rounding.
Collectives are counted in a step of the plan's own precision.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch

from tpplan.core.errors import RankFailedError, TpplanError, UsageError, VerificationError
from tpplan.core.layout import R, local_shape
from tpplan.core.mesh import Axis
from tpplan.core.units import format_bytes
from tpplan.plan.optimizers import OPTIMIZERS
from tpplan.plan.plan import Pass, Plan, Precision, uses_fsdp
from tpplan.search.models.user_model import load_model_file
from tpplan.trace.trace import quiet
from tpplan.verify.collective_log import Difference, Issued, differences, first_member, listed
from tpplan.verify.prove_plan import prove_plan
from tpplan.verify.rank_task import (
    GRADIENT_NOISE,
    Findings,
    Reference,
    Subject,
    Task,
    check_on_fake_rank,
    check_on_rank,
    reference_step,
)
from tpplan.verify.shrink import dropped_layers, on_mesh, smaller_mesh, with_layers
from tpplan.verify.spawn_ranks import on_ranks

#: ranks that are started by default, or fewer where the plan has fewer
DEFAULT_RANKS = 4
TIMEOUT_S = 600.0
#: relative error allowed of a loss in float32; and in bfloat16 (8 significant bits), compared with float32
LOSS_TOLERANCE, BF16_LOSS_TOLERANCE = 1e-5, 0.05
#: error allowed of a gradient, relative to its largest entry, or to GRADIENT_NOISE of the model's largest
GRADIENT_TOLERANCE = 1e-4
#: relative error allowed of the predicted peak memory, compared with the tracked one
MEMORY_TOLERANCE = 0.10
#: differences that a check shows
MOST_SHOWN = 8


class Outcome(StrEnum):
    """The result of a check; the detail of a skipped one says why."""

    PASS = "pass"
    FAIL = "FAIL"
    SKIPPED = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: its result in a line, and the differences, those of the first layer first."""

    name: str
    outcome: Outcome
    detail: str
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The checks, and in words what was run. `mended` is the whole plan with its new proof in it; None where that was
    not asked for, or the plan is not proven."""

    ran: str
    checks: tuple[Check, ...]
    mended: Plan | None = None

    @property
    def is_right(self) -> bool:
        """True where no check failed."""
        return all(check.outcome is not Outcome.FAIL for check in self.checks)


def verify_plan(
    plan: Plan | str | os.PathLike[str],
    model: str,
    *,
    ranks: int | None = None,
    layers: int | None = None,
    dry: bool = False,
    mend: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Verifies a plan for the model that `model` names (model.py, model.py:BUILDER, hf:config.json).

    ranks: real ranks to run on, 4 by default or as many as the plan has, on a mesh with the plan's degrees as far as
        they go.
    layers: how many layers of each repeated block to keep, all by default.
    dry: whether to run one rank of the plan's own mesh on fake tensors, in place of real ranks.
    mend: whether to prove the whole plan, also where a smaller one runs, and put it with that proof into the report.
    progress: hears of each stage ("prove", "ranks", "fakes") as it begins and ends, with 0 or 1 of 1 done.

    Raises PlanError, ModelError, UsageError for what cannot be run at all; wrong results are in the report.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    spec = load_model_file(model)
    shrunk = _shrunk(loaded, None if dry else ranks or DEFAULT_RANKS, layers)
    subject = Subject(spec=spec, dropped=dropped_layers(loaded, layers) if layers is not None else frozenset())
    ran = _what_ran(loaded, shrunk, dry=dry, layers=layers)
    try:
        with quiet(), _stage(progress, "prove"), spec.locating():
            is_whole = shrunk is loaded
            proven = prove_plan(shrunk, subject.build, spec.example_inputs, loss=spec.loss, is_as_solved=is_whole)
            whole = proven
            if mend and not is_whole:
                whole = prove_plan(loaded, spec.build_model, spec.example_inputs, loss=spec.loss)
    except VerificationError as error:
        failed = Check(name="proof", outcome=Outcome.FAIL, detail="the plan is not proven", differences=(str(error),))
        return Report(ran=ran, checks=(failed, Check(name="all else", outcome=Outcome.SKIPPED, detail="not run")))
    shrunk = proven.plan
    detail = f"{len(proven.traced.graph.values)} values typed; the applied model's ops are the model's"
    checks = [Check(name="proof", outcome=Outcome.PASS, detail=detail)]
    task = Task(plan=shrunk.dumps(), source=spec.source, dropped=subject.dropped)
    if not dry:
        with _stage(progress, "ranks"):
            checks += _on_real_ranks(task, shrunk, subject, timeout_s)
    with _stage(progress, "fakes"):
        checks += _on_fakes(task, shrunk, timeout_s, is_alone=dry)
    return Report(ran=ran, checks=tuple(checks), mended=whole.plan if mend else None)


@contextmanager
def _stage(progress: Callable[[str, int, int], None], name: str) -> Iterator[None]:
    """Tells that a stage begins, and that it ends."""
    progress(name, 0, 1)
    yield
    progress(name, 1, 1)


def _shrunk(plan: Plan, ranks: int | None, layers: int | None) -> Plan:
    """The plan for at most this many ranks, and so many layers of each block; itself where nothing is left out."""
    if layers is not None and (layers < 1 or not plan.blocks):
        raise UsageError(
            f"layers: expected 1 or more layers of each repeated block, got {layers}; the plan has "
            f"{len(plan.blocks)} repeated blocks"
        )
    shrunk = plan if layers is None else with_layers(plan, layers)
    mesh = plan.mesh if ranks is None else smaller_mesh(plan.mesh, ranks)
    return shrunk if mesh == plan.mesh else on_mesh(shrunk, mesh)


def _what_ran(plan: Plan, shrunk: Plan, *, dry: bool, layers: int | None) -> str:
    """Describes the run: mesh, precision, batches, and what is smaller than in the plan."""
    batch = shrunk.batch
    parts = [
        f"{shrunk.mesh}, {shrunk.precision}, {batch.accumulation_steps} x micro-batch {batch.micro_batch}"
        + (f" x {batch.seq_len}" if batch.seq_len > 1 else "")
    ]
    if shrunk.mesh != plan.mesh:
        parts.append(f"the plan's choices, which were made for {plan.mesh}")
    if layers is not None:
        parts.append(f"the first {layers} layers of {', '.join(plan.blocks)}")
    parts.append("one rank on fake tensors" if dry else f"{shrunk.mesh.num_gpus} real ranks")
    return "; ".join(parts)


# ---- real ranks


def _on_real_ranks(task: Task, plan: Plan, subject: Subject, timeout_s: float) -> Iterator[Check]:
    """The checks of real ranks, on GPUs where there are enough, else on the CPU."""
    num_ranks = plan.mesh.num_gpus
    device_type = "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"
    reference = reference_step(subject, plan)
    with tempfile.TemporaryDirectory(prefix="tpplan-verify-") as folder:
        path = Path(folder) / "reference.pt"
        reference.save(path)
        given = replace(task, reference=str(path), device_type=device_type)
        try:
            found = on_ranks(num_ranks, check_on_rank, given, device_type=device_type, timeout_s=timeout_s)
        except RankFailedError as error:
            yield Check(name="ranks", outcome=Outcome.FAIL, detail="a rank failed", differences=(str(error),))
            return
    yield from compare(plan, reference, found)


# ---- what was found, beside what was expected


def compare(plan: Plan, reference: Reference, found: Sequence[Findings]) -> Iterator[Check]:
    """The checks of what real ranks found against one process and the plan."""
    yield _parameter_check(reference, found)
    yield from _loss_checks(plan, reference, found)
    yield _gradient_check(reference, found)
    yield _collective_check(plan, [(f"rank {rank}: ", one.issued, one.shard_rank) for rank, one in enumerate(found)])


def _parameter_check(reference: Reference, found: Sequence[Findings]) -> Check:
    seen = {
        name: ranks
        for name in reference.parameters
        if (ranks := [str(rank) for rank, one in enumerate(found) if name in one.parameters])
    }
    lines = [f"{name} differs on ranks {', '.join(ranks)}" for name, ranks in seen.items()]
    total = len(reference.parameters)
    return _check("parameters", lines, f"{total} equal after the plan is applied", f"{len(lines)} of {total} differ")


def _loss_checks(plan: Plan, reference: Reference, found: Sequence[Findings]) -> Iterator[Check]:
    tp, expected = plan.mesh.tp, reference.loss
    loss = sum(one.loss for one in found[::tp]) / len(found[::tp])
    apart = [rank for rank, one in enumerate(found) if one.loss != found[rank // tp * tp].loss]
    error = abs(loss - expected) / max(abs(expected), GRADIENT_NOISE)
    said = f"{loss:.6g}, in one process {expected:.6g}: relative error {error:.1e}, allowed {LOSS_TOLERANCE:.0e}"
    lines = [] if error <= LOSS_TOLERANCE else ["the ranks compute a different loss"]
    lines += [f"rank {rank} has a different loss than the other ranks of its tensor-parallel group" for rank in apart]
    yield _check("loss", lines, said, said)
    if plan.precision is not Precision.FP32:
        own = sum(one.own_loss for one in found[::tp]) / len(found[::tp])
        error = abs(own - expected) / max(abs(expected), GRADIENT_NOISE)
        said = f"{own:.4g}, in float32 {expected:.4g}: relative {error:.1e}, allowed {BF16_LOSS_TOLERANCE:.0e}"
        is_right = error <= BF16_LOSS_TOLERANCE
        yield _check(f"loss in {plan.precision}", [] if is_right else ["far from the loss in float32"], said, said)


def _gradient_check(reference: Reference, found: Sequence[Findings]) -> Check:
    names = list(reference.parameters)
    worst = {name: max(one.gradients.get(name, 0.0) for one in found) for name in names}
    lines = [f"{name}: {worst[name]:.1e}" for name in names if not worst[name] <= GRADIENT_TOLERANCE]
    name = max(worst, key=lambda name: worst[name], default="")
    allowed = f"allowed {GRADIENT_TOLERANCE:.0e}, noise floor {GRADIENT_NOISE:.0e} of the model's largest"
    said = f"{len(reference.gradients)}, the worst relative error {worst.get(name, 0.0):.1e} at {name}; {allowed}"
    return _check("gradients", lines, said, f"{len(lines)} of {len(names)} differ; {allowed}")


def _collective_check(plan: Plan, logs: Sequence[tuple[str, Sequence[Issued], int]]) -> Check:
    """Compares kind, axis, pass, dtype, bytes and count of the collectives on every rank with the plan's.

    Of reductions at the end of a step only the first ranks of the shard axis are compared, which the plan lists: where
    FSDP's shards are uneven, other ranks reduce less.
    """
    planned = listed(plan)
    lines: list[str] = []
    for who, issued, shard_rank in logs:
        wanted = {one: n for one, n in planned.items() if shard_rank == 0 or one.during is not Pass.STEP}
        seen = [one for one in issued if shard_rank == 0 or one.during is not Pass.STEP]
        lines += [f"{who}{_in_words(plan, found, seen)}" for found in differences(plan, wanted, seen)]
    total = sum(planned.values())
    said = f"{total} a step, of {len(planned)} kinds and sizes, as the plan lists them"
    return _check("collectives", lines, said, f"{len(lines)} kinds and sizes are not as the plan lists them")


def _in_words(plan: Plan, difference: Difference, issued: Sequence[Issued]) -> str:
    where = difference.collective.where
    first = first_member(plan, difference, issued)
    return str(difference) if first == where else f"{first}, first of {difference}"


def _check(name: str, lines: Sequence[str], right: str, wrong: str) -> Check:
    shown = tuple(lines[:MOST_SHOWN]) + ((f"and {len(lines) - MOST_SHOWN} more",) if len(lines) > MOST_SHOWN else ())
    return Check(
        name=name, outcome=Outcome.FAIL if lines else Outcome.PASS, detail=wrong if lines else right, differences=shown
    )


# ---- a fake group


def _on_fakes(task: Task, plan: Plan, timeout_s: float, *, is_alone: bool) -> Iterator[Check]:
    """The memory check on a fake group; with is_alone, where no real ranks run, also those of collectives and
    shapes."""
    try:
        (found,) = on_ranks(1, check_on_fake_rank, task, timeout_s=timeout_s)
    except TpplanError as error:
        yield Check(
            name="fake group", outcome=Outcome.FAIL, detail="a step on fake tensors fails", differences=(str(error),)
        )
        return
    if is_alone:
        yield _shape_check(plan, found.shapes)
        yield _collective_check(plan, [("", found.issued, 0)])
    yield _memory_check(plan, found.peak_bytes)


def _shape_check(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> Check:
    """Compares local shapes on rank 0 with the placements: sharded over tp as placed, then along dim 0 by FSDP."""
    lines, divided, over_tp = [], plan.expert_calls().keys(), plan.parameters_over_tp()
    for name, parameter in plan.parameter_plans().items():
        ep = plan.mesh.ep if name.rpartition(".")[0] in divided else 1
        own = (parameter.shape[0] // ep, *parameter.shape[1:]) if parameter.shape else ()
        expected = local_shape(own, parameter.placement if plan.mesh.tp > 1 else R, plan.mesh.tp)
        if uses_fsdp(plan.mesh, plan.precision):
            ranks = plan.mesh.size(Axis.SHARD_TP) if name in over_tp else plan.mesh.shard // ep
            expected = (-(-expected[0] // ranks), *expected[1:])
        if shapes.get(name) != expected:
            lines.append(f"{name}: {list(shapes.get(name, ()))} on rank 0, expected {list(expected)}")
    right = f"{len(shapes)} parameters have the local shapes of their placements"
    return _check(
        "shapes", lines, right, f"{len(lines)} parameters have other local shapes than their placements imply"
    )


def _memory_check(plan: Plan, peak_bytes: int | None) -> Check:
    predicted = plan.predicted
    if peak_bytes is None:
        tracked = ", ".join(name for name, own in OPTIMIZERS.items() if own.is_tracked)
        why = f"the optimizer {plan.optimizer} cannot be tracked, only {tracked} can"
        return Check(name="memory", outcome=Outcome.SKIPPED, detail=why)
    error = predicted.peak_memory_bytes / peak_bytes - 1
    said = (
        f"predicted {format_bytes(predicted.peak_memory_bytes)}, tracked {format_bytes(peak_bytes)}: {error:+.1%}, "
        f"allowed {MEMORY_TOLERANCE:.0%}"
    )
    where = f"predicted in {predicted.peak_during} of {predicted.peak_module}"
    return _check("memory", [] if abs(error) <= MEMORY_TOLERANCE else [where], said, said)
