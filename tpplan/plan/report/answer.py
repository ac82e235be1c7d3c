"""The first lines of a report: the mesh, what a step takes, what binds, and warnings before training."""

from collections.abc import Iterator

from tpplan.core.units import format_seconds
from tpplan.plan.parts import RECOMPUTATION
from tpplan.plan.plan import ExpertsPlan, Plan, ProofStatus
from tpplan.plan.proof_hash import MEND
from tpplan.plan.report.words import format_count, gib, mesh_sizes, mfu, samples, tokens_per_s, unit_of
from tpplan.plan.tp_shares import percent, rows, summary

#: of a step: the least part that is named among what takes its time, and how many are
_NAMED_SHARE, _NAMED_PARTS = 0.03, 3
#: of the limit: a peak above it is called nearly full
_FULL_SHARE = 0.9
#: rows that the busiest rank gets over those of an even routing, for which the step is told
_IMBALANCES = (1.5, 2.0, 4.0)


def answer(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields (name, text): the mesh, the step with its error, throughput, memory, and what takes the time."""
    predicted, mesh, cluster = plan.predicted, plan.mesh, plan.cluster
    used = f"{mesh.num_gpus}" if mesh.num_gpus == cluster.gpus else f"{mesh.num_gpus} of {cluster.gpus}"
    yield "mesh", f"{mesh_sizes(mesh) or 'one GPU'}: {used} GPUs, {cluster.gpus_per_node} per node, {cluster.profile}"
    beyond = ", extrapolated: some sizes lie beyond the profile's" if predicted.is_extrapolated else ""
    yield "step", f"{format_seconds(predicted.step_time_s)} +/- {format_seconds(predicted.step_time_error_s)}{beyond}"
    if (speed := tokens_per_s(plan)) is not None:
        yield "speed", _speed(plan, speed)
    if plan.experts is not None:
        yield "experts", _experts(plan, plan.experts)
    yield "memory", _memory(plan)
    yield "why", _binding(plan)
    if plan.tp_shares is not None:
        yield "divided", summary(plan.tp_shares)


def _experts(plan: Plan, experts: ExpertsPlan) -> str:
    """How experts are divided, the rows that a rank gets, and the step under more unequal routings than planned."""
    own = sorted({call.experts // experts.ep for call in experts.modules.values()})
    step, even = plan.predicted.step_time_s, experts.seconds_of_rows / experts.imbalance
    worse = [factor for factor in _IMBALANCES if factor > experts.imbalance]
    times = (f"{factor:g} x: {format_seconds(step + (factor - experts.imbalance) * even)}" for factor in worse)
    return (
        f"{experts.ep} ranks divide them, {' or '.join(map(str, own))} on each; {experts.rows:,} rows to a rank a call"
        + (f"; the step where one gets more, {', '.join(times)}" if worse else "")
    )


def _speed(plan: Plan, speed: float) -> str:
    used = mfu(plan.predicted, plan.mesh.num_gpus)
    return (
        f"{format_count(speed)} {unit_of(plan.batch)}/s, {format_count(speed / plan.mesh.num_gpus)} per GPU"
        + (f", MFU {percent(used)}" if used is not None else "")
        + f"; {samples(plan.batch)} a step"
    )


def _memory(plan: Plan) -> str:
    """The peak with its slack, of the limit."""
    predicted = plan.predicted
    limit, held = predicted.memory_limit_bytes, predicted.held_bytes
    share = f" ({percent(held / limit)})" if limit else ""
    slack = f", {gib(predicted.slack_bytes)} of it slack" if predicted.slack_bytes else ""
    return f"{gib(held)} of {gib(limit)} per GPU{share}{slack}"


def _binding(plan: Plan) -> str:
    """Says which parts take the step's time, and whether memory is nearly full."""
    predicted = plan.predicted
    step, held = predicted.step_time_s, predicted.held_bytes
    parts = sorted(predicted.time_s.items(), key=lambda item: (-item[1], item[0]))
    dearest = [(name, s / step) for name, s in parts[:_NAMED_PARTS] if step and s >= _NAMED_SHARE * step]
    named = [f"{percent(share).replace(' ', '')} {name}" for name, share in dearest]
    text = f"a step is {', '.join(named)}" if named else "a step takes no time that is known"
    if predicted.memory_limit_bytes and held > _FULL_SHARE * predicted.memory_limit_bytes:
        again = predicted.time_s.get(RECOMPUTATION, 0.0)
        spent = f", for which {format_seconds(again)} go to recomputation" if again else ""
        return f"{text}; memory is nearly full{spent}"
    return f"{text}; memory does not bind"


def warnings(plan: Plan, unproven: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each warning before training: no proof, what every rank runs whole and why, notes.
    `unproven` says why the plan counts as unproven, "" where it is proven."""
    step = plan.predicted.step_time_s
    if unproven:
        yield "proof", f"{ProofStatus.UNPROVEN}: {unproven}"
        if plan.proof.status is not ProofStatus.UNPROVEN:
            yield "", MEND
    for module, text in rows(plan.tp_shares, step) if plan.tp_shares is not None else ():
        yield "not divided", f"{module}: {text}"
    if plan.untouched is not None:
        yield (
            "replicated",
            f"parameters stay as they are, whole on each rank, and gradients are averaged: {plan.untouched}",
        )
    for key, whole in sorted((plan.opaque or {}).items()):
        counted = f", functions of {', '.join(whole.bodies)} counted once" if whole.bodies else ""
        yield "runs whole", f"{key} ({format_seconds(whole.seconds)} of the step{counted}): {whole.reason}"
    if plan.unruled_ops:
        dearest = sorted(plan.unruled_ops.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{target} ({format_seconds(seconds)} of the step)" for target, seconds in dearest)
        yield "no rule for", f"{shown}: these run on whole values"
    for note in plan.notes or ():
        yield "note", note
