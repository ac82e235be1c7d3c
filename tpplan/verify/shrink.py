"""Shrinks a plan to fewer ranks, fewer layers or float32, so that it can run where the whole plan cannot. A plan of
stages is shrunk by its stages.

Placements, conversions, recomputation and FSDP units are carried over by name. The collectives, the prediction and the
fingerprints remain those of the original plan; whoever runs a shrunk plan computes them anew
(tpplan.verify.prove_plan).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from tpplan.core.errors import UsageError
from tpplan.core.layout import Conversion, Layout, LayoutKind
from tpplan.core.mesh import Mesh, divisors
from tpplan.core.name_patterns import format_ranges, is_pattern, parse_ranges, substitute
from tpplan.plan.plan import (
    BoundaryPlan,
    BufferPlan,
    CrossingPlan,
    MeshPlan,
    ParameterPlan,
    Plan,
    Precision,
    SizePlan,
    StagePlan,
)

T = TypeVar("T")


# ---- fewer ranks


def smaller_mesh(mesh: Mesh, ranks: int) -> Mesh:
    """The largest mesh, on at most `ranks` ranks, whose degrees divide those of `mesh`: tp first, then both data axes.

    An axis of size 1 stays 1, so fewer ranks may be used. Raises UsageError where tp would become 1.
    """
    tp = _largest_divisor(mesh.tp, ranks)
    if tp == 1 < mesh.tp:
        least = divisors(mesh.tp)[1]
        found = f"{ranks} rank{'s' * (ranks > 1)}"
        raise UsageError(f"the plan has tp = {mesh.tp}, which {found} cannot run: give at least {least} ranks")
    rest = ranks // tp
    has_both = min(mesh.replicate, mesh.shard) > 1 and rest >= 2 * divisors(mesh.replicate)[1]
    shard = _largest_divisor(mesh.shard, rest // divisors(mesh.replicate)[1] if has_both else rest)
    return Mesh(replicate=_largest_divisor(mesh.replicate, rest // shard), shard=shard, tp=tp)


def _largest_divisor(degree: int, most: int) -> int:
    return max(divisor for divisor in divisors(degree) if divisor <= max(most, 1))


def on_mesh(plan: Plan, mesh: Mesh) -> Plan:
    """The plan on a mesh whose degrees divide its own; each rank keeps its micro-batches. FSDP shards no units over
    shard and tp on a mesh without shards.

    Raises UsageError where a size does not carry over, or where slices shared by ranks would not be shared by fewer
    ranks.
    """
    tables = (*_layouts(plan),)
    shared = sorted({layout.slices or 0 for layout in tables if layout.kind is LayoutKind.COPIED})
    if mesh.tp != plan.mesh.tp and shared and shared[-1] >= mesh.tp:
        raise UsageError(
            f"the plan has slices that ranks share (S(d)/{shared[-1]}), which {mesh.tp} tensor-parallel ranks cannot: "
            f"give a multiple of {plan.mesh.tp} ranks, or --dry"
        )
    batch = plan.batch
    whole = batch.micro_batch * batch.accumulation_steps * mesh.data_parallel
    return replace(
        plan,
        cluster=replace(plan.cluster, gpus=mesh.num_gpus, gpus_per_node=min(mesh.num_gpus, plan.cluster.gpus_per_node)),
        mesh_degrees=MeshPlan(replicate=mesh.replicate, shard=mesh.shard, tp=mesh.tp),
        batch=replace(batch, global_batch=whole),
        fsdp=plan.fsdp if mesh.shard > 1 else replace(plan.fsdp, over_tp=None),
        sizes={
            name: tuple(_on_tp(size, name, plan.mesh.tp, mesh.tp) for size in sizes)
            for name, sizes in plan.sizes.items()
        },
    )


def _layouts(plan: Plan) -> list[Layout]:
    crossings = [c for b in plan.boundaries.values() for c in (*b.inputs.values(), *b.outputs.values())]
    found = [layout for c in crossings for layout in (c.conversion.source, c.conversion.target)]
    return found + [layout for p in plan.parameters.values() for layout in (p.placement, *p.reads.values())]


def _on_tp(size: SizePlan, module: str, planned: int, tp: int) -> SizePlan:
    """The size on fewer ranks, where a rank's slice is larger. It then applies to tensors of any shape."""
    if planned == tp:
        return size
    if size.dims is not None and size.written < size.local:  # the code gives a rank's share for the whole
        return replace(size, of=(0,) * len(size.of), written=size.written * planned // tp)
    local = size.local * planned // tp
    if local > size.written:
        raise UsageError(
            f"sizes.{module}: {size.local} in place of {size.written} on {planned} ranks does not carry over to {tp} "
            f"ranks: give a multiple of {planned} ranks, or --dry"
        )
    times = size.times and size.times * planned // tp
    return replace(size, of=(0,) * len(size.of), local=local, times=times)


# ---- fewer layers


def with_layers(plan: Plan, count: int) -> Plan:
    """The plan for the model with only the first `count` layers of each repeated block."""
    kept = {pattern: parse_ranges(ranges)[:count] for pattern, ranges in plan.blocks.items()}
    dropped = dropped_layers(plan, count)

    def is_kept(name: str) -> bool:
        return is_pattern(name) or not any(name == own or name.startswith(f"{own}.") for own in dropped)

    def filtered(table: Mapping[str, T], change: Callable[[T], T] = lambda entry: entry) -> dict[str, T]:
        return {name: change(entry) for name, entry in table.items() if is_kept(name)}

    def readers_kept(parameter: ParameterPlan) -> ParameterPlan:
        reads = {reader: layout for reader, layout in parameter.reads.items() if is_kept(reader)}
        return replace(parameter, reads=reads, aliases=tuple(filter(is_kept, parameter.aliases)))

    def buffer_readers_kept(buffer: BufferPlan) -> BufferPlan:
        return replace(buffer, reads={reader: own for reader, own in buffer.reads.items() if is_kept(reader)})

    return replace(
        plan,
        blocks={pattern: format_ranges(indices) for pattern, indices in kept.items()},
        parameters=filtered(plan.parameters, readers_kept),
        boundaries=filtered(plan.boundaries),
        buffers=filtered(plan.buffers, buffer_readers_kept) if plan.buffers is not None else None,
        sizes=filtered(plan.sizes),
        losses=filtered(plan.losses),
        draws=tuple(filter(is_kept, plan.draws)),
        recompute=filtered(plan.recompute),
        fsdp=replace(
            plan.fsdp,
            units=tuple(filter(is_kept, plan.fsdp.units)),
            exceptions=tuple(filter(is_kept, plan.fsdp.exceptions)),
            over_tp=tuple(filter(is_kept, plan.fsdp.over_tp or ())) or None,
        ),
        opaque=filtered(plan.opaque) if plan.opaque is not None else None,
    )


def dropped_layers(plan: Plan, count: int) -> frozenset[str]:
    """Names of the layers beyond the first `count` of each repeated block."""
    return frozenset(
        substitute(pattern, index) for pattern, ranges in plan.blocks.items() for index in parse_ranges(ranges)[count:]
    )


# ---- float32


def in_float32(plan: Plan) -> Plan:
    """The plan in float32, so that comparisons are not blurred by rounding."""
    return replace(
        plan,
        precision=Precision.FP32,
        parameters={name: replace(p, dtype=_wide(p.dtype)) for name, p in plan.parameters.items()},
        stage=_wide_stage(plan.stage) if plan.stage is not None else None,
        boundaries={
            name: BoundaryPlan(inputs=_wide_crossings(b.inputs), outputs=_wide_crossings(b.outputs))
            for name, b in plan.boundaries.items()
        },
    )


def _wide_stage(stage: StagePlan) -> StagePlan:
    """The stage with what it receives and sends in float32."""
    receives, sends = (
        tuple(replace(one, dtype=_wide(one.dtype)) for one in tensors) for tensors in (stage.receives, stage.sends)
    )
    return replace(stage, receives=receives, sends=sends)


def _wide_crossings(table: Mapping[str, CrossingPlan]) -> dict[str, CrossingPlan]:
    return {
        path: CrossingPlan(Conversion(c.conversion.source, c.conversion.target), _wide(c.dtype))
        for path, c in table.items()
    }


def _wide(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype
