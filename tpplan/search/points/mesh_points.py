"""The points to search: meshes with micro-batches on which the model can be laid out."""

from dataclasses import dataclass, replace

import torch

from tpplan.core.errors import IndivisibleError, UsageError
from tpplan.core.graph import ModelGraph, within
from tpplan.core.mesh import Mesh, divisors, meshes, sub_clusters, tp_degrees
from tpplan.core.name_patterns import ROOT
from tpplan.costs.runs.kernels import dtype_name
from tpplan.layouts.buffer_writes import BufferWrite, why_apart
from tpplan.layouts.parameter_writes import why_copies, why_not_recomputed, write_within, writes_of
from tpplan.plan.plan import Precision, Recompute, uses_fsdp
from tpplan.search.models.trace_cache import TraceCache, Traced
from tpplan.search.points.request import Request
from tpplan.search.points.unsearched import unsearched_counts, unsearched_degrees

#: position of the argument `sparse` of each lookup
_SPARSE = {"aten.embedding.default": 4, "aten.embedding_bag.default": 5, "aten.embedding_bag.padding_idx": 5}


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A mesh and a micro-batch, which no ILP decides. Of plans of equal time the one of the lesser point is taken."""

    num_gpus: int
    tp: int
    shard: int
    micro_batch: int
    ep: int = 1

    @classmethod
    def of(cls, mesh: Mesh, micro_batch: int) -> "Point":
        """The point of a mesh and a micro-batch."""
        return cls(mesh.num_gpus, mesh.tp, mesh.shard, micro_batch, mesh.ep)

    @property
    def space(self) -> tuple[int, int, int]:
        """Equal for points that share decisions and their costs: micro-batch, tp degree, ranks that divide experts."""
        return self.micro_batch, self.tp, self.ep

    @property
    def ranks(self) -> tuple[int, ...]:
        """Equal for points on one mesh."""
        return self.num_gpus, self.tp, self.shard, self.ep

    @property
    def mesh(self) -> Mesh:
        """The mesh of the point."""
        return Mesh(replicate=self.num_gpus // (self.tp * self.shard), shard=self.shard, tp=self.tp, ep=self.ep)


def points_of(request: Request, *, tp: int | None, fsdp: int | None) -> tuple[list[Point], tuple[str, ...]]:
    """Every mesh with every micro-batch that divides a rank's share of the global batch, and lines on meshes that are
    left out. Raises IndivisibleError where there is no point."""
    batch, all_gpus = request.batch, request.all_gpus
    gpus, per_node = request.cluster.gpus, request.cluster.gpus_per_node
    across = not request.profile.unmeasured_across_nodes
    unsearched = tuple(unsearched_degrees(request.cluster, request.profile)) if tp is None else ()
    own = (tp,) if tp else tuple(sorted({*tp_degrees(gpus, per_node, across_nodes=across), *divisors(per_node)}))
    every = list(meshes(gpus, per_node, tp=tp, fsdp=fsdp, across_nodes=across))
    for fewer in () if all_gpus else sub_clusters(gpus, per_node)[:-1]:
        degrees = [fewer // degree for degree in own if fewer % degree == 0]
        is_dividing = any(batch.global_batch % degree == 0 for degree in degrees)
        if is_dividing and fewer % ((tp or 1) * (fsdp or 1)) == 0:
            found_on = meshes(fewer, per_node, tp=tp, fsdp=fsdp, across_nodes=across)
            every += (mesh for mesh in found_on if mesh.tp in own)
    if not all_gpus:
        unsearched += tuple(unsearched_counts(request.cluster))
    division = request.subject.experts
    if division is not None:
        every = [replace(mesh, ep=division.ep) for mesh in every if mesh.shard % division.ep == 0]
    found = [Point.of(mesh, m) for mesh in every for m in batch.micro_batches(mesh)]
    if not found:
        degrees = sorted({mesh.data_parallel for mesh in every})
        each = f" into micro-batches of {batch.micro_batch}" if batch.micro_batch else ""
        raise IndivisibleError(
            f"global batch {batch.global_batch} does not divide{each} on {' or '.join(map(str, degrees))} "
            f"data-parallel ranks of {gpus} GPUs; change --global-batch, --micro-batch or --tp"
        )
    return found, unsearched


def applicable(points: list[Point], request: Request, traces: TraceCache) -> list[Point]:
    """The points on which the traced model can be laid out: not all where its parameters must stay plain tensors, are
    written to in forward, or do not suit FSDP2; none where divided experts run by their own code. Raises UsageError
    where none is left."""
    traced = traces.traced(min(point.micro_batch for point in points))
    for name, _ in request.subject.experts.calls if request.subject.experts is not None else ():
        for whole, reason in traced.opaques.reasons.items():
            if within(name, whole):
                raise UsageError(
                    f"experts of {name} are not divided, for {whole or ROOT} runs by its own code: " + reason
                )
    for unit in traced.units:
        if obstacle := why_not_recomputed(traced.graph, unit, request.recompute or Recompute.NONE):
            raise UsageError(f"{unit} cannot be recomputed selectively: {obstacle}; plan with --recompute full")
    untouched = traced.opaques.untouched
    points = _with_one_buffer(_written(points, request, traced), traced.buffers_written())
    points = _with_whole_gradients(points, traced.opaques.hooked_weight)
    points = _untouched(_with_own_weights(points, traced), request, untouched)
    return points if untouched else _within_fsdp(points, request, traces, traced)


def _written(points: list[Point], request: Request, traced: Traced) -> list[Point]:
    """Points whose mesh applies a forward's in-place parameter writes exactly once."""
    write = next(iter(writes_of(traced.graph)), None)
    if write is None:
        return points
    kept = [point for point in points if not why_copies(point.mesh, request.precision)]
    if not kept:
        where = f"{write}: {traced.opaques.untouched}" if traced.opaques.untouched else str(write)
        raise UsageError(
            f"{where}, and {why_copies(points[0].mesh, request.precision)}: plan with --fsdp 1 and as many GPUs as "
            "--tp, in fp32 or bf16, or write to it after optimizer.step() instead"
        )
    again = write_within(traced.graph, traced.units)
    if again is not None and request.recompute not in (None, Recompute.NONE):
        raise UsageError(
            f"{again}, and would again where that layer is recomputed: leave out --recompute {request.recompute}, or "
            "write to it after optimizer.step() instead"
        )
    return kept


def _with_one_buffer(points: list[Point], writes: tuple[BufferWrite, ...]) -> list[Point]:
    """Points on whose mesh all ranks write the same to buffers that training reads."""
    kept = [point for point in points if not why_apart(writes, point.mesh)]
    if not kept:
        raise UsageError(
            f"{why_apart(writes, points[0].mesh)}: plan with --fsdp 1 and as many GPUs as --tp, or write to it after "
            "optimizer.step(), from what all ranks have, instead"
        )
    return kept


def _with_whole_gradients(points: list[Point], hooked: str) -> list[Point]:
    """Points without data parallelism where a parameter, `hooked`, has a hook on its gradient; all where none has."""
    if not hooked:
        return points
    kept = [point for point in points if point.mesh.data_parallel == 1]
    if not kept:
        raise UsageError(
            f"parameter {hooked} has a hook on its gradient (register_hook), which on {points[0].mesh.data_parallel} "
            "data-parallel ranks would see each rank's own gradient: plan with --fsdp 1 and as many GPUs as --tp, or "
            "call register_post_accumulate_grad_hook after the plan is applied instead"
        )
    return kept


def _with_own_weights(points: list[Point], traced: Traced) -> list[Point]:
    """Points without tensor parallelism, by which weights are DTensors in backward, where the model's code runs modules
    there; all where none does."""
    name = traced.running_again()
    kept = [point for point in points if not name or point.mesh.tp == 1]
    if not kept:
        raise UsageError(
            f"{name} runs modules in backward, by an autograd.Function of its own, where tensor-parallel ranks have "
            "other weights than in its forward: plan with --tp 1, or use torch.utils.checkpoint"
        )
    return kept


def _within_fsdp(points: list[Point], request: Request, traces: TraceCache, traced: Traced) -> list[Point]:
    """Points without FSDP, or all where FSDP2 can hold the model's parameters. Raises UsageError where none is left."""
    held = [point for point in points if uses_fsdp(point.mesh, request.precision)]
    found = (_shared_by_units(traced), _several_dtypes(request, traces, traced), _sparse_gradient(traced.graph))
    obstacle = next(filter(None, found), "") if held else ""
    kept = [point for point in points if point not in held] if obstacle else points
    if not kept:
        raise UsageError(f"{obstacle}, or plan with as many GPUs as --tp, in fp32 or bf16")
    return kept


def _shared_by_units(traced: Traced) -> str:
    """Why FSDP2 cannot hold a unit: a parameter inside is one outside too. "" where none is."""
    for source in traced.graph.parameters:
        for unit in traced.units:
            inside = [unit in around for around in traced.graph.holders(source)]
            if any(inside) and not all(inside):
                names = (source.label, *source.aliases)
                own, other = names[inside.index(True)], names[inside.index(False)]
                return (
                    f"FSDP2 gathers {unit} by itself, and its {own} is {other} too, which no code reads: give each "
                    "layer weights of its own"
                )
    return ""


def _several_dtypes(request: Request, traces: TraceCache, traced: Traced) -> str:
    """Why FSDP2 cannot hold a unit: its trained parameters were built in several dtypes. "" where no unit's were."""
    dtypes = traces.dtypes()
    found: dict[str, dict[torch.dtype, str]] = {}
    for name, weight in traced.model.named_parameters():
        if weight.requires_grad and weight.dim():
            unit = next((unit for unit in traced.units if within(name, unit)), "")
            own = weight.dtype if request.precision is Precision.BF16 else dtypes[name]
            found.setdefault(unit, {}).setdefault(own, name)
    several = next(((unit, names) for unit, names in found.items() if len(names) > 1), None)
    if several is None:
        return ""
    shown = " and ".join(f"{name} is {dtype_name(dtype)}" for dtype, name in several[1].items())
    where = several[0] or ROOT
    return f"FSDP2 takes one dtype of trained parameters a unit, and in {where} {shown}: give them one dtype"


def _untouched(points: list[Point], request: Request, reason: str) -> list[Point]:
    """Points on which parameters may stay plain tensors; all points where `reason`, why they must, is ""."""
    if not reason:
        return points
    if request.precision is Precision.BF16_MIXED:
        raise UsageError(
            f"bf16-mixed needs FSDP2, which replaces parameters, and this model's must stay as they are: {reason}; "
            "plan with --precision bf16 or fp32, or change that"
        )
    plain = [point for point in points if point.shard == 1]
    if not plain:
        raise UsageError(f"parameters must stay as they are, and cannot be sharded: {reason}; plan with --fsdp 1")
    return plain


def _sparse_gradient(graph: ModelGraph) -> str:
    """Why FSDP2 cannot train the model: a lookup gives a sparse gradient. "" where none does."""
    found = (op for op in graph.ops if op.args[_SPARSE.get(op.target, len(op.args)) :][:1] == (True,))
    op = next(found, None)
    if op is None:
        return ""
    return f"FSDP2 takes no sparse gradients, and {op.module or ROOT} looks up with sparse=True: leave sparse=True out"
