"""Rates of fused attention: medians of published figures, or the like machine's, scaled by the rate of large products.

FLOP are those that are executed: half for causal masks, and backward 2.5 times forward.
"""

import numpy as np

from published.machines import BestAttention, PublishedAttention
from tpplan.machine.fit_tables import digits
from tpplan.machine.tables import AttentionRate

TERA = 1e12
HALF_PRECISIONS = ("bfloat16", "float16")


def spread(figures: PublishedAttention) -> float:
    """How far the farthest figure is from the median, forward or backward."""
    both = (np.array(figures.forward_tflops), np.array(figures.backward_tflops))
    return max(float(np.abs(np.log(bars / np.median(bars))).max()) for bars in both)


def rates(
    forward_tflops: float,
    backward_tflops: float,
    *,
    float32_share: float,
    error: float,
    how: str,
    sources: tuple[str, ...],
) -> list[AttentionRate]:
    """All dtypes' entries; float32_share is float32's rate over bfloat16's, in large matmuls."""
    in_full = f"{how}; times {float32_share:.2f}, float32 against bfloat16 in large matmuls, with twice the error"

    def entry(dtype: str, factor: float, error: float, inferred: str) -> AttentionRate:
        return AttentionRate(
            dtype=dtype,
            forward_flop_per_s=digits(forward_tflops * TERA * factor, 3),
            backward_flop_per_s=digits(backward_tflops * TERA * factor, 3),
            relative_error=digits(error, 2),
            sources=sources,
            inferred=inferred,
        )

    return [
        *(entry(dtype, 1.0, error, how) for dtype in HALF_PRECISIONS),
        entry("float32", float32_share, 2 * error, in_full),
    ]


def published(figures: PublishedAttention, float32_share: float) -> list[AttentionRate]:
    """The median figure; its error is the farthest one."""
    return rates(
        float(np.median(figures.forward_tflops)),
        float(np.median(figures.backward_tflops)),
        float32_share=float32_share,
        error=max(spread(figures), figures.least_relative_error),
        how=figures.how,
        sources=figures.sources,
    )


def from_best(figures: BestAttention, shapes: PublishedAttention, float32_share: float) -> list[AttentionRate]:
    """The best figure, times median over best of another machine's figures, with twice the error of those."""
    forward, backward = (
        float(np.median(bars) / np.max(bars)) for bars in (shapes.forward_tflops, shapes.backward_tflops)
    )
    return rates(
        figures.forward_tflops * forward,
        figures.backward_tflops * backward,
        float32_share=float32_share,
        error=float(np.hypot(spread(shapes), np.log(min(forward, backward)))),
        how=figures.how + "; relative_error: how far those shapes lie apart, with how far median and best do",
        sources=figures.sources,
    )


def scaled(
    like: tuple[AttentionRate, ...], factor: float, error: float, how: str, sources: tuple[str, ...]
) -> list[AttentionRate]:
    """The like machine's rates times factor, with an error more."""
    return [
        AttentionRate(
            dtype=rate.dtype,
            forward_flop_per_s=digits(rate.forward_flop_per_s * factor, 3),
            backward_flop_per_s=digits(rate.backward_flop_per_s * factor, 3),
            relative_error=digits(float(np.hypot(rate.relative_error, error)), 2),
            sources=tuple(dict.fromkeys(rate.sources + sources)),
            inferred=f"{how} ({rate.inferred})" if rate.inferred else how,
        )
        for rate in like
    ]
