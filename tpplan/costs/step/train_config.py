"""How a model is trained, and on which machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES
from tpplan.layouts.assignment import master_bytes
from tpplan.layouts.layer_treatments import Treatment
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Precision, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the model is trained, on which machine. `units` are its layers."""

    profile: HardwareProfile
    gpus_per_node: int
    precision: Precision
    optimizer: str
    memory_limit_bytes: float
    accumulation_steps: int
    units: tuple[str, ...]
    #: micro-batches whose activations a rank keeps at once; several in a stage of a pipeline
    in_flight: int = 1
    #: bytes that a rank holds of other stages meanwhile
    beside_bytes: float = 0.0
    #: stages of the rank that keep as many layers gathered as this one between forward and backward, itself among them
    like_stages: int = 1
    #: bytes of the limit that a model never gets
    slack_bytes: float = 0.0
    #: recomputation of every unit but the root; None: the ILP decides for each
    recompute: Recompute | None = Recompute.NONE
    #: ZeRO-3; False keeps units gathered until their backward (ZeRO-2); None: the ILP decides for each
    reshard_after_forward: bool | None = True
    #: True: FSDP shards each layer that can be over shard and tp together, False: none; None: the ILP decides for each
    fsdp_over_tp: bool | None = None
    #: FSDP reduces gradients once a step, and a rank keeps them whole until then
    whole_gradients: bool = False
    #: FSDP gathers units that it does not reshard once a step, and a rank keeps them until then
    gathered_once: bool = False
    #: the treatment of each unit, where it is decided
    treatments: Mapping[str, Treatment] | None = None
    #: the units over shard and tp together, where it is decided
    units_over_tp: frozenset[str] | None = None
    #: name of the first layer of each layer's family, where layers were alike before their treatments were decided
    kin: Mapping[str, str] | None = None

    def master_bytes(self, dtype: str) -> int:
        """Bytes per element of a parameter at rest and of its gradient; the trace has the compute dtype."""
        return master_bytes(self.precision, dtype)

    @property
    def seconds_per_moved_byte(self) -> float:
        """Seconds per byte of kernels that read and write a full bucket of gradients."""
        return self.profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES

    @property
    def reductions(self) -> int:
        """How often a step FSDP reduces the gradients of a unit over its shards."""
        return 1 if self.whole_gradients else self.accumulation_steps

    @property
    def gathers(self) -> int:
        """How often a step FSDP gathers a unit that it does not reshard."""
        return 1 if self.gathered_once else self.accumulation_steps
