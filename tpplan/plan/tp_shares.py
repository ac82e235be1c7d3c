"""The shares of a step's FLOPs and of parameters that tensor parallelism divides, and the modules that run whole.

Counted are the FLOPs of products, convolutions and attention, forward and backward; what recomputation runs again is
not, as it is divided like the first run. An op is divided where each of tp ranks runs 1/tp of its FLOPs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpplan.core.strict_json import Amount, Count

#: the beginning of a reason that holds for the plan's machine alone
BY_PRICES = "faster so by the prices"
#: of a step's FLOPs or seconds: a module of which less runs whole is not listed
LISTED_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShares:
    """The ops in the own code of all modules of one pattern: their share of the step's FLOPs, the part of that share
    that is divided, and the seconds of a step in ops that every rank runs whole. `reason` says why the dearest of these
    does; it is given where they cost LISTED_SHARE of the step."""

    flops_share: Amount
    divided_flops_share: Amount
    whole_seconds: Amount
    reason: str | None = None

    def is_listed(self, step_time_s: float) -> bool:
        """True where what runs whole costs LISTED_SHARE of a step's FLOPs or seconds."""
        whole = self.flops_share - self.divided_flops_share
        return max(whole, self.whole_seconds / step_time_s if step_time_s else 0.0) >= LISTED_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class TpShares:
    """The share of a step's FLOPs that tensor parallelism divides, that of the elements of all parameters, and modules
    by pattern ("<root>" is the model itself). `heads` are numbers of attention heads along the dim in which a parameter
    is split, of each of the dim's parts: (12, 12, 12) where it has queries, keys and values one after another."""

    flops_share: Amount
    parameters_share: Amount
    modules: Mapping[str, ModuleShares]
    heads: Mapping[str, tuple[Count, ...]] | None = None

    def listed(self, step_time_s: float) -> Iterator[tuple[str, ModuleShares]]:
        """Yields modules whose whole ops cost enough to be listed, the dearest first."""
        found = [(name, own) for name, own in self.modules.items() if own.is_listed(step_time_s)]
        yield from sorted(
            found, key=lambda row: (row[1].divided_flops_share - row[1].flops_share, -row[1].whole_seconds, row[0])
        )


def summary(shares: TpShares) -> str:
    """One line: `tp divides 97 % of FLOPs, 99 % of parameters`."""
    return f"tp divides {percent(shares.flops_share)} of FLOPs, {percent(shares.parameters_share)} of parameters"


def rows(shares: TpShares, step_time_s: float) -> Iterator[tuple[str, str]]:
    """Yields (module, how much of the step every rank runs whole there, and why) for each module that is listed."""
    for name, own in shares.listed(step_time_s):
        whole = own.flops_share - own.divided_flops_share
        flops = f"{percent(whole)} of FLOPs, " if whole else ""
        time = f"{percent(own.whole_seconds / step_time_s)} of the step's time" if step_time_s else "no time"
        yield name, f"{flops}{time}: {own.reason or 'laid out so by the plan'}"


def percent(share: float) -> str:
    """A share in percent, rounded so that 100 % and 0 % stand for all and nothing alone."""
    text = f"{share:.0%}" if share in (0, 1) or 0.1 <= share < 0.995 else f"{share:.1%}"
    if text in ("100.0%", "0.0%") and share not in (0, 1):
        text = ">99.9%" if share > 0.5 else "<0.1%"
    return text.replace("%", " %")
