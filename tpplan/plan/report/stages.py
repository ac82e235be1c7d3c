"""The report of a plan of stages: what a step takes, a line for each stage, and what was not searched."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tpplan.core.units import DTYPE_BYTES, format_bytes, format_seconds
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Plan, Recompute
from tpplan.plan.proof_hash import why_unproven
from tpplan.plan.report.details import certificate
from tpplan.plan.report.words import format_count, gib, plural, samples, tokens, unit_of


def stage_lines(plan: PipelinePlan) -> list[str]:
    """The report, a line each; rows of the table are indented."""
    facts = stage_facts(plan)
    width = max(len(name) for name, _ in facts)
    lines = [f"{name.ljust(width)}  {text}" for name, text in facts]
    rows = [("stage", "layers", "step", "memory", "recomputed", "kept", "sends"), *map(_row, plan.stages)]
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["", *("  " + "  ".join(c.ljust(n) for c, n in zip(row, columns, strict=True)).rstrip() for row in rows)]
    return [
        *lines,
        "",
        "kept: micro-batches that wait for their backward; sends: bytes of each on every GPU.",
        "`tpplan show plan.json --stage 0` prints the layouts of a stage.",
    ]


def stage_name(plan: Plan) -> str:
    """A stage by its number and layers, as in `0: layers 0-15`."""
    number, layers, *_ = _row(plan)
    return f"{number}: {layers}"


def stage_facts(plan: PipelinePlan) -> list[tuple[str, str]]:
    """(name, text) of the stages together: their number, step, speed, memory, schedule and proof, and what was not
    searched."""
    first, predicted = plan.stages[0], plan.predicted
    limit = max(own.predicted.memory_limit_bytes for own in plan.stages)
    held = max(own.predicted.held_bytes for own in plan.stages)
    unproven = next(filter(None, map(why_unproven, plan.stages)), "")
    mesh = replace(first.mesh, ep=plan.ep)
    return [
        (
            "stages",
            f"{_counted(plan)}, each on {mesh}: {plan.num_gpus} GPUs, {first.cluster.profile}",
        ),
        (
            "step",
            f"{format_seconds(predicted.step_time_s)}: {format_seconds(predicted.stage_s)} in the slowest "
            f"{'stage' if plan.virtual_stages == 1 else 'GPU'}, "
            f"{format_seconds(predicted.bubble_s)} to fill and drain, {format_seconds(predicted.send_s)} sending",
        ),
        *_speed(plan),
        ("memory", f"{gib(held)} of {gib(limit)} on the fullest GPU"),
        (
            "schedule",
            f"{plan.schedule}, {plan.batch.accumulation_steps} micro-batches of {plan.batch.micro_batch} a rank; "
            f"{samples(plan.batch)} a step",
        ),
        *_crossing(plan),
        *_tied(plan),
        ("proof", f"unproven: {unproven}" if unproven else "proven: every stage, and that stages run the whole model"),
        *certificate(plan.solver),
        *_asked(plan),
    ]


def _tied(plan: PipelinePlan) -> Iterator[tuple[str, str]]:
    """Yields the parameters that several stages have."""
    every = {one: None for own in plan.stages if own.stage is not None for one in own.stage.ties}
    for one in every:
        stages = ", ".join(map(str, one.stages[:-1])) + f" and {one.stages[-1]}"
        yield "tied", f"{one.name} is in stages {stages}, which add up their gradients once a step"


def _asked(plan: PipelinePlan) -> Iterator[tuple[str, str]]:
    """Yields what was asked for, as far as the plan says it."""
    request = plan.request
    if request is None:
        return
    if request.command:
        yield "command", request.command
    if request.pins:
        yield "pins", ", ".join(f"{pattern}={style}" for pattern, style in sorted(request.pins.items()))


def stage_sentence(plan: Plan) -> str:
    """A sentence on the modules that a stage runs and the tensors that it keeps and sends, without words that need
    explaining."""
    stage = plan.stage
    assert stage is not None
    number, layers, *_, sends = _row(plan)
    many = plural(stage.in_flight, "micro-batch").replace("batchs", "batches")
    sent = f" It sends {sends} of each micro-batch to the next stage, and gets as much back." if stage.sends else ""
    return f"Stage {number} of {stage.count} runs {layers}, and keeps what {many} need for backward.{sent}"


def _counted(plan: PipelinePlan) -> str:
    """How many stages there are, and how many a GPU has."""
    several = f", {plan.virtual_stages} on each GPU" if plan.virtual_stages > 1 else ""
    return f"{len(plan.stages)}{several}"


def _speed(plan: PipelinePlan) -> Iterator[tuple[str, str]]:
    """Yields the throughput of all GPUs and of one; nothing where the predicted time is 0."""
    if plan.predicted.step_time_s:
        speed = tokens(plan.stages[0]) / plan.predicted.step_time_s
        per_gpu = format_count(speed / plan.num_gpus)
        yield "speed", f"{format_count(speed)} {unit_of(plan.batch)}/s, {per_gpu} per GPU"


def _row(plan: Plan) -> tuple[str, ...]:
    """The cells of a stage: its number, layers, seconds, memory, recomputed layers, micro-batches kept, bytes sent of
    each."""
    stage = plan.stage
    assert stage is not None
    return (
        str(stage.index),
        ", ".join(f"{pattern.removesuffix('.*')} {ranges}" for pattern, ranges in plan.blocks.items())
        or ", ".join(filter(None, plan.layers()))
        or stage.last
        or f"after {stage.received}",
        format_seconds(plan.predicted.step_time_s),
        gib(plan.predicted.held_bytes),
        ", ".join(_recomputed(plan)) or "none",
        str(stage.in_flight),
        format_bytes(_sent_bytes(plan)) if stage.sends else "-",
    )


def _sent_bytes(plan: Plan) -> int:
    """Bytes that a GPU of a stage sends of a micro-batch."""
    assert plan.stage is not None
    sent = (one.on_a_rank(plan.mesh.tp) for one in plan.stage.sends)
    return sum(prod(one.shape) * DTYPE_BYTES[one.dtype] for one in sent)


def _crossing(plan: PipelinePlan) -> Iterator[tuple[str, str]]:
    """Yields what stages send, where they send slices."""
    sends = dict.fromkeys(
        str(one) for own in plan.stages if own.stage for one in own.stage.sends if one.sliced is not None
    )
    if sends:
        yield "sends", f"{', '.join(sends)}: each tensor-parallel rank its own, to its like in the next stage"


def _recomputed(plan: Plan) -> Iterator[str]:
    modes = list(plan.recomputed_modules().values())
    yield from (f"{modes.count(mode)} {mode}" for mode in Recompute if mode in modes)
