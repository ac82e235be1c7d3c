"""The typing half of the proof: the layout of every value, and of its gradient, derived again from the plan alone.

    problem = typecheck(graph, plan)    # None, or the first thing that does not type

It reads the traced graph, the plan as its file says it, the rules (each validated by brute force over all layouts,
ranks and both directions) and the conversions of tpplan.core.layout. Of decisions, costs and solvers it knows nothing.

(1) Inputs, buffers and constants are R. A parameter rests as its placement, and each module reads it as the plan says.
(2) Where a value crosses a module's boundary it is in the layout that the plan's conversion starts from, and goes on in
    the one it ends in; without a conversion it goes on as it is. Storage that an op writes to later is not converted: a
    copy would be written.
(3) The layouts of an op's operands are those of one of its strategies; its results have that strategy's. An op without
    a rule has every operand that carries a gradient R, or every one R*.
(4) The loss is R, and so are the model's outputs, those among them that its forward leaves behind, unless the plan
    says that they are sharded.
(5) The plan names nothing that the graph has not, and gives every parameter the graph's names and shape.
(6) Where code writes to a parameter, no copy is written, and nothing twice (tpplan.layouts.parameter_writes).

What an op gives follows from what it reads, with two exceptions: a dim that is stretched may be whole or a slice, as
far as it is told to stretch, and a tensor made of nothing and written to later may be R or R*. So `_forward` keeps what
is possible, and `_backward` takes what the readers need. How far a rank really stretches is seen where the applied
model runs: every layout must have its `local_shapes`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tpplan.core.graph import LEFT_AT, LOSS_SCOPE, Boundary, Direction, ModelGraph, Op, Source, within
from tpplan.core.layout import R_STAR, ROWS, Conversion, Layout, P, R, can_convert, fits, local_shape
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.extra_layouts import find_extra_layouts
from tpplan.layouts.parameter_writes import why_copies, why_not_selective, write_within, writes_of
from tpplan.layouts.rules import (
    OPAQUE,
    Call,
    Strategy,
    call_strategies,
    crossings_before_writes,
    draws,
    written_operands,
)
from tpplan.plan.plan import BoundaryPlan, ParameterPlan, Plan, Recompute

EMBEDDING = "aten.embedding.default"
#: the one op of a user's loss that takes a sharded output and plain tensors together
CROSS_ENTROPY = "tpplan.cross_entropy.default"

#: where a tensor crosses: module, direction, path
Place = tuple[str, Direction, str]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistyped:
    """What does not type. `blamed`: the node of the graph that shows it; none where the plan is another graph's.
    `place`: where the plan says what does not, or should say it: a section, a full name in it, and the path below.
    """

    message: str
    blamed: tuple[str, ...] = ()
    place: tuple[str, ...] = ()


def typecheck(graph: ModelGraph, plan: Plan, *, local_shapes: Mapping[str, Shape] | None = None) -> Mistyped | None:
    """None when every value of the graph has a layout under the plan, else the first problem.

    `local_shapes` are the shapes of computed values on one rank, where the applied model was seen to run.
    """
    return next(_Checker(graph, plan, local_shapes or {}).problems(), None)


def implied_strategies(graph: ModelGraph, plan: Plan) -> dict[str, Strategy] | Mistyped:
    """The strategy of every node of the graph that the plan implies, by the node's name, or the first problem."""
    checker = _Checker(graph, plan, {})
    return next(checker.problems(), None) or checker.taken


class _Checker:
    """The layouts `possible` for each value so far, for each node the strategies that fit them, and the one `taken`."""

    def __init__(self, graph: ModelGraph, plan: Plan, local_shapes: Mapping[str, Shape]) -> None:
        self.graph = graph
        self.tp = plan.mesh.tp
        self.local_shapes = local_shapes
        self.outputs = plan.outputs
        self.plans = plan.parameter_plans()
        boundaries = {"" if name == ROOT else name: boundary for name, boundary in plan.boundary_plans().items()}
        self.losses = plan.sharded_losses()
        self.draws = frozenset(plan.drawing_modules())
        self.opaque = frozenset(plan.opaque_modules())
        self.copies = why_copies(plan.mesh, plan.precision)
        self.recomputed = plan.recomputed_modules()
        self.sized = plan.size_plans().keys()
        self.modules = boundaries.keys() | self.sized | self.losses.keys() | self.draws
        self.crossings = _crossings(boundaries)
        named = {layout for parameter in self.plans.values() for layout in parameter.reads.values()}
        named |= {conversion.target for conversion in self.crossings.values()}
        self.extra = named.union(*find_extra_layouts(graph, self.tp).values())
        self.parameters = {source.result: source for source in graph.parameters}
        self.written_later = crossings_before_writes(graph)
        self.written = {graph.values[name].storage for op in graph.ops for name in written_operands(op)}
        self.possible: dict[str, tuple[Layout, ...]] = {
            source.result: (R,) for source in graph.sources if source.result not in self.parameters
        }
        self.strategies: dict[str, tuple[Strategy, ...]] = {}
        self.taken: dict[str, Strategy] = {}

    def problems(self) -> Iterator[Mistyped]:
        """In the order in which they show; what comes after the first may only follow from it."""
        yield from self._unknown_names()
        for source in self.graph.parameters:
            for problem in self._parameter(source, self.plans[source.label]):
                yield Mistyped(message=f"parameter {source.label}: {problem}", place=("parameters", source.label))
        yield from self._written()
        yield from self._forward()
        yield from self._backward()

    # What the plan names: (5), and (1) for parameters

    def _unknown_names(self) -> Iterator[Mistyped]:
        labels = {source.label for source in self.graph.parameters}
        places = {_place(boundary) for boundary in self.graph.boundaries}
        outputs = {boundary.path for boundary in self.graph.boundaries if _leaves_model(boundary)}
        outputs |= {path for path, _ in self.graph.outputs if path.startswith(LEFT_AT)}
        losses = {op.module for op in self.graph.ops if op.target == CROSS_ENTROPY}
        for label in sorted(labels ^ self.plans.keys()):
            there, here = ("model", "plan") if label in labels else ("plan", "model")
            place = ("parameters", label)
            yield Mistyped(message=f"parameter {label}: in the {there}, not in the {here}", place=place)
        for module in sorted(self.modules - {boundary.module for boundary in self.graph.boundaries}):
            place = (self._section_naming(module), module)
            yield Mistyped(message=f"module {module}: in the plan, not in the model", place=place)
        for module, direction, path in sorted(self.crossings.keys() - places):
            message = f"{direction} {path} of {module or ROOT}: the plan converts it, and nothing crosses"
            yield Mistyped(message=message, place=("boundaries", module, f"{direction}s", path))
        whole = {op.module for op in self.graph.ops if op.target == OPAQUE}
        for module in sorted(whole - self.opaque):
            message = f"module {module or ROOT}: runs whole, and the plan does not say so"
            yield Mistyped(message=message, place=("opaque", module))
        for module in sorted(self.opaque - whole):
            message = f"module {module or ROOT}: the plan says that it runs whole, and it does not"
            yield Mistyped(message=message, place=("opaque", module))
        for path in sorted(self.outputs.keys() - outputs):
            yield Mistyped(message=f"output {path}: in the plan, not in the model", place=("outputs", path))
        for module in sorted(self.losses.keys() - losses):
            yield Mistyped(message=f"loss of {module or ROOT}: in the plan, not in the model", place=("losses", module))

    def _written(self) -> Iterator[Mistyped]:
        """(6)"""
        write = next(iter(writes_of(self.graph)), None)
        if write is not None and self.copies:
            yield Mistyped(message=f"{write}, and {self.copies}", place=("mesh_degrees",))
        write = write_within(self.graph, self.recomputed)
        if write is not None:
            region = next(name for name in self.recomputed if within(write.module, name))
            yield Mistyped(
                message=f"{write}, and would again where {region or ROOT} is recomputed", place=("recompute",)
            )
        for region, mode in self.recomputed.items():
            obstacle = why_not_selective(self.graph, region) if mode is Recompute.SELECTIVE else ""
            if obstacle:
                yield Mistyped(message=f"{region or ROOT} is recomputed selectively: {obstacle}", place=("recompute",))

    def _parameter(self, source: Source, plan: ParameterPlan) -> Iterator[str]:
        shape = self.graph.values[source.result].shape
        if (plan.shape, plan.trainable) != (shape, source.trainable):
            yield f"{plan.shape}, trainable {plan.trainable} in the plan; {shape}, trainable {source.trainable} here"
        if set(plan.aliases) != set(source.aliases):
            yield f"tied to {plan.aliases or 'nothing'} in the plan, to {source.aliases or 'nothing'} in the model"
        if not plan.placement.is_plain or not fits(shape, plan.placement, self.tp):
            yield f"{shape} cannot rest as {plan.placement} on {self.tp} ranks"
        consumers = self.graph.consumers.get(source.result, ())
        readers = {node.module for node in consumers if isinstance(node, Op)}
        if unplanned := sorted(readers - plan.reads.keys()):
            yield f"{unplanned[0] or ROOT} reads it, and the plan does not say how"
        for reader, layout in sorted(plan.reads.items()):
            if reader not in readers:
                yield f"{reader or ROOT} does not read it"
            if not self._can_be_read(source, plan.placement, layout) or (reader == LOSS_SCOPE and self.tp > 1):
                yield f"{reader or ROOT} cannot read {shape} as {layout} where it rests as {plan.placement}"

    def _can_be_read(self, source: Source, placement: Layout, layout: Layout) -> bool:
        value = self.graph.values[source.result]
        if layout == ROWS or not value.can_be(layout, self.tp):
            return False
        if layout == R_STAR and not (placement == R and source.trainable):
            return False
        start = R_STAR if placement == R and layout.dim is not None else placement
        if not can_convert(start, layout):
            return False
        return value.storage not in self.written or not Conversion(start, layout).forward

    def _section_naming(self, module: str) -> str:
        tables = {"losses": self.losses, "draws": self.draws, "sizes": self.sized}
        return next((section for section, names in tables.items() if module in names), "boundaries")

    def _place_of(self, node: Op | Boundary) -> tuple[str, ...]:
        """Of what crosses, its conversion; of an op, how it reads a parameter, if it does, else its module's border."""
        if isinstance(node, Boundary):
            return "boundaries", node.module, f"{node.direction}s", node.path
        label = next((self.parameters[name].label for name in node.operands if name in self.parameters), None)
        return ("parameters", label, "reads", node.module) if label is not None else ("boundaries", node.module)

    # From the sources on: (2), (3)

    def _forward(self) -> Iterator[Mistyped]:
        """Keeps of each node the strategies that fit what may flow into it."""
        for node in self.graph.nodes:
            options = self._crossing(node) if isinstance(node, Boundary) else self._op(node)
            if isinstance(options, str):
                message = f"{_title(node)}: {options}"
                yield Mistyped(message=message, blamed=(node.name,), place=self._place_of(node))
                return
            kept = tuple(strategy for strategy in options if self._has_local_shapes(node, strategy))
            if not kept:
                seen = [self.local_shapes.get(result) for result in node.results]
                message = f"{_title(node)}: gives {'; '.join(map(str, options))}, and {seen} was seen"
                yield Mistyped(message=message, blamed=(node.name,), place=self._place_of(node))
                return
            self.strategies[node.name] = kept
            for i, result in enumerate(node.results):
                self.possible[result] = tuple(dict.fromkeys(strategy.results[i] for strategy in kept))

    def _op(self, op: Op) -> tuple[Strategy, ...] | str:
        is_random = draws(Call.of(self.graph, op))
        allowed = [
            s
            for s in call_strategies(Call.of(self.graph, op, self.extra), self.tp)
            if self._fits_the_loss(op, s) and (not is_random or self._draws_in_step(op, s))
        ]
        read = [self._read(op, name) for name in op.operands]
        fitting = tuple(s for s in allowed if _is_one_of(s, read) and _reads_alike(s, op.operands))
        if fitting:
            return fitting
        found = ", ".join(
            f"{self._called(n)} as {_either(layouts)}" for n, layouts in zip(op.operands, read, strict=True)
        )
        return f"reads {found}; its rule allows {'; '.join(map(str, allowed)) or 'nothing'}"

    def _fits_the_loss(self, op: Op, strategy: Strategy) -> bool:
        """A sharded output comes to the user's loss as a DTensor, which meets no plain tensor in any op but our loss.
        In the model's own forward, that sees slices of as many classes as the plan says."""
        is_whole = all(layout.is_whole for layout in (*strategy.operands, *strategy.results))
        if op.target != CROSS_ENTROPY:
            return is_whole or op.module != LOSS_SCOPE or len(op.operands) < 2
        num_classes = self.graph.values[op.operands[0]].shape[-1]
        is_planned = self.losses.get(op.module) == num_classes
        is_mistaken = num_classes * self.tp in self.losses.values()
        return op.module == LOSS_SCOPE or (not is_mistaken if is_whole else is_planned)

    def _draws_in_step(self, op: Op, strategy: Strategy) -> bool:
        """What is dropped at random is slices in the modules that the plan says, and whole or summands in others."""
        return any(layout.dim is not None for layout in strategy.operands) == (op.module in self.draws)

    def _read(self, op: Op, name: str) -> tuple[Layout, ...]:
        source = self.parameters.get(name)
        return self.possible[name] if source is None else (self.plans[source.label].reads[op.module],)

    def _called(self, value: str) -> str:
        producer = self.graph.producers.get(value)
        if isinstance(producer, Boundary):
            return _title(producer)
        return self.parameters[value].label if value in self.parameters else value

    def _crossing(self, boundary: Boundary) -> tuple[Strategy, ...] | str:
        if boundary.operand in self.parameters:
            return f"{self.parameters[boundary.operand].label} is passed around: no module reads it for itself"
        possible = self.possible[boundary.operand]
        planned = self.crossings.get(_place(boundary))
        if planned is None:
            return tuple(Strategy((layout,), (layout,)) for layout in possible)
        if planned.source not in possible:
            return f"the plan converts {planned}, and what crosses is {_either(possible)}"
        if not planned.is_identity and (problem := self._obstacle(boundary, planned)):
            return f"the plan converts {planned}, and {problem}"
        return (Strategy((planned.source,), (planned.target,)),)

    def _obstacle(self, boundary: Boundary, planned: Conversion) -> str | None:
        """Why what crosses cannot be converted so."""
        value = self.graph.values[boundary.operand]
        if boundary.name in self.written_later:
            return "what crosses is written to later"
        if not value.can_be(planned.target, self.tp):
            return f"{value.shape} does not divide by {self.tp}" + (", or only today" if value.varying else "")
        if not value.carries_gradient and planned.target in (R_STAR, P):
            return "what crosses carries no gradient"
        if planned.target == ROWS and not self._is_looked_up(boundary):
            return "the module is not one lookup whose result is masked where it leaves"
        return None

    def _is_looked_up(self, ids: Boundary) -> bool:
        """Ids enter an embedding module and go nowhere else; what it looks up leaves it through its mask alone."""
        lookup = self._only_reader(ids.result)
        if not isinstance(lookup, Op) or lookup.target != EMBEDDING or lookup.operands[0] not in self.parameters:
            return False
        leaving = self._only_reader(lookup.results[0])
        if not isinstance(leaving, Boundary) or not ids.module == lookup.module == leaving.module:
            return False
        mask = self.crossings.get(_place(leaving))
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

    # From the ends back: (4), and one layout for each value

    def _backward(self) -> Iterator[Mistyped]:
        """Takes of each node the first strategy that gives its values the layouts in which they are read."""
        layouts: dict[str, Layout] = {}
        for title, value, wanted in self._ends():
            layouts[value] = wanted
            if wanted not in self.possible[value] or not wanted.is_plain:
                message = f"{title} is {_either(self.possible[value])}, expected {wanted}"
                producer = self.graph.producers.get(value)
                blamed = (producer.name,) if producer is not None else ()
                yield Mistyped(message=message, blamed=blamed, place=("outputs", title.removeprefix("output ")))
        for node in reversed(self.graph.nodes):
            named = ((strategy, self._named(node, strategy)) for strategy in self.strategies[node.name])
            fitting = ((s, names) for s, names in named if all(layouts.get(n, x) == x for n, x in names.items()))
            taken = next(fitting, None)
            if taken is None:
                message = f"{_title(node)}: what reads it needs several layouts"
                yield Mistyped(message=message, blamed=(node.name,), place=self._place_of(node))
                return
            self.taken[node.name] = taken[0]
            layouts |= taken[1]

    def _named(self, node: Op | Boundary, strategy: Strategy) -> dict[str, Layout]:
        """A strategy's layouts by the names of the values, parameters aside."""
        pairs = zip((*node.operands, *node.results), (*strategy.operands, *strategy.results), strict=True)
        return {name: layout for name, layout in pairs if name not in self.parameters}

    def _ends(self) -> Iterator[tuple[str, str, Layout]]:
        """What leaves the model, and what leaves the step past it: title, value, layout."""
        leaving = {boundary.result: boundary.path for boundary in self.graph.boundaries if _leaves_model(boundary)}
        for value, path in leaving.items():
            yield f"output {path}", value, self.outputs.get(path, R)
        for path, value in self.graph.outputs:
            if value not in leaving:
                is_loss = value == self.graph.loss
                yield "the loss" if is_loss else f"output {path}", value, R if is_loss else self.outputs.get(path, R)


def _crossings(boundaries: Mapping[str, BoundaryPlan]) -> dict[Place, Conversion]:
    return {
        (module, direction, path): crossing.conversion
        for module, boundary in boundaries.items()
        for direction, side in ((Direction.INPUT, boundary.inputs), (Direction.OUTPUT, boundary.outputs))
        for path, crossing in side.items()
    }


def _place(boundary: Boundary) -> Place:
    return boundary.module, boundary.direction, boundary.path


def _leaves_model(boundary: Boundary) -> bool:
    return boundary.module == "" and boundary.direction is Direction.OUTPUT


def _is_one_of(strategy: Strategy, read: Iterable[tuple[Layout, ...]]) -> bool:
    return all(layout in layouts for layout, layouts in zip(strategy.operands, read, strict=True))


def _reads_alike(strategy: Strategy, operands: tuple[str, ...]) -> bool:
    """A value that is read twice is read under one layout."""
    return len(set(zip(operands, strategy.operands, strict=True))) == len(set(operands))


def _either(layouts: Iterable[Layout]) -> str:
    return " or ".join(map(str, layouts))


def _title(node: Op | Boundary) -> str:
    if isinstance(node, Op):
        return f"{node.target} in {node.module or ROOT}"
    return f"{node.direction} {node.path} of {node.module or ROOT}"
