"""The kernels and memory of one run of an op."""

from dataclasses import dataclass
from math import prod

from tpplan.core.graph import Value
from tpplan.core.layout import Layout, local_shape
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.runs.kernels import Kernel


def local_bytes(value: Value, layout: Layout, tp: int) -> int:
    """Returns the bytes of a value in a layout on one of tp ranks."""
    return prod(local_shape(value.shape, layout, tp)) * DTYPE_BYTES[value.dtype]


@dataclass(frozen=True, slots=True)
class Gradient:
    """An operand's gradient: its bytes, and whether it shares the memory of a result's gradient."""

    num_bytes: int
    is_view: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The kernels and memory of one run of an op."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    #: indices of the operands, and of the results, whose storage autograd keeps
    saves: frozenset[int]
    saves_results: frozenset[int]
    #: bytes that autograd keeps of other tensors (statistics, masks, log-probabilities)
    saved_bytes: int
    #: bytes that are held each time that an op has made a tensor: in forward, where the last number is what forward
    #: leaves behind; in backward, where the first number is the same
    held: tuple[tuple[int, ...], tuple[int, ...]]
    #: by operand; None where it has no gradient
    gradients: tuple[Gradient | None, ...] = ()
    #: messages about kernels that were not seen, and how they are priced
    guesses: tuple[str, ...] = ()

    @property
    def forward_bytes(self) -> int:
        """The most that forward held besides the bytes that it leaves behind."""
        return max(self.held[0]) - self.held[0][-1]

    @property
    def backward_bytes(self) -> int:
        """The most that backward held, with the gradients of results and operands."""
        return max(self.held[1]) - self.held[1][0]
