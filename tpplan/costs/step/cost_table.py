"""A decision space with the cost of its strategies per micro-batch, and the parts of an ILP that no mesh changes."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar, cast

from tpplan.core.graph import Boundary, ModelGraph
from tpplan.core.mesh import Axis, Mesh
from tpplan.costs.layer_activations import Activations, layer_activations
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.known_times import KnownTimes
from tpplan.costs.strategy_times import Rates, StrategyTime, time_table
from tpplan.layouts.assignment import units_of
from tpplan.layouts.decision_space import Space
from tpplan.layouts.layer_treatments import FsdpUnit
from tpplan.layouts.rules import Strategy
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Recompute
from tpplan.solvers.problem import Edge, Expression, Node, Shared

T = TypeVar("T")


@dataclass(slots=True)
class Frame:
    """Parts of an ILP that follow from the decisions, whatever they cost: nodes and edges, and what a solver computed
    of them."""

    nodes_and_edges: list[tuple[tuple[Node, ...], tuple[Edge, ...]]] = field(default_factory=list)
    shared: Shared = field(default_factory=Shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSpace:
    """A decision space with the cost of its strategies per micro-batch, for every mesh of its tp degree."""

    space: Space
    times: Mapping[str, tuple[StrategyTime, ...]]
    executor: Executor
    is_compiled: bool
    #: shared by all spaces with the same decisions (decides_like)
    frame: Frame = field(default_factory=Frame)
    _activations: dict[tuple[str, ...], Activations] = field(default_factory=dict, init=False)
    _memo: dict[Hashable, object] = field(default_factory=dict, init=False)

    @property
    def shared(self) -> Shared:
        """A solver's results about the edges, kept for the next problem with the same edges."""
        return self.frame.shared

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value that `make` returned for this key at the first call; for values that do not depend on the mesh."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast(T, self._memo[key])

    def activations(self, units: tuple[str, ...]) -> Activations:
        """Activations kept from forward to backward, by layer; `units` are the layers."""
        if units not in self._activations:
            self._activations[units] = layer_activations(self.space, self.executor, units)
        return self._activations[units]

    def recomputed_forward(
        self, units: tuple[str, ...], layer: str, mode: Recompute
    ) -> tuple[Expression, Expression, Expression]:
        """Seconds of kernels, seconds of collectives, and the number of both, of the forward that a layer runs again;
        `units` are the layers."""
        if mode is Recompute.NONE:
            return Expression(), Expression(), Expression()
        return self.once(("run again", units, layer, mode), lambda: self._recomputed_forward(units, layer, mode))

    def _recomputed_forward(
        self, units: tuple[str, ...], layer: str, mode: Recompute
    ) -> tuple[Expression, Expression, Expression]:
        rows: tuple[dict[str, tuple[float, ...]], ...] = ({}, {}, {})
        for name, number in self.activations(units).layers[layer].again.items():
            works = [time.again[mode] for time in self.times[name]]
            vectors = zip(*((own.compute.seconds, own.collectives.seconds, own.kernels) for own in works), strict=True)
            for row, vector in zip(rows, vectors, strict=True):
                if any(vector):
                    row[name] = tuple(number * amount for amount in vector)
        compute, collectives, kernels = (Expression(terms=tuple(row.items())) for row in rows)
        return compute, collectives, kernels

    def units(self, names: tuple[str, ...]) -> tuple[FsdpUnit, ...]:
        """Every FSDP unit, the root last under the name "": each parameter in the deepest unit with all its names."""
        space = self.space
        return space.once_for_all_sizes((units_of, names), lambda: units_of(space.graph, names, space.classes))

    def nodes(self) -> tuple[Node, ...]:
        """A node for each deciding decision."""
        return self._frame()[0]

    def edges(self) -> tuple[Edge, ...]:
        """An edge for each two decisions that must agree, without repetitions."""
        return self._frame()[1]

    def _frame(self) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
        found = self.frame.nodes_and_edges
        if not found:
            strategies = self.space.strategies
            nodes = (Node(name=name, strategies=tuple(map(str, strategies[name]))) for name in self.space.members)
            found.append((tuple(nodes), tuple(dict.fromkeys(edges_of(self.space)))))
        return found[0]


def decides_like(space: Space, other: Space) -> bool:
    """True where two spaces have the same decisions and strategies and their graphs differ only in sizes: then their
    nodes and edges are equal, whatever their tp degrees."""
    return (
        all(space.strategies[name] == other.strategies.get(name) for name in space.members)
        and (space.graph.is_resized_of(other.graph) or _outlined(space.graph) == _outlined(other.graph))
        # As tuples, since equal ones of graphs that were made of one are one object.
        and (space.classes, space.flows) == (other.classes, other.flows)
    )


def _outlined(graph: ModelGraph) -> tuple[object, ...]:
    """The sources, and the nodes in order without the arguments of ops, which contain sizes."""
    return graph.once_for_all_sizes(
        (_outlined, graph.ep),
        lambda: (
            graph.sources,
            *(
                node if isinstance(node, Boundary) else (node.name, node.module, node.operands, node.results)
                for node in graph.nodes
            ),
        ),
    )


def edges_of(space: Space) -> Iterator[Edge]:
    """Yields an edge where layouts along a flow, readings of a parameter, or shared strategies must agree."""
    for source, result, target, operand in space.once_for_all_sizes("flows of classes", lambda: _class_flows(space)):
        yield Edge(
            source=source,
            target=target,
            source_layouts=tuple(str(s.results[result]) for s in space.strategies[source]),
            target_layouts=tuple(str(s.operands[operand]) for s in space.strategies[target]),
        )
    for readings in space.readings.values():
        yield from _agreements(space, [r.name for r in readings], lambda strategy: str(strategy.operands[0]))
    for shared in space.shared:
        yield from _agreements(space, shared, str)


def _class_flows(space: Space) -> tuple[tuple[str, int, str, int], ...]:
    """(source, result, target, operand) of the flows between deciding decisions, without repetitions."""
    classes = space.classes
    return tuple(dict.fromkeys((classes[f.source], f.result, classes[f.target], f.operand) for f in space.flows))


def _agreements(space: Space, names: Sequence[str], label: Callable[[Strategy], str]) -> Iterator[Edge]:
    """Yields edges that make all these decisions choose strategies with the same label."""
    classes = list(dict.fromkeys(space.classes[name] for name in names))
    for source, target in pairwise(classes):
        yield Edge(
            source=source,
            target=target,
            source_layouts=tuple(map(label, space.strategies[source])),
            target_layouts=tuple(map(label, space.strategies[target])),
        )


def price_space(
    space: Space,
    profile: HardwareProfile,
    gpus_per_node: int,
    executor: Executor,
    *,
    is_compiled: bool = False,
    num_gpus: int | None = None,
    rates: Rates | None = None,
    others: Iterable[PricedSpace] = (),
) -> PricedSpace:
    """The space with the times of every decision on its tp group: of `num_gpus` GPUs, where given, on the slowest one.
    `rates` are times of the profile's kernels that were looked up before. The frame is that of one of `others` with the
    same decisions, if there is one."""
    ep = space.graph.ep
    mesh = Mesh(replicate=max(1, (num_gpus or 1) // space.tp // ep), shard=ep, tp=space.tp, ep=ep)
    group, experts = (mesh.group(axis, gpus_per_node) for axis in (Axis.TP, Axis.EP))
    frame = next((other.frame for other in others if decides_like(space, other.space)), None)
    return PricedSpace(
        space=space,
        frame=frame or Frame(),
        times=time_table(space, rates or Rates(KnownTimes(profile)), group, experts, executor, is_compiled=is_compiled),
        executor=executor,
        is_compiled=is_compiled,
    )
