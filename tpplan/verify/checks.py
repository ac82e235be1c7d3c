"""The checks of a plan: what was found on ranks, beside what one process found and what the plan says."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from tpplan.core.layout import R, local_shape
from tpplan.core.mesh import Axis
from tpplan.core.units import format_bytes
from tpplan.plan.optimizers import OPTIMIZERS
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Pass, Plan, Precision, uses_fsdp
from tpplan.verify.collective_log import Difference, Issued, differences, first_member, listed
from tpplan.verify.rank_task import GRADIENT_NOISE, Findings, Reference

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
    mended: Plan | PipelinePlan | None = None

    @property
    def is_right(self) -> bool:
        """True where no check failed."""
        return all(check.outcome is not Outcome.FAIL for check in self.checks)


@contextmanager
def telling(progress: Callable[[str, int, int], None], name: str) -> Iterator[None]:
    """Tells that a part of the checks begins, and that it ends."""
    progress(name, 0, 1)
    yield
    progress(name, 1, 1)


# ---- real ranks


def compare(plan: Plan, reference: Reference, found: Sequence[Findings]) -> Iterator[Check]:
    """The checks of what real ranks found against one process and the plan."""
    yield parameter_check(reference, found)
    yield from loss_checks(plan, reference, found)
    yield gradient_check(reference, found)
    yield collective_check([(f"rank {rank}: ", plan, one.issued, one.shard_rank) for rank, one in enumerate(found)])


def parameter_check(reference: Reference, found: Sequence[Findings]) -> Check:
    """Compares the parameters on every rank after the plan is applied with those of one process."""
    seen = {
        name: ranks
        for name in reference.parameters
        if (ranks := [str(rank) for rank, one in enumerate(found) if name in one.parameters])
    }
    lines = [f"{name} differs on ranks {', '.join(ranks)}" for name, ranks in seen.items()]
    total = len(reference.parameters)
    return check("parameters", lines, f"{total} equal after the plan is applied", f"{len(lines)} of {total} differ")


def loss_checks(plan: Plan, reference: Reference, found: Sequence[Findings]) -> Iterator[Check]:
    """Compares the mean loss of all ranks with that of one process, in float32 and in the plan's precision."""
    tp, expected = plan.mesh.tp, reference.loss
    loss = sum(one.loss for one in found[::tp]) / len(found[::tp])
    apart = [rank for rank, one in enumerate(found) if one.loss != found[rank // tp * tp].loss]
    error = abs(loss - expected) / max(abs(expected), GRADIENT_NOISE)
    said = f"{loss:.6g}, in one process {expected:.6g}: relative error {error:.1e}, allowed {LOSS_TOLERANCE:.0e}"
    lines = [] if error <= LOSS_TOLERANCE else ["the ranks compute a different loss"]
    lines += [f"rank {rank} has a different loss than the other ranks of its tensor-parallel group" for rank in apart]
    yield check("loss", lines, said, said)
    if plan.precision is not Precision.FP32:
        own = sum(one.own_loss for one in found[::tp]) / len(found[::tp])
        error = abs(own - expected) / max(abs(expected), GRADIENT_NOISE)
        said = f"{own:.4g}, in float32 {expected:.4g}: relative {error:.1e}, allowed {BF16_LOSS_TOLERANCE:.0e}"
        is_right = error <= BF16_LOSS_TOLERANCE
        yield check(f"loss in {plan.precision}", [] if is_right else ["far from the loss in float32"], said, said)


def gradient_check(reference: Reference, found: Sequence[Findings]) -> Check:
    """Compares the gradient of every parameter with that of one process."""
    names = list(reference.parameters)
    worst = {name: max(one.gradients.get(name, 0.0) for one in found) for name in names}
    lines = [f"{name}: {worst[name]:.1e}" for name in names if not worst[name] <= GRADIENT_TOLERANCE]
    name = max(worst, key=lambda name: worst[name], default="")
    allowed = f"allowed {GRADIENT_TOLERANCE:.0e}, noise floor {GRADIENT_NOISE:.0e} of the model's largest"
    said = f"{len(reference.gradients)}, the worst relative error {worst.get(name, 0.0):.1e} at {name}; {allowed}"
    return check("gradients", lines, said, f"{len(lines)} of {len(names)} differ; {allowed}")


#: collectives that a rank issued: whose they are, the plan that lists them, and the rank's place on the shard axis
Log = tuple[str, Plan, Sequence[Issued], int]


def collective_check(logs: Sequence[Log], planned_by: Callable[[Plan], Counter[Issued]] = listed) -> Check:
    """Compares kind, axis, pass, dtype, bytes and count of the collectives on every rank with the plan's, which
    `planned_by` gives.

    Of reductions at the end of a step only the first ranks of the shard axis are compared, which the plan lists: where
    FSDP's shards are uneven, other ranks reduce less.
    """
    planned = {id(plan): planned_by(plan) for _, plan, _, _ in logs}
    lines: list[str] = []
    for who, plan, issued, shard_rank in logs:
        own = planned[id(plan)]
        wanted = {one: n for one, n in own.items() if shard_rank == 0 or one.during is not Pass.STEP}
        seen = [one for one in issued if shard_rank == 0 or one.during is not Pass.STEP]
        lines += [f"{who}{_in_words(plan, found, seen)}" for found in differences(plan, wanted, seen)]
    total, kinds = sum(sum(own.values()) for own in planned.values()), sum(map(len, planned.values()))
    said = f"{total} a step, of {kinds} kinds and sizes, as the plan lists them"
    return check("collectives", lines, said, f"{len(lines)} kinds and sizes are not as the plan lists them")


def _in_words(plan: Plan, difference: Difference, issued: Sequence[Issued]) -> str:
    where = difference.collective.where
    first = first_member(plan, difference, issued)
    return str(difference) if first == where else f"{first}, first of {difference}"


def check(name: str, lines: Sequence[str], right: str, wrong: str) -> Check:
    """A check that fails where there are lines on differences; `right` and `wrong` are what it then says."""
    shown = tuple(lines[:MOST_SHOWN]) + ((f"and {len(lines) - MOST_SHOWN} more",) if len(lines) > MOST_SHOWN else ())
    return Check(
        name=name, outcome=Outcome.FAIL if lines else Outcome.PASS, detail=wrong if lines else right, differences=shown
    )


# ---- a fake group


def shape_check(found: Sequence[tuple[str, Plan, Mapping[str, tuple[int, ...]]]]) -> Check:
    """Compares local shapes on rank 0 with the placements; `found` are whose they are, the plan, and the shapes."""
    lines = [f"{who}{line}" for who, plan, shapes in found for line in _other_shapes(plan, shapes)]
    right = f"{sum(len(shapes) for _, _, shapes in found)} parameters have the local shapes of their placements"
    return check("shapes", lines, right, f"{len(lines)} parameters have other local shapes than their placements imply")


def _other_shapes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yields parameters of other local shapes than placed: sharded over tp, then along dim 0 by FSDP."""
    divided, over_tp = plan.expert_calls().keys(), plan.parameters_over_tp()
    for name, parameter in plan.parameter_plans().items():
        ep = plan.mesh.ep if name.rpartition(".")[0] in divided else 1
        own = (parameter.shape[0] // ep, *parameter.shape[1:]) if parameter.shape else ()
        expected = local_shape(own, parameter.placement if plan.mesh.tp > 1 else R, plan.mesh.tp)
        if uses_fsdp(plan.mesh, plan.precision):
            ranks = plan.mesh.size(Axis.SHARD_TP) if name in over_tp else plan.mesh.shard // ep
            expected = (-(-expected[0] // ranks), *expected[1:])
        if shapes.get(name) != expected:
            yield f"{name}: {list(shapes.get(name, ()))} on rank 0, expected {list(expected)}"


def memory_check(found: Sequence[tuple[str, Plan, int | None]]) -> Check:
    """Compares tracked peaks in bytes with predicted ones; `found` are whose they are, the plan that predicts the most,
    and the peak. None is no peak, as of an optimizer that cannot be tracked."""
    if any(peak_bytes is None for _, _, peak_bytes in found):
        tracked = ", ".join(name for name, own in OPTIMIZERS.items() if own.is_tracked)
        why = f"the optimizer {found[0][1].optimizer} cannot be tracked, only {tracked} can"
        return Check(name="memory", outcome=Outcome.SKIPPED, detail=why)
    rows = [(plan.predicted.peak_memory_bytes / (peak or 1) - 1, who, plan, peak or 0) for who, plan, peak in found]
    lines = [
        f"{who}predicted in {plan.predicted.peak_during} of {plan.predicted.peak_module}"
        for error, who, plan, _ in rows
        if abs(error) > MEMORY_TOLERANCE
    ]
    error, who, plan, peak_bytes = max(rows, key=lambda row: abs(row[0]))
    said = (
        f"{who}predicted {format_bytes(plan.predicted.peak_memory_bytes)}, tracked {format_bytes(peak_bytes)}: "
        f"{error:+.1%}, allowed {MEMORY_TOLERANCE:.0%}"
    )
    return check("memory", lines, said, said)
