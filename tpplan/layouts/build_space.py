"""Builds the decision space of a graph: strategies that the rules and the contract with the user allow.

Inputs, buffers and the loss are whole, and so are outputs that the user can read and did not declare unused. Where a
value crosses several boundaries one after the other, one of them may convert.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from tpplan.core.errors import ModelError
from tpplan.core.graph import LEFT_AT, LOSS_SCOPE, Boundary, Direction, ModelGraph, Op, SourceKind, Value
from tpplan.core.layout import R_STAR, ROWS, Layout, P, R, S, can_convert, conversions_between, layouts_of
from tpplan.layouts.decision_space import Decider, Space, classes_of, deciders_of, flows_of
from tpplan.layouts.fused.extra_layouts import find_extra_layouts
from tpplan.layouts.fused.stacked_dims import stacked_dims
from tpplan.layouts.readings import Reading, sliced_buffers
from tpplan.layouts.rules import Strategy, call_strategies, crossings_before_writes, strategies
from tpplan.layouts.rules.embedding import EMBEDDING
from tpplan.layouts.rules.loss import CROSS_ENTROPY

#: True for a forbidden strategy, given the decision's name and the strategy
Cut = Callable[[str, Strategy], bool]


class NoLayoutError(ModelError):
    """A decision has no strategy left; `decision` is its name, which tpplan.search.diagnose puts into words."""

    def __init__(self, decision: str, tp: int) -> None:
        super().__init__(f"{decision}: no layout on {tp} ranks satisfies inputs, outputs and its own rule")
        self.decision = decision


def build_space(
    graph: ModelGraph,
    tp: int,
    *,
    unused_outputs: frozenset[str] = frozenset(),
    cut: Cut | None = None,
    apart: Callable[[str], Hashable] | None = None,
    crossing: Mapping[str, Layout] | None = None,
) -> Space:
    """The decision space of a graph on tp ranks, with every consistent strategy.

    Inputs, buffers and the loss are R, and so are outputs except those in `unused_outputs` (by path). `cut` forbids
    strategies. Modules of a repeated block for which `apart` returns different values do not share decisions. Values in
    `crossing` have its layouts instead, as those that cross between stages (tpplan.layouts.plan_entries). Raises
    NoLayoutError where a decision has no strategy left.
    """
    builder = _Builder(graph, tp, unused_outputs, crossing or {})
    classes, members = classes_of(graph, apart)
    contracts: dict[str, dict[_Contract, None]] = {}
    for name, contract in builder.bound.items():
        contracts.setdefault(classes[name], {})[contract] = None
    found: dict[str, tuple[Strategy, ...]] = {}
    for representative in members:
        options = builder.options(builder.deciders[representative])
        for contract in contracts.get(representative, ()):
            options = tuple(strategy for strategy in options if contract.allows(strategy))
        if tp == 1:
            options = tuple(s for s in options if {*s.operands, *s.results} <= {R})
        options = tuple(s for s in options if cut is None or not cut(representative, s))
        if not options:
            raise NoLayoutError(representative, tp)
        found[representative] = options
    return Space(
        graph=graph,
        tp=tp,
        deciders=builder.deciders,
        strategies={name: found[classes[name]] for name in builder.deciders},
        flows=flows_of(graph),
        classes=classes,
        members=members,
        crossing=builder.crossing,
    )


@dataclass(frozen=True, slots=True)
class _Contract:
    """Positions and layouts of a node's operands that are read in one layout (inputs, buffers, constants: R), and of
    results that are given in one (outputs: R); positions of results that reach the user or stay behind on a module."""

    read: tuple[tuple[int, Layout], ...]
    made: tuple[tuple[int, Layout], ...]
    given: tuple[int, ...]

    def allows(self, strategy: Strategy) -> bool:
        """True where a strategy keeps the contract. What reaches the user is whole or slices: a summand would be wrong
        silently."""
        return (
            all(strategy.operands[i] == layout for i, layout in self.read)
            and all(strategy.results[i] == layout for i, layout in self.made)
            and all(strategy.results[i].is_plain for i in self.given)
        )


class _Builder:
    """Computes the strategies of each decision from the graph alone."""

    def __init__(
        self, graph: ModelGraph, tp: int, unused_outputs: frozenset[str], crossing: Mapping[str, Layout]
    ) -> None:
        self.graph = graph
        self.crossing = crossing
        self.tp = tp
        self.parameters = {source.result: source for source in graph.parameters}
        self.fixed = {source.result for source in graph.sources if source.kind is not SourceKind.PARAMETER}
        self.sliced = sliced_buffers(graph)
        self.read_once = graph.once_for_all_sizes("read once", lambda: _read_once(graph))
        self.whole_outputs = graph.once_for_all_sizes(
            (_whole_outputs, unused_outputs), lambda: _whole_outputs(graph, unused_outputs)
        )
        self.left = {value for path, value in graph.outputs if path.startswith(LEFT_AT)}
        self.converting = graph.once_for_all_sizes(_converting_boundaries, lambda: _converting_boundaries(graph))
        #: names of the lookups that may be in a rank's rows of the table, and of the boundaries before and behind them
        self.lookups, self.before_lookup, self.behind_lookup = graph.once_for_all_sizes("lookups", self._lookups)
        self.extra = find_extra_layouts(graph, tp) if tp > 1 else {}
        self.written_later = crossings_before_writes(graph)
        self.deciders = deciders_of(graph)
        #: the decisions of which the contract with the user forbids strategies
        key = "bound", unused_outputs, tuple(crossing.items())
        self.bound = graph.once_for_all_sizes(key, lambda: dict(self._bound()))

    def options(self, decider: Decider) -> tuple[Strategy, ...]:
        """The decision's strategies that its rule allows."""
        match decider:
            case Op():
                options = strategies(self.graph, decider, self.tp, self.extra)
                return tuple(s for s in options if self._rows_are_masked(decider, s) and _fits_the_loss(decider, s))
            case Boundary():
                return self._boundary_options(decider)
            case Reading():
                return self._reading_options(decider)

    def _bound(self) -> Iterator[tuple[str, "_Contract"]]:
        """Yields each node whose operands or results a contract is about, with the contract."""
        for node in self.graph.nodes:
            leaves = isinstance(node, Boundary) and node.leaves_model
            known, outputs = self.crossing, self.whole_outputs | self.crossing.keys()
            read = tuple((i, known.get(x, R)) for i, x in enumerate(node.operands) if self._is_fixed(node, x))
            made = tuple((i, known.get(x, R)) for i, x in enumerate(node.results) if x in outputs)
            given = tuple(i for i, name in enumerate(node.results) if name in self.left or leaves)
            if read or made or given:
                yield node.name, _Contract(read, made, given)

    def _is_fixed(self, node: Op | Boundary, operand: str) -> bool:
        return operand in self.fixed and not (isinstance(node, Op) and operand in self.sliced)

    def _boundary_options(self, boundary: Boundary) -> tuple[Strategy, ...]:
        value = self.graph.values[boundary.operand]
        layouts = layouts_of(value.shape, carries_gradient=value.carries_gradient, tp=self.tp)
        layouts = (*(layout for layout in layouts if value.can_be(layout, self.tp)), *self._extra(value))
        stacked = stacked_dims(self.graph, lambda call: call_strategies(call, 1)).get(value.name, frozenset())
        if boundary.name not in self.converting or boundary.name in self.written_later:
            return _kept_layouts(layouts, carries_gradient=value.carries_gradient)
        found = _conversions(layouts, stacked, carries_gradient=value.carries_gradient)
        if boundary.name in self.before_lookup:
            return (*found, Strategy((R,), (ROWS,)))
        if boundary.name in self.behind_lookup:
            return (*found, *(Strategy((ROWS,), (layout,)) for layout in layouts if can_convert(P, layout)))
        return found

    def _reading_options(self, reading: Reading) -> tuple[Strategy, ...]:
        source = reading.source
        value = self.graph.values[source.result]
        if source.kind is SourceKind.BUFFER:
            slices = (*map(S, range(len(value.shape))), *self._extra(value)) if self.tp > 1 else ()
            possible = (own for own in slices if can_convert(R_STAR, own) and value.can_be(own, self.tp))
            return tuple(Strategy((R,), (layout,)) for layout in (R, *possible))
        reads = (R, R_STAR, P) if source.trainable else (R, P)
        found = [Strategy((R,), (read,)) for read in reads]
        if self.tp > 1:
            found += (Strategy((S(dim),), (S(dim),)) for dim, size in enumerate(value.shape) if size % self.tp == 0)
        for layout in self._extra(value):
            # A fused weight rests in its own order and is exchanged when read; a vector is too small for that.
            rest = S(layout.dim or 0) if layout.parts and len(value.shape) > 1 else R
            if rest != R or source.result in self.read_once:
                found.append(Strategy((rest,), (layout,)))
        return tuple(found)

    def _extra(self, value: Value) -> tuple[Layout, ...]:
        layouts = sorted(self.extra.get(value.name, ()), key=str)
        return tuple(layout for layout in layouts if value.can_be(layout, self.tp))

    def _lookups(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        lookups = (op.name for op in self.graph.ops if op.target == EMBEDDING and self._rows_possible(op))
        before = (boundary.name for boundary in self.graph.boundaries if self._feeds_lookup(boundary))
        behind = (boundary.name for boundary in self.graph.boundaries if self._follows_lookup(boundary))
        return frozenset(lookups), frozenset(before), frozenset(behind)

    def _feeds_lookup(self, boundary: Boundary) -> bool:
        """True where ids enter an embedding module and are read by its lookup alone."""
        consumers = self.graph.consumers.get(boundary.result, ())
        return (
            boundary.direction is Direction.INPUT
            and len(consumers) == 1
            and isinstance(consumers[0], Op)
            and consumers[0].target == EMBEDDING
            and consumers[0].module == boundary.module
            and self._result_leaves(consumers[0])
        )

    def _follows_lookup(self, boundary: Boundary) -> bool:
        producer = self.graph.producers.get(boundary.operand)
        return isinstance(producer, Op) and producer.target == EMBEDDING and self._rows_possible(producer)

    def _result_leaves(self, op: Op) -> bool:
        """True where only the output boundary of the op's own module reads the result."""
        consumers = self.graph.consumers.get(op.results[0], ())
        return len(consumers) == 1 and all(
            isinstance(c, Boundary) and c.direction is Direction.OUTPUT and c.module == op.module for c in consumers
        )

    def _rows_possible(self, op: Op) -> bool:
        producer = self.graph.producers.get(op.operands[1])
        return isinstance(producer, Boundary) and self._feeds_lookup(producer)

    def _rows_are_masked(self, op: Op, strategy: Strategy) -> bool:
        """True unless the strategy gives `rows` where no output boundary masks the rows of other ranks."""
        return ROWS not in strategy.results or op.name in self.lookups


@cache
def _conversions(
    layouts: tuple[Layout, ...], stacked: frozenset[Layout], *, carries_gradient: bool
) -> tuple[Strategy, ...]:
    """The strategies of a boundary that converts between layouts; a `stacked` one is kept, or made of the whole where
    no gradient has to come back."""
    return tuple(
        Strategy((own.source,), (own.target,))
        for own in conversions_between(layouts, layouts, carries_gradient=carries_gradient)
        if own.is_identity
        or stacked.isdisjoint((own.source, own.target))
        or (own.source == R and not carries_gradient and len(set(own.target.parts)) == 1)
    )


@cache
def _kept_layouts(layouts: tuple[Layout, ...], *, carries_gradient: bool) -> tuple[Strategy, ...]:
    """The strategies of a boundary that does not convert."""
    possible = conversions_between(layouts, layouts, carries_gradient=carries_gradient)
    return tuple(Strategy((own.source,), (own.target,)) for own in possible if own.is_identity)


def _read_once(graph: ModelGraph) -> frozenset[str]:
    """Names of the values that one node reads."""
    return frozenset(value for value, readers in graph.consumers.items() if len(readers) == 1)


def _whole_outputs(graph: ModelGraph, unused: frozenset[str]) -> frozenset[str]:
    """Values that the user can read and did not declare unused: outputs of the step, outputs of the model beside its
    loss, and tensors that forward leaves behind; without outputs in passing. What forward leaves without a gradient is
    for the next step, and never unused."""
    of_step = {
        value
        for path, value in graph.outputs
        if path.removeprefix(LEFT_AT) not in unused
        or (path.startswith(LEFT_AT) and not graph.values[value].carries_gradient)
    }
    of_model = {value for path, value in graph.returned.items() if path not in unused}
    return frozenset((of_step | of_model) - set(graph.returned_in_passing.values()))


def _fits_the_loss(op: Op, strategy: Strategy) -> bool:
    """False where the user's loss would mix a sharded output, which is a DTensor there, with a plain tensor in one op;
    only tpplan's own cross entropy takes both."""
    if op.module != LOSS_SCOPE or op.target == CROSS_ENTROPY or len(op.operands) < 2:
        return True
    return all(layout.is_whole for layout in (*strategy.operands, *strategy.results))


def _converting_boundaries(graph: ModelGraph) -> frozenset[str]:
    """Names of the boundaries that may convert: one of each run of crossings, the last entry or else the first exit.

    A module called several times converts in all its calls or in none. Where that binds the chosen crossing of a run to
    those of others, the run converts at one of its own, too: the last entry of a module that is called once, or else
    the first exit of one. The output of an embedding module is never merged with the next crossing: rows of other ranks
    are masked there.
    """
    outputs = {value for _, value in graph.outputs}
    chains: list[list[Boundary]] = []
    chain_of: dict[str, list[Boundary]] = {}
    for boundary in graph.boundaries:
        producer = graph.producers.get(boundary.operand)
        follows = (
            isinstance(producer, Boundary)
            and len(graph.consumers[boundary.operand]) == 1
            and boundary.operand not in outputs
            and not _leaves_lookup(graph, producer)
        )
        chain = chain_of[producer.name] if follows and producer is not None else []
        if not chain:
            chains.append(chain)
        chain.append(boundary)
        chain_of[boundary.name] = chain

    num_calls = Counter(place for boundary in graph.boundaries for place in boundary.places)
    places = set[tuple[str, Direction, str]]()
    for chain in chains:
        chosen = _converting(chain)
        places.update(chosen.places)
        if any(num_calls[place] > 1 for place in chosen.places):
            own = [boundary for boundary in chain if all(num_calls[place] == 1 for place in boundary.places)]
            places.update(_converting(own).places if own else ())
    return frozenset(boundary.name for boundary in graph.boundaries if not places.isdisjoint(boundary.places))


def _converting(chain: list[Boundary]) -> Boundary:
    """The boundary of a run of crossings that may convert."""
    entries = [boundary for boundary in chain if boundary.direction is Direction.INPUT]
    return entries[-1] if entries else chain[0]


def _leaves_lookup(graph: ModelGraph, boundary: Boundary) -> bool:
    producer = graph.producers.get(boundary.operand)
    return isinstance(producer, Op) and producer.target == EMBEDDING
