"""Extrapolates the graph of a model at a micro-batch from traces at two others.

Two traces that run the same ops in the same modules, and differ in sizes alone, say how each size grows with the batch:

    size(m) = size(a) + (size(b) - size(a)) (m - a) / (b - a)

Shapes and literals follow this line. There is no grown graph where the traces differ in more, or where a size is no
whole number. Two traces do not prove what code does at other batches: the search traces the micro-batch of its answer
and compares (tpplan.search.branch_and_bound), and the plan notes the other micro-batches whose graph was grown.
"""

from dataclasses import dataclass, replace

from tpplan.core.graph import Argument, Boundary, ModelGraph, Op, Value


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

    def value(self, low: Value, high: Value) -> Value:
        """A tensor with its shape on the line."""
        if low == high:
            return low
        if len(low.shape) != len(high.shape) or replace(high, shape=low.shape) != low:
            raise _UnlikeError
        return replace(low, shape=tuple(map(self.at, low.shape, high.shape)))

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

    def node(self, low: Op | Boundary, high: Op | Boundary) -> Op | Boundary:
        """A node with its arguments on the line."""
        if isinstance(low, Op) and isinstance(high, Op):
            return self.op(low, high)
        if low != high:
            raise _UnlikeError
        return low


def grown(first: ModelGraph, second: ModelGraph, sizes: tuple[int, int], size: int) -> ModelGraph | None:
    """The graph at micro-batch `size` from those at two other `sizes`; None where they differ in more than sizes."""
    about = [(g.sources, g.outputs, g.loss, g.blocks, g.questions, tuple(g.values)) for g in (first, second)]
    if about[0] != about[1] or len(first.nodes) != len(second.nodes):
        return None
    line = _Line(*sizes, size)
    try:
        return replace(
            first,
            values={name: line.value(value, second.values[name]) for name, value in first.values.items()},
            nodes=tuple(map(line.node, first.nodes, second.nodes)),
        )
    except _UnlikeError:
        return None
