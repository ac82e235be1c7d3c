"""Assignments of formulations, and the ILP of one held against the ILP that it was chosen in."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tpplan.costs.prediction.step_time import formulated, time_of
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.assignment import Assignment
from tpplan.solvers.problem import total

#: relative difference between tied and untied prices that rounding explains
PRICE_TOLERANCE = 1e-6
#: relative difference between sums of the same numbers in another order
ROUNDING = 1e-12


def untied(formulation: Formulation, choice: Mapping[str, int]) -> tuple[Assignment, Formulation]:
    """The assignment that a choice makes, and the ILP in which that is the only one: every decision on its own.

    Raises AssertionError where the price of the choice is not that of the assignment, or where the assignment may need
    more memory than the choice: it may need less, for the layers that were chosen need not name the least.
    """
    assignment, setting = formulation.assignment(choice), formulation.setting
    kin = {unit.name: kind.unit.name for kind in formulation.kinds for unit in kind.units}
    alone = formulated(assignment, setting.profile, setting.gpus_per_node, formulation.priced.executor, kin=kin)
    limits = {"memory_limit_bytes": setting.memory_limit_bytes, "slack_bytes": setting.slack_bytes}
    alone = replace(alone, setting=replace(alone.setting, **limits))
    everything = dict.fromkeys(assignment.strategies, 0)
    before, after = formulation.problem.price(choice), alone.problem.price(everything)
    assert abs(before - after) <= PRICE_TOLERANCE * max(before, after), (
        f"the tied problem prices its solution at {before}, the assignment costs {after}"
    )
    for tied, row in zip(formulation.problem.resources, alone.problem.resources, strict=True):
        before, after = total(tied.terms, choice), total(row.terms, everything)
        assert after <= before * (1 + PRICE_TOLERANCE), (
            f"{row.name}: the tied problem says {before} bytes, the assignment needs {after}"
        )
    assert alone.problem.is_consistent(everything), "the assignment's layouts disagree along an edge"
    check_tied(assignment, alone)
    return assignment, alone


def check_tied(assignment: Assignment, alone: Formulation) -> None:
    """Checks that an assignment takes as long where like decisions are priced as one as where each is on its own
    (`alone`)."""
    setting, executor = alone.setting, alone.priced.executor
    tied = formulated(assignment, setting.profile, setting.gpus_per_node, executor, is_tied=True)
    assert tied.table.keys() == tied.space.members.keys()
    for name, representative in tied.space.classes.items():
        assert tied.table[representative] == alone.table[name], name
    found, expected = time_of(assignment, tied), time_of(assignment, alone)
    assert found.time_s == pytest.approx(expected.time_s, rel=ROUNDING)
    assert found.error_s == pytest.approx(expected.error_s, rel=ROUNDING)
    assert found.is_extrapolated == expected.is_extrapolated
