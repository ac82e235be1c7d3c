"""Computes a lower bound of the compute seconds of a sequence, at the best rates in a profile.

A micro-batch of m sequences takes at least the work that grows with m. It is found from traces at two micro-batches,
a < b sequences: per op the larger one's work less the smaller one's, per sequence. At the best rates,

    seconds(m) >= m * sum over ops of max(0, t(b) - t(a)) / (b - a)

with t an op's work divided by the best rate. Launches, fixed work and rates below the best are left out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod

from tpplan.core.graph import ModelGraph
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.kernels import Attention, Kernel, Matmul, MemoryBound
from tpplan.machine.profile import HardwareProfile


@dataclass(slots=True)
class BestRates:
    """The best rates of a profile. Where compiled, memory-bound kernels count 0: fusion may remove nearly all bytes."""

    profile: HardwareProfile
    is_compiled: bool
    _known: dict[object, float] = field(default_factory=dict)

    def seconds(self, kernel: Kernel) -> float:
        """Returns the kernel's seconds at the best rate of its dtype; 0 where the profile has no rate."""
        match kernel:
            case Matmul(m=m, n=n, k=k, batch=batch, dtype=dtype):
                rate = self._once(("matmul", dtype), self._matmul_rates(dtype))
                return self.profile.matmul_slowdown * 2.0 * batch * m * n * k / rate if rate else 0.0
            case Attention(flop=flop):
                sizes = kernel.sizes
                factor = flop / (sizes.batch_heads * sizes.queries * sizes.keys * sizes.head_dim)
                key = ("attention", kernel.dtype, kernel.is_backward, sizes.causal, round(factor, 6))
                rate = self._once(key, self._attention_rates(kernel, factor))
                return flop / rate if rate else 0.0
            case MemoryBound(num_bytes=num_bytes):
                rate = self._once("memory", self._memory_rates())
                return 0.0 if self.is_compiled else num_bytes / rate

    def _once(self, key: object, rates: Iterator[float]) -> float:
        if key not in self._known:
            self._known[key] = max(rates, default=0.0)
        return self._known[key]

    def _matmul_rates(self, dtype: str) -> Iterator[float]:
        for table in self.profile.matmuls:
            if table.dtype == dtype:
                for sizes, seconds in zip(product(*table.grids), table.time_s, strict=True):
                    yield 2.0 * prod(sizes) / self._marginal(seconds)

    def _attention_rates(self, kernel: Attention, factor: float) -> Iterator[float]:
        for rate in self.profile.attention_rates:
            if rate.dtype == kernel.dtype:
                yield rate.backward_flop_per_s if kernel.is_backward else rate.forward_flop_per_s
        for table in self.profile.attention_tables or ():
            if (table.dtype, table.backward, table.causal) == (kernel.dtype, kernel.is_backward, kernel.sizes.causal):
                for (heads, length, dim), seconds in zip(product(*table.grids), table.time_s, strict=True):
                    yield factor * heads * length**2 * dim / self._marginal(seconds)

    def _memory_rates(self) -> Iterator[float]:
        table = self.profile.memory_bound_table
        if table is None:
            yield self.profile.bandwidth.hbm_bytes_per_s
        else:
            yield from (size / seconds for size, seconds in zip(table.bytes, table.time_s, strict=True))

    def _marginal(self, seconds: float) -> float:
        """Returns a measured time less the launch, the part that grows with the work beyond the table.

        A time that is mostly launch stays: beyond it the bytes decide (tpplan.machine.profile.HardwareProfile.matmul).
        """
        launch_s = self.profile.launch_s
        return seconds - launch_s if seconds > 2 * launch_s else seconds


def seconds_of_a_sequence(
    first: ModelGraph, second: ModelGraph, sizes: tuple[int, int], rates: BestRates, executor: Executor
) -> float:
    """Returns a lower bound of the seconds of a sequence's forward and backward on one GPU.

    `first` and `second` are graphs at micro-batches of `sizes` = (a, b) sequences, a < b.
    """
    low, high = (dict(_work(graph, rates, executor)) for graph in (first, second))
    added = sum(max(0.0, seconds - low[name]) for name, seconds in high.items() if name in low)
    return added / (sizes[1] - sizes[0])


def _work(graph: ModelGraph, rates: BestRates, executor: Executor) -> Iterator[tuple[str, float]]:
    """Yields each op's name with its target, and its seconds at best rates, forward and backward together."""
    for op in graph.ops:
        execution = executor.whole(graph, op)
        yield f"{op.name} {op.target}", _total(rates, (*execution.forward, *execution.backward))


def _total(rates: BestRates, kernels: Iterable[Kernel]) -> float:
    return sum(map(rates.seconds, kernels))
