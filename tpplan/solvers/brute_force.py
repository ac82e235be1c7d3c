"""Brute force, the tests' oracle: enumerates every choice on which the edges agree and prices it from scratch.

Shares no code with the ILP: no bounds, relaxation or scaling. Edges are checked as soon as both ends are chosen, limits
only for complete choices.
"""

import itertools
import math
import time
from collections.abc import Iterator

from tpplan.core.errors import SolverError, UsageError
from tpplan.solvers.problem import LIMIT_TOLERANCE, Choice, Edge, Problem, Solution, Split, Status

#: most choices that are priced; 10 s at about 10 us each
MAX_CHOICES = 1_000_000
#: largest product of the nodes' numbers of strategies; on a graph with edges most of these choices never agree
MAX_PRODUCT = 1e12


def solve(
    problem: Problem, *, time_limit_s: float | None = None, cutoff: float = math.inf, is_relaxed: bool = False
) -> Solution:
    """The cheapest feasible choice, the first in lexicographic order among equals. Ignores the cutoff.

    Raises UsageError for more than MAX_CHOICES agreeing choices, SolverError when the time is up.
    """
    options = _agreeing_options(problem)
    num_choices = math.prod(len(strategies) for strategies in options.values())
    if num_choices > MAX_PRODUCT:
        raise UsageError(
            f"brute-force: {num_choices:.3g} choices, at most {MAX_CHOICES:,} are enumerated; use solver 'highs'"
        )
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    best: dict[str, int] | None = None
    best_price = math.inf
    for number, choice in enumerate(_with_numbers(problem, _choices(problem, options))):
        if number >= MAX_CHOICES:
            raise UsageError(
                f"brute-force: at most {MAX_CHOICES:,} choices are enumerated, more agree; use solver 'highs'"
            )
        if time.monotonic() > deadline:
            raise SolverError(f"brute-force: not done after {time_limit_s} s, and without a bound; use solver 'highs'")
        price = problem.price(choice)
        if (best is None or price < best_price) and problem.is_feasible(choice, tolerance=LIMIT_TOLERANCE):
            best, best_price = dict(choice), price
    if best is None:
        return Solution(status=Status.INFEASIBLE, solver="brute-force")
    return Solution(status=Status.OPTIMAL, solver="brute-force", choice=best, objective=best_price, bound=best_price)


def _with_numbers(problem: Problem, choices: Iterator[Choice]) -> Iterator[Choice]:
    """Yields each choice with every way to divide the splits among their parts."""
    ways = [list(_divisions(split)) for split in problem.splits]
    for choice in choices:
        for numbers in itertools.product(*ways):
            yield {**choice, **{part: number for own in numbers for part, number in own.items()}}


def _divisions(split: Split) -> Iterator[Choice]:
    """Yields every way to divide a split's total among its parts."""
    for numbers in itertools.product(range(split.total + 1), repeat=len(split.parts)):
        if sum(numbers) == split.total:
            yield dict(zip(split.parts, numbers, strict=True))


def _agreeing_options(problem: Problem) -> dict[str, list[int]]:
    """Node name -> its strategies that agree with some strategy at the other end of every edge."""
    options = {node.name: list(range(len(node.strategies))) for node in problem.nodes}
    shrinking = True
    while shrinking:
        shrinking = False
        for edge in problem.edges:
            offered = {edge.source_layouts[s] for s in options[edge.source]}
            accepted = {edge.target_layouts[s] for s in options[edge.target]}
            for name, layouts in ((edge.source, edge.source_layouts), (edge.target, edge.target_layouts)):
                kept = [s for s in options[name] if layouts[s] in offered & accepted]
                shrinking = shrinking or len(kept) < len(options[name])
                options[name] = kept
    return options


def _choices(problem: Problem, options: dict[str, list[int]]) -> Iterator[Choice]:
    """Yields every choice on which all edges agree, depth first; the yielded dict is reused."""
    names = list(options)
    position = {name: i for i, name in enumerate(names)}
    closing: list[list[Edge]] = [[] for _ in names]
    for edge in problem.edges:
        closing[max(position[edge.source], position[edge.target])].append(edge)
    choice: dict[str, int] = {}

    def descend(depth: int) -> Iterator[Choice]:
        if depth == len(names):
            yield choice
            return
        for strategy in options[names[depth]]:
            choice[names[depth]] = strategy
            if all(e.source_layouts[choice[e.source]] == e.target_layouts[choice[e.target]] for e in closing[depth]):
                yield from descend(depth + 1)

    return descend(0)
