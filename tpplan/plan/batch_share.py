"""The rows of a global batch that a rank reads in each micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tpplan.core.errors import UsageError


class Rows(Protocol):
    """A tensor, an array or a list with one row per sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """A rank's rows of each global batch: the data_rank-th of data_parallel equal slices, divided into micro-batches.

    The ranks of a tensor-parallel group have the same data_rank and read the same rows. Raises UsageError where
    data_parallel * accumulation_steps * micro_batch is not the global batch, or data_rank is out of range.
    """

    global_batch: int
    seq_len: int
    micro_batch: int
    accumulation_steps: int = 1
    data_parallel: int = 1
    data_rank: int = 0

    def __post_init__(self) -> None:
        if self.data_parallel * self.accumulation_steps * self.micro_batch != self.global_batch:
            raise UsageError(
                f"global batch {self.global_batch} is not {self.data_parallel} data-parallel ranks x "
                f"{self.accumulation_steps} accumulation steps x micro-batch {self.micro_batch}"
            )
        if not 0 <= self.data_rank < self.data_parallel:
            raise UsageError(f"data rank {self.data_rank}: expected 0 to {self.data_parallel - 1}")

    @property
    def rows(self) -> tuple[range, ...]:
        """The rows of a global batch that this rank reads, one range for each micro-batch."""
        first = self.data_rank * self.accumulation_steps
        starts = ((first + step) * self.micro_batch for step in range(self.accumulation_steps))
        return tuple(range(start, start + self.micro_batch) for start in starts)

    def micro_batches(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """This rank's micro-batches of a global batch; each has all that has no rows, as a flag or a number. Raises
        UsageError for inputs of another number of rows."""
        rowed: dict[str, Rows] = {name: value for name, value in inputs.items() if _has_rows(value)}
        for name, value in rowed.items():
            if len(value) != self.global_batch:
                raise UsageError(f"{name}: expected a global batch of {self.global_batch} rows, got {len(value)}")
        return [
            {**inputs, **{name: value[rows.start : rows.stop] for name, value in rowed.items()}} for rows in self.rows
        ]


def _has_rows(value: object) -> bool:
    """False for what has no length: numbers, None, tensors without dims; and for text."""
    is_scalar = getattr(value, "ndim", None) == 0
    return hasattr(value, "__len__") and not is_scalar and not isinstance(value, str | bytes)
