"""Undominated expressions against every assignment."""

import random
from itertools import product

import pytest

from tpplan.solvers.problem import Expression
from tpplan.solvers.undominated import undominated

WIDTHS = {"a": 1, "b": 2, "c": 3, "d": 2}


def _some(rng: random.Random) -> Expression:
    names = rng.sample(sorted(WIDTHS), rng.randint(0, len(WIDTHS)))
    if rng.random() < 0.1:
        names += names[:1]  # a node may have several vectors, which add up
    vectors = ((name, tuple(float(rng.randint(-3, 5)) for _ in range(WIDTHS[name]))) for name in names)
    return Expression(constant=float(rng.randint(-4, 6)), terms=tuple(vectors))


@pytest.mark.parametrize("seed", range(20))
def test_a_maximum_is_the_same_without_what_is_dominated(seed: int) -> None:
    rng = random.Random(seed)
    every = [_some(rng) for _ in range(rng.randint(1, 60))]
    kept = undominated(every)
    assert set(kept) <= set(every)
    for choice in product(*map(range, WIDTHS.values())):
        chosen = dict(zip(WIDTHS, choice, strict=True))
        assert max(e.value(chosen) for e in kept) == max(e.value(chosen) for e in every)


def test_what_the_largest_exceeds_everywhere_is_dropped() -> None:
    large = Expression(constant=1.0, terms=(("c", (5.0, 2.0, 3.0)),))
    below = Expression(constant=0.5, terms=(("c", (5.0, 2.0, 3.0)),))
    other_node = Expression(constant=2.0, terms=(("b", (0.0, 1.0)),))  # at most 3 = 1 + the least of large's vector
    above_once = Expression(terms=(("c", (0.0, 3.5, 0.0)),))
    assert undominated([above_once, other_node, below, large, large]) == (large, above_once)
    assert undominated([]) == ()
