"""The parameters of an assignment on one rank, in elements and bytes: at rest, gathered, with their states."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tpplan.core.graph import Source
from tpplan.core.layout import Conversion, local_shape
from tpplan.core.mesh import Axis
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.step.parameter_bytes import padded_elements, shard_elements
from tpplan.layouts.assignment import Assignment, master_bytes
from tpplan.layouts.readings import has_partial_gradient, reading_conversion
from tpplan.plan.optimizers import optimizer_named


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parameters of an assignment, in elements and bytes on one rank."""

    assignment: Assignment

    def shape(self, source: Source) -> tuple[int, ...]:
        """The shape of a parameter on a tp rank, gathered over FSDP's ranks."""
        value = self.assignment.graph.values[source.result]
        return local_shape(value.shape, self.assignment.placement(source), self.assignment.mesh.tp)

    def elements(self, source: Source) -> int:
        """Elements of a parameter on a tp rank, gathered over FSDP's ranks."""
        return prod(self.shape(source))

    def padded_elements(self, source: Source) -> int:
        """Elements with dim 0 padded to a multiple of the FSDP ranks, as FSDP2's flat buffers hold it."""
        return padded_elements(self.shape(source), self.fsdp_ranks(source))

    def shard_elements(self, source: Source) -> int:
        """Elements of the largest FSDP shard, which the first ranks have."""
        return shard_elements(self.shape(source), self.fsdp_ranks(source))

    def fsdp_ranks(self, source: Source) -> int:
        """The ranks over which FSDP shards a parameter: for experts those that have the same ones."""
        mesh = self.assignment.mesh
        if source.label in self.assignment.sources_over_tp:
            return mesh.size(Axis.SHARD_TP)
        return mesh.shard // source.ep

    def compute_width(self, source: Source) -> int:
        """Bytes per element in forward."""
        return DTYPE_BYTES[self.assignment.graph.values[source.result].dtype]

    def master_width(self, source: Source) -> int:
        """Bytes per element at rest, and of a gradient that is reduced."""
        return master_bytes(self.assignment.precision, self.assignment.graph.values[source.result].dtype)

    def resting(self, bytes_per_element: Callable[[Source], float], sources: Iterable[Source] | None = None) -> float:
        """Bytes in the FSDP shards of `sources`, by default of every parameter."""
        chosen = self.assignment.graph.parameters if sources is None else sources
        return sum(bytes_per_element(source) * self.shard_elements(source) for source in chosen)

    @cached_property
    def trainable(self) -> tuple[Source, ...]:
        """Parameters that train: they have gradients and optimizer states."""
        return tuple(source for source in self.assignment.graph.parameters if source.trainable)

    @cached_property
    def summands(self) -> tuple[Source, ...]:
        """Parameters that train, and whose gradients on a tp rank are summands: they are summed over tp once a step."""
        return tuple(source for source in self._partial if source.label not in self.assignment.sources_over_tp)

    @cached_property
    def multiplied(self) -> frozenset[str]:
        """Names of the parameters whose gradients are summands too, but FSDP averages them over tp: each backward
        multiplies them by tp."""
        return self.assignment.sources_over_tp.intersection(source.label for source in self._partial)

    @cached_property
    def _partial(self) -> tuple[Source, ...]:
        own = self.assignment
        return tuple(
            s for s in self.trainable if any(has_partial_gradient(own.strategy(r.name)) for r in own.readings[s.label])
        )

    def states(self) -> float:
        """Bytes of the optimizer's states on a rank."""
        optimizer = optimizer_named(self.assignment.optimizer)
        return self.resting(lambda source: optimizer.bytes_per_element(self.master_width(source)), self.trainable)

    def step_temporaries(self) -> float:
        """Bytes of the temporary tensors of the optimizer's step on a rank."""
        optimizer = optimizer_named(self.assignment.optimizer)
        largest = max((self.resting(self.master_width, [source]) for source in self.trainable), default=0.0)
        return optimizer.of_all * self.resting(self.master_width, self.trainable) + optimizer.of_largest * largest

    def reading(self, name: str) -> Conversion | None:
        """The conversion of the reading of this name; None where nothing has it."""
        strategy = self.assignment.strategies.get(name)
        return reading_conversion(strategy) if strategy is not None else None
