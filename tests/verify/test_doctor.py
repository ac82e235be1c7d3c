"""What `tpplan doctor` finds on this machine, and on one on which something does not work."""

import pytest

from tpplan.core.errors import RankFailedError
from tpplan.plan.plan import Recompute
from tpplan.torch_internals.probes import FailedProbe
from tpplan.verify import doctor
from tpplan.verify.doctor import Finding, State, examine

NAMES = ["tpplan", "torch", "CUDA", "NCCL", "gloo", "solvers", "internals", "operators", "optional", "round"]


@pytest.fixture(scope="module")
def here() -> dict[str, Finding]:
    """What is found as things are."""
    return {finding.name: finding for finding in examine()}


def test_ten_parts_are_tried_and_none_fails_here(here: dict[str, Finding]) -> None:
    assert list(here) == NAMES
    failed = {name: finding for name, finding in here.items() if finding.state is State.FAILS}
    assert not failed
    assert {here[name].state for name in ("gloo", "solvers", "internals", "operators", "round")} == {State.WORKS}


def test_ranks_add_up(here: dict[str, Finding]) -> None:
    assert here["gloo"].said.endswith(": 3")  # (0 + 1) + (1 + 1)


def test_the_round_is_proven(here: dict[str, Finding]) -> None:
    assert "proven" in here["round"].said


def test_what_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = FailedProbe(
        name="storages", uses="UntypedStorage._cdata", needed_for="traces", reason="AttributeError: gone"
    )
    monkeypatch.setattr(doctor, "failed_probes", lambda: (missing,))
    found = doctor.tried("internals")
    assert found.state is State.FAILS
    assert found.details == ("storages (UntypedStorage._cdata), needed for traces: AttributeError: gone",)


def test_an_operator_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "KEPT_OPS", {Recompute.SELECTIVE: frozenset({"aten::no_such_operator"})})
    found = doctor.tried("operators")
    assert found.state is State.FAILS
    assert "aten::no_such_operator" in found.details[0]


def test_a_part_that_raises_is_a_finding_and_the_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> list[float]:
        raise RankFailedError("rank 1 died\nof something")

    monkeypatch.setattr(doctor, "on_ranks", fail)
    found = doctor.tried("gloo")
    assert (found.state, found.said) == (State.FAILS, "RankFailedError: rank 1 died")


def test_an_untested_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch, "__version__", "9.9.9")
    found = doctor.tried("torch")
    assert found.state is State.FAILS
    assert "9.9.9" in found.said
