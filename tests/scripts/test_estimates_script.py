"""scripts/evidence/estimates.py solves the stages that it has estimates of, and sees where the best was left out."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.stage_solver import Degrees

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))

import estimates

SHAPE, DEGREES = PipelineShape(parts=2), Degrees(tp=1, micro_batch=1)


@pytest.mark.long
def test_the_toy_is_solved_at_all_its_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimates.main(["toy"]) == 0
    *rows, usual, deferred, last = capsys.readouterr().out.splitlines()
    assert all("--pp 2" in row for row in rows)
    solved = [sum(("zero-bubble" in row) == kind for row in rows) for kind in (False, True)]
    assert min(solved) >= 5
    assert usual.startswith(f"toy, 1f1b and interleaved: {solved[0]} solved")
    assert deferred.startswith(f"toy, zero-bubble: {solved[1]} solved")
    assert last == "toy: left out 0.00%"


def test_a_step_that_its_estimate_hides_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    bar = estimates.worth(SHAPE)
    long = bar + 0.01
    found = [estimates.Row(seconds, step_s, SHAPE, DEGREES) for seconds, step_s in [(1.0, 1.0), (long, 0.8)]]
    assert not estimates.judged("made up", found)
    said = capsys.readouterr().out
    assert "2 solved, 1 within 10% of the fastest" in said
    assert said.endswith("left out 25.00%\n")
    assert estimates.judged("made up", [*found[:1], estimates.Row(bar - 0.01, 0.8, SHAPE, DEGREES)])
    deferring = replace(SHAPE, is_zero_bubble=True)
    assert not estimates.judged("made up", [*found[:1], estimates.Row(bar - 0.01, 0.8, deferring, DEGREES)])


def test_a_case_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        estimates.main(["80b"])
    assert "no case 80b: take some of toy, 8b" in capsys.readouterr().err


def test_links_between_nodes_alone_are_slower() -> None:
    usual, slow = estimates.slowed(1.0).to_dict(), estimates.slowed(8.0).to_dict()
    for one, other in zip(usual["collectives"], slow["collectives"], strict=True):
        factor = 8.0 if one["ranks"] > one["ranks_per_node"] else 1.0
        assert other["time_s"] == pytest.approx([factor * seconds for seconds in one["time_s"]])
