"""The sections of a plan that an assignment decides, by full names: parameters, boundaries, outputs, losses, FSDP.

tpplan.search.build_plan puts them into a Plan, like layers under one pattern.
"""

from tpplan.core.errors import ModelError
from tpplan.core.graph import LEFT_AT, LOSS_SCOPE, Boundary, Direction, ModelGraph, SourceKind
from tpplan.core.layout import Conversion, Layout, R, S
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.fused.stacked_dims import stacked_dims
from tpplan.layouts.rules import Call, call_strategies, draws
from tpplan.layouts.rules.embedding import BAGS
from tpplan.layouts.rules.loss import CROSS_ENTROPY
from tpplan.plan.compress_names import pattern_of
from tpplan.plan.plan import BoundaryPlan, BufferPlan, CrossingPlan, FsdpPlan, ParameterPlan


def parameter_plans(assignment: Assignment) -> dict[str, ParameterPlan]:
    """Placement, readings, shape and dtype of each parameter, by name."""
    found = {}
    for source in assignment.graph.parameters:
        readings = assignment.readings[source.label]
        found[source.label] = ParameterPlan(
            placement=assignment.placement(source),
            reads={reading.op.module: assignment.strategy(reading.name).results[0] for reading in readings},
            shape=assignment.graph.whole_shape(source),
            dtype=assignment.master_dtype(source),
            trainable=source.trainable,
            aliases=source.aliases,
        )
    return found


def buffer_plans(assignment: Assignment) -> dict[str, BufferPlan]:
    """Readings and shape of each buffer that a module reads as a slice, by name."""
    graph = assignment.graph
    found = {
        source.label: BufferPlan(
            reads={reading.op.module: assignment.strategy(reading.name).results[0] for reading in readings},
            shape=graph.values[source.result].shape,
        )
        for source in graph.sources
        if source.kind is SourceKind.BUFFER and (readings := assignment.readings.get(source.label))
    }
    return {name: plan for name, plan in found.items() if any(layout != R for layout in plan.reads.values())}


def boundary_plans(assignment: Assignment) -> dict[str, BoundaryPlan]:
    """Conversions at the boundaries of each module that converts anything, by name."""
    chosen: dict[tuple[str, Direction, str], CrossingPlan] = {}
    for boundary in assignment.graph.boundaries:
        conversion = _named(assignment.graph, boundary, assignment.conversion(boundary))
        planned = CrossingPlan(conversion, assignment.graph.values[boundary.operand].dtype)
        for place in boundary.places:
            assert chosen.setdefault(place, planned).conversion == conversion, f"calls of a module differ at {place}"
    found: dict[str, dict[Direction, dict[str, CrossingPlan]]] = {}
    for (module, direction, path), crossing in chosen.items():
        if not crossing.conversion.is_identity:
            sides = found.setdefault(module, {Direction.INPUT: {}, Direction.OUTPUT: {}})
            sides[direction][path] = crossing
    return {
        module: BoundaryPlan(inputs=sides[Direction.INPUT], outputs=sides[Direction.OUTPUT])
        for module, sides in found.items()
    }


def _named(graph: ModelGraph, boundary: Boundary, conversion: Conversion) -> Conversion:
    """The conversion as a plan names it: the parts of a stacked dim follow from the batch, and all have one size."""
    stacked = stacked_dims(graph, lambda call: call_strategies(call, 1)).get(boundary.operand, frozenset())
    target = conversion.target
    if conversion.is_identity or target not in stacked:
        return conversion
    return Conversion(conversion.source, Layout(target.kind, target.dim, each=target.parts[0]))


def outputs(assignment: Assignment) -> dict[str, Layout]:
    """Layouts other than R of the model's outputs and of tensors that its forward leaves on modules, by path; without
    what a stage sends, whose layout the plan of the stage has."""
    graph = assignment.graph
    returned = (
        (boundary.path, boundary.result)
        for boundary in graph.boundaries
        if boundary.module == "" and boundary.direction is Direction.OUTPUT
        if boundary.result not in assignment.crossing
    )
    left = ((path, value) for path, value in graph.outputs if path.startswith(LEFT_AT))
    return {path: layout for path, value in (*returned, *left) if (layout := assignment.layout(value)) != R}


def sharded_losses(assignment: Assignment) -> dict[str, int]:
    """Number of classes by module in whose forward a cross entropy runs on slices of the classes.

    Raises ModelError for a module with two such losses over different numbers of classes.
    """
    found: dict[str, int] = {}
    for op in assignment.graph.ops:
        if op.target != CROSS_ENTROPY or op.module == LOSS_SCOPE:
            continue
        if assignment.strategy(op.name).operands[0].dim is None:
            continue
        count = assignment.graph.values[op.operands[0]].shape[-1]
        if found.setdefault(op.module, count) != count:
            raise ModelError(
                f"module {op.module or ROOT}: its forward has cross entropies over {found[op.module]} and over "
                f"{count} classes, which a plan cannot tell apart on slices; put them into modules of their own"
            )
    return {module or ROOT: count for module, count in found.items()}


def row_bags(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    """Numbers of rows of tables by module in whose forward bags add up a rank's own rows of them."""
    found: dict[str, set[int]] = {}
    for op in assignment.graph.ops:
        if op.target == BAGS and assignment.strategy(op.name).operands[0] == S(0):
            found.setdefault(op.module or ROOT, set()).add(assignment.graph.values[op.operands[0]].shape[0])
    return {module: tuple(sorted(counts)) for module, counts in found.items()}


def drawing_modules(assignment: Assignment) -> tuple[str, ...]:
    """Modules whose forward draws dropout on slices."""
    found = {
        op.module: None
        for op in assignment.graph.ops
        if draws(Call.of(assignment.graph, op))
        and any(layout.dim is not None for layout in assignment.strategy(op.name).operands)
    }
    return tuple(module or ROOT for module in found)


def fsdp_plan(assignment: Assignment) -> FsdpPlan:
    """FSDP's units by pattern, the root last; none without FSDP, or where parameters stay plain tensors."""
    uses_fsdp = assignment.uses_fsdp
    names = [unit.name or ROOT for unit in assignment.units] if uses_fsdp else []
    patterns = dict.fromkeys(pattern_of(assignment.graph, name) for name in names)
    treatments = assignment.treatments
    resharded = [treatment.reshard for treatment in treatments.values()]
    rule = 2 * sum(resharded) >= len(resharded)
    exceptions = tuple(name for name in names if name in treatments and treatments[name].reshard != rule)
    units = tuple(patterns) if assignment.num_averages is None else ()
    others = {pattern_of(assignment.graph, name) for name in names if name not in assignment.over_tp}
    over_tp = (
        name if pattern_of(assignment.graph, name) in others else pattern_of(assignment.graph, name)
        for name in names
        if name in assignment.over_tp
    )
    return FsdpPlan(
        units=units,
        reshard_after_forward=rule,
        exceptions=exceptions,
        whole_gradients=True if assignment.whole_gradients and uses_fsdp else None,
        over_tp=tuple(dict.fromkeys(over_tp)) or None,
        gathered_once=True if assignment.gathered_once and uses_fsdp else None,
        uneven_reads=True if assignment.has_uneven_reads else None,
    )
