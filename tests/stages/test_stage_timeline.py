"""The step of stages over time: its end is the predicted step, and every rectangle of the page is one of its runs."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from stage_models import LENGTH, Stack, loss, text

import tpplan
from profiles import synthetic_profile
from tpplan.anatomy.stage_timeline import stage_timeline
from tpplan.commands import main
from tpplan.machine.profile import HardwareProfile
from tpplan.page.stage_drawing import stage_drawing
from tpplan.page.step_drawing import WIDTH
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Precision
from tpplan.plan.step_anatomy import StageRun, StageWork
from tpplan.search.points.options import Options

MACHINE = HardwareProfile.from_dict(synthetic_profile(), origin="synthetic")
BATCH = 8


@pytest.fixture(scope="module", params=[*Schedule])
def plan(request: pytest.FixtureRequest) -> PipelinePlan:
    return tpplan.solve_stages(
        Stack,
        text,
        stages=2,
        virtual_stages=1 + (request.param is Schedule.INTERLEAVED),
        schedule=request.param,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=MACHINE),
        global_batch=BATCH,
        seq_len=LENGTH,
        micro_batch=1,
        options=Options(loss=loss, precision=Precision.FP32, recompute="none"),
        prove=False,
    )


def computed(plan: PipelinePlan, part: int) -> list[StageRun]:
    runs = stage_timeline(plan, MACHINE).runs
    return [run for run in runs if run.part == part and run.work is not StageWork.SENDING]


def test_ranks_do_one_thing_at_a_time_and_all_of_it(plan: PipelinePlan) -> None:
    """Every stage runs each micro-batch forward and backward; together these are the seconds of its own step."""
    for part in range(plan.parts):
        own = sorted(computed(plan, part), key=lambda run: run.start_s)
        assert all(one.start_s + one.seconds <= after.start_s * (1 + 1e-9) for one, after in pairwise(own))
        for stage in range(part, len(plan.stages), plan.parts):
            runs = [run for run in own if run.stage == stage]
            works = [StageWork.FORWARD, StageWork.BACKWARD]
            works += [StageWork.WEIGHTS] if plan.schedule is Schedule.ZERO_BUBBLE else []
            wanted = {(work, index) for work in works for index in range(BATCH)}
            assert {(run.work, run.micro_batch) for run in runs} == {*wanted, (StageWork.ONCE, None)}
            assert sum(run.seconds for run in runs) == pytest.approx(plan.stages[stage].predicted.step_time_s)


def test_the_drawn_step_is_the_predicted_one(plan: PipelinePlan) -> None:
    """A step is priced by this simulation; that of 1F1B by a sum which is no less than what it takes."""
    drawn, predicted = stage_timeline(plan, MACHINE), plan.predicted.step_time_s
    if plan.schedule is not Schedule.ONE_F_ONE_B:
        assert drawn.end_s == pytest.approx(predicted)
    else:
        alone = stage_timeline(plan, None)
        assert not alone.has_sending
        assert alone.end_s <= predicted - plan.predicted.send_s + 1e-12
        assert alone.end_s < drawn.end_s <= predicted * (1 + 1e-9)
        assert drawn.end_s > 0.9 * predicted


def test_a_rectangle_is_as_wide_as_its_seconds(plan: PipelinePlan) -> None:
    timeline = stage_timeline(plan, MACHINE)
    (window,) = stage_drawing(timeline, plan).windows
    lanes = [shapes for name, shapes in window.lanes if name != "sends"]
    assert len(lanes) == plan.parts
    for part, shapes in enumerate(lanes):
        wide = [float(width) for shape in shapes for width in re.findall(r"h([\d.]+)v", shape.path)]
        own = [run.seconds * WIDTH / timeline.end_s for run in computed(plan, part) if run.seconds]
        assert wide == pytest.approx(own, abs=0.01)


def test_the_page_says_how_long_each_stage_waits(plan: PipelinePlan, tmp_path: Path) -> None:
    plan.dump(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    names = ("Stage 0", "Stage 1") if plan.virtual_stages == 1 else ("Stages 0, 2", "Stages 1, 3")
    assert all(f"{name} on GPU {part}: at work for" in page for part, name in enumerate(names))
    assert "Sending between stages is not drawn" in page  # the profile is none that is shipped
