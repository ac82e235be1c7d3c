"""How many stages: the fastest of all numbers of them, found without solving those that a bound excludes."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import FOLDER
from stage_models import LENGTH, Skipping, Stack, loss, text

import tpplan
from profiles import synthetic_profile
from tpplan.commands import main
from tpplan.core.errors import InfeasibleError, TpplanError
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule, load_plan
from tpplan.plan.plan import Plan, Precision
from tpplan.plan.report.stages import stage_facts
from tpplan.search.best_first import NotFasterError
from tpplan.search.pipelines import most_promising
from tpplan.search.pipelines.any_pipeline import VIRTUAL_STAGES
from tpplan.search.pipelines.estimates import Estimator, WholeModel
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.shape_search import Search
from tpplan.search.pipelines.stage_plans import AllStages
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.points.options import Batch, Options

MACHINE = HardwareProfile.from_dict(synthetic_profile(), origin="synthetic")
CLUSTER = tpplan.Cluster(gpus=4, gpus_per_node=4, profile=MACHINE)
BATCH = 8
#: a limit in bytes under which the model must be cut; tried at a micro-batch that is given
LIMIT = 0.345e6
MICRO_BATCH: dict[float | None, int | None] = {None: None, LIMIT: 1, 1e4: 8}


def found(limit: float | None) -> Plan | PipelinePlan:
    return tpplan.solve_any(
        Stack,
        text,
        cluster=CLUSTER,
        global_batch=BATCH,
        seq_len=LENGTH,
        micro_batch=MICRO_BATCH[limit],
        options=options(limit),
        prove=False,
    )


def options(limit: float | None) -> Options:
    return Options(loss=loss, precision=Precision.FP32, memory_limit_bytes=limit)


def in_stages(parts: int, virtual: int, limit: float | None, schedule: Schedule | None = None) -> float:
    """Seconds of the best plan of a shape, not below its bound; infinite where there is none."""
    try:
        plan = tpplan.solve_stages(
            Stack,
            text,
            stages=parts,
            virtual_stages=virtual,
            schedule=schedule,
            cluster=CLUSTER,
            global_batch=BATCH,
            seq_len=LENGTH,
            micro_batch=MICRO_BATCH[limit],
            options=options(limit),
            prove=False,
        )
    except TpplanError:
        return math.inf
    solver = plan.solver
    assert 0.5 * solver.objective_s < solver.bound_s <= solver.objective_s == plan.predicted.step_time_s
    assert solver.gap == pytest.approx(1 - solver.bound_s / solver.objective_s)
    return plan.predicted.step_time_s


def whole(limit: float | None) -> float:
    try:
        return tpplan.solve(
            Stack,
            text,
            cluster=CLUSTER,
            global_batch=BATCH,
            seq_len=LENGTH,
            micro_batch=MICRO_BATCH[limit] or "auto",
            loss=loss,
            precision=Precision.FP32,
            memory_limit_bytes=limit,
            prove=False,
        ).predicted.step_time_s
    except InfeasibleError:
        return math.inf


def stage_solver(limit: float | None) -> StageSolver:
    return StageSolver(
        build_model=Stack,
        example_inputs=text,
        cluster=CLUSTER,
        batch=Batch(BATCH, MICRO_BATCH[limit], LENGTH),
        options=replace(options(limit), all_gpus=True, ep=1),
    )


@pytest.mark.parametrize("limit", [None, pytest.param(LIMIT, marks=pytest.mark.long)])
def test_no_number_of_stages_is_faster(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are degrees that are left out by an estimate: each shape by itself is searched without one."""
    with monkeypatch.context() as without:
        without.setattr(most_promising, "worth", lambda shape: math.inf)
        every = {(p, v): in_stages(p, v, limit) for p in (2, 4) for v in VIRTUAL_STAGES if p * v <= 4}
        deferred = [in_stages(p, 1, limit, Schedule.ZERO_BUBBLE) for p in (2, 4)]
    every[1, 1] = whole(limit)
    plan = found(limit)
    fastest = min(*every.values(), *deferred)
    assert plan.predicted.step_time_s == pytest.approx(fastest, rel=1e-9)
    assert 0 < plan.solver.bound_s <= fastest * (1 + 1e-9)
    assert any("stages on a GPU" in line for line in plan.solver.unsearched or ())


@pytest.mark.parametrize(
    ("shape", "limit"), [(PipelineShape(parts=2, virtual_stages=2), LIMIT), (PipelineShape(parts=4), None)]
)
def test_no_step_is_below_its_floors(shape: PipelineShape, limit: float | None) -> None:
    """Of every tp degree and micro-batch, with weights gathered once and for every micro-batch."""
    solver = stage_solver(limit)
    search = Search(solver=solver, shape=shape, progress=None)
    steps: dict[Degrees, float] = {}
    for degrees in search.degrees():
        for once in (False, True):
            own = replace(degrees, once=once)
            steps[own], _ = search.tried(own)
            floor = AllStages.of(solver, shape, solver.sizes(shape, own), own).floor()
            assert max(floor, solver.floor(shape, own)) <= steps[own] * (1 + 1e-9)
    fastest = min(steps.values())
    assert fastest < math.inf
    # What takes as long as another step is left out, and so is what is known to, before all stages are solved.
    assert most_promising.fastest([search], least=fastest * 0.99) is None
    for own, seconds in steps.items():
        fresh = replace(solver, _tried={})
        with suppress(NotFasterError):
            found, _ = Search(solver=fresh, shape=shape, progress=None).tried(own, fastest * 1.001)
            assert found == pytest.approx(seconds, rel=1e-6)
            continue
        assert seconds > fastest * 1.001


@pytest.mark.parametrize(("bytes_per_s", "batch"), [(1e6, 8), (2e6, 4)])
def test_a_zero_bubble_schedule_is_found_where_1f1b_is_slower_than_no_stages(bytes_per_s: float, batch: int) -> None:
    rates = {"intra_bytes_per_s": bytes_per_s, "inter_bytes_per_s": bytes_per_s}
    slow = synthetic_profile(flop_per_s=1e8, launch_s=1e-9, hbm_bytes_per_s=1e9, **rates)
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=HardwareProfile.from_dict(slow, origin="slow"))

    def solved(solve: Callable[..., Plan | PipelinePlan], **given: Any) -> Plan | PipelinePlan:
        asked = {"cluster": cluster, "global_batch": batch, "seq_len": LENGTH, "prove": False, **given}
        return solve(Stack, text, options=options(None), **asked)

    one_f_one_b = solved(tpplan.solve_stages, stages=2, schedule=Schedule.ONE_F_ONE_B)
    zero_bubble = solved(tpplan.solve_stages, stages=2, schedule=Schedule.ZERO_BUBBLE)
    single = tpplan.solve(
        Stack, text, cluster=cluster, global_batch=batch, seq_len=LENGTH, loss=loss, precision=Precision.FP32,
        micro_batch="auto", prove=False,
    )  # fmt: skip
    steps = [own.predicted.step_time_s for own in (zero_bubble, single, one_f_one_b)]
    assert steps == sorted(steps)
    found = solved(tpplan.solve_any)
    assert isinstance(found, PipelinePlan)
    assert found.predicted.step_time_s <= steps[0] * (1 + 1e-9)  # several stages on a GPU may be faster still


@pytest.mark.parametrize("shape", [PipelineShape(parts=2), PipelineShape(parts=2, is_zero_bubble=True)])
def test_no_cuts_are_faster_than_the_bound(shape: PipelineShape) -> None:
    """All cuts at all degrees, by brute force."""
    solver = stage_solver(None)
    search = Search(solver=solver, shape=shape, progress=None)
    steps: dict[tuple[int, ...], float] = {}
    for degrees in search.degrees():
        layers = len(solver.cuts(degrees.micro_batch, shape)) + 1
        for first in range(1, layers):
            sizes = first, layers - first
            plans = AllStages.of(solver, shape, sizes, replace(degrees, once=True)).plans()
            if plans is not None:
                steps[sizes] = min(steps.get(sizes, math.inf), search.seconds(plans))
    assert len(steps) > 2
    assert 0.5 * min(steps.values()) < search.bound(math.inf) <= min(steps.values())


@pytest.mark.parametrize(
    ("build", "precision", "why"),
    [(Skipping, Precision.FP32, "reads what layers.0"), (Stack, Precision.BF16_AUTOCAST, "autocast")],
)
def test_the_plan_says_why_the_model_is_not_cut(build: type[Stack], precision: Precision, why: str) -> None:
    own = Options(loss=loss, precision=precision)
    plan = tpplan.solve_any(build, text, cluster=CLUSTER, global_batch=BATCH, seq_len=LENGTH, options=own, prove=False)
    assert isinstance(plan, Plan)
    assert any(line.startswith("stages that cannot be had") and why in line for line in plan.solver.unsearched or ())


def test_where_nothing_fits_the_error_says_what_is_missing() -> None:
    with pytest.raises(InfeasibleError, match=r"the smallest needs .* too much"):
        found(1e4)


def test_where_no_stages_fit_the_error_names_one_of_them() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan of --pp 2 fits: at tp \d and micro-batch 1 .* stage [01] fits"):
        tpplan.solve_stages(
            Stack,
            text,
            stages=2,
            cluster=CLUSTER,
            global_batch=BATCH,
            seq_len=LENGTH,
            micro_batch=1,
            options=options(1e4),
            prove=False,
        )


@pytest.mark.parametrize("parts", ["1", "auto"])
def test_stages_on_a_gpu_need_a_number_of_stages(capsys: pytest.CaptureFixture[str], parts: str) -> None:
    arguments = ["--gpus", "4", "--profile", "h100-sxm", "--global-batch", "8", "--seq-len", "16"]
    assert main(["solve", str(FOLDER / "gpt.py"), *arguments, "--pp", parts, "--virtual-stages", "2"]) == 2
    assert f"--virtual-stages with --pp {parts}" in capsys.readouterr().err


def test_a_plan_of_stages_says_what_was_asked_for(tmp_path: Path) -> None:
    """The model, the command and the pins, as other plans do."""
    model, pin, path = str(FOLDER / "gpt.py"), "layers.*.feed_forward=replicate", tmp_path / "plan.json"
    words = ["--gpus", "2", "--profile", "h100-sxm", "--global-batch", "4", "--seq-len", "16", "--micro-batch", "1"]
    assert main(["solve", model, *words, "--pp", "2", "--no-prove", "--pin", pin, "-o", str(path)]) == 0
    plan = load_plan(path)
    assert isinstance(plan, PipelinePlan)
    request = plan.request
    assert request is not None
    assert (request.model, request.pins) == (model, {"layers.*.feed_forward": "replicate"})
    assert request.command is not None
    assert request.command.startswith(f"tpplan solve {model} --gpus 2 ")
    told = dict(stage_facts(plan))
    assert (told["command"], told["pins"]) == (request.command, pin)


def test_degrees_at_which_pins_leave_no_layout_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The megatron style needs two tp ranks; where one is asked for, the error says so."""
    words = [
        "solve",
        str(FOLDER / "gpt.py"),
        "--gpus",
        "4",
        "--profile",
        "h100-sxm",
        "--global-batch",
        "4",
        "--seq-len",
    ]
    words += ["16", "--micro-batch", "1", "--pp", "2", "--no-prove", "--pin", "layers.*.attention=megatron"]
    assert main([*words, "-o", os.devnull]) == 0
    capsys.readouterr()
    assert main([*words, "--tp", "1", "-o", os.devnull]) == 3
    assert "'layers.*.attention=megatron' leaves no layout" in capsys.readouterr().err


def test_stages_that_do_not_fit_with_units_over_tp_are_solved_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are compared without layers that FSDP shards over shard x tp; with them the others may not fit beside."""
    solved = StageSolver.solved

    def plain_alone(self: StageSolver, *given: Any, is_plain: bool, **named: Any) -> Plan | None:
        return solved(self, *given, is_plain=is_plain, **named) if is_plain else None

    expected = in_stages(2, 1, None)
    monkeypatch.setattr(StageSolver, "solved", plain_alone)
    assert in_stages(2, 1, None) == pytest.approx(expected)


def test_shapes_that_do_not_fit_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short a step they promise, one that fits is found."""
    fastest_way, solved = Search.fastest_way, list[PipelineShape]()

    def unfit_at_first(self: Search, degrees: Degrees, least: float) -> tuple[float, Degrees | None]:
        solved.append(self.shape)
        return (math.inf, degrees) if self.shape == solved[0] else fastest_way(self, degrees, least)

    monkeypatch.setattr(Search, "fastest_way", unfit_at_first)
    monkeypatch.setattr("tpplan.search.pipelines.any_pipeline.solve_request", too_large)
    plan = found(None)
    assert isinstance(plan, PipelinePlan)
    assert PipelineShape.of(plan) != solved[0]


def test_degrees_with_a_long_estimate_are_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are solved have an estimate up to 3 % longer than the best step; without such a limit more are, and
    the step is the same. Bounds, which leave out as many here, are not looked at."""
    fastest_way, solved = Search.fastest_way, list[Degrees]()

    def noted(self: Search, degrees: Degrees, least: float) -> tuple[float, Degrees | None]:
        solved.append(degrees)
        return fastest_way(self, degrees, least)

    def planned() -> float:
        """The step of two stages of more micro-batches."""
        asked = {"stages": 2, "cluster": CLUSTER, "global_batch": 8 * BATCH, "seq_len": LENGTH}
        return tpplan.solve_stages(Stack, text, **asked, options=options(None), prove=False).predicted.step_time_s

    def no_floors(self: Search, _least: float) -> dict[Degrees, float]:
        return dict.fromkeys(self.degrees(), 0.0)

    monkeypatch.setattr(Search, "fastest_way", noted)
    monkeypatch.setattr(Search, "floors", no_floors)
    few, number = planned(), len(solved)
    monkeypatch.setattr(most_promising, "worth", lambda shape: math.inf)
    assert planned() == pytest.approx(few)
    assert 1 <= number < len(solved) - number


@pytest.mark.parametrize(("parts", "virtual"), [(2, 1), (2, 2), (4, 1)])
def test_estimates_are_near_the_steps_that_are_found(parts: int, virtual: int) -> None:
    """Of every tp degree and micro-batch, by relaxations, which are no longer, and by ILPs. Stages of a single layer
    hide fewer gathers than the whole model."""
    solver = stage_solver(None)
    shape = PipelineShape(parts=parts, virtual_stages=virtual)
    search, whole = Search(solver=solver, shape=shape, progress=None), WholeModel(solver=solver)
    ratios = []
    for degrees in search.degrees():
        estimator = Estimator(whole=whole, shape=shape, degrees=replace(degrees, once=True))
        relaxed = estimator.relaxed()
        estimate = estimator.of_ilp(relaxed)
        assert estimator.unlimited().seconds <= relaxed.seconds * (1 + 1e-9) <= estimate.seconds * (1 + 1e-8)
        step_s, _ = search.fastest_way(replace(degrees, once=True), math.inf)
        ratios.append(step_s / estimate.seconds)
    assert 0.97 < min(ratios) <= max(ratios) < 1.13


def too_large(*_given: Any, **_options: Any) -> Plan:
    raise InfeasibleError("too large")
