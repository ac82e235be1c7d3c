"""Parts of a whole as rows for horizontal bars, largest first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A part: its name, its amount as text with a unit, its share of the whole in percent, and the sum of the shares of
    the bars before it (`starts_at`), so that bars can stand side by side."""

    name: str
    amount: str
    percent: float
    starts_at: float


def bars(parts: Mapping[str, float], whole: float, text_of: Callable[[float], str]) -> tuple[Bar, ...]:
    """A bar for each nonzero part, the largest first and equal ones by name; `parts` and `whole` are of one unit.

    Shares are 0 where the whole is 0.
    """
    found: list[Bar] = []
    ends = 0.0
    for name, amount in sorted(parts.items(), key=lambda item: (-item[1], item[0])):
        if not amount:
            continue
        percent = 100.0 * amount / whole if whole else 0.0
        found.append(Bar(name=name, amount=text_of(amount), percent=percent, starts_at=ends))
        ends += percent
    return tuple(found)
