"""Derives the graph of a model whose experts are divided among some ranks from graphs of two other numbers of ranks.

A rank has E / ep of the E experts, and gets as many rows as it sends, whatever ep is. So where two graphs at one
micro-batch run the same ops, a size that differs between them is one of `ep` itself, or of its share of the experts:

    size(ep) = size(a) ep / a        or        size(ep) = size(a) a / ep

or, of one that the batch does not change, such as the number of the last expert, is on a line with the share:

    size(ep) = size(a) + (size(b) - size(a)) (1 / ep - 1 / a) / (1 / b - 1 / a)

There is no derived graph where the two differ in more, or where a size is no whole number. The search traces its
answer's own graph and compares (tpplan.search.branch_and_bound).
"""

from dataclasses import replace

from tpplan.core.graph import Argument, Boundary, ModelGraph, Op


class _UnlikeError(Exception):
    """The graphs differ in more than sizes."""


def of_degree(base: ModelGraph, first: ModelGraph, second: ModelGraph, degree: int) -> ModelGraph | None:
    """The graph of `degree` ranks at the micro-batch of `base`. `first` and `second` are of one micro-batch, `base` and
    `first` of one number of ranks. None where they differ in more than sizes."""
    sizes = _Sizes(first.ep, second.ep, degree)
    graphs = base, first, second
    if len({(tuple(graph.values), graph.outputs, graph.loss, graph.blocks, graph.questions) for graph in graphs}) > 1:
        return None
    if len({len(graph.nodes) for graph in graphs}) > 1 or first.ep == second.ep or base.ep != first.ep:
        return None
    if {replace(source, ep=1) for source in first.sources} != {replace(source, ep=1) for source in second.sources}:
        return None
    try:
        values = {
            name: value.of_shape(sizes.shape(value.shape, first.values[name].shape, second.values[name].shape))
            for name, value in base.values.items()
        }
        nodes = tuple(map(sizes.node, base.nodes, first.nodes, second.nodes))
    except _UnlikeError:
        return None
    sources = tuple(replace(source, ep=degree) if source.ep > 1 else source for source in base.sources)
    return replace(base, values=values, nodes=nodes, sources=sources)


class _Sizes:
    """Sizes at `degree` ranks, from those at `one` and `other`."""

    def __init__(self, one: int, other: int, degree: int) -> None:
        self.one, self.other, self.degree = one, other, degree

    def at(self, base: int, one: int, other: int) -> int:
        """The size that is `base` at `one` ranks, and grows with the ranks as from `one` to `other`. Raises
        _UnlikeError where it grows otherwise."""
        if one == other:
            return base
        if one * self.other == other * self.one:
            found, rest = divmod(base * self.degree, self.one)
        elif one * self.one == other * self.other:
            found, rest = divmod(base * self.one, self.degree)
        elif base == one:
            grown, rest = divmod(
                (other - one) * (self.one - self.degree) * self.other, self.degree * (self.one - self.other)
            )
            found = one + grown
        else:
            raise _UnlikeError
        if rest:
            raise _UnlikeError
        return found

    def shape(self, base: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        """A shape, size by size."""
        if len({len(base), len(one), len(other)}) > 1:
            raise _UnlikeError
        return base if one == other else tuple(map(self.at, base, one, other))

    def argument(self, base: Argument, one: Argument, other: Argument) -> Argument:
        """An argument of an op; nothing but whole numbers may differ."""
        if one == other and type(one) is type(other):
            return base
        if isinstance(base, tuple) and isinstance(one, tuple) and isinstance(other, tuple):
            if len({len(base), len(one), len(other)}) > 1:
                raise _UnlikeError
            return tuple(map(self.argument, base, one, other))
        if type(base) is int and type(one) is int and type(other) is int:
            return self.at(base, one, other)
        raise _UnlikeError

    def node(self, base: Op | Boundary, one: Op | Boundary, other: Op | Boundary) -> Op | Boundary:
        """A node with its arguments, of which nothing but whole numbers may differ."""
        if one == other and base.name == one.name:
            return base
        if not (isinstance(base, Op) and isinstance(one, Op) and isinstance(other, Op)):
            raise _UnlikeError
        if len({_outline(own) for own in (base, one, other)}) > 1:
            raise _UnlikeError
        args = self.argument(base.args, one.args, other.args)
        assert isinstance(args, tuple)
        named = zip(base.kwargs, one.kwargs, other.kwargs, strict=True)
        kwargs = tuple((name, self.argument(own, a, b)) for (name, own), (_, a), (_, b) in named)
        return replace(base, args=args, kwargs=kwargs)


def _outline(op: Op) -> tuple[object, ...]:
    return op.name, op.target, op.results, op.module, tuple(name for name, _ in op.kwargs)
