"""Computes how long a GPU waits for the CPU that issues its kernels.

A GPU runs kernels in the order in which the CPU issues them ahead of it: a flow shop of two machines. A kernel starts
when it has been issued and the previous one is done, so that kernels with issue times i and device times d take

    T = max over k of (i_1 + ... + i_k + d_k + ... + d_n)

[Johnson 1954, Optimal two- and three-stage production schedules]. The CPU waits for the GPU once a step, where the loss
or a gradient's norm is read. If all kernels of a forward are alike, and all of a backward, the maximum is at the end of
a forward or a backward. With I and D the issue and device seconds of a micro-batch, F_I and F_D those of its forward,
and A micro-batches,

    T - A D = max(0, A (I - D), F_I - F_D, (A - 1) (I - D) + F_I - F_D)

A CPU runs its own kernels, so there the issue time is added to each kernel. An optimizer's step is measured separately.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpplan.solvers.problem import Expression


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLag:
    """Seconds by strategy by which issuing a decision's kernels takes longer than running them.

    `forward` is that of the forward alone, `both` of forward and backward together.
    """

    forward: tuple[float, ...]
    both: tuple[float, ...]


def waiting(lags: Mapping[str, LaunchLag], steps: int) -> tuple[Expression, ...]:
    """Returns expressions over the decisions whose maximum is T - A D; `lags` are by decision, steps is A."""
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


def _pairs(lag: LaunchLag) -> Iterator[tuple[float, float]]:
    return zip(lag.forward, lag.both, strict=True)


def repeated(values: Sequence[float], count: int) -> tuple[float, ...]:
    """Returns each value times the number of like decisions."""
    return tuple(count * value for value in values)
