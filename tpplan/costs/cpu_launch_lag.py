"""How long a GPU waits for the CPU that issues its kernels.

A GPU runs kernels in the order in which they are issued while the CPU goes on: a flow shop of two machines. A kernel
starts when it has been issued and the one before it is done, so that kernels with issue times i and device times d take

    T = max over k of (i_1 + ... + i_k + d_k + ... + d_n)

[Johnson 1954, Optimal two- and three-stage production schedules]. The CPU waits for the GPU once a step, where the loss
or a gradient's norm is read. Taking the kernels of a forward as alike, and those of a backward, the largest k is at the
end of one of them: with I, D of a micro-batch, F of its forward, and A micro-batches,

    T - A D = max(0, A (I - D), F_I - F_D, (A - 1) (I - D) + F_I - F_D)

A CPU runs its own kernels: there issuing one is added to its time. An optimizer's step is measured by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpplan.solvers.problem import Expression


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How much longer issuing a decision's kernels takes than running them, in seconds, by strategy: in forward, and in
    forward and backward together."""

    forward: tuple[float, ...]
    both: tuple[float, ...]


def waiting(lags: Mapping[str, Lag], steps: int) -> tuple[Expression, ...]:
    """The expressions whose largest is T - A D, over decisions by name; steps is A."""
    found = [Expression()]
    for earlier, is_cut_between in ((steps, False), (0, True), (steps - 1, True)):
        terms = (
            (name, tuple(earlier * both + is_cut_between * first for first, both in _pairs(lag)))
            for name, lag in lags.items()
        )
        expression = Expression(terms=tuple(terms))
        if expression not in found:
            found.append(expression)
    return tuple(found)


def _pairs(lag: Lag) -> Iterator[tuple[float, float]]:
    return zip(lag.forward, lag.both, strict=True)


def repeated(values: Sequence[float], count: int) -> tuple[float, ...]:
    """Each value as often as there are decisions alike."""
    return tuple(count * value for value in values)
