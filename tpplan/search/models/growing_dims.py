"""The dims of a trace's values that grow with batch or length: those that differ in traces at others."""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from tpplan.core.errors import TpplanError
from tpplan.core.graph import ModelGraph
from tpplan.search.models.trace_cache import TraceCache, Traced
from tpplan.torch_internals import pytree


@dataclass(frozen=True)
class GrowingDims(Container[tuple[str, int]]):
    """The pairs (value, dim) of a trace that grow with batch or length, as far as the model runs the same ops there.

    When a pair is first looked for, the model is traced at half the length, and at a larger batch unless it was seen to
    run the same ops at another one; what is found is kept in the cache's Reuse.
    """

    traces: TraceCache
    traced: Traced

    def __contains__(self, pair: object) -> bool:
        return pair in self._found

    @cached_property
    def _found(self) -> frozenset[tuple[str, int]]:
        key, known = self.traces.key(self.traced.micro_batch), self.traces.reuse.growing
        if key not in known:
            known[key] = frozenset(self._differing())
        return known[key]

    def _differing(self) -> Iterator[tuple[str, int]]:
        batch, length = self.traced.micro_batch, self.traces.subject.seq_len
        at_batch = self.traces.alike(self.traced) or self._graph(batch + 1, length)
        at_half = self._graph(batch, max(length // 2, 1))
        for other in (at_batch, at_half or self._graph(batch, max(length - 1, 1))):
            yield from _differing(self.traced.graph, other) if other is not None else ()

    def _graph(self, batch: int, length: int) -> ModelGraph | None:
        """The graph at a batch and a length; None where the model takes no such inputs, or they are those of the
        trace."""
        try:
            inputs = self.traces.subject.inputs(batch, length)
        except Exception:  # the user's code
            return None
        if _shapes(inputs) == _shapes(self.traced.inputs):
            return None
        try:
            return self.traces.elsewhere(self.traced.model, batch, length).graph
        except TpplanError:
            return None


def _shapes(inputs: object) -> list[torch.Size]:
    return [leaf.shape for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def _differing(graph: ModelGraph, other: ModelGraph) -> Iterator[tuple[str, int]]:
    """Yields the dims of the values of `graph` that are another size in `other`."""
    for name, value in graph.values.items():
        there = other.values[name].shape if name in other.values else ()
        if len(there) == len(value.shape):
            yield from ((name, dim) for dim, size in enumerate(value.shape) if size != there[dim])
