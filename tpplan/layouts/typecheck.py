"""The typing half of the proof: derives the layout of every value and gradient from the plan alone.

    problem = typecheck(graph, plan)    # None, or the first thing that does not type

Reads the traced graph, the plan as written in its file, the rules (each validated by brute force over all layouts,
ranks and both directions) and the conversions of tpplan.core.layout. Uses no decisions, costs or solvers.

(1) Inputs, buffers and constants are R. A parameter rests as its placement, and each module reads it as the plan says;
so is a buffer read that the plan names, to no view of which an op may write (tpplan.layouts.readings).
(2) At a module's boundary a value is in the layout from which the plan's conversion starts, and continues in the layout
in which it ends; without a conversion it keeps its layout. A value whose storage an op writes to later is not
converted, because a copy would be written.
(3) The layouts of an op's operands are those of one of its strategies; its results have that strategy's. An op without
a rule has every operand that carries a gradient R, or every one R*.
(4) The loss is R, and so are the model's outputs, tensors that forward leaves behind included, unless the plan says
that they are sharded.
(5) The plan names nothing that the graph does not have, and gives every parameter the graph's names and shape.
(6) Where code writes to a parameter, it writes to no copy, and not twice (tpplan.layouts.parameter_writes); where it
writes to a buffer from rows of the batch and reads it, all ranks have the same rows (tpplan.layouts.buffer_writes).

An op's operands determine its results, with two exceptions: an expanded dim may be whole or a slice, depending on the
size it is expanded to, and so may a tensor that is created and written to later. So `_forward` keeps all possible
strategies, `_narrow` drops those that no reader or writer of their values can have, and `_backward` takes those that
the readers need. The size to which a rank really expands is seen where the applied model runs: every layout must agree
with the observed `local_shapes`.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tpplan.core.graph import LOSS_SCOPE, Boundary, Direction, ModelGraph, Op, SourceKind
from tpplan.core.layout import R_STAR, ROWS, Conversion, Layout, P, R, S, local_shape
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.fused.extra_layouts import find_extra_layouts
from tpplan.layouts.plan_entries import PlanEntries, crossing_layouts
from tpplan.layouts.rules import Call, Strategy, call_strategies, crossings_before_writes, draws
from tpplan.layouts.rules.embedding import BAGS, EMBEDDING
from tpplan.layouts.rules.loss import CROSS_ENTROPY
from tpplan.plan.plan import Plan

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistyped:
    """A problem that typechecking found. `blamed`: the graph's node that shows it, empty where the plan is for another
    graph. `place`: where the plan states it or should: a section, a full name in it, and the path below."""

    message: str
    blamed: tuple[str, ...] = ()
    place: tuple[str, ...] = ()


def typecheck(graph: ModelGraph, plan: Plan, *, local_shapes: Mapping[str, Shape] | None = None) -> Mistyped | None:
    """The first problem, or None where every value of the graph has a layout under the plan.

    `local_shapes` are observed shapes of computed values on one rank of the applied model.
    """
    return next(_Checker(graph, plan, local_shapes or {}).problems(), None)


def implied_strategies(graph: ModelGraph, plan: Plan) -> dict[str, Strategy] | Mistyped:
    """Node name -> the strategy that the plan implies, for every node of the graph; or the first problem."""
    checker = _Checker(graph, plan, {})
    return next(checker.problems(), None) or checker.taken


class _Checker:
    """The state of typechecking: `possible` layouts by value; by node, fitting `strategies` and the one `taken`."""

    def __init__(self, graph: ModelGraph, plan: Plan, local_shapes: Mapping[str, Shape]) -> None:
        self.graph = graph
        self.tp = plan.mesh.tp
        self.local_shapes = local_shapes
        self.planned = PlanEntries(graph, plan)
        self.crossing = crossing_layouts(graph, plan.stage)
        self.extra = self.planned.layouts.union(*find_extra_layouts(graph, self.tp).values())
        self.parameters = {source.result: source for source in graph.parameters}
        self.written_later = crossings_before_writes(graph)
        self.possible: dict[str, tuple[Layout, ...]] = {
            source.result: (self.crossing.get(source.result, R),)
            for source in graph.sources
            if source.result not in self.parameters
        }
        #: name of a buffer that some module reads as a slice -> how each module reads it
        self.slices = {
            source.result: self.planned.buffers[source.label].reads
            for source in graph.sources
            if source.kind is SourceKind.BUFFER and source.label in self.planned.buffers
        }
        self.strategies: dict[str, tuple[Strategy, ...]] = {}
        self.taken: dict[str, Strategy] = {}
        #: with the proposed strategies, which are held, so that their id is not reused
        self.fitting: dict[Hashable, tuple[tuple[Strategy, ...], tuple[Strategy, ...]]] = {}

    def problems(self) -> Iterator[Mistyped]:
        """Yields problems in the order in which they are found; those after the first may be its consequences."""
        yield from (Mistyped(message=message, place=place) for message, place in self.planned.problems())
        yield from self._forward()
        self._narrow()
        yield from self._backward()

    def _place_of(self, node: Op | Boundary) -> tuple[str, ...]:
        """A node's place in the plan: a boundary's conversion, an op's reading of a parameter, or its module's
        boundaries."""
        if isinstance(node, Boundary):
            return "boundaries", node.module, f"{node.direction}s", node.places[0][-1]
        label = next((self.parameters[name].label for name in node.operands if name in self.parameters), None)
        return ("parameters", label, "reads", node.module) if label is not None else ("boundaries", node.module)

    # From the sources forward: (2), (3)

    def _forward(self) -> Iterator[Mistyped]:
        """Keeps each node's strategies whose operands' layouts are possible; yields a problem where none is left."""
        for node in self.graph.nodes:
            options = self._crossing(node) if isinstance(node, Boundary) else self._op(node)
            if isinstance(options, str):
                message = f"{_title(node)}: {options}"
                yield Mistyped(message=message, blamed=(node.name,), place=self._place_of(node))
                return
            kept = tuple(strategy for strategy in options if self._has_local_shapes(node, strategy))
            if not kept:
                seen = [self.local_shapes.get(result) for result in node.results]
                message = (
                    f"{_title(node)}: may run as {'; '.join(map(str, options))}, but local shapes {seen} were observed"
                )
                yield Mistyped(message=message, blamed=(node.name,), place=self._place_of(node))
                return
            self.strategies[node.name] = kept
            for i, result in enumerate(node.results):
                self.possible[result] = tuple(dict.fromkeys(strategy.results[i] for strategy in kept))

    def _op(self, op: Op) -> tuple[Strategy, ...] | str:
        call = Call.of(self.graph, op)
        proposed = call_strategies(Call.of(self.graph, op, self.extra), self.tp)
        read = tuple(self._read(op, name) for name in op.operands)
        if found := tuple(s for s in self._fitting(proposed, op.operands, read) if self._is_allowed(op, call, s)):
            return found
        given = ", ".join(
            f"{self._name_in_message(n)} as {_either(layouts)}" for n, layouts in zip(op.operands, read, strict=True)
        )
        allowed = (s for s in proposed if self._is_allowed(op, call, s))
        return f"reads {given}; its rule allows {'; '.join(map(str, allowed)) or 'nothing'}"

    def _fitting(
        self, proposed: tuple[Strategy, ...], operands: tuple[str, ...], read: tuple[tuple[Layout, ...], ...]
    ) -> tuple[Strategy, ...]:
        """The strategies under which operands are read in one of their layouts, and a value that is read twice in one
        layout. Calls of like layers share `proposed`, one object, and what is found in it."""
        key = id(proposed), tuple(map(operands.index, operands)), read
        if key not in self.fitting:
            fitting = (s for s in proposed if _is_one_of(s, read) and _reads_alike(s, operands))
            self.fitting[key] = proposed, tuple(fitting)
        return self.fitting[key][1]

    def _is_allowed(self, op: Op, call: Call, strategy: Strategy) -> bool:
        """True for a strategy of the op's rule that the op can have in its module."""
        fits_plan = self._fits_the_loss(op, strategy) and self._has_its_rows(op, strategy)
        return fits_plan and (not draws(call) or self._draws_in_step(op, strategy))

    def _has_its_rows(self, op: Op, strategy: Strategy) -> bool:
        """True where an op is no bag; for bags by rows, where the plan names their table's rows; and for other bags,
        where no rank takes the rows that they read for its own of a larger table."""
        if op.target != BAGS:
            return True
        num_rows, planned = self.graph.values[op.operands[0]].shape[0], self.planned.bags.get(op.module, ())
        return num_rows in planned if strategy.operands[0] == S(0) else num_rows * self.tp not in planned

    def _fits_the_loss(self, op: Op, strategy: Strategy) -> bool:
        """True where an op can run in the loss under a strategy.

        In the user's loss function a sharded output is a DTensor, which no op but tpplan's cross entropy takes together
        with plain tensors. In the model's own forward, a cross entropy may run on a slice of the number of classes in
        the plan.
        """
        is_whole = all(layout.is_whole for layout in (*strategy.operands, *strategy.results))
        if op.target != CROSS_ENTROPY:
            return is_whole or op.module != LOSS_SCOPE or len(op.operands) < 2
        num_classes = self.graph.values[op.operands[0]].shape[-1]
        is_planned = self.planned.losses.get(op.module) == num_classes
        is_mistaken = num_classes * self.tp in self.planned.losses.values()
        return op.module == LOSS_SCOPE or (not is_mistaken if is_whole else is_planned)

    def _draws_in_step(self, op: Op, strategy: Strategy) -> bool:
        """True where the op drops elements of slices exactly in the modules that the plan lists under `draws`."""
        return any(layout.dim is not None for layout in strategy.operands) == (op.module in self.planned.draws)

    def _read(self, op: Op, name: str) -> tuple[Layout, ...]:
        if name in self.slices:
            return (self.slices[name][op.module],)
        source = self.parameters.get(name)
        return self.possible[name] if source is None else (self.planned.parameters[source.label].reads[op.module],)

    def _name_in_message(self, value: str) -> str:
        producer = self.graph.producers.get(value)
        if isinstance(producer, Boundary):
            return _title(producer)
        return self.parameters[value].label if value in self.parameters else value

    def _crossing(self, boundary: Boundary) -> tuple[Strategy, ...] | str:
        if boundary.operand in self.parameters:
            return (
                f"{self.parameters[boundary.operand].label} is passed to a module as an argument: it cannot be sharded"
            )
        possible = self.possible[boundary.operand]
        shape = self.graph.values[boundary.operand].shape
        found = (self.planned.crossings.get(place) for place in boundary.places)
        planned, *others = (own.of(shape) if own is not None else None for own in found)
        if any(other != planned for other in others):
            return "one tensor is given as all of these, but the plan converts it in several ways"
        if planned is None:
            return tuple(Strategy((layout,), (layout,)) for layout in possible)
        if planned.source not in possible:
            return f"the plan converts {planned}, but the tensor is {_either(possible)}"
        if not planned.is_identity and (problem := self._obstacle(boundary, planned)):
            return f"the plan converts {planned}, but {problem}"
        return (Strategy((planned.source,), (planned.target,)),)

    def _obstacle(self, boundary: Boundary, planned: Conversion) -> str | None:
        """The reason why the tensor at a boundary cannot be converted as planned; None where it can."""
        value = self.graph.values[boundary.operand]
        if boundary.name in self.written_later:
            return "the tensor is written to later, and a conversion would make a copy"
        if not value.can_be(planned.target, self.tp):
            return f"{value.shape} does not divide by {self.tp}" + (
                " at every size that data may give" if value.varying else ""
            )
        if not value.carries_gradient and planned.target in (R_STAR, P):
            return "the tensor carries no gradient"
        if planned.target == ROWS and not self._is_looked_up(boundary):
            return "the module is not one lookup whose result is masked where it leaves"
        return None

    def _is_looked_up(self, ids: Boundary) -> bool:
        """True where ids enter an embedding module for its lookup alone, whose result leaves only through its mask."""
        lookup = self._only_reader(ids.result)
        if not isinstance(lookup, Op) or lookup.target != EMBEDDING or lookup.operands[0] not in self.parameters:
            return False
        leaving = self._only_reader(lookup.results[0])
        if not isinstance(leaving, Boundary) or not ids.module == lookup.module == leaving.module:
            return False
        mask = self.planned.crossings.get(leaving.places[0])
        directions = (ids.direction, leaving.direction)
        return directions == (Direction.INPUT, Direction.OUTPUT) and mask is not None and mask.source == ROWS

    def _only_reader(self, value: str) -> Op | Boundary | None:
        readers = self.graph.consumers.get(value, ())
        return readers[0] if len(readers) == 1 else None

    def _has_local_shapes(self, node: Op | Boundary, strategy: Strategy) -> bool:
        return all(
            local_shape(self.graph.values[result].shape, layout, self.tp) == self.local_shapes[result]
            for result, layout in zip(node.results, strategy.results, strict=True)
            if result in self.local_shapes
        )

    def _narrow(self) -> None:
        """Drops strategies with a layout that another node on the value cannot have, until none is left to drop."""
        open_values = {name for name, layouts in self.possible.items() if len(layouts) > 1}
        nodes = [n for n in self.graph.nodes if not open_values.isdisjoint((*n.operands, *n.results))]
        while sum(self._narrow_at(node) for node in (*reversed(nodes), *nodes)):
            pass

    def _narrow_at(self, node: Op | Boundary) -> bool:
        """True where a value of the node has fewer possible layouts than before."""
        named = [(s, self._value_layouts(node, s)) for s in self.strategies[node.name]]
        kept = [(s, own) for s, own in named if all(layout in self.possible[name] for name, layout in own.items())]
        if not kept:
            return False  # _backward reports it
        self.strategies[node.name] = tuple(s for s, _ in kept)
        left = {name: {own[name] for _, own in kept} for name in kept[0][1]}
        is_less = False
        for name, layouts in left.items():
            is_less |= len(layouts) < len(self.possible[name])
            self.possible[name] = tuple(layout for layout in self.possible[name] if layout in layouts)
        return is_less

    # From the outputs back: (4), and one layout for each value

    def _backward(self) -> Iterator[Mistyped]:
        """Takes for each node the first strategy that gives its values the layouts in which they are read."""
        layouts: dict[str, Layout] = {}
        for title, value, wanted in self._planned_outputs():
            layouts[value] = wanted
            is_readable = wanted.is_plain or value in self.crossing
            if wanted not in self.possible[value] or not is_readable:
                message = f"{title} is {_either(self.possible[value])}, expected {wanted}"
                producer = self.graph.producers.get(value)
                blamed = (producer.name,) if producer is not None else ()
                yield Mistyped(message=message, blamed=blamed, place=("outputs", title.removeprefix("output ")))
        for node in reversed(self.graph.nodes):
            named = ((strategy, self._value_layouts(node, strategy)) for strategy in self.strategies[node.name])
            fitting = ((s, names) for s, names in named if all(layouts.get(n, x) == x for n, x in names.items()))
            taken = next(fitting, None)
            if taken is None:
                message = f"{_title(node)}: its readers need different layouts of one value"
                yield Mistyped(message=message, blamed=(node.name,), place=self._place_of(node))
                return
            self.taken[node.name] = taken[0]
            layouts |= taken[1]

    def _value_layouts(self, node: Op | Boundary, strategy: Strategy) -> dict[str, Layout]:
        """Value name -> its layout in a strategy of the node, without parameters and buffers that ops read as
        slices."""
        pairs = zip((*node.operands, *node.results), (*strategy.operands, *strategy.results), strict=True)
        read = self.slices if isinstance(node, Op) else ()
        return {name: layout for name, layout in pairs if name not in self.parameters and name not in read}

    def _planned_outputs(self) -> Iterator[tuple[str, str, Layout]]:
        """Yields (title, value, planned layout) of the model's outputs, and of the step's outputs beside them."""
        leaving = {boundary.result: boundary.path for boundary in self.graph.boundaries if boundary.leaves_model}
        for value, path in leaving.items():
            yield f"output {path}", value, self.crossing.get(value, self.planned.outputs.get(path, R))
        for path, value in self.graph.outputs:
            if value not in leaving:
                is_loss = value == self.graph.loss
                yield (
                    "the loss" if is_loss else f"output {path}",
                    value,
                    self.crossing.get(value, R) if is_loss else self.planned.outputs.get(path, R),
                )


def _is_one_of(strategy: Strategy, read: Iterable[tuple[Layout, ...]]) -> bool:
    return all(layout in layouts for layout, layouts in zip(strategy.operands, read, strict=True))


def _reads_alike(strategy: Strategy, operands: tuple[str, ...]) -> bool:
    """True where a value that is read twice is read under one layout."""
    return len(set(zip(operands, strategy.operands, strict=True))) == len(set(operands))


def _either(layouts: Iterable[Layout]) -> str:
    return " or ".join(map(str, layouts))


def _title(node: Op | Boundary) -> str:
    if isinstance(node, Op):
        return f"{node.target} in {node.module or ROOT}"
    return f"{node.direction} {node.path} of {node.module or ROOT}"
