"""The sections on what a step is predicted to take: its collectives, its seconds and its bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.core.mesh import Axis
from tpplan.core.strict_json import Amount, Count, Size
from tpplan.plan.sections.modes import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """`count` equal collectives per optimizer step on one rank; num_bytes is the size of the whole value of each."""

    where: str
    kind: str
    axis: Axis
    during: Pass
    dtype: str
    num_bytes: Size
    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted seconds per optimizer step and bytes per GPU, by part. step_time_error_s is one standard deviation.

    memory_bytes are the parts of the peak, which occurs in the pass `peak_during` while an op of the module
    `peak_module` runs ("<root>" is the model itself). slack_bytes are added for the framework and its allocator, from
    the profile. The limit applies to peak and slack together. model_flop are the FLOP of a step's matmuls and attention
    without recomputation, on all ranks together; peak_flop_per_s those of a GPU in the profile's fastest matmul.
    """

    step_time_s: Amount
    step_time_error_s: Amount
    is_extrapolated: bool
    time_s: Mapping[str, Amount]
    peak_memory_bytes: Amount
    slack_bytes: Amount
    memory_limit_bytes: Amount
    memory_bytes: Mapping[str, Amount]
    peak_during: Pass
    peak_module: str
    model_flop: Amount | None = None
    peak_flop_per_s: Amount | None = None

    @property
    def held_bytes(self) -> float:
        """Bytes of the peak and the slack together, to which the limit applies."""
        return self.peak_memory_bytes + self.slack_bytes
