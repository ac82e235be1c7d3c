"""What a probe is: one thing that tpplan wants of torch's internals, and a check of whether it is so."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`works` returns False, or raises, where the torch at hand does not do what tpplan counts on. It takes
    milliseconds on the CPU, needs no process group, and leaves torch as it was.

    `uses` names torch's own functions; `needed_for` says what of tpplan does not work without them.
    """

    name: str
    uses: str
    needed_for: str
    works: Callable[[], bool]
