"""scripts/evidence/estimates.py solves the stages that it has estimates of, and sees where the best was left out."""

import math
import sys
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
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) >= 10
    assert all("--pp 2" in row for row in rows)
    assert last.startswith(f"toy: {len(rows)} solved")
    assert last.endswith("left out 0.00%")


def test_a_step_that_its_estimate_hides_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    found = [estimates.Row(seconds, step_s, SHAPE, DEGREES) for seconds, step_s in [(1.0, 1.0), (1.1, 0.8)]]
    assert not estimates.judged("made up", found)
    assert "1 within 10% of the fastest" in (said := capsys.readouterr().out)
    assert said.endswith("left out 25.00%\n")
    assert estimates.judged("made up", [*found[:1], estimates.Row(1.02, 0.8, SHAPE, DEGREES)])


def test_links_between_nodes_alone_are_slower() -> None:
    usual, slow = estimates.slowed(1.0).to_dict(), estimates.slowed(8.0).to_dict()
    for one, other in zip(usual["collectives"], slow["collectives"], strict=True):
        factor = 8.0 if one["ranks"] > one["ranks_per_node"] else 1.0
        assert other["time_s"] == pytest.approx([factor * seconds for seconds in one["time_s"]])
    assert math.isclose(estimates.WORTH, 1.03)
