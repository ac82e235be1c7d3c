"""What surrounds a model: how it is trained, and on what."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.layouts.assignment import master_bytes
from tpplan.layouts.layer_treatments import Treatment
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Precision, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the model is trained, on which machine; what is None is decided."""

    profile: HardwareProfile
    gpus_per_node: int
    precision: Precision
    optimizer: str
    memory_limit_bytes: float
    accumulation_steps: int
    units: tuple[str, ...]
    #: of the limit what is never the model's
    slack_bytes: float = 0.0
    #: what of every unit but the root runs again in backward; None: decided for each
    recompute: Recompute | None = Recompute.NONE
    #: ZeRO-3; False keeps units gathered until their backward (ZeRO-2); None: decided for each
    reshard_after_forward: bool | None = True
    #: what has been decided, by unit
    treatments: Mapping[str, Treatment] | None = None
    #: the first layer of each one's kind, where layers were alike before something was decided
    kin: Mapping[str, str] | None = None

    def master_bytes(self, dtype: str) -> int:
        """Bytes per element of a parameter at rest and of its gradient; the trace has the compute dtype."""
        return master_bytes(self.precision, dtype)
