"""Holds a plan against what it does: on real ranks beside one process, or on a fake group of the plan's real size.

    report = verify_plan("plan.json", "model.py", ranks=4)       # report.checks, report.is_right
    report = verify_plan("plan.json", "model.py", dry=True)      # 512 ranks on a laptop: no values, all else

    check        what is compared
    proof        what follows from the plan alone, with the model's ops (tpplan.verify.prove_plan)
    parameters   whole parameters after the plan is applied, bit by bit; ranks but the first hold garbage before
    loss         the mean over all micro-batches, against one process
    gradients    of every parameter, whole, against one process
    collectives  of a step, one by one, against the plan's list
    shapes       of every parameter's part on a rank, against its placement (dry)
    memory       peak of a step on fake tensors, by torch's tracker, against the plan's

Values are compared in float32, whatever the plan's precision: bfloat16 would hide what is wrong below its rounding. A
step in the plan's own precision is what collectives are counted in.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch

from tpplan.core.errors import RankFailedError, TpplanError, UsageError, VerificationError
from tpplan.core.layout import R, local_shape
from tpplan.core.units import format_bytes
from tpplan.plan.plan import Pass, Plan, Precision, uses_fsdp
from tpplan.plan.shrink import dropped_layers, on_mesh, smaller_mesh, with_layers
from tpplan.trace.trace import quiet
from tpplan.trace.user_model import load_model_file
from tpplan.verify.collective_log import Difference, Issued, differences, first_member, listed
from tpplan.verify.fake_step import OPTIMIZERS
from tpplan.verify.prove_plan import prove_plan
from tpplan.verify.rank_task import (
    GRADIENT_NOISE,
    Findings,
    Reference,
    Subject,
    Task,
    examine,
    reference_step,
    rehearse,
)
from tpplan.verify.spawn_ranks import on_ranks

#: ranks that are started unless told, if the plan has so many
DEFAULT_RANKS = 4
TIMEOUT_S = 600.0
#: of a loss, relative; in bfloat16, whose numbers have 8 significant bits, against float32
LOSS_TOLERANCE, BF16_LOSS_TOLERANCE = 1e-5, 0.05
#: of a gradient, relative to its largest entry, or to GRADIENT_NOISE of the model's largest
GRADIENT_TOLERANCE = 1e-4
#: predicted peak against tracked, relative
MEMORY_TOLERANCE = 0.10
#: differences that a check shows
MOST_SHOWN = 8


class Outcome(StrEnum):
    """What became of a check; skipped ones say why."""

    PASS = "pass"
    FAIL = "FAIL"
    SKIPPED = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: its result in a line, and what differs, the first layer first."""

    name: str
    outcome: Outcome
    detail: str
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was run, and what was found. `mended` is the whole plan with the proof that it now has; None where it was
    not asked for or is not proven."""

    ran: str
    checks: tuple[Check, ...]
    mended: Plan | None = None

    @property
    def is_right(self) -> bool:
        """No check failed."""
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
) -> Report:
    """Verifies a plan for the model that `model` names (model.py, model.py:BUILDER, hf:config.json).

    On `ranks` real ranks (4, or as many as the plan has), on a mesh with the plan's degrees as far as they go; with
    `layers` the first so many of each repeated block. dry=True runs one rank of the plan's own mesh on fake tensors.
    With mend=True the whole plan is proven too, where something smaller ran, and is in the report with that proof.
    Raises PlanError, ModelError, UsageError for what cannot be run at all; what is found wrong is in the report.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    spec = load_model_file(model)
    if layers is not None and (layers < 1 or not loaded.blocks):
        raise UsageError(
            f"layers: expected 1 or more of a repeated block, got {layers} and {len(loaded.blocks)} blocks"
        )
    shrunk = loaded if layers is None else with_layers(loaded, layers)
    if not dry:
        mesh = smaller_mesh(loaded.mesh, ranks or DEFAULT_RANKS)
        shrunk = shrunk if mesh == loaded.mesh else on_mesh(shrunk, mesh)
    subject = Subject(spec=spec, dropped=dropped_layers(loaded, layers) if layers is not None else frozenset())
    ran = _what_ran(loaded, shrunk, dry=dry, layers=layers)
    try:
        with quiet():
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
        checks += _on_real_ranks(task, shrunk, subject, timeout_s)
    checks += _on_fakes(task, shrunk, timeout_s, is_alone=dry)
    return Report(ran=ran, checks=tuple(checks), mended=whole.plan if mend else None)


def _what_ran(plan: Plan, shrunk: Plan, *, dry: bool, layers: int | None) -> str:
    """How what ran differs from the plan."""
    batch = shrunk.batch
    parts = [
        f"{shrunk.mesh}, {shrunk.precision}, {batch.accumulation_steps} x micro-batch {batch.micro_batch} x "
        f"{batch.seq_len}"
    ]
    if shrunk.mesh != plan.mesh:
        parts.append(f"the plan's choices by name, which are for {plan.mesh}")
    if layers is not None:
        parts.append(f"the first {layers} layers of {', '.join(plan.blocks)}")
    parts.append("one rank on fake tensors" if dry else f"{shrunk.mesh.num_gpus} real ranks")
    return "; ".join(parts)


# ---- real ranks


def _on_real_ranks(task: Task, plan: Plan, subject: Subject, timeout_s: float) -> Iterator[Check]:
    num_ranks = plan.mesh.num_gpus
    device_type = "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"
    reference = reference_step(subject, plan)
    with tempfile.TemporaryDirectory(prefix="tpplan-verify-") as folder:
        path = Path(folder) / "reference.pt"
        reference.save(path)
        given = replace(task, reference=str(path), device_type=device_type)
        try:
            found = on_ranks(num_ranks, examine, given, device_type=device_type, timeout_s=timeout_s)
        except RankFailedError as error:
            yield Check(name="ranks", outcome=Outcome.FAIL, detail="a rank failed", differences=(str(error),))
            return
    yield from compare(plan, reference, found)


# ---- what was found, beside what was expected


def compare(plan: Plan, reference: Reference, found: Sequence[Findings]) -> Iterator[Check]:
    """The checks of real ranks."""
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
    lines = [] if error <= LOSS_TOLERANCE else ["the ranks compute another loss"]
    lines += [f"rank {rank} has another loss than its tensor-parallel peers" for rank in apart]
    yield _check("loss", lines, said, said)
    if plan.precision is not Precision.FP32:
        own = sum(one.own_loss for one in found[::tp]) / len(found[::tp])
        error = abs(own - expected) / max(abs(expected), GRADIENT_NOISE)
        said = f"{own:.4g}, in float32 {expected:.4g}: relative {error:.1e}, allowed {BF16_LOSS_TOLERANCE:.0e}"
        is_right = error <= BF16_LOSS_TOLERANCE
        yield _check(f"loss in {plan.precision}", [] if is_right else ["far from that in float32"], said, said)


def _gradient_check(reference: Reference, found: Sequence[Findings]) -> Check:
    names = list(reference.parameters)
    worst = {name: max(one.gradients.get(name, 0.0) for one in found) for name in names}
    lines = [f"{name}: {worst[name]:.1e}" for name in names if not worst[name] <= GRADIENT_TOLERANCE]
    name = max(worst, key=lambda name: worst[name], default="")
    allowed = f"allowed {GRADIENT_TOLERANCE:.0e}, noise floor {GRADIENT_NOISE:.0e} of the model's largest"
    said = f"{len(reference.gradients)}, the worst relative error {worst.get(name, 0.0):.1e} at {name}; {allowed}"
    return _check("gradients", lines, said, f"{len(lines)} of {len(names)} differ; {allowed}")


def _collective_check(plan: Plan, logs: Sequence[tuple[str, Sequence[Issued], int]]) -> Check:
    """Kind, axis, pass, dtype, bytes and count of each, on every rank. The plan says what the first ranks of FSDP's
    axis reduce over tp at a step's end; the last may hold less of what does not divide."""
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
    """Memory, and, where nothing ran on real ranks, collectives and shapes."""
    try:
        (found,) = on_ranks(1, rehearse, task, timeout_s=timeout_s)
    except TpplanError as error:
        yield Check(name="fake group", outcome=Outcome.FAIL, detail="a step fails", differences=(str(error),))
        return
    if is_alone:
        yield _shape_check(plan, found.shapes)
        yield _collective_check(plan, [("", found.issued, 0)])
    yield _memory_check(plan, found.peak_bytes)


def _shape_check(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> Check:
    """Rank 0's parts: cut by tp as placed, then along dim 0 by FSDP."""
    lines = []
    for name, parameter in plan.parameter_plans().items():
        expected = local_shape(parameter.shape, parameter.placement if plan.mesh.tp > 1 else R, plan.mesh.tp)
        if uses_fsdp(plan.mesh, plan.precision):
            expected = (-(-expected[0] // plan.mesh.shard), *expected[1:])
        if shapes.get(name) != expected:
            lines.append(f"{name}: {list(shapes.get(name, ()))} on rank 0, expected {list(expected)}")
    return _check("shapes", lines, f"{len(shapes)} parameters lie as placed", f"{len(lines)} parameters lie otherwise")


def _memory_check(plan: Plan, peak_bytes: int | None) -> Check:
    predicted = plan.predicted
    if peak_bytes is None:
        why = f"no tracker for the optimizer {plan.optimizer}: there is one for {', '.join(OPTIMIZERS)}"
        return Check(name="memory", outcome=Outcome.SKIPPED, detail=why)
    error = predicted.peak_memory_bytes / peak_bytes - 1
    said = (
        f"predicted {format_bytes(predicted.peak_memory_bytes)}, tracked {format_bytes(peak_bytes)}: {error:+.1%}, "
        f"allowed {MEMORY_TOLERANCE:.0%}"
    )
    where = f"predicted in {predicted.peak_during} of {predicted.peak_module}"
    return _check("memory", [] if abs(error) <= MEMORY_TOLERANCE else [where], said, said)
