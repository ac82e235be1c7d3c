"""The choices that a plan names by a word: precision, what is recomputed, what is compiled, when a collective runs."""

from enum import StrEnum

from tpplan.core.mesh import Mesh


class Precision(StrEnum):
    """fp32: as the model was built. bf16-mixed: float32 parameters and optimizer states, bfloat16 compute. bf16:
    bfloat16 throughout, including the user's floating inputs. bf16-autocast: as the model was built, forward and loss
    under torch.autocast(dtype=torch.bfloat16), which the training code opens."""

    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16"
    BF16_AUTOCAST = "bf16-autocast"

    @property
    def makes_half(self) -> bool:
        """True where the model computes with bfloat16 parameters."""
        return self in (Precision.BF16, Precision.BF16_MIXED)


def uses_fsdp(mesh: Mesh, precision: Precision) -> bool:
    """True where FSDP2 shards, replicates or casts parameters."""
    return mesh.data_parallel > 1 or precision is Precision.BF16_MIXED


class WorkKind(StrEnum):
    """The work that makes a tensor in forward: a matrix product or convolution, attention, a sum or an exchange over
    ranks (all-reduce, reduce-scatter, all-to-all), or anything else."""

    PRODUCT = "product"
    ATTENTION = "attention"
    SUM = "sum over ranks"
    REST = "rest"


class Recompute(StrEnum):
    """The part of a module's forward that runs again in backward; a row of _MODES says all that defines a mode. none:
    nothing, as an exception to a pattern."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"

    @property
    def keeps(self) -> frozenset[WorkKind]:
        """The kinds of work whose results are kept from forward to backward, beside the module's inputs; the rest runs
        again. A product that only sums over ranks read is not kept beside their results."""
        return _MODES[self][0]

    @property
    def says(self) -> str:
        """The words for it in a report."""
        return _MODES[self][1]

    @property
    def is_selective(self) -> bool:
        """True where some results are kept and others are made again."""
        return bool(self.keeps) and self is not Recompute.NONE

    @property
    def lighter(self) -> "tuple[Recompute, ...]":
        """The modes that run less again: those before this one by the number of kinds kept, most first."""
        by_work = sorted(Recompute, key=lambda mode: -len(mode.keeps))
        return tuple(by_work[: by_work.index(self)])


_MODES = {
    Recompute.NONE: (frozenset(WorkKind), "nothing runs again"),
    Recompute.FULL: (frozenset[WorkKind](), "forward runs again in backward"),
    Recompute.SELECTIVE: (
        frozenset((WorkKind.PRODUCT, WorkKind.ATTENTION, WorkKind.SUM)),
        "all but products, attention and sums over ranks run again in backward",
    ),
}


class Compile(StrEnum):
    """The use of torch.compile that a prediction assumes. none: the model runs eagerly. blocks: each repeated layer is
    compiled separately, and so are the modules around them."""

    NONE = "none"
    BLOCKS = "blocks"


class Pass(StrEnum):
    """When a collective runs: in forward or backward of each micro-batch, or once per optimizer step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
