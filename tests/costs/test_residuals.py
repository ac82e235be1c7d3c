"""Error bars: linear within a table, in quadrature over tables, and the residual of a fit in the place of both."""

import dataclasses

import pytest
from examples import machine

from tpplan.costs.error_bars import Residuals
from tpplan.machine.tables import Fitted


def test_one_table_adds_up_and_two_are_independent() -> None:
    profile = machine()
    one = Residuals(matmuls=3.0)
    assert (one + one).combined(profile, 0.0) == 6.0
    assert (one + Residuals(memory=4.0)).combined(profile, 0.0) == 5.0
    assert (one * 2 + Residuals(attention=8.0)).combined(profile, 0.0) == 10.0


def test_what_was_fitted_is_as_uncertain_as_its_fit() -> None:
    number = Fitted(name="matmul_slowdown", value=1.1, residual=0.1, runs=9, what="made up")
    profile = dataclasses.replace(machine(), fitted=(number,))
    assert Residuals(matmuls=99.0).combined(profile, 30.0) == pytest.approx(3.0)
    assert Residuals(matmuls=99.0, tp_collectives=4.0).combined(profile, 30.0) == pytest.approx(5.0)
