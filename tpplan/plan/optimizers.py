"""What optimizers keep for each parameter, and what their step makes besides.

States are in the parameter's own dtype, as torch makes them, or bytes by number (`bytes:6`: 6 per element). Temporaries
are those of a step, in the parameter's dtype: of all parameters together, where a step goes through them at once
(foreach), and of the largest one, where it goes through them one by one. [torch 2.13, optim/adam.py, optim/sgd.py]
"""

import re
from dataclasses import dataclass

from tpplan.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Per element of a parameter: `states` that last, or `state_bytes` instead; `of_all` and `of_largest` are elements
    made during the step."""

    states: int = 0
    state_bytes: float = 0.0
    of_all: int = 0
    of_largest: int = 0

    def bytes_per_element(self, width: int) -> float:
        """Of states, for a parameter of `width` bytes an element."""
        return self.states * width + self.state_bytes


#: AdamW's denominator is a square root of all second moments (foreach), or one and what it is divided into (for each).
#: What torch takes unless told depends on the parameters: DTensors go one by one.
OPTIMIZERS = {
    "adamw": Optimizer(states=2, of_largest=2),
    "adamw-foreach": Optimizer(states=2, of_all=1),
    "adamw-fused": Optimizer(states=2),
    "sgd-momentum": Optimizer(states=1),
    "sgd": Optimizer(),
}
#: of an optimizer known by its bytes alone, what torch's Adafactor makes of the largest parameter: its update, and that
#: squared
BYTES_OF_LARGEST = 2
_BYTES = re.compile(r"bytes:(\d+(?:\.\d+)?)")


def optimizer_named(name: str) -> Optimizer:
    """The optimizer of a name. Raises UsageError, with the names there are."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if found := _BYTES.fullmatch(name):
        return Optimizer(state_bytes=float(found[1]), of_largest=BYTES_OF_LARGEST)
    raise UsageError(
        f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}, and bytes:N for one that keeps N bytes of states "
        "per parameter (bytes:6, bytes:0.02)"
    )
