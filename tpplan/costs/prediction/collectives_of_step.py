"""Every collective of an optimizer step on one rank: kind, axis, bytes, dtype, how often, and in which module.

What a rank sends follows from the assignment alone; no profile is asked. The proof compares a plan's list with this
one, and `tpplan verify` counts what ranks issue against it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES, bucketed
from tpplan.core.graph import Source
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.collectives import Transfer, transfers_of
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.weights import Weights
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import classes_of
from tpplan.layouts.layer_treatments import FsdpUnit
from tpplan.layouts.readings import Reading
from tpplan.machine.profile import Collective
from tpplan.plan.compress_names import pattern_of
from tpplan.plan.plan import CollectivePlan, Pass, WorkKind

#: the dtype in which FSDP gathers parameters of several dtypes
BYTES = "uint8"
#: numbers that ranks exchange for each parameter outside FSDP: whether it has a gradient, and whether it is new
FLAGS = 2

#: a collective: pattern of its module, kind, axis, pass, dtype, bytes of the whole tensor
_Key = tuple[str, str, Axis, Pass, str, int]
_Counts = Counter[_Key]


def collectives(lifetimes: Lifetimes) -> tuple[CollectivePlan, ...]:
    """The collectives of a step of an assignment, sorted. Its lifetimes say where a recomputed forward stops."""
    assignment = lifetimes.assignment
    transfers = _transfers(assignment)
    counts = _tp_collectives(assignment, transfers)
    if assignment.recomputed:
        counts.update(_repeats(lifetimes, transfers))
    counts.update(_tp_reductions(assignment))
    if assignment.num_averages is None:
        counts.update(_fsdp_collectives(assignment))
    counts.update(_averages(assignment))
    if assignment.has_uneven_reads:
        counts.update(_agreements(assignment))
    return tuple(
        CollectivePlan(where=where, kind=kind, axis=axis, during=during, dtype=dtype, num_bytes=num_bytes, count=count)
        for (where, kind, axis, during, dtype, num_bytes), count in sorted(counts.items())
        if num_bytes
    )


def _transfers(assignment: Assignment) -> dict[str, tuple[Transfer, ...]]:
    """The collectives that each decision issues in a micro-batch, computed once for like decisions with one strategy;
    decisions that issue none are left out."""
    graph, strategies = assignment.graph, assignment.strategies
    known: dict[tuple[str, int], tuple[Transfer, ...]] = {}
    found = {}
    for name, representative in classes_of(graph)[0].items():
        key = representative, id(strategies[name])  # the assignment holds it
        if key not in known:
            known[key] = transfers_of(graph, assignment.deciders[name], strategies[name])
        if known[key]:
            found[name] = known[key]
    return found


def _tp_collectives(assignment: Assignment, transfers: Mapping[str, tuple[Transfer, ...]]) -> _Counts:
    """Collectives of conversions at boundaries and readings, and of ops, in all micro-batches."""
    found: _Counts = Counter()
    for name, own in transfers.items():
        where = _where(assignment, assignment.deciders[name].module)
        for transfer in own:
            key = where, str(transfer.kind), transfer.axis, transfer.during, transfer.dtype, transfer.num_bytes
            found[key] += assignment.accumulation_steps
    return found


def _repeats(lifetimes: Lifetimes, transfers: Mapping[str, tuple[Transfer, ...]]) -> _Counts:
    """Forward collectives that recomputed modules run again in backward."""
    found: _Counts = Counter()
    assignment = lifetimes.assignment
    for run, names in lifetimes.run_again():
        for name in names:
            decider = assignment.deciders[name]
            if isinstance(decider, Reading) and WorkKind.SUM in run.mode.keeps:
                continue  # an exchange of a weight's parts is kept like a sum (tpplan.apply.recompute)
            for transfer in transfers.get(name, ()):
                if transfer.during is Pass.FORWARD:
                    where = _where(assignment, decider.module)
                    key = where, str(transfer.kind), transfer.axis, Pass.BACKWARD, transfer.dtype, transfer.num_bytes
                    found[key] += assignment.accumulation_steps
    return found


def _tp_reductions(assignment: Assignment) -> _Counts:
    """Sums of gradients over tp, once a step in buckets, each rank its FSDP shard."""
    weights = Weights(assignment=assignment)
    buckets = _buckets(weights, weights.summands, weights.shard_elements)
    return Counter((ROOT, str(Collective.ALL_REDUCE), Axis.TP, Pass.STEP, dtype, size) for dtype, size in buckets)


def _fsdp_collectives(assignment: Assignment) -> _Counts:
    """Gathers and reductions of each unit. A micro-batch, or a step, gathers the root and units that are not resharded
    once; a micro-batch gathers a resharded unit, and again in backward; replicas reduce once a step."""
    found: _Counts = Counter()
    mesh, steps, treatments = assignment.mesh, assignment.accumulation_steps, assignment.treatments
    kinds = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
    gather, scatter, reduce = map(str, kinds)
    for unit in assignment.units if mesh.data_parallel > 1 else ():
        for (name, ep), own in _by_fsdp_module(unit).items():
            where = _where(assignment, name)
            axis, ranks = (Axis.SHARD if ep == 1 else Axis.EXPERT_SHARD), mesh.shard // ep
            if unit.name in assignment.over_tp:
                axis, ranks = Axis.SHARD_TP, mesh.size(Axis.SHARD_TP)
            held = [source for source in own if not _is_beside_fsdp(assignment, source)]
            trained = [source for source in held if assignment.has_gradient(source)]
            gathered, reduced = _unit_bytes(assignment, held, trained)
            if ranks > 1 and held:
                dtype = _gathered_dtype(assignment, held)
                is_resharded = bool(unit.name) and treatments[unit.name].reshard
                is_kept = not is_resharded and ep == 1
                calls = 1 if is_kept else unit.calls
                found[where, gather, axis, Pass.FORWARD, dtype, gathered] += calls * (
                    assignment.gathers if is_kept else steps
                )
                if again := _gathers_in_backward(assignment, unit, reshards=is_resharded):
                    found[where, gather, axis, Pass.BACKWARD, dtype, gathered] += again
            if not trained:
                continue
            dtype = assignment.master_dtype(trained[0])
            if ranks > 1:
                found[where, scatter, axis, Pass.BACKWARD, dtype, reduced] += assignment.reductions
            if mesh.replicate > 1:
                found[where, reduce, Axis.REPLICATE, Pass.BACKWARD, dtype, reduced // ranks] += 1
    return found


def _gathers_in_backward(assignment: Assignment, unit: FsdpUnit, *, reshards: bool) -> int:
    """How often the backwards of a step gather a unit: the last one frees it, others where the plan says so."""
    earlier = unit.gathers_in_backward(reshards=reshards, is_kept=assignment.gathered_once)
    last = unit.gathers_in_backward(reshards=reshards, is_kept=False)
    return (assignment.accumulation_steps - 1) * earlier + last


def _by_fsdp_module(unit: FsdpUnit) -> dict[tuple[str, int], list[Source]]:
    """The parameters of a unit by the module that FSDP gathers them for, and the ranks that divide their experts: a
    module of divided experts is gathered by itself."""
    found: dict[tuple[str, int], list[Source]] = {}
    for source in unit.parameters:
        name = source.label.rpartition(".")[0] if source.ep > 1 else unit.name
        found.setdefault((name, source.ep), []).append(source)
    return found


def _averages(assignment: Assignment) -> _Counts:
    """Averages of gradients that FSDP does not hold, over each of its axes: ranks first exchange which parameters have
    one, then they reduce in buckets (tpplan.apply.collectives.dp_gradients)."""
    found: _Counts = Counter()
    weights, times = Weights(assignment=assignment), assignment.num_averages or 1
    beside = [source for source in weights.trainable if _is_beside_fsdp(assignment, source)]
    buckets = list(_buckets(weights, filter(assignment.has_gradient, beside), weights.elements))
    for axis in (Axis.REPLICATE, Axis.SHARD):
        if beside and assignment.mesh.size(axis) > 1:
            kind = str(Collective.ALL_REDUCE)
            found[ROOT, kind, axis, Pass.STEP, "int32", FLAGS * DTYPE_BYTES["int32"] * len(beside)] += times
            for dtype, num_bytes in buckets:
                found[ROOT, kind, axis, Pass.STEP, dtype, num_bytes] += times
    return found


def _agreements(assignment: Assignment) -> _Counts:
    """Exchanges of which of FSDP's parameters have a gradient, over the axes that reduce them, once a step
    (tpplan.apply.collectives.uneven_reads)."""
    counts: Counter[Axis] = Counter()
    for unit in assignment.units:
        for (_, ep), own in _by_fsdp_module(unit).items():
            axis = Axis.SHARD_TP if unit.name in assignment.over_tp else Axis.SHARD if ep == 1 else Axis.EXPERT_SHARD
            counts[axis] += sum(not _is_beside_fsdp(assignment, source) for source in own)
    found: _Counts = Counter()
    for over, count in counts.items():
        mesh = replace(assignment.mesh, ep=assignment.graph.ep)
        for axis in (Axis.REPLICATE, over):
            if mesh.size(axis) > 1:
                found[ROOT, str(Collective.ALL_REDUCE), axis, Pass.STEP, "int32", DTYPE_BYTES["int32"] * count] += 1
    return found


def _buckets(
    weights: Weights, sources: Iterable[Source], elements: Callable[[Source], int]
) -> Iterator[tuple[str, int]]:
    """Yields (dtype, bytes) of each bucket of the gradients of parameters, each of which has so many elements."""
    sizes: dict[str, list[int]] = {}
    for source in sources:
        own = sizes.setdefault(weights.assignment.master_dtype(source), [])
        own.append(weights.master_width(source) * elements(source))
    for dtype, own in sizes.items():
        yield from ((dtype, sum(own[i] for i in bucket)) for bucket in bucketed(own, BUCKET_BYTES))


def _is_beside_fsdp(assignment: Assignment, source: Source) -> bool:
    """True for a parameter that FSDP does not hold: all of them stay plain tensors, or it has no dims."""
    if assignment.num_averages is not None:
        return True
    return assignment.uses_fsdp and not assignment.graph.values[source.result].shape


def _unit_bytes(assignment: Assignment, held: Sequence[Source], trained: Sequence[Source]) -> tuple[int, int]:
    """Bytes of a unit on one tp rank as gathered and as reduced: whole, padded as in FSDP's buffers."""
    weights = Weights(assignment=assignment)
    gathered = sum(weights.compute_width(source) * weights.padded_elements(source) for source in held)
    reduced = sum(weights.master_width(source) * weights.padded_elements(source) for source in trained)
    return gathered, reduced


def _gathered_dtype(assignment: Assignment, held: Sequence[Source]) -> str:
    """The dtype in which FSDP gathers a unit: parameters of several dtypes travel as bytes."""
    dtypes = {assignment.graph.values[source.result].dtype for source in held}
    return dtypes.pop() if len(dtypes) == 1 else BYTES


def _where(assignment: Assignment, module: str) -> str:
    return pattern_of(assignment.graph, module) or ROOT
