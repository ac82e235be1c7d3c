"""How the dims of a model's inputs depend on batch and length, and for which of those a plan is proven.

A plan is proven at the shapes of its example inputs and once more at another batch and another length. A proof at b and
b' holds for every multiple of their greatest common divisor: the two are chosen so that only what the plan itself needs
(a slice for each rank) divides both.
"""

import re
from dataclasses import dataclass

from tpplan.core.errors import PlanError

#: the quantities that a dim may be proportional to
BATCH, LENGTH, BOTH = "batch", "length", "batch * length"
#: regular expression of a dim's text
DIM_PATTERN = r"(?:0|[1-9][0-9]*)|(?:[1-9][0-9]* )?(?:batch \* length|batch|length)(?: [+-] [1-9][0-9]*)?"
_GROWING = re.compile(r"(?:([1-9][0-9]*) )?(batch \* length|batch|length)(?: ([+-]) ([1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class Dim:
    """size = constant + factor * (batch, length or batch * length), named by `grows_with`; "" for a constant dim."""

    constant: int
    factor: int = 0
    grows_with: str = ""

    def __str__(self) -> str:
        if not self.grows_with:
            return str(self.constant)
        times = f"{self.factor} " if self.factor != 1 else ""
        rest = f" {'+' if self.constant > 0 else '-'} {abs(self.constant)}" if self.constant else ""
        return f"{times}{self.grows_with}{rest}"

    def size(self, batch: int, length: int) -> int:
        """The size at a batch and a length."""
        count = {"": 0, BATCH: batch, LENGTH: length, BOTH: batch * length}[self.grows_with]
        return self.constant + self.factor * count

    def count(self, size: int) -> int | None:
        """The batch, length or product at which the dim has this size; None where there is none."""
        if not self.grows_with:
            return None
        count, rest = divmod(size - self.constant, self.factor)
        return count if not rest and count > 0 else None


def parse_dim(text: str) -> Dim:
    """The dim from its str(). Raises PlanError for any other text."""
    if re.fullmatch("0|[1-9][0-9]*", text):
        return Dim(int(text))
    match = _GROWING.fullmatch(text)
    if match is None:
        raise PlanError(f"expected a dim such as '32', 'batch', 'length + 1' or 'batch * length', got {text!r}")
    factor, grows_with, sign, constant = match.groups()
    return Dim(int(f"{sign or ''}{constant or 0}"), int(factor or 1), grows_with)


def dim_through(sizes: tuple[int, int, int], batches: tuple[int, int], lengths: tuple[int, int]) -> Dim:
    """The dim with these sizes at (batches[0], lengths[0]), (batches[1], lengths[0]) and (batches[0], lengths[1]).

    A constant where the size depends on neither, or in a way that Dim cannot express.
    """
    first, at_batch, at_length = sizes
    slopes = (at_batch - first) / (batches[1] - batches[0]), (at_length - first) / (lengths[1] - lengths[0])
    match slopes:
        case (by_batch, 0.0) if by_batch > 0 and by_batch.is_integer():
            return Dim(first - int(by_batch) * batches[0], int(by_batch), BATCH)
        case (0.0, by_length) if by_length > 0 and by_length.is_integer():
            return Dim(first - int(by_length) * lengths[0], int(by_length), LENGTH)
        case (by_batch, by_length):
            factor, rest = divmod(int(by_batch), lengths[0])
            is_product = (
                factor > 0
                and rest == 0
                and (by_batch, by_length)
                == (
                    factor * lengths[0],
                    factor * batches[0],
                )
            )
            return Dim(first - factor * batches[0] * lengths[0], factor, BOTH) if is_product else Dim(first)
