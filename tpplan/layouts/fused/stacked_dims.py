"""Finds stacked dims: dims that join a whole dim with one that weights make, such as the batch and heads of attention.

`x.view(T, B * H, D)` of x [T, B, H * D] gives a rank H / t heads of each sample: its dim of B * H is sharded part by
part, in B parts of H. The parts follow from the batch, so a plan names the size of each of them alone.

What is computed with such a value without a gradient, such as a mask [B * H, T, J], has the layouts that go with it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tpplan.core.graph import ModelGraph, Op
from tpplan.core.layout import Layout, S
from tpplan.core.repeated_blocks import like_ops
from tpplan.layouts.fused.fused_dims import matrices
from tpplan.layouts.fused.retold_walks import op_named, walked
from tpplan.layouts.rules.call import Call, Strategy
from tpplan.layouts.rules.views import RESHAPES, regrouped

#: most parts of a stacked dim
MOST_STACKED = 1024


def stacked_dims(
    graph: ModelGraph, strategies: Callable[[Call], Iterable[Strategy]]
) -> Mapping[str, frozenset[Layout]]:
    """Value name -> its layouts S(d; parts) of a stacked dim d, for values between the reshape that stacks dims and the
    ones that take them apart, and for values without a gradient that ops read beside them.

    `strategies` gives the strategies of a call without regard to parts.
    """
    return graph.once(stacked_dims, lambda: _stacked_dims(graph, strategies))


def _stacked_dims(
    graph: ModelGraph, strategies: Callable[[Call], Iterable[Strategy]]
) -> Mapping[str, frozenset[Layout]]:
    def layouts_of_results(question: _Question) -> tuple[Found, ...]:
        name, given, results = question
        call = Call.of(graph, op_named(graph, name))
        return _handed_on(call, given, strategies) if results is None else _asked(call, given, results, strategies)

    return walked(graph, stacked_dims, layouts_of_results, lambda ask: _followed(graph, ask))


#: layouts S(d) that come from a sharded weight, and S(d; parts) likewise, of a value
Found = tuple[frozenset[Layout], frozenset[Layout]]
_NONE: Found = (frozenset(), frozenset())
#: an op's name, the layouts of each of its operands, and those of its results where what it reads is asked for
_Question = tuple[str, tuple[Found, ...], tuple[Found, ...] | None]


def _followed(
    graph: ModelGraph, layouts_of_results: Callable[[_Question], tuple[Found, ...]]
) -> dict[str, frozenset[Layout]]:
    """The stacked layouts by value, from what each op says of its results, given the layouts of its operands."""
    layouts: dict[str, Found] = {}
    for name in matrices(graph):
        layouts[name] = frozenset(map(S, range(len(graph.values[name].shape)))), frozenset()

    def add(name: str, found: Found) -> None:
        """Adds layouts to those that a value has: a part of a weight has some from the start."""
        if name in layouts:
            made, stacked = layouts[name]
            layouts[name] = made | found[0], stacked | found[1]
        elif any(found):
            layouts[name] = found

    for like, operands, results in _walk(graph):
        if layouts.keys().isdisjoint(operands):
            continue
        if like is None:
            add(results[0], layouts[operands[0]])
            continue
        given = tuple([layouts.get(name, _NONE) for name in operands])
        for name, found in zip(results, layouts_of_results((like, given, None)), strict=True):
            add(name, found)
    _follow_back(graph, layouts, layouts_of_results)
    return {name: stacked for name, (_, stacked) in layouts.items() if stacked}


def _follow_back(
    graph: ModelGraph,
    layouts: dict[str, Found],
    layouts_of_operands: Callable[[_Question], tuple[Found, ...]],
) -> None:
    """Adds the layouts in which values without a gradient are read, from the last reader back."""
    free = {name for name, value in graph.values.items() if not value.carries_gradient and name not in layouts}
    for like, operands, results in reversed(_walk(graph)):
        if free.isdisjoint(operands) or layouts.keys().isdisjoint((*operands, *results)):
            continue
        read: tuple[Found, ...] = (layouts.get(results[0], _NONE),) if results else ()
        if like is not None:
            given, made = (tuple(layouts.get(name, _NONE) for name in names) for names in (operands, results))
            read = layouts_of_operands((like, given, made))
        for name, found in zip(operands, read, strict=True):
            if name in free and any(found):
                plain, stacked = layouts.get(name, _NONE)
                layouts[name] = plain | found[0], stacked | found[1]


def _asked(
    call: Call,
    given: tuple[Found, ...],
    made: tuple[Found, ...],
    strategies: Callable[[Call], Iterable[Strategy]],
) -> tuple[Found, ...]:
    """The layouts in which a call reads its operands, from those of all its operands and results."""
    plain, stacked = ([set[Layout]() for _ in call.operands] for _ in range(2))
    values, known = (*call.operands, *call.results), (*given, *made)
    for strategy in strategies(call):
        layouts = (*strategy.operands, *strategy.results)
        parts = {
            own.parts
            for layout, (_, by_parts) in zip(layouts, known, strict=True)
            for own in by_parts
            if layout == S(own.dim or 0)
        }
        is_made = any(layout in own for layout, (own, _) in zip(layouts, known, strict=True))
        for place, (value, layout) in enumerate(zip(values, layouts, strict=True)):
            if place >= len(call.operands) or layout.dim is None or not layout.is_plain:
                continue
            if is_made:
                plain[place].add(layout)
            stacked[place].update(S(layout.dim, *own) for own in parts if sum(own) == value.shape[layout.dim])
    if call.target in RESHAPES:
        for own, other in regrouped(call.operands[0].shape, call.results[0].shape):
            if max(own.count, other.count) <= MOST_STACKED and other.layout in made[0][other.count > 1]:
                (stacked if own.count > 1 else plain)[0].add(own.layout)
    return tuple((frozenset(own), frozenset(other)) for own, other in zip(plain, stacked, strict=True))


def _handed_on(
    call: Call, given: tuple[Found, ...], strategies: Callable[[Call], Iterable[Strategy]]
) -> tuple[Found, ...]:
    """The layouts of a call's results, from those of its operands."""
    made, stacked = ([set[Layout]() for _ in call.results] for _ in range(2))
    options = tuple(strategies(call))
    for place, layout in _results(options, [own for own, _ in given]):
        made[place].add(layout)
    if call.target in RESHAPES:
        for own, other in regrouped(call.operands[0].shape, call.results[0].shape):
            if other.count == 1 and own.count <= MOST_STACKED and own.layout in given[0][1]:
                made[0].add(other.layout)  # a stacked dim is taken apart
            if S(own.dim) not in given[0][0]:
                continue
            if other.count == 1:  # of a fused dim
                made[0].add(other.layout)
            elif own.count == 1 and other.count <= MOST_STACKED:
                stacked[0].add(other.layout)
    else:
        for position, (_, handed) in enumerate(given):
            for operand in handed:
                sharded = [{S(operand.dim or 0)} if i == position else () for i in range(len(given))]
                for place, layout in _results(options, sharded):
                    if call.results[place].shape[layout.dim or 0] == sum(operand.parts):
                        stacked[place].add(S(layout.dim or 0, *operand.parts))
    return tuple((frozenset(own), frozenset(other)) for own, other in zip(made, stacked, strict=True))


def _walk(graph: ModelGraph) -> tuple[tuple[str | None, tuple[str, ...], tuple[str, ...]], ...]:
    """(op at its place in the first like block or None for a boundary, operands, results) of each node."""

    def nodes() -> Iterator[tuple[str | None, tuple[str, ...], tuple[str, ...]]]:
        like = like_ops(graph)
        for node in graph.nodes:
            yield like[node.name] if isinstance(node, Op) else None, node.operands, node.results

    return graph.once_for_all_sizes(_walk, lambda: tuple(nodes()))


def _results(options: Iterable[Strategy], sharded: Sequence[Collection[Layout]]) -> Iterator[tuple[int, Layout]]:
    """Yields (position, layout) of each sharded result of a strategy that shards an operand as given."""
    for strategy in options:
        if any(layout in own for layout, own in zip(strategy.operands, sharded, strict=True)):
            for place, layout in enumerate(strategy.results):
                if layout.dim is not None:
                    yield place, layout
