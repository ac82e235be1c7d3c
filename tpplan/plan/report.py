"""A plan for people (`render`) and for programs (`as_data`): the same text after solving and when shown later.

The text depends on the plan alone and not on the order of its mappings. It is ASCII, so that logs, pull requests and
terminals show it alike.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tpplan.core.errors import PlanError
from tpplan.core.escapes import escaped_data
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT, format_ranges
from tpplan.core.units import DTYPE_BYTES, GIB, format_bytes, format_count, format_seconds
from tpplan.plan.layer_table import layer_lines
from tpplan.plan.parts import SLACK
from tpplan.plan.plan import (
    BatchPlan,
    CollectivePlan,
    Compile,
    Pass,
    Plan,
    Precision,
    Prediction,
    ProofStatus,
    Recompute,
)
from tpplan.plan.proof_hash import MEND, why_unproven
from tpplan.plan.tp_shares import LISTED_SHARE
from tpplan.plan.tp_shares import rows as tp_rows
from tpplan.plan.tp_shares import summary as tp_summary

#: columns of a report that is not printed to a terminal
DEFAULT_WIDTH = 100
_INDENT = 2
_BAR_WIDTH = 20

_PRECISION = {
    Precision.FP32: "everything as the model was built",
    Precision.BF16_MIXED: "float32 parameters and optimizer states, bfloat16 compute",
    Precision.BF16: "bfloat16 throughout",
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
}


def render(plan: Plan, *, width: int = DEFAULT_WIDTH, color: bool = False) -> str:
    """The report as text of at most `width` columns that ends with a newline; with terminal colours where asked.

    Raises PlanError for a dtype of unknown size.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="auto" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as capture:
        console.print(_report(escaped_data(plan), width, why_unproven(plan)))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def as_data(plan: Plan) -> dict[str, object]:
    """The plan's JSON data, with numbers that the report computes under "derived"."""
    num_parameters, num_bytes = _model_size(plan)
    tokens_per_s = tokens_per_s_of(plan)
    return plan.to_dict() | {
        "derived": {
            "hash": plan.hash,
            "is_proven": not why_unproven(plan),
            "num_parameters": num_parameters,
            "parameter_bytes": num_bytes,
            "num_gpus": plan.mesh.num_gpus,
            "tokens_per_step": _tokens(plan),
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s / plan.mesh.num_gpus if tokens_per_s is not None else None,
        }
    }


def _report(plan: Plan, width: int, unproven: str) -> RenderableType:
    return Group(
        *_section("Plan", _facts(header_facts(plan))),
        *_section("Layers", *layer_lines(plan, width - _INDENT)),
        *_section("Predicted step", *_time(plan)),
        *_tp_section(plan),
        *_section("Predicted peak memory per GPU", *_memory(plan)),
        *_section("Collectives of a step on one rank", *_collectives(plan.collectives)),
        *_section("Why this plan", _facts(provenance_facts(plan, unproven)), last=True),
    )


def _section(title: str, *parts: RenderableType, last: bool = False) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    yield Padding(Group(*parts), (0, 0, 0 if last else 1, _INDENT))


def _facts(rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


# The section "Plan"


def header_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of what the plan is for and what it does; a name is "" where a line goes on."""
    cluster, batch, mesh = plan.cluster, plan.batch, plan.mesh
    yield "model", _model_line(plan)
    used = "" if mesh.num_gpus == cluster.gpus else f"{mesh.num_gpus} of "
    nodes = -(-cluster.gpus // cluster.gpus_per_node)
    yield "cluster", f"{used}{cluster.gpus} GPUs, {cluster.gpus_per_node} per node, {_plural(nodes, 'node')}"
    yield "profile", f"{cluster.profile} ({_short_hash(cluster.profile_fingerprint)})"
    yield "mesh", str(mesh)
    for axis in Axis:
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
        f"{_samples(batch)} = micro-batch {batch.micro_batch} x "
        f"{_plural(batch.accumulation_steps, 'accumulation step')} x {_plural(mesh.data_parallel, 'data rank')}",
    )
    if batch.accumulation_steps * mesh.data_parallel > 1:
        yield "loss", _LOSS
    if plan.outputs:
        yield (
            "outputs",
            ", ".join(f"{path}: {layout}" for path, layout in sorted(plan.outputs.items())) + "; others whole",
        )


def _model_line(plan: Plan) -> str:
    count, num_bytes = _model_size(plan)
    frozen = sum(prod(p.shape) for p in plan.parameter_plans().values() if not p.trainable)
    suffix = f", of which {format_count(frozen)} frozen" if frozen else ""
    return f"{format_count(count)} parameters, {format_bytes(num_bytes)}{suffix}"


def _axis_line(plan: Plan, axis: Axis) -> str:
    group = plan.mesh.group(axis, plan.cluster.gpus_per_node)
    place = "within a node" if group.nodes == 1 else f"across {group.nodes} nodes"
    return f"{axis}: {_AXES[axis].format(ranks=group.ranks)} ({place})"


def _recompute_line(plan: Plan) -> str:
    """Recomputed modules, grouped by what is recomputed."""
    named: dict[Recompute, list[str]] = {mode: [] for mode in Recompute}
    for name, mode in plan.recomputed_modules().items():
        named[mode].append(name or ROOT)
    return "; ".join(f"{_ranges(names)}: {mode.says}" for mode, names in named.items() if names) or "nothing"


def _counted(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{key} x{count}" if count > 1 else key for key, count in counts)


def _fsdp_line(plan: Plan) -> str:
    names = _counted((unit, sum(1 for _ in plan.expand(unit))) for unit in plan.fsdp.units)
    if plan.mesh.shard == 1:
        return names
    zero = {True: "resharded after forward (ZeRO-3)", False: "kept until backward (ZeRO-2)"}
    rule = plan.fsdp.reshard_after_forward
    exceptions = _ranges([name for name, is_resharded in plan.resharded_units().items() if is_resharded is not rule])
    return f"{names}; {zero[rule]}" + (f", but {exceptions} {zero[not rule]}" if exceptions else "")


def _ranges(names: Sequence[str]) -> str:
    """Names as text; names that differ in one number share a range: layers.0-11,30."""
    numbered: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = re.split(r"(\d+)", name, maxsplit=1) if re.search(r"\d", name) else (name, "", "")
        numbered.setdefault((before, after), []).extend([int(number)] if number else [])
    return ", ".join(
        f"{before}{format_ranges(tuple(sorted(found)))}{after}" for (before, after), found in numbered.items()
    )


def _model_size(plan: Plan) -> tuple[int, int]:
    """Elements and bytes of all parameters; a tied weight counts once."""
    count = num_bytes = 0
    for name, parameter in plan.parameter_plans().items():
        if parameter.dtype not in DTYPE_BYTES:
            raise PlanError(
                f"parameters.{name}.dtype: expected one of {', '.join(DTYPE_BYTES)}, got {parameter.dtype!r}"
            )
        count += prod(parameter.shape)
        num_bytes += prod(parameter.shape) * DTYPE_BYTES[parameter.dtype]
    return count, num_bytes


# The sections of predictions and collectives


def _time(plan: Plan) -> Iterator[RenderableType]:
    predicted, batch = plan.predicted, plan.batch
    step = f"{format_seconds(predicted.step_time_s)} +/- {format_seconds(predicted.step_time_error_s)}"
    tokens_per_s = tokens_per_s_of(plan)
    if tokens_per_s is not None:
        what = "tokens" if batch.seq_len > 1 else "samples"
        step += (
            f", {format_count(tokens_per_s)} {what}/s, {format_count(tokens_per_s / plan.mesh.num_gpus)} per GPU "
            f"({_samples(batch)} a step)"
        )
    yield Text(step)
    if predicted.is_extrapolated:
        yield Text("Some sizes lie beyond what the profile measured: their times are extrapolated.", style="yellow")
    yield _parts(predicted.time_s, predicted.step_time_s, "share", format_seconds)


def _tp_section(plan: Plan) -> Iterator[RenderableType]:
    """The section on tensor parallelism: shares divided, and modules that run whole; none on one rank."""
    shares, step_s = plan.tp_shares, plan.predicted.step_time_s
    if shares is None:
        return
    listed = list(tp_rows(shares, step_s))
    parts: list[RenderableType] = [Text(tp_summary(shares))]
    if listed:
        parts += [Text(f"On every rank whole, at {LISTED_SHARE:.0%} of the step or more:"), _facts(iter(listed))]
    yield from _section("Tensor parallelism", *parts)


def _memory(plan: Plan) -> Iterator[RenderableType]:
    """Lines on predicted peak, slack and limit, then the peak's parts."""
    predicted = plan.predicted
    limit, peak, slack = predicted.memory_limit_bytes, predicted.peak_memory_bytes, predicted.slack_bytes
    share = (peak + slack) / limit if limit else 0.0
    held = f"{gib(peak)} predicted + {gib(slack)} slack" if slack else gib(peak)
    yield Text(f"{held} of {gib(limit)}: {share:.1%}, {gib(limit - peak - slack)} free; {peak_moment(predicted)}")
    parts = {**predicted.memory_bytes, **({SLACK: slack} if slack else {})}
    yield _parts(parts, limit, "of limit", gib)


def peak_moment(predicted: Prediction) -> str:
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


def _collectives(collectives: tuple[CollectivePlan, ...]) -> Iterator[RenderableType]:
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


def collective_totals(collectives: Iterable[CollectivePlan]) -> list[tuple[Axis, Pass, str, int, int]]:
    """(axis, pass, kind, count, bytes of the whole values) of a rank's step, ordered by axis, pass and kind."""
    totals: dict[tuple[int, int, str], tuple[int, int]] = {}
    axes, passes = list(Axis), list(Pass)
    for entry in collectives:
        key = (axes.index(entry.axis), passes.index(entry.during), entry.kind)
        count, num_bytes = totals.get(key, (0, 0))
        totals[key] = (count + entry.count, num_bytes + entry.count * entry.num_bytes)
    return [(axes[axis], passes[during], kind, *total) for (axis, during, kind), total in sorted(totals.items())]


# The section "Why this plan"


def provenance_facts(plan: Plan, unproven: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of solver, proof and notes. `unproven` says why the plan is unproven; "" where it is not."""
    solver, proof = plan.solver, plan.proof
    yield (
        "solver",
        f"{solver.name}: {solver.status}, {format_seconds(solver.objective_s)}, "
        f"bound {format_seconds(solver.bound_s)}, gap {solver.gap:.2%}, "
        f"{_plural(solver.meshes_tried, 'point')} tried"
        + "".join(f", {count} {reason}" for reason, count in sorted(solver.skipped.items())),
    )
    for left_out in solver.unsearched or ():
        yield "not searched", left_out
    status, why = (ProofStatus.UNPROVEN, unproven) if unproven else (proof.status, _PROVEN)
    yield "proof", f"{status}: {why} ({_plural(proof.rounds, 'round')})"
    if unproven and proof.status is not ProofStatus.UNPROVEN:
        yield "", MEND
    for assumption in proof.assumptions:
        yield "assuming", f"{assumption}, as for the example inputs"
    yield from _particulars(plan)
    for cut in proof.cuts:
        yield "", f"forbidden on the way: {cut}"
    if plan.unruled_ops:
        dearest = sorted(plan.unruled_ops.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{target} ({format_seconds(seconds)} of the step)" for target, seconds in dearest)
        yield "no rule for", f"{shown}: these run on whole values"
    for note in plan.notes or ():
        yield "note", note
    yield "versions", f"tpplan {plan.tpplan_version}, torch {plan.torch_version}"


def _particulars(plan: Plan) -> Iterator[tuple[str, str]]:
    """Lines on modules that run otherwise than by layouts alone: sizes, losses, dropout, what runs whole."""
    for key, sizes in sorted(plan.sizes.items()):
        numbers = ", ".join(f"{s.call} {s.written} as {s.local}" for s in dict.fromkeys(sizes))
        yield "sizes", f"{key}: {numbers}"
    for key, count in sorted(plan.losses.items()):
        yield "loss", f"{key}: its cross entropy runs on slices of {count} classes, which are never gathered"
    if plan.draws:
        yield "dropout", f"{', '.join(plan.draws)}: on slices, each rank draws for its own"
    if plan.untouched is not None:
        yield (
            "replicated",
            f"parameters stay as they are, whole on each rank, and gradients are averaged: {plan.untouched}",
        )
    for key, whole in sorted((plan.opaque or {}).items()):
        counted = f", functions of {', '.join(whole.bodies)} counted once" if whole.bodies else ""
        yield "runs whole", f"{key} ({format_seconds(whole.seconds)} of the step{counted}): {whole.reason}"


def _samples(batch: BatchPlan) -> str:
    """The global batch in words: `8 sequences of 4096 tokens`; `8 samples` where they have no length."""
    if batch.seq_len == 1:
        return _plural(batch.global_batch, "sample")
    return f"{_plural(batch.global_batch, 'sequence')} of {batch.seq_len} tokens"


def _tokens(plan: Plan) -> int:
    return plan.batch.global_batch * plan.batch.seq_len


def tokens_per_s_of(plan: Plan) -> float | None:
    """Tokens per second; None where the predicted time is 0."""
    return _tokens(plan) / plan.predicted.step_time_s if plan.predicted.step_time_s else None


def gib(num_bytes: float) -> str:
    """Bytes as text in GiB, so that parts compare; in smaller units below 0.01 GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= 0.01 * GIB else format_bytes(num_bytes)


def _plural(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def _short_hash(fingerprint: str) -> str:
    return fingerprint.removeprefix("sha256:")[:12]
