"""The ILP against enumeration, the reported status and bound against the truth, the registry."""

import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest

from tpplan import solvers
from tpplan.core.errors import SolverError, UsageError
from tpplan.solvers import branching, groups, highs
from tpplan.solvers.groups import Skeleton, skeleton_of
from tpplan.solvers.milp import Outcome
from tpplan.solvers.presolve import reduce
from tpplan.solvers.problem import (
    Choice,
    Conflict,
    Edge,
    Expression,
    Node,
    Problem,
    Resource,
    Shared,
    Solution,
    Split,
    Status,
    Term,
    total,
)

ILP_SOLVERS = ("highs", "cbc")

#: problems compared with enumeration; HiGHS is in process, CBC a process of its own each time
NUM_RANDOM_PROBLEMS = 400

SECONDS_SCALES = (1e-9, 1e-6, 1.0, 1e3)
BYTES_SCALES = (1.0, 1e9, 1e12)


def node(name: str, num_strategies: int) -> Node:
    return Node(name=name, strategies=tuple(f"{name}{s}" for s in range(num_strategies)))


def linear(name: str, *vectors: tuple[str, tuple[float, ...]], constant: float = 0.0, weight: float = 1.0) -> Term:
    return Term(name=name, expressions=(Expression(constant=constant, terms=vectors),), weight=weight)


def edge(source: str, target: str, source_layouts: str, target_layouts: str) -> Edge:
    """An edge whose layouts are single letters, e.g. "RS"."""
    return Edge(
        source=source, target=target, source_layouts=tuple(source_layouts), target_layouts=tuple(target_layouts)
    )


def random_vector(rng: random.Random, size: int, scale: float) -> tuple[float, ...]:
    """Zeros, ties among small integers, or numbers of any size below `scale`."""
    match rng.randrange(4):
        case 0:
            return tuple(scale * rng.randrange(3) for _ in range(size))
        case 1:
            return tuple(scale * rng.random() for _ in range(size))
        case 2:
            return tuple(scale * 10 ** rng.uniform(-6, 0) for _ in range(size))
        case _:
            return tuple(rng.choice((0.0, scale)) * rng.random() for _ in range(size))


def random_expression(rng: random.Random, nodes: tuple[Node, ...], scale: float) -> Expression:
    """Up to four vectors, now and then two over the same node."""
    chosen = [rng.choice(nodes) for _ in range(rng.choice((0, 1, 2, 3, 4)))]
    constant = rng.choice((0.0, scale * rng.random()))
    return Expression(
        constant=constant,
        terms=tuple((n.name, random_vector(rng, len(n.strategies), scale)) for n in chosen),
    )


def random_term(rng: random.Random, nodes: tuple[Node, ...], scale: float, parts: tuple[str, ...] = ()) -> Term:
    """A linear term, a max of up to four expressions, or exposed communication max(0, a - b); with parts now and then
    once for each of one, or with expressions that count by whether there are any."""
    term = random_plain_term(rng, nodes, scale)
    if parts and rng.random() < 0.7:
        term = replace(term, each=rng.choice(parts))
    if parts and rng.random() < 0.4:
        guarded = replace(
            random_expression(rng, nodes, scale),
            where=rng.choice((None, *parts)),
            unless=tuple(part for part in parts if rng.random() < 0.3),
        )
        term = replace(term, expressions=(*term.expressions, guarded))
    return term


def random_plain_term(rng: random.Random, nodes: tuple[Node, ...], scale: float) -> Term:
    """A linear term, a max of up to four expressions, or exposed communication max(0, a - b)."""
    weight = rng.choice((0.0, 1.0, 1.0, 32.0, rng.random()))
    if rng.random() < 0.3:
        a, b = rng.choice(nodes), rng.choice(nodes)
        gather = random_vector(rng, len(a.strategies), scale)
        compute = tuple(-t for t in random_vector(rng, len(b.strategies), scale))
        exposed = Expression(terms=((a.name, gather), (b.name, compute)))
        return Term(name="exposed", expressions=(Expression(), exposed), weight=weight)
    num_expressions = rng.choice((1, 2, 3, 4))
    expressions = tuple(random_expression(rng, nodes, scale) for _ in range(num_expressions))
    return Term(name="term", expressions=expressions, weight=weight)


def random_edges(rng: random.Random, nodes: tuple[Node, ...], planted: Choice | None) -> tuple[Edge, ...]:
    """A tree, sometimes with cycles, parallel and reversed edges, and an edge from a node to itself."""
    pairs = [(rng.randrange(i), i) for i in range(1, len(nodes)) if rng.random() < 0.9]
    if rng.random() < 0.5:
        pairs += [(rng.randrange(len(nodes)), rng.randrange(len(nodes))) for _ in range(rng.randint(1, 3))]
    letters = rng.choice(("RS", "RS", "RSP", "RSPT"))
    edges = []
    for i, j in pairs:
        source_layouts = [rng.choice(letters) for _ in nodes[i].strategies]
        target_layouts = [rng.choice(letters) for _ in nodes[j].strategies]
        if planted is not None:
            target_layouts[planted[nodes[j].name]] = source_layouts[planted[nodes[i].name]]
        edges.append(edge(nodes[i].name, nodes[j].name, "".join(source_layouts), "".join(target_layouts)))
    return tuple(edges)


def random_splits(rng: random.Random) -> tuple[Split, ...]:
    """None, one or two, of up to three parts."""
    return tuple(
        Split(parts=tuple(f"split{i} part{j}" for j in range(rng.randint(1, 3))), total=rng.choice((1, 1, 2, 3, 5)))
        for i in range(rng.choice((0, 0, 1, 2)))
    )


def random_numbers(rng: random.Random, splits: tuple[Split, ...]) -> dict[str, int]:
    """A way to divide what splits divide."""
    found: dict[str, int] = {}
    for split in splits:
        found |= dict.fromkeys(split.parts, 0)
        for _ in range(split.total):
            found[rng.choice(split.parts)] += 1
    return found


def random_resource(
    rng: random.Random, nodes: tuple[Node, ...], scale: float, reached: Choice, parts: tuple[str, ...]
) -> Resource:
    """A limit that a choice reaches exactly, or almost, or that it exceeds."""
    terms = tuple(random_term(rng, nodes, scale, parts) for _ in range(rng.randint(1, 3)))
    limit = total(terms, reached) * rng.choice((1.0, 1.0, 1.0, 1.1, 0.9))
    return Resource(name="memory", terms=terms, limit=max(0.0, limit))


def random_problem(seed: int) -> Problem:
    """Up to 6 nodes of up to 6 strategies; mostly with a choice on which all edges agree."""
    rng = random.Random(seed)
    smallest = rng.choice((0, 1, 1, 3, 3, 3, 3, 4, 4, 4))
    nodes = tuple(node(f"n{i}", rng.randint(smallest, 6)) for i in range(rng.choice((1, 2, 3, 4, 5, 5, 6, 6))))
    if not all(n.strategies for n in nodes):
        return Problem(nodes=nodes, edges=random_edges(rng, nodes, None), objective=())
    splits = random_splits(rng)
    parts = tuple(part for split in splits for part in split.parts)
    planted = {n.name: rng.randrange(len(n.strategies)) for n in nodes} | random_numbers(rng, splits)
    seconds, size = rng.choice(SECONDS_SCALES), rng.choice(BYTES_SCALES)
    return Problem(
        nodes=nodes,
        edges=random_edges(rng, nodes, planted if rng.random() < 0.9 else None),
        objective=tuple(random_term(rng, nodes, seconds, parts) for _ in range(rng.randint(0, 6))),
        resources=tuple(random_resource(rng, nodes, size, planted, parts) for _ in range(rng.randint(0, 2))),
        splits=splits,
    )


def knapsack(num_nodes: int, *, share: float = 0.45, seed: int = 0) -> Problem:
    """Many knapsacks over the same nodes, and edges around a ring: hard for branch and bound.

    The limits are `share` of what 1000 per node would use; a random choice uses 0.55.
    """
    rng = random.Random(seed)
    nodes = tuple(node(f"n{i}", 8) for i in range(num_nodes))

    def weights() -> tuple[Term, ...]:
        return tuple(linear("use", (n.name, tuple(float(rng.randint(100, 999)) for _ in n.strategies))) for n in nodes)

    ring = tuple(
        edge(a.name, b.name, "RSRSRSRS", "RRSSRRSS") for a, b in zip(nodes, (*nodes[1:], nodes[0]), strict=True)
    )
    resources = tuple(Resource(name=f"limit{i}", terms=weights(), limit=1000 * share * num_nodes) for i in range(6))
    return Problem(nodes=nodes, edges=ring, objective=weights(), resources=resources)


def assert_truthful(problem: Problem, solution: Solution) -> None:
    """Choice, objective, bound and gap fit each other and the problem."""
    assert solution.choice is not None
    assert solution.objective is not None
    assert solution.bound is not None
    assert solution.choice.keys() == {*(n.name for n in problem.nodes), *problem.parts}
    assert problem.is_feasible(solution.choice)
    assert solution.objective == problem.price(solution.choice)
    assert solution.bound <= solution.objective


# --- against enumeration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ILP_SOLVERS)
@pytest.mark.parametrize("batch", range(10))
def test_ilp_matches_brute_force(solver: str, batch: int) -> None:
    for seed in range(batch, NUM_RANDOM_PROBLEMS, 10):
        problem = random_problem(seed)
        expected = solvers.solve(problem, solver="brute-force")
        actual = solvers.solve(problem, solver=solver)
        assert actual.status is expected.status, f"seed {seed}"
        if expected.objective is None:
            assert actual.choice is None
            continue
        assert_truthful(problem, actual)
        assert actual.objective == pytest.approx(expected.objective, rel=1e-9, abs=1e-30), f"seed {seed}"
        assert actual.bound == pytest.approx(expected.objective, rel=1e-9, abs=1e-30), f"seed {seed}"


@pytest.mark.parametrize("most_nodes", [0, 2, 4])
def test_highs_own_search_goes_on_where_that_by_relaxations_has_seen_its_nodes(
    most_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimum of enumeration after a search that did not start, or that may know a solution; some problems need
    more nodes than these."""
    ended = list[bool]()
    search = branching.Branching.search

    def noted(self: branching.Branching) -> bool:
        ended.append(search(self))
        return ended[-1]

    monkeypatch.setattr(branching, "MOST_NODES", most_nodes)
    monkeypatch.setattr(branching.Branching, "search", noted)
    for seed in range(0, NUM_RANDOM_PROBLEMS, 2):
        problem = random_problem(seed)
        expected = solvers.solve(problem, solver="brute-force")
        for cutoff in (math.inf, 1.0 if expected.objective is None else 1.01 * expected.objective):
            actual = solvers.solve(problem, solver="highs", cutoff=cutoff)
            assert (actual.objective is None) == (expected.objective is None), f"seed {seed}"
            if expected.objective is not None:
                assert actual.objective == pytest.approx(expected.objective, rel=1e-9, abs=1e-30), f"seed {seed}"
    assert ended.count(False) >= 10
    assert most_nodes == 0 or ended.count(True) >= 10


def test_what_the_search_by_relaxations_found_is_kept_where_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution with a true bound, where HiGHS's own search then finds none."""
    monkeypatch.setattr(branching, "MOST_NODES", 3)
    monkeypatch.setattr(highs, "_outcome", lambda _highs, _cutoff: Outcome(status=None))
    num_kept = 0
    for seed in range(NUM_RANDOM_PROBLEMS):
        problem = random_problem(seed)
        try:
            actual = solvers.solve(problem, solver="highs")
        except SolverError:  # none was found
            continue
        if actual.status is Status.FEASIBLE:
            assert_truthful(problem, actual)
            expected = solvers.solve(problem, solver="brute-force")
            assert actual.bound is not None
            assert actual.bound <= expected.objective * (1 + 1e-9), f"seed {seed}"
            num_kept += 1
    assert num_kept >= 3


@pytest.mark.parametrize("solver", ILP_SOLVERS)
def test_a_cutoff_leaves_the_optimum_or_a_bound_below_it(solver: str) -> None:
    """Above the optimum it changes nothing; below it there is a bound between both, or still the optimum."""
    num_bounded = 0
    for seed in range(0, NUM_RANDOM_PROBLEMS, 2 if solver == "highs" else 20):
        problem = random_problem(seed)
        expected = solvers.solve(problem, solver="brute-force")
        for share in (2.0, 1.01, 1 + 1e-8, 0.99, 0.5):
            cutoff = 1.0 if expected.objective is None else share * expected.objective
            actual = solvers.solve(problem, solver=solver, cutoff=cutoff)
            if actual.status is Status.BOUNDED:
                assert expected.objective is None or share < 1, f"seed {seed}"
                assert actual.bound is not None
                assert cutoff < actual.bound, f"seed {seed}"
                if expected.objective is not None:
                    assert actual.bound <= expected.objective * (1 + 1e-9), f"seed {seed}"
                num_bounded += 1
                continue
            assert actual.status is expected.status, f"seed {seed}"
            if expected.objective is not None:
                assert_truthful(problem, actual)
                assert actual.objective == pytest.approx(expected.objective, rel=1e-9, abs=1e-30), f"seed {seed}"
    assert num_bounded >= 10


def test_a_relaxation_that_starts_at_another_ones_end_bounds_the_optimum() -> None:
    """Problems with the same nodes and edges share the basis: each with other prices, and a last one as at first."""
    num_bounded = 0
    for seed in range(0, NUM_RANDOM_PROBLEMS, 2):
        problem, rng = random_problem(seed), random.Random(seed)
        parts = tuple(problem.parts)
        dearer = tuple(random_term(rng, problem.nodes, 1.0, parts) for _ in range(3)) if problem.objective else ()
        alone = solvers.solve(replace(problem, shared=Shared()), solver="highs", is_relaxed=True)
        for own in (problem, replace(problem, objective=dearer), problem):
            expected = solvers.solve(own, solver="brute-force")
            actual = solvers.solve(own, solver="highs", is_relaxed=True)
            if expected.objective is None or actual.bound is None:
                assert expected.objective is None, f"seed {seed}"
                continue
            assert actual.bound <= expected.objective * (1 + 1e-9) + 1e-30, f"seed {seed}"
            num_bounded += actual.status is Status.BOUNDED
        assert (actual.bound is None) == (alone.bound is None), f"seed {seed}"
        if actual.bound is not None:
            assert actual.bound == pytest.approx(alone.bound, rel=1e-5, abs=1e-30), f"seed {seed}"
    assert num_bounded >= 10


@pytest.mark.parametrize("share", [2.0, 1 + 1e-8, 1.0, 0.99, 0.8, 0.5])
def test_a_relaxation_that_ends_at_a_cutoff_bounds_the_optimum(share: float) -> None:
    """Where its bound is above the cutoff, so is the optimum, and the bound is none of a problem that is not there."""
    num_above = num_below = 0
    for seed in range(0, NUM_RANDOM_PROBLEMS, 2):
        problem = random_problem(seed)
        expected = solvers.solve(problem, solver="brute-force")
        cutoff = 1.0 if expected.objective is None else share * expected.objective
        actual = solvers.solve(problem, solver="highs", cutoff=cutoff, is_relaxed=True)
        if expected.objective is None:
            assert actual.objective is None, f"seed {seed}"
            continue
        assert actual.bound is not None, f"seed {seed}"
        assert actual.bound <= expected.objective * (1 + 1e-9) + 1e-30, f"seed {seed}"
        num_above += actual.status is Status.BOUNDED and actual.bound > cutoff
        num_below += actual.bound <= cutoff
    assert num_above >= 10 or share >= 1
    assert num_below >= 10 or share < 0.8


def random_conflicts(rng: random.Random, problem: Problem, choice: Choice) -> tuple[Conflict, ...]:
    """Some that forbid a choice, by one node or several, and some that need not."""
    found = []
    for _ in range(rng.randint(1, 4)):
        own = rng.sample(problem.nodes, rng.randint(1, len(problem.nodes)))
        groups = ((n.name, {choice[n.name], rng.randrange(len(n.strategies))}) for n in own)
        found.append(Conflict(choices=tuple((name, frozenset(group)) for name, group in groups)))
    return tuple(found)


@pytest.mark.parametrize("solver", ILP_SOLVERS)
def test_conflicts_leave_the_optimum_that_enumeration_finds(solver: str) -> None:
    """Each forbids what was the optimum before: found again, until nothing is left."""
    num_solved = num_dearer = 0
    for seed in range(0, NUM_RANDOM_PROBLEMS, 3):
        problem, rng = random_problem(seed), random.Random(seed)
        free = solvers.solve(problem, solver="brute-force")
        if free.choice is None or free.objective is None:
            continue
        problem = replace(problem, conflicts=random_conflicts(rng, problem, free.choice))
        expected = solvers.solve(problem, solver="brute-force")
        actual = solvers.solve(problem, solver=solver)
        assert actual.status is expected.status, f"seed {seed}"
        if expected.objective is None:
            continue
        assert_truthful(problem, actual)
        assert all(conflict.is_avoided(actual.choice or {}) for conflict in problem.conflicts)
        assert actual.objective == pytest.approx(expected.objective, rel=1e-9, abs=1e-30), f"seed {seed}"
        num_solved += 1
        num_dearer += expected.objective > free.objective
    assert num_solved >= 30
    assert num_dearer >= 15


def test_conflicts_name_nodes_that_there_are() -> None:
    nodes = (node("a", 2), node("b", 2))
    for names in (("a", "c"), ("a", "a")):
        conflict = Conflict(choices=tuple((name, frozenset({0})) for name in names))
        with pytest.raises(ValueError, match="conflict names"):
            Problem(nodes=nodes, edges=(), objective=(), conflicts=(conflict,))


def test_random_problems_cover_what_they_are_meant_to() -> None:
    problems = [random_problem(seed) for seed in range(NUM_RANDOM_PROBLEMS)]
    solutions = [solvers.solve(problem, solver="brute-force") for problem in problems]
    infeasible = sum(solution.status is Status.INFEASIBLE for solution in solutions)
    free = [replace(problem, resources=()) for problem in problems]
    unlimited = [solvers.solve(problem, solver="brute-force").objective for problem in free]
    bound_by_limits = sum(s.objective != u for s, u in zip(solutions, unlimited, strict=True))
    reduced = [r for r in map(reduce, problems) if r is not None]
    maxima = sum(bool(r.objective.maxima or any(resource.maxima for resource in r.resources)) for r in reduced)
    assert 20 <= infeasible <= NUM_RANDOM_PROBLEMS // 2
    assert bound_by_limits >= 50
    undecided = sum(len(r.columns) > len(r.starts) for r in reduced)
    divided = sum(len([part for part in r.parts if part.most]) > len({part.split for part in r.parts}) for r in reduced)
    assert maxima >= 100
    assert undecided >= 150
    assert divided >= 100


# --- known answers ---------------------------------------------------------------------------------------------------

ALL_SOLVERS = ("highs", "cbc", "brute-force")

#: column-row pair of an MLP: up gives R or S, down takes R or S; sharded, compute is half and an all-reduce follows
MLP = Problem(
    nodes=(node("up", 2), node("down", 2)),
    edges=(edge("up", "down", "RS", "RS"),),
    objective=(
        linear("compute", ("up", (8e-9, 4e-9)), ("down", (8e-9, 4e-9))),
        linear("all_reduce", ("down", (0.0, 3e-9))),
    ),
    resources=(
        Resource(
            name="memory",
            terms=(linear("weights", ("up", (2e12, 1e12)), ("down", (2e12, 1e12))),),
            limit=4e12,
        ),
    ),
)


def test_what_changes_of_a_valid_problem_is_checked() -> None:
    sizes = {own.name: len(own.strategies) for own in MLP.nodes}
    first = MLP.nodes[0].name
    wrong = (Term(name="wrong", expressions=(Expression(terms=((first, (1.0,) * (sizes[first] + 1)),)),)),)
    limited = replace(MLP, resources=(Resource(name="memory", terms=(), limit=1.0),))
    for change in (
        {"resources": (Resource(name="memory", terms=wrong, limit=1.0),)},
        {"objective": wrong},
        {"edges": (replace(MLP.edges[0], source="nobody"),)},
        {"nodes": MLP.nodes[1:]},
    ):
        with pytest.raises(ValueError, match="strategies"):
            replace(limited, **change)


@pytest.mark.parametrize("solver", ALL_SOLVERS)
def test_column_row_pair_wins_and_both_ends_agree(solver: str) -> None:
    solution = solvers.solve(MLP, solver=solver)
    assert solution == Solution(
        status=Status.OPTIMAL,
        solver=solver,
        choice={"up": 1, "down": 1},
        objective=pytest.approx(4e-9 + 4e-9 + 3e-9),
        bound=pytest.approx(11e-9),
    )
    assert solution.gap == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("solver", ALL_SOLVERS)
def test_exposed_time_is_the_larger_of_zero_and_the_difference(solver: str) -> None:
    # gather 5 or 7 behind compute 10 or 6: 5 hides behind 6, so 6 + 0; 7 would cost 6 + 1 or 10 + 0, less 0.5 for it
    exposed = Term(
        name="exposed",
        expressions=(Expression(), Expression(terms=(("g", (5.0, 7.0)), ("c", (-10.0, -6.0))))),
        weight=2.0,
    )
    compute = linear("compute", ("c", (10.0, 6.0)), ("g", (0.0, -0.5)))
    problem = Problem(nodes=(node("g", 2), node("c", 2)), edges=(), objective=(exposed, compute))
    solution = solvers.solve(problem, solver=solver)
    assert solution.choice == {"g": 0, "c": 1}
    assert solution.objective == 6.0


@pytest.mark.parametrize("solver", ALL_SOLVERS)
def test_peak_memory_is_the_largest_transient_not_their_sum(solver: str) -> None:
    def problem(limit: float) -> Problem:
        transients = tuple(Expression(terms=((name, (6e12, 1e12)),)) for name in "ab")
        return Problem(
            nodes=(node("a", 2), node("b", 2)),
            edges=(),
            objective=(linear("time", ("a", (1.0, 2.0)), ("b", (1.0, 4.0))),),
            resources=(Resource(name="memory", terms=(Term(name="peak", expressions=transients),), limit=limit),),
        )

    assert solvers.solve(problem(6e12), solver=solver).objective == 1.0 + 1.0
    assert solvers.solve(problem(5.9e12), solver=solver).objective == 2.0 + 4.0
    assert solvers.solve(problem(0.9e12), solver=solver).status is Status.INFEASIBLE


@pytest.mark.parametrize("solver", ALL_SOLVERS)
def test_nanoseconds_decide_next_to_a_forbiddingly_expensive_strategy(solver: str) -> None:
    nodes = tuple(node(f"n{i}", 3) for i in range(4))
    terms = tuple(linear("time", (n.name, (1e3, 2e-9 + i * 1e-12, 2e-9))) for i, n in enumerate(nodes))
    ring = tuple(edge(a.name, b.name, "RSS", "RSS") for a, b in zip(nodes, (*nodes[1:], nodes[0]), strict=True))
    solution = solvers.solve(Problem(nodes=nodes, edges=ring, objective=terms), solver=solver)
    assert solution.objective == pytest.approx(4 * 2e-9, rel=1e-9)


@pytest.mark.parametrize("solver", ALL_SOLVERS)
def test_first_optimum_far_below_the_largest_cost_is_refined(solver: str) -> None:
    # All lower bounds are 0, and the cheap ends of the two nodes exclude each other: 3 ps or 2 ps next to 1000 s.
    problem = Problem(
        nodes=(node("a", 4), node("b", 4)),
        edges=(edge("a", "b", "RSPT", "RSPT"),),
        objective=(linear("time", ("a", (0.0, 3e-12, 1e3, 1.0)), ("b", (2e-12, 0.0, 0.0, 1e3))),),
    )
    solution = solvers.solve(problem, solver=solver)
    assert solution.choice == {"a": 0, "b": 0}
    assert solution.objective == 2e-12


@pytest.mark.parametrize("solver", ALL_SOLVERS)
def test_no_nodes_cost_the_constants(solver: str) -> None:
    resource = Resource(name="memory", terms=(linear("reserved", constant=2.0),), limit=2.0)
    problem = Problem(nodes=(), edges=(), objective=(linear("launch", constant=3.0),), resources=(resource,))
    expected = Solution(status=Status.OPTIMAL, solver=solver, choice={}, objective=3.0, bound=3.0)
    assert solvers.solve(problem, solver=solver) == expected
    too_small = Resource(name="memory", terms=resource.terms, limit=1.9)
    problem = Problem(nodes=(), edges=(), objective=(), resources=(too_small,))
    assert solvers.solve(problem, solver=solver).status is Status.INFEASIBLE


@pytest.mark.parametrize("solver", ALL_SOLVERS)
def test_node_without_strategies_is_infeasible(solver: str) -> None:
    problem = Problem(nodes=(node("a", 2), node("b", 0)), edges=(), objective=())
    assert solvers.solve(problem, solver=solver) == Solution(status=Status.INFEASIBLE, solver=solver)


@pytest.mark.parametrize("solver", ALL_SOLVERS)
def test_cycle_that_only_the_ilp_sees_is_infeasible(solver: str) -> None:
    # a = b, b = c, c != a: each edge alone has partners for every strategy
    edges = (edge("a", "b", "RS", "RS"), edge("b", "c", "RS", "RS"), edge("c", "a", "RS", "SR"))
    problem = Problem(nodes=tuple(node(name, 2) for name in "abc"), edges=edges, objective=())
    assert solvers.solve(problem, solver=solver).status is Status.INFEASIBLE


# --- reduction -------------------------------------------------------------------------------------------------------


def test_reduction_leaves_only_what_can_be_chosen() -> None:
    problem = Problem(
        nodes=(node("a", 3), node("b", 3)),
        edges=(edge("a", "b", "RSP", "RST"), edge("b", "a", "RST", "RRP")),
        objective=(linear("time", ("a", (1.0, 2.0, 3.0))),),
    )
    reduced = reduce(problem)
    assert reduced is not None
    # P and T have no partner; the second edge wants b = R where a is 0 or 1, the first then a = R.
    assert len(reduced.columns) == 1
    assert reduced.choice(reduced.columns, {}) == {"a": 0, "b": 0}
    assert not reduced.skeleton.links
    assert reduced.objective.low == 1.0
    assert not reduced.objective.extras.any()


def test_reduction_drops_expressions_that_are_never_the_largest() -> None:
    expressions = (
        Expression(constant=5.0, terms=(("a", (0.0, 1.0)), ("b", (0.0, 1.0)))),
        Expression(constant=3.0, terms=(("a", (1.0, 0.0)), ("b", (0.0, 1.0)))),  # at most 5
    )
    problem = Problem(
        nodes=(node("a", 2), node("b", 2)),
        edges=(edge("a", "b", "RS", "SR"),),
        objective=(Term(name="peak", expressions=expressions, weight=2.0),),
    )
    reduced = reduce(problem)
    assert reduced is not None
    # a and b are one group: b is what a is not
    assert len(reduced.starts) == 1
    assert reduced.objective.maxima == ()
    assert reduced.objective.low == 2 * 6.0
    assert len(reduced.columns) == 1


# --- time limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ILP_SOLVERS)
def test_timed_out_incumbent_is_feasible_with_a_true_bound(solver: str) -> None:
    problem = knapsack(60, share=0.6)
    limited = first_incumbent(problem, solver)
    assert_truthful(problem, limited)
    assert limited.gap is not None
    if limited.status is Status.OPTIMAL:  # a machine fast enough: then the gap must be closed
        assert limited.gap <= 1e-9
        return
    assert limited.status is Status.FEASIBLE
    assert limited.gap > 1e-6


def first_incumbent(problem: Problem, solver: str) -> Solution:
    """The solution within the shortest time limit that yields one: on a busy machine seconds mean little."""
    for time_limit_s in (0.2, 0.5, 1.0, 2.0, 5.0):
        try:
            return solvers.solve(problem, solver=solver, time_limit_s=time_limit_s)
        except SolverError:
            continue
    pytest.fail("no incumbent within 5 s")


@pytest.mark.parametrize("solver", ILP_SOLVERS)
def test_bounds_of_timed_out_runs_are_below_the_optimum(solver: str) -> None:
    problem = knapsack(20)
    optimum = solvers.solve(problem, solver=solver).objective
    assert optimum is not None
    # The shortest ones end in CBC's preprocessing, which then calls the problem infeasible.
    for time_limit_s in (0.002, 0.004, 0.008, 0.014, 0.02, 0.05, 0.1, 0.3):
        try:
            limited = solvers.solve(problem, solver=solver, time_limit_s=time_limit_s)
        except SolverError:
            continue
        assert_truthful(problem, limited)
        assert limited.bound is not None
        assert limited.objective is not None
        assert limited.bound <= optimum * (1 + 1e-9) <= limited.objective * (1 + 2e-9)


@pytest.mark.parametrize("solver", ILP_SOLVERS)
def test_time_too_short_for_any_choice_is_an_error(solver: str) -> None:
    with pytest.raises(SolverError, match="no feasible choice in 1e-06 s"):
        solvers.solve(knapsack(60), solver=solver, time_limit_s=1e-6)


def test_brute_force_out_of_time_is_an_error() -> None:
    problem = Problem(nodes=tuple(node(f"n{i}", 2) for i in range(18)), edges=(), objective=())
    with pytest.raises(SolverError, match="not done after"):
        solvers.solve(problem, solver="brute-force", time_limit_s=1e-3)


# --- behaviour in a process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ILP_SOLVERS)
def test_same_problem_gives_same_choice_and_nothing_is_printed(
    solver: str, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    problem = knapsack(8)
    assert len({str(solvers.solve(problem, solver=solver)) for _ in range(3)}) == 1
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_highs_runs_after_someone_else_has_started_its_threads() -> None:
    code = (
        "import highspy\n"
        "other = highspy.Highs(); other.setOptionValue('output_flag', False); other.setOptionValue('threads', 2)\n"
        "other.addVar(0, 1); other.run(); print('started')\n"
        "import test_solvers as t\n"
        "print(t.solvers.solve(t.MLP, solver='highs').status)"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=subprocess_env(), capture_output=True, text=True, check=True)
    assert ran.stdout.partition("started\n")[2] == "optimal\n"
    assert ran.stderr == ""


def test_importing_solvers_imports_no_solver_library() -> None:
    code = "import sys, tpplan.solvers; print(sorted({'pulp', 'highspy'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], env=subprocess_env(), capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def subprocess_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# --- registry --------------------------------------------------------------------------------------------------------


def test_most_preferred_installed_solver_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solvers.available() == ("highs", "cbc", "brute-force")
    assert solvers.solve(MLP).solver == "highs"
    hide(monkeypatch, "highspy")
    assert solvers.available() == ("cbc", "brute-force")
    assert solvers.solve(MLP).solver == "cbc"
    with pytest.raises(SolverError, match="pip install highspy"):
        solvers.solve(MLP, solver="highs")


def test_no_solver_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "pulp", "highspy")
    assert solvers.available() == ("brute-force",)
    with pytest.raises(SolverError, match="pip install highspy"):
        solvers.solve(MLP)


def hide(monkeypatch: pytest.MonkeyPatch, *libraries: str) -> None:
    """Make libraries look as if they were not installed."""
    monkeypatch.setattr(solvers, "find_spec", lambda name: None if name in libraries else find_spec(name))


def test_unknown_solver_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"expected one of highs, cbc, brute-force\. Did you mean 'highs'"):
        solvers.solve(MLP, solver="higsh")


def test_time_limit_that_is_not_positive_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 0 s, got 0"):
        solvers.solve(MLP, time_limit_s=0.0)


def test_brute_force_refuses_what_it_cannot_enumerate() -> None:
    problem = Problem(nodes=tuple(node(f"n{i}", 10) for i in range(7)), edges=(), objective=())
    with pytest.raises(UsageError, match="at most 1,000,000"):
        solvers.solve(problem, solver="brute-force")


def test_problems_that_differ_in_names_have_one_skeleton() -> None:
    def found(first: str, second: str, layouts: str) -> Skeleton:
        nodes = node(first, 3), node(second, 3)
        own = skeleton_of(nodes, (edge(first, second, "RST", layouts),))
        assert own is not None
        return own

    own, renamed, other = found("a", "b", "RSS"), found("y", "x", "RSS"), found("a", "b", "RRR")
    assert list(own.places) == ["a", "b"]
    assert list(renamed.places) == ["y", "x"]
    for name, new in (("a", "y"), ("b", "x")):
        assert own.places[name].strategies is renamed.places[new].strategies
    assert [list(one.places["a"].strategies) for one in (own, other)] == [[0, 1, 1], [0, 0, 0]]


def test_merging_groups_takes_time_in_proportion_to_the_nodes() -> None:
    def seconds(number: int) -> float:
        nodes = tuple(node(f"n{i}", 3) for i in range(number))
        # Every second link merges its nodes, for it is one to one; the others merge nothing.
        edges = tuple(edge(f"n{i}", f"n{i + 1}", *(("RST", "RST"), ("RRR", "RRR"))[i % 2]) for i in range(number - 1))
        groups._skeleton.cache_clear()
        started = time.process_time()
        found = skeleton_of(nodes, edges)
        taken = time.process_time() - started
        assert found is not None
        assert found.num_columns == 3 * number // 2
        return taken

    assert min(seconds(3200) for _ in range(2)) < 7 * min(seconds(800) for _ in range(2))
