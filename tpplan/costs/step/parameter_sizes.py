"""Bytes of a plan's parameters on one rank: as they rest, as they are gathered, and what belongs to them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from tpplan.core.graph import Source
from tpplan.core.layout import Conversion, Layout, local_shape
from tpplan.core.units import DTYPE_BYTES
from tpplan.layouts.assignment import Assignment, master_bytes
from tpplan.layouts.decision_space import reading_conversion
from tpplan.plan.optimizers import optimizer_named


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parameters of an assignment."""

    assignment: Assignment

    def placement(self, source: Source) -> Layout:
        """How a parameter rests on the tp axis."""
        return self.assignment.placement(source)

    def shape(self, source: Source) -> tuple[int, ...]:
        """On a rank of tp, gathered over the others."""
        value = self.assignment.graph.values[source.result]
        return local_shape(value.shape, self.placement(source), self.assignment.mesh.tp)

    def elements(self, source: Source) -> int:
        """Of that shape."""
        return prod(self.shape(source))

    def padded_elements(self, source: Source) -> int:
        """The same with dim 0 filled up to a multiple of FSDP's ranks, in whose buffers it lies so."""
        shape = self.shape(source)
        return self.shard_elements(source) * self.assignment.mesh.shard if shape else 1

    def shard_elements(self, source: Source) -> int:
        """What rests on a rank: FSDP cuts dim 0, and the first ranks have the most."""
        first, *others = self.shape(source) or (1,)
        return ceil(first / self.assignment.mesh.shard) * prod(others)

    def compute_width(self, source: Source) -> int:
        """Bytes per element in forward."""
        return DTYPE_BYTES[self.assignment.graph.values[source.result].dtype]

    def master_width(self, source: Source) -> int:
        """Bytes per element at rest, and of a gradient that is reduced."""
        return master_bytes(self.assignment.precision, self.assignment.graph.values[source.result].dtype)

    def resting(self, bytes_per_element: Callable[[Source], float], sources: Iterable[Source] | None = None) -> float:
        """Bytes of what every parameter, or some, has in its shard."""
        chosen = self.assignment.graph.parameters if sources is None else sources
        return sum(bytes_per_element(source) * self.shard_elements(source) for source in chosen)

    @cached_property
    def trainable(self) -> tuple[Source, ...]:
        """Those that have gradients and states."""
        return tuple(source for source in self.assignment.graph.parameters if source.trainable)

    def states(self) -> float:
        """Bytes of the optimizer's states."""
        optimizer = optimizer_named(self.assignment.optimizer)
        return self.resting(lambda source: optimizer.bytes_per_element(self.master_width(source)), self.trainable)

    def step_temporaries(self) -> float:
        """Bytes that the optimizer's step makes for a while."""
        optimizer = optimizer_named(self.assignment.optimizer)
        largest = max((self.resting(self.master_width, [source]) for source in self.trainable), default=0.0)
        return optimizer.of_all * self.resting(self.master_width, self.trainable) + optimizer.of_largest * largest

    def reading(self, name: str) -> Conversion | None:
        """What a reading of this name converts; None where nothing is read under it."""
        strategy = self.assignment.strategies.get(name)
        return reading_conversion(strategy) if strategy is not None else None
