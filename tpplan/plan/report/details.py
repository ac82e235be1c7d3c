"""The parts of a report below its table: the setting, the step and the peak by part, collectives, and provenance."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tpplan.core.graph import AS_IF_EVEN
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT
from tpplan.core.units import format_bytes, format_seconds
from tpplan.plan.parts import SLACK
from tpplan.plan.plan import (
    SHAPE,
    CollectivePlan,
    Compile,
    Pass,
    Plan,
    Precision,
    Prediction,
    Recompute,
    SizePlan,
    SolverReport,
)
from tpplan.plan.report.words import (
    axes_of,
    format_count,
    gib,
    model_size,
    placed,
    plural,
    ranges,
    samples,
    short_hash,
)

_BAR_WIDTH = 20
_PRECISION = {
    Precision.FP32: "everything as the model was built",
    Precision.BF16_MIXED: "float32 parameters and optimizer states, bfloat16 compute",
    Precision.BF16: "bfloat16 throughout",
    Precision.BF16_AUTOCAST: "forward and loss run under torch.autocast(device, torch.bfloat16), which the training "
    "code opens",
}
_COMPILE = {
    Compile.BLOCKS: "predicted as torch.compile fuses elementwise ops within each layer; applying the plan compiles "
    "nothing, and eager is slower"
}
_PROVEN = "run as applied on the first and last rank; every layout derived again from the plan alone"
_LOSS = (
    "the mean, over micro-batches and data ranks, of the model's on each; where these hold different numbers of tokens "
    "(padding), tpplan.loss_weights makes it the mean over tokens"
)
_AXES = {
    Axis.REPLICATE: "{ranks} replicas split the batch; gradients are all-reduced",
    Axis.SHARD: "{ranks} ranks split the batch; FSDP shards parameters, gradients and optimizer states",
    Axis.TP: "{ranks} ranks read the same batch and split the layers",
    Axis.EP: "{ranks} neighbours on the shard axis divide experts; rows go to the rank that has theirs",
    Axis.EXPERT_SHARD: "{ranks} ranks have the same experts; FSDP shards these among them",
    Axis.SHARD_TP: "{ranks} ranks of shard and tp together; FSDP shards layers whose weights tp replicates among them",
}


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of (name, text), the text folded beside the names."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def setting(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of what was planned: model, machine, mesh, what is sharded and recomputed, batch."""
    cluster, batch, mesh = plan.cluster, plan.batch, plan.mesh
    yield "model", _model_line(plan)
    used = "" if mesh.num_gpus == cluster.gpus else f"{mesh.num_gpus} of "
    nodes = -(-cluster.gpus // cluster.gpus_per_node)
    yield "cluster", f"{used}{cluster.gpus} GPUs, {cluster.gpus_per_node} per node, {plural(nodes, 'node')}"
    yield "profile", f"{cluster.profile} ({short_hash(cluster.profile_fingerprint)})"
    yield "mesh", str(mesh)
    for axis in axes_of(plan):
        if mesh.size(axis) > 1:
            yield "", _axis_line(plan, axis)
    if plan.fsdp.units:
        yield "fsdp units", _fsdp_line(plan)
    if plan.recompute:
        yield "recompute", _recompute_line(plan)
    if plan.compile is not Compile.NONE:
        yield "compile", f"{plan.compile}: {_COMPILE[plan.compile]}"
    yield "precision", f"{plan.precision}: {_PRECISION[plan.precision]}"
    yield "optimizer", plan.optimizer
    yield (
        "batch",
        f"{samples(batch)} = micro-batch {batch.micro_batch} x "
        f"{plural(batch.accumulation_steps, 'accumulation step')} x {plural(mesh.data_parallel, 'data rank')}",
    )
    if batch.accumulation_steps * mesh.data_parallel > 1:
        yield "loss", _LOSS
    if plan.outputs:
        yield (
            "outputs",
            ", ".join(f"{path}: {layout}" for path, layout in sorted(plan.outputs.items())) + "; others whole",
        )


def _model_line(plan: Plan) -> str:
    count, num_bytes = model_size(plan)
    frozen = sum(prod(p.shape) for p in plan.parameter_plans().values() if not p.trainable)
    suffix = f", of which {format_count(frozen)} frozen" if frozen else ""
    return f"{format_count(count)} parameters, {format_bytes(num_bytes)}{suffix}"


def _axis_line(plan: Plan, axis: Axis) -> str:
    group = plan.mesh.group(axis, plan.cluster.gpus_per_node)
    return f"{axis}: {_AXES[axis].format(ranks=group.ranks)} ({placed(group)})"


def _recompute_line(plan: Plan) -> str:
    """Recomputed modules, grouped by what is recomputed."""
    named: dict[Recompute, list[str]] = {mode: [] for mode in Recompute}
    for name, mode in plan.recomputed_modules().items():
        named[mode].append(name or ROOT)
    return "; ".join(f"{ranges(names)}: {mode.says}" for mode, names in named.items() if names) or "nothing"


def _counted(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{key} x{count}" if count > 1 else key for key, count in counts)


def _fsdp_line(plan: Plan) -> str:
    names = _counted((unit, sum(1 for _ in plan.expand(unit))) for unit in plan.fsdp.units)
    if plan.fsdp.whole_gradients:
        names += "; gradients whole between micro-batches, reduced once a step"
    if plan.mesh.shard == 1:
        return names
    kept = "gathered once a step" if plan.fsdp.gathered_once else "kept until backward (ZeRO-2)"
    zero = {True: "resharded after forward (ZeRO-3)", False: kept}
    rule = plan.fsdp.reshard_after_forward
    exceptions = ranges([name for name, is_resharded in plan.resharded_units().items() if is_resharded is not rule])
    text = f"{names}; {zero[rule]}" + (f", but {exceptions} {zero[not rule]}" if exceptions else "")
    over_tp = plan.units_over_tp()
    if not over_tp:
        return text
    return f"{text}; over shard x tp: {ranges([name for name in plan.fsdp_units() if name in over_tp])}"


def time_parts(plan: Plan) -> RenderableType:
    """A table of the step's seconds by part."""
    return _parts(plan.predicted.time_s, plan.predicted.step_time_s, "share", format_seconds)


def memory_parts(plan: Plan) -> Iterator[RenderableType]:
    """Yields a line on when memory peaks, and a table of the peak's bytes by part, the slack among them."""
    predicted, slack = plan.predicted, plan.predicted.slack_bytes
    yield Text(f"{moment(predicted)}; the slack is for the framework and its allocator" if slack else moment(predicted))
    parts = {**predicted.memory_bytes, **({SLACK: slack} if slack else {})}
    yield _parts(parts, predicted.memory_limit_bytes, "of limit", gib)


def moment(predicted: Prediction) -> str:
    """The pass and the module of the peak."""
    if predicted.peak_during is Pass.STEP:
        return "most during the optimizer's step"
    return f"most during {predicted.peak_during}, in {predicted.peak_module}"


def _parts(parts: Mapping[str, float], whole: float, share_title: str, text_of: Callable[[float], str]) -> Table:
    """A table of the nonzero parts, largest first, with a bar each."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for name, amount in sorted(parts.items(), key=lambda item: (-item[1], item[0])):
        if not amount:
            continue
        share = amount / whole if whole else 0.0
        suffix = f"{share:.1%} {share_title}" if share_title != "share" else f"{share:.1%}"
        table.add_row(Text(name), text_of(amount), suffix, Text(_bar(share), style="cyan"))
    return table


def _bar(share: float) -> str:
    """A bar of 20 marks for the whole; any share of at least 1 % has one mark."""
    return "#" * min(_BAR_WIDTH, max(round(share * _BAR_WIDTH), int(share >= 0.01)))


def collective_totals(collectives: Iterable[CollectivePlan]) -> list[tuple[Axis, Pass, str, int, int]]:
    """(axis, pass, kind, count, bytes of the whole values) of a rank's step, ordered by axis, pass and kind."""
    totals: dict[tuple[int, int, str], tuple[int, int]] = {}
    axes, passes = list(Axis), list(Pass)
    for entry in collectives:
        key = (axes.index(entry.axis), passes.index(entry.during), entry.kind)
        count, num_bytes = totals.get(key, (0, 0))
        totals[key] = (count + entry.count, num_bytes + entry.count * entry.num_bytes)
    return [(axes[axis], passes[during], kind, *total) for (axis, during, kind), total in sorted(totals.items())]


def collective_rows(collectives: tuple[CollectivePlan, ...]) -> Iterator[RenderableType]:
    """Yields a table of the collectives of a step on one rank, by axis, pass and kind."""
    if not collectives:
        yield Text("none")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title, justify in (("axis", "left"), ("during", "left"), ("collective", "left"), ("count", "right")):
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]  # a literal of the tuple
    table.add_column("bytes of the whole values", justify="right")
    for axis, during, kind, count, num_bytes in collective_totals(collectives):
        table.add_row(axis, during, kind.replace("_", "-"), str(count), format_bytes(num_bytes))
    yield table


def certificate(solver: SolverReport) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of how near a plan is to the best, and of what was not searched."""
    yield (
        "solver",
        f"{solver.name}: {solver.status}, {format_seconds(solver.objective_s)}, "
        f"bound {format_seconds(solver.bound_s)}, gap {solver.gap:.2%}, "
        f"{plural(solver.meshes_tried, 'point')} tried"
        + "".join(f", {count} {reason}" for reason, count in sorted(solver.skipped.items())),
    )
    for left_out in solver.unsearched or ():
        yield "not searched", left_out


def provenance(plan: Plan, unproven: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of how the plan was found and proven; `unproven` says why it is not, "" where it is."""
    proof = plan.proof
    yield from certificate(plan.solver)
    if not unproven:
        yield "proof", f"{proof.status}: {_PROVEN} ({plural(proof.rounds, 'round')})"
    for assumption in proof.assumptions:
        yield "assuming", assumption if assumption.endswith(AS_IF_EVEN) else f"{assumption}, as for the example inputs"
    yield from _particulars(plan)
    for cut in proof.cuts:
        yield "", f"forbidden on the way: {cut}"
    if plan.request is not None:
        if plan.request.command:
            yield "command", plan.request.command
        elif plan.request.pins:
            yield "pins", ", ".join(f"{pattern}={style}" for pattern, style in sorted(plan.request.pins.items()))
    yield "versions", f"tpplan {plan.tpplan_version}, torch {plan.torch_version}"


def _particulars(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields lines on modules that need more than layouts: sizes, losses, bags, buffers, dropout."""
    for key, sizes in sorted(plan.sizes.items()):
        yield "sizes", f"{key}: {', '.join(dict.fromkeys(map(_size, sizes)))}"
    for key, count in sorted(plan.losses.items()):
        yield "loss", f"{key}: its cross entropy runs on slices of {count} classes, which are never gathered"
    for key, counts in sorted((plan.bags or {}).items()):
        yield "bags", f"{key}: adds up a rank's own of {', '.join(map(str, counts))} rows"
    for key, buffer in sorted((plan.buffers or {}).items()):
        readers = ", ".join(f"{reader or ROOT} as {layout}" for reader, layout in sorted(buffer.reads.items()))
        yield "buffer", f"{key}: every rank has it whole; read by {readers}"
    if plan.draws:
        yield "dropout", f"{', '.join(plan.draws)}: on slices, each rank draws for its own"


def _size(size: SizePlan) -> str:
    if size.call == SHAPE:
        return (
            f"told {size.written} of {size.local} where it asks a tensor of {size.count} dims for dim {size.position}"
        )
    return f"{size.call} {size.written} as {size.local}"
