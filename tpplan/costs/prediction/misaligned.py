"""What a step loses in matmuls on matrices whose rows do not begin at multiples of 16 bytes, by module."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tpplan.core.name_patterns import ROOT
from tpplan.core.units import DTYPE_BYTES, format_seconds
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.runs.kernels import Matmul, further_time
from tpplan.machine.profile import HardwareProfile
from tpplan.machine.tables import ALIGNED_BYTES
from tpplan.plan.compress_names import pattern_of

#: share of the step from which a loss is told
LEAST_SHARE = 0.01


@dataclass(slots=True)
class _Loss:
    """Seconds that a module's matmuls take longer in a step; `sizes` are elements between rows, and `multiples` those
    that they should be multiples of."""

    seconds: float = 0.0
    sizes: set[int] = field(default_factory=set)
    multiples: set[int] = field(default_factory=set)


def misaligned_matmuls(lifetimes: Lifetimes, profile: HardwareProfile, step_s: float) -> Iterator[str]:
    """Yields a note for each module, by its pattern, whose misaligned matmuls take LEAST_SHARE of a step longer than
    aligned ones would. What recomputation runs again is not counted."""
    graph, losses = lifetimes.graph, dict[str, _Loss]()
    for position, execution in lifetimes.executions.items():
        for kernel in (*execution.forward, *execution.backward):
            if isinstance(kernel, Matmul) and kernel.alignment < ALIGNED_BYTES:
                multiple = ALIGNED_BYTES // DTYPE_BYTES[kernel.dtype]
                loss = losses.setdefault(pattern_of(graph, graph.nodes[position].module) or ROOT, _Loss())
                loss.seconds += further_time(profile, kernel) * lifetimes.assignment.accumulation_steps
                loss.sizes |= {size for size in kernel.leading if size % multiple}
                loss.multiples.add(multiple)
    for module, loss in losses.items():
        if loss.seconds >= LEAST_SHARE * step_s:
            sizes = ", ".join(map(str, sorted(loss.sizes)))
            yield (
                f"{module}: on each rank its matmuls have a size of {sizes}, no multiple of {max(loss.multiples)}, and"
                f" take {format_seconds(loss.seconds)} of the step longer than aligned ones; pad the size"
            )
