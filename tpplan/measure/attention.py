"""Times fused attention, forward and backward, over batch * heads, sequence, head dim and mask."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tpplan.costs.runs.kernels import ATTENTION_BACKWARD_PRODUCTS, dtype_name
from tpplan.machine.fit_tables import TIME_DIGITS, Array, attention_table, digits, relative_error
from tpplan.machine.tables import AttentionRate, AttentionTable
from tpplan.measure.device import MEASURED
from tpplan.measure.timer import (
    LARGEST_PART,
    NUM_REPEATS,
    PROBE_REPEATS,
    SHORTEST_USEFUL_WINDOW_S,
    WINDOWS_PER_POINT,
    Progress,
    Stopwatch,
    in_rounds,
    silent,
)

#: fewest sequence lengths of an attention table
FEWEST_SEQUENCES = 2
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """An attention with query, key and value of shape (batch, heads, sequence, head_dim)."""

    batch: int
    heads: int
    sequence: int
    head_dim: int
    causal: bool

    @property
    def forward_flop(self) -> float:
        """Executed FLOP of Q K^T and of the product with V; half of them where causal."""
        flop = 4.0 * self.batch * self.heads * self.sequence**2 * self.head_dim
        return flop / 2 if self.causal else flop

    @property
    def point(self) -> tuple[int, int, int]:
        """The shape's point in a table: (batch * heads, sequence, head_dim)."""
        return self.batch * self.heads, self.sequence, self.head_dim


def measure_attention(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[AttentionShape],
    budget_s: float,
    launch_s: float,
    progress: Progress = silent,
) -> tuple[AttentionRate, tuple[AttentionTable, ...]]:
    """Times the fused kernel over the shapes, forward and backward.

    Returns the median rates over all shapes, whose error is the spread between shapes too, and tables for each mask
    whose shapes are all combinations of their sizes.
    """
    shapes = _affordable_shapes(device, dtype, shapes, LARGEST_PART * budget_s / WINDOWS_PER_POINT)
    points = list(product((False, True), shapes))

    def make(point: tuple[bool, AttentionShape]) -> Callable[[], object]:
        return _attention_work(device, dtype, *point)

    with sdpa_kernel(FUSED):
        samples = in_rounds(device, points, make, f"attention {dtype_name(dtype)}", budget_s, progress)
    tables = (
        _attention_table(dtype, causal, backward, samples, launch_s)
        for causal, backward in product((False, True), (False, True))
    )
    return _attention_rate(dtype, samples), tuple(table for table in tables if table is not None)


def _attention_work(
    device: torch.device, dtype: torch.dtype, backward: bool, shape: AttentionShape
) -> Callable[[], object]:
    size = (shape.batch, shape.heads, shape.sequence, shape.head_dim)
    inputs = [torch.randn(size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    return (_attention_backward if backward else _attention)(inputs, shape.causal)


def _attention(inputs: Sequence[Tensor], causal: bool) -> Callable[[], object]:
    query, key, value = inputs
    return lambda: scaled_dot_product_attention(query, key, value, is_causal=causal)


def _attention_backward(inputs: Sequence[Tensor], causal: bool) -> Callable[[], object]:
    query, key, value = inputs
    result = scaled_dot_product_attention(query, key, value, is_causal=causal)
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def _affordable_shapes(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[AttentionShape], budget_s: float
) -> Sequence[AttentionShape]:
    """The shapes without the longest sequences, until one call of each, forward and backward, fits the budget at the
    rate of a middle shape."""
    sequences = sorted({shape.sequence for shape in shapes})
    middle = sequences[len(sequences) // 2]
    probed = max((shape for shape in shapes if shape.sequence == middle), key=lambda shape: shape.forward_flop)
    stopwatch = Stopwatch(device=device, window_s=SHORTEST_USEFUL_WINDOW_S[device.type], repeats=PROBE_REPEATS)
    with sdpa_kernel(FUSED):
        (seconds,) = stopwatch.samples(_attention_work(device, dtype, False, probed))
    per_flop = (1 + ATTENTION_BACKWARD_PRODUCTS) * seconds / probed.forward_flop
    while len(sequences) > FEWEST_SEQUENCES and per_flop * sum(s.forward_flop for s in shapes) > budget_s:
        sequences.pop()
        shapes = [shape for shape in shapes if shape.sequence in sequences]
    return shapes


def _attention_rate(dtype: torch.dtype, samples: Mapping[tuple[bool, AttentionShape], Array]) -> AttentionRate:
    rates: dict[bool, list[Array]] = {False: [], True: []}
    for (backward, shape), seconds in samples.items():
        rates[backward].append(shape.forward_flop * (ATTENTION_BACKWARD_PRODUCTS if backward else 1.0) / seconds)
    medians = {way: float(np.median(np.median(found, axis=1))) for way, found in rates.items()}
    return AttentionRate(
        dtype=dtype_name(dtype),
        forward_flop_per_s=digits(medians[False], TIME_DIGITS),
        backward_flop_per_s=digits(medians[True], TIME_DIGITS),
        relative_error=relative_error(np.stack([np.stack(rates[way]) / medians[way] for way in rates])),
        sources=MEASURED,
    )


def _attention_table(
    dtype: torch.dtype,
    causal: bool,
    backward: bool,
    samples: Mapping[tuple[bool, AttentionShape], Array],
    launch_s: float,
) -> AttentionTable | None:
    """The table of one mask, forward or backward; None where its shapes are not all combinations of their sizes."""
    by_point: dict[tuple[int, ...], Array] = {
        shape.point: seconds for (way, shape), seconds in samples.items() if way == backward and shape.causal == causal
    }
    axes = [tuple(sorted({point[axis] for point in by_point})) for axis in range(3)]
    wanted = list(product(*axes))
    if not by_point or any(point not in by_point for point in wanted):
        return None
    table = np.stack([by_point[point] for point in wanted]).reshape(*(len(axis) for axis in axes), NUM_REPEATS)
    return attention_table(
        dtype_name(dtype), causal=causal, backward=backward, axes=axes, samples=table, launch_s=launch_s,
        sources=MEASURED,
    )  # fmt: skip
