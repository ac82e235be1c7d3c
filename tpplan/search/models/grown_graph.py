"""Extrapolates the graph of a model at a micro-batch from traces at two others.

Two traces that run the same ops in the same modules, and differ in sizes alone, say how each size grows with the batch:

    size(m) = size(a) + (size(b) - size(a)) (m - a) / (b - a)

Shapes and literals follow this line. There is no grown graph where the traces differ in more, or where a size is no
whole number. Two traces do not prove what code does at other batches: the search traces the micro-batch of its answer
and compares (tpplan.search.branch_and_bound), and the plan notes the other micro-batches whose graph was grown.
"""

from dataclasses import dataclass, replace

from tpplan.core.graph import Argument, ModelGraph, Op, Source, Value


class _UnlikeError(Exception):
    """The two traces differ in more than sizes."""


@dataclass(frozen=True, slots=True)
class _Line:
    """The line through sizes at the micro-batches `first` and `second`, read at the micro-batch `size`."""

    first: int
    second: int
    size: int

    def at(self, low: int, high: int) -> int:
        """The size on the line through `low` and `high`. Raises _UnlikeError where it is no whole number above 0."""
        if low == high:
            return low
        grown, rest = divmod((high - low) * (self.size - self.first), self.second - self.first)
        if rest or low + grown < 1:
            raise _UnlikeError
        return low + grown

    def shape(self, low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with its sizes on the line."""
        return tuple(map(self.at, low, high))

    def argument(self, low: Argument, high: Argument) -> Argument:
        """An argument of an op with its whole numbers on the line; nothing else may differ."""
        if low == high and type(low) is type(high):
            return low
        if isinstance(low, tuple) and isinstance(high, tuple) and len(low) == len(high):
            return tuple(self.argument(a, b) for a, b in zip(low, high, strict=True))
        if type(low) is int and type(high) is int:
            return self.at(low, high)
        raise _UnlikeError

    def op(self, low: Op, high: Op) -> Op:
        """An op with its arguments on the line."""
        same = (low.name, low.target, low.results, low.module) == (high.name, high.target, high.results, high.module)
        if not same or [name for name, _ in low.kwargs] != [name for name, _ in high.kwargs]:
            raise _UnlikeError
        args = self.argument(low.args, high.args)
        assert isinstance(args, tuple)
        kwargs = tuple((name, self.argument(a, b)) for (name, a), (_, b) in zip(low.kwargs, high.kwargs, strict=True))
        return low if (args, kwargs) == (low.args, low.kwargs) else replace(low, args=args, kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class _Unlike:
    """The sizes that differ between two graphs: values, with both shapes, and ops by position. `second` is held, so
    that its id, by which this is cached, is not reused."""

    values: tuple[tuple[Value, tuple[int, ...]], ...]
    ops: tuple[tuple[int, Op, Op], ...]
    second: ModelGraph

    @classmethod
    def between(cls, first: ModelGraph, second: ModelGraph) -> "_Unlike | None":
        """The sizes that differ; None where two graphs differ in more than sizes of values, arguments of ops, and the
        number of ranks that divide experts."""
        about = [
            (tuple(map(_of_all_ranks, g.sources)), g.outputs, g.loss, g.blocks, g.questions, tuple(g.values))
            for g in (first, second)
        ]
        if about[0] != about[1] or len(first.nodes) != len(second.nodes):
            return None
        values = []
        for low, high in zip(first.values.values(), second.values.values(), strict=True):
            if low != high:
                if len(low.shape) != len(high.shape) or low.of_shape(high.shape) != high:
                    return None
                values.append((low, high.shape))
        ops = []
        for position, (own, other) in enumerate(zip(first.nodes, second.nodes, strict=True)):
            if own != other:
                if not isinstance(own, Op) or not isinstance(other, Op):
                    return None
                ops.append((position, own, other))
        return cls(tuple(values), tuple(ops), second)


def _of_all_ranks(source: Source) -> Source:
    return source if source.ep == 1 else replace(source, ep=1)


def grown(first: ModelGraph, second: ModelGraph, sizes: tuple[int, int], size: int) -> ModelGraph | None:
    """The graph at micro-batch `size` from those at two other `sizes`; None where they differ in more than sizes."""
    unlike = first.once((_Unlike, id(second)), lambda: _Unlike.between(first, second))
    if unlike is None:
        return None
    line, shapes = _Line(*sizes, size), dict[object, tuple[int, ...]]()
    values = {}
    try:
        for low, high in unlike.values:
            if (key := (low.shape, high)) not in shapes:
                shapes[key] = line.shape(*key)
            values[low.name] = low.of_shape(shapes[key])
        return first.resized(values, {position: line.op(low, high) for position, low, high in unlike.ops})
    except _UnlikeError:
        return None


def share_outline(first: ModelGraph, second: ModelGraph) -> bool:
    """Lets the second of two graphs, where they differ in sizes alone, have what follows of the first from all else
    (ModelGraph.once_for_all_sizes); False where they differ in more."""
    unlike = first.once((_Unlike, id(second)), lambda: _Unlike.between(first, second))
    if unlike is None:
        return False
    line = _Line(0, 1, 1)
    try:
        for _, low, high in unlike.ops:
            line.op(low, high)
    except _UnlikeError:
        return False
    second.share_outline(first)
    return True
