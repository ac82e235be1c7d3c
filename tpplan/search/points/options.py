"""Arguments of solve: the cluster, the batch, and the options."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tpplan.core.errors import UsageError
from tpplan.core.graph import ModelGraph
from tpplan.core.mesh import MAX_COUNT, MAX_GPUS, Mesh, divisors
from tpplan.layouts.rules import Strategy
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.plan.plan import Precision, Recompute, StagePlan
from tpplan.trace.trace import Loss

#: called with a stage ("trace", "costs", "solve", "prove"), how much of it is done, and how much there is
Progress = Callable[[str, int, int], None]
#: whether a decision may choose a strategy
Allows = Callable[[str, Strategy], bool]


#: stands for the number of GPUs on a node of the profile's machine
OF_PROFILE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The GPUs to plan for, the machine's profile (name, path or object), and how many GPUs share a node: by default as
    many as on the profile's machine, at most `gpus`. Raises UsageError for numbers out of range, and ProfileError where
    the profile is asked for its number and cannot be read."""

    gpus: int
    gpus_per_node: int = field(default=OF_PROFILE)
    profile: str | os.PathLike[str] | HardwareProfile

    def __post_init__(self) -> None:
        if self.gpus_per_node == OF_PROFILE:
            object.__setattr__(self, "gpus_per_node", min(self.gpus, self.load_profile().gpus_per_node))
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise UsageError(
                f"cluster: expected at least 1 GPU and 1 per node, got {self.gpus} and {self.gpus_per_node}"
            )
        if max(self.gpus, self.gpus_per_node) > MAX_GPUS:
            raise UsageError(
                f"cluster: expected at most {MAX_GPUS} GPUs, got {self.gpus:.3g}, {self.gpus_per_node:.3g} of them per "
                "node"
            )

    def load_profile(self) -> HardwareProfile:
        """The machine's profile. Raises ProfileError where it is unknown or malformed."""
        return self.profile if isinstance(self.profile, HardwareProfile) else load_profile(self.profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of solve besides the model, the cluster and the batch, under the same names."""

    loss: Loss | None = None
    unused_outputs: tuple[str, ...] = ()
    tp: int | None = None
    fsdp: int | None = None
    ep: int | None = None
    expert_imbalance: float = 1.0
    precision: Precision | str | None = None
    optimizer: str = "adamw"
    recompute: Recompute | str | None = None
    reshard_after_forward: bool | None = None
    fsdp_over_tp: bool | None = None
    whole_gradients: bool = False
    gathered_once: bool = False
    all_gpus: bool = False
    compile: bool = False
    memory_limit_bytes: float | None = None
    solver: str | None = None
    time_limit_s: float | None = None
    allows: Callable[[ModelGraph], Allows] | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    stage: StagePlan | None = None
    #: bytes that a rank holds of other stages, times the FSDP degree, besides the stage's own beside_bytes
    sharded_beside_bytes: float = 0.0
    #: stages of a rank that keep as many layers gathered as this one, itself among them
    like_stages: int = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of a step, samples at once on a rank (None: to be decided), and tokens of a sample. Raises
    UsageError for a number below 1."""

    global_batch: int
    micro_batch: int | None
    seq_len: int

    def __post_init__(self) -> None:
        if min(self.global_batch, self.micro_batch or 1, self.seq_len) < 1 or self.micro_batch == 0:
            raise UsageError(
                f"expected a global batch, micro-batch and sequence length of at least 1, got "
                f"{self.global_batch}, {self.micro_batch} and {self.seq_len}"
            )
        if max(self.global_batch, self.seq_len) > MAX_COUNT:
            raise UsageError(
                f"expected a global batch and a sequence length of at most {MAX_COUNT}, got {self.global_batch:.3g} "
                f"and {self.seq_len:.3g}"
            )

    def micro_batches(self, mesh: Mesh) -> tuple[int, ...]:
        """The micro-batches possible on a mesh, ascending; none where its ranks do not divide the global batch."""
        share, rest = divmod(self.global_batch, mesh.data_parallel)
        if rest or not share:
            return ()
        return tuple(m for m in divisors(share) if self.micro_batch in (None, m))

    def accumulation_steps(self, mesh: Mesh, micro_batch: int) -> int:
        """Micro-batches per step on each rank."""
        return self.global_batch // (micro_batch * mesh.data_parallel)


def parse_precision(name: Precision | str) -> Precision:
    """A precision by name. Raises UsageError for an unknown one."""
    try:
        return Precision(name)
    except ValueError:
        raise UsageError(f"unknown precision {name!r}; known: {', '.join(Precision)}") from None


def parse_recompute(name: Recompute | str | None) -> Recompute | None:
    """A mode of recomputation by name; None, to be decided, stays None. Raises UsageError for an unknown one."""
    if name is None:
        return None
    try:
        return Recompute(name)
    except ValueError:
        raise UsageError(f"unknown recomputation {name!r}; known: {', '.join(Recompute)}") from None
