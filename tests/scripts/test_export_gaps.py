"""scripts/evidence/export_gaps.py: what its table and its exit code say."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from forks import in_fork

EVIDENCE = Path(__file__).resolve().parents[2] / "scripts" / "evidence"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EVIDENCE))
    import export_gaps

    return export_gaps


def test_a_gap_is_what_export_traces_and_nothing_proves(script: ModuleType) -> None:
    row = script.Row(name="x", runs="yes", exports="yes", proven="yes", error=1e-6)
    assert not row.is_gap
    assert not row.is_wrong
    assert replace(row, proven="ModelError: no").is_gap
    assert not replace(row, proven="ModelError: no", exports="RuntimeError: no").is_gap
    assert replace(row, error=1e-2).is_wrong
    assert replace(row, error=float("nan")).is_wrong
    assert "GAP" in script.line(replace(row, proven="ModelError: no"))


def test_every_construct_runs_where_a_step_of_it_does(script: ModuleType) -> None:
    found = script.constructs()
    assert len({construct.name for construct in found}) == len(found) > 150
    for name in ("EMA teacher", "einsum", "dict returned"):
        construct = next(c for c in found if c.name == name)
        outcome = script.step(script.built(construct), construct)
        assert any(gradient is not None for gradient in outcome.gradients.values())


def test_in_double_a_step_is_the_same_to_more_digits(script: ModuleType) -> None:
    construct = next(c for c in script.constructs() if c.name == "EMA teacher")
    wide = script.in_double(construct)
    narrow, found = (script.step(script.built(each), each) for each in (construct, wide))
    assert {str(g.dtype) for g in found.gradients.values() if g is not None} == {"torch.float64"}
    assert narrow.loss != found.loss
    assert narrow.loss == pytest.approx(found.loss, rel=1e-5)


def row_of(name: str) -> object:
    import export_gaps

    construct = next(c for c in export_gaps.constructs() if c.name == name)
    (row,) = export_gaps.rows_of([construct], numerics=True, budget_s=200.0)
    return row


@pytest.mark.long
def test_a_construct_is_examined(script: ModuleType) -> None:
    row = in_fork(row_of, "self in a closure")
    assert (row.runs, row.exports, row.proven, row.whole) == ("yes", "yes", "yes", "")
    assert row.sharded is not None
    assert row.sharded > 0.9
    assert row.error is not None
    assert not row.is_wrong, row.worst
