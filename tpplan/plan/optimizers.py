"""Optimizers by name: torch's class, states per parameter, and temporaries of the step.

States have the parameter's dtype, as torch creates them, or a number of bytes per element (`bytes:6`). Temporaries have
the parameter's dtype and exist during the step: for all parameters together where the step handles them at once
(foreach), for the largest parameter where it handles them one by one. [torch 2.13, optim/adam.py, optim/sgd.py]
"""

import re
from dataclasses import dataclass

from tpplan.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Counts per element of a parameter: `states`, or `state_bytes` in their place; temporaries of the step, `of_all`
    parameters together or `of_largest` parameter alone.

    `torch_class` is the class in torch.optim, made with `options`; "" where torch has none. `is_tracked` is false where
    torch's memory tracker measures the step wrong: of a fused step it counts temporaries that do not exist.
    """

    torch_class: str = ""
    options: tuple[tuple[str, bool | float], ...] = ()
    is_tracked: bool = True
    states: int = 0
    state_bytes: float = 0.0
    of_all: int = 0
    of_largest: int = 0

    def bytes_per_element(self, width: int) -> float:
        """Bytes of states per element, for a parameter of `width` bytes an element."""
        return self.states * width + self.state_bytes


#: AdamW's temporaries: foreach holds the square roots of all second moments; the loop holds one parameter's and a
#: quotient. torch takes the loop for DTensors unless told otherwise.
OPTIMIZERS = {
    "adamw": Optimizer(torch_class="AdamW", states=2, of_largest=2),
    "adamw-foreach": Optimizer(torch_class="AdamW", options=(("foreach", True),), states=2, of_all=1),
    "adamw-fused": Optimizer(torch_class="AdamW", options=(("fused", True),), is_tracked=False, states=2),
    "sgd-momentum": Optimizer(torch_class="SGD", options=(("momentum", 0.9),), states=1),
    "sgd": Optimizer(torch_class="SGD"),
}
#: temporaries assumed for `bytes:N`: torch's Adafactor holds the largest parameter's update and its square
BYTES_OF_LARGEST = 2
_BYTES = re.compile(r"bytes:(\d+(?:\.\d+)?)")


def optimizer_named(name: str) -> Optimizer:
    """The optimizer of a name. Raises UsageError that lists the known names."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if found := _BYTES.fullmatch(name):
        return Optimizer(is_tracked=False, state_bytes=float(found[1]), of_largest=BYTES_OF_LARGEST)
    raise UsageError(
        f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}, and bytes:N for one that keeps N bytes of states "
        "per parameter (bytes:6, bytes:0.02)"
    )
