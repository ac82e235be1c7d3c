"""Cuts: strategies that counterexamples have forbidden, alone or together, and guesses that end a search sooner."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from tpplan.layouts.decision_space import Space
from tpplan.layouts.rules import Strategy
from tpplan.solvers.problem import Conflict

logger = logging.getLogger(__name__)

#: some strategies of each of some decisions
Choices = Mapping[str, frozenset[Strategy]]
#: strategies that are forbidden, by tp and decision
Forbidden = dict[tuple[int, str], set[Strategy]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuted:
    """A counterexample on tp ranks in words, and the sets of choices that it forbids to be made together. `layouts` are
    the first of these in words."""

    tp: int
    message: str
    layouts: str
    forbidden: tuple[Choices, ...]

    def __str__(self) -> str:
        return f"on {self.tp} ranks {self.layouts}: {self.message}"


@dataclass(slots=True)
class Cuts:
    """Counterexamples of one search, and what they forbid.

    `wrong` are strategies with which no plan can be proven, `conflicts` by tp choices that cannot be proven together.
    `guesses` are forbidden to end sooner, though they may be right: the optimum without them is the bound. `refuted`
    hold each counterexample, and `messages` these in words, with what was made to run whole. `counterexamples` are
    counted by tp and the class of the module whose code differed, None where it is no module's.
    """

    wrong: Forbidden = field(default_factory=dict)
    guesses: Forbidden = field(default_factory=dict)
    conflicts: dict[int, list[Choices]] = field(default_factory=dict)
    refuted: list[Refuted] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    counterexamples: Counter[tuple[int, type[nn.Module] | None]] = field(default_factory=Counter)

    def note(self, refuted: Refuted) -> None:
        """Keeps a counterexample, in words once."""
        self.refuted.append(refuted)
        if str(refuted) not in self.messages:
            self.messages.append(str(refuted))

    def forbids(self, tp: int, name: str, strategy: Strategy) -> bool:
        """True where a decision may not choose a strategy on tp ranks."""
        return strategy in self.wrong.get((tp, name), ()) or strategy in self.guesses.get((tp, name), ())

    def of_degree(self, tp: int) -> frozenset[tuple[str, Strategy]]:
        """All pairs of a decision and a strategy that are forbidden on tp ranks."""
        tables = (self.wrong, self.guesses)
        return frozenset((n, s) for table in tables for (own, n), cut in table.items() if own == tp for s in cut)

    @property
    def degrees(self) -> set[int]:
        """The tp degrees on which anything is forbidden."""
        return {tp for tp, _ in (*self.wrong, *self.guesses)}

    def cut(self, space: Space, name: str, strategies: Iterable[Strategy], *, is_guess: bool = False) -> None:
        """Forbids strategies of a decision and of all decisions of its class."""
        table = self.guesses if is_guess else self.wrong
        for member in space.members[space.classes[name]]:
            table.setdefault((space.tp, member), set()).update(strategies)

    def forget(self) -> None:
        """Forbids nothing from now on, for the graph has changed; keeps the messages."""
        for table in (self.wrong, self.guesses, self.conflicts, self.counterexamples, self.refuted):
            table.clear()

    def without_guesses(self) -> "Cuts":
        """The cuts without guesses: they exclude no plan that can be proven."""
        return replace(self, guesses={})

    def conflicts_in(self, space: Space) -> tuple[Conflict, ...]:
        """The conflicts by deciding decisions, without those that other cuts already prevent."""
        found: dict[Conflict, None] = {}
        for choices in self.conflicts.get(space.tp, ()):
            if not choices.keys() <= space.classes.keys():
                continue  # of another micro-batch's graph, which has other nodes
            own: dict[str, frozenset[int]] = {}
            for name, group in choices.items():
                representative = space.classes[name]
                options = space.strategies[representative]
                indices = frozenset(i for i, strategy in enumerate(options) if strategy in group)
                own[representative] = own.get(representative, indices) & indices
            kept = tuple((name, indices) for name, indices in own.items() if len(indices) < len(space.strategies[name]))
            if all(indices for _, indices in kept):
                found[Conflict(choices=kept)] = None
        return tuple(found)
