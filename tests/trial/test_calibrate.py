"""Calibration finds the numbers that made the runs."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from examples import FOLDER, machine, solve_example

from tpplan.machine.profile import HardwareProfile
from tpplan.machine.tables import Fitted
from tpplan.plan.plan import Plan
from tpplan.search.models.user_model import load_model_file
from tpplan.search.planner import price
from tpplan.trial.calibrate import Run, calibrated, chooses_alike, solved_again

GPT = load_model_file(str(FOLDER / "gpt.py"))
#: kernels and links of a like cost: both numbers change what a step takes
RATES = {"flop_per_s": 1e10, "hbm_bytes_per_s": 1e12, "launch_s": 1e-9, "intra_bytes_per_s": 1e9, "latency_s": 1e-9}


def with_numbers(profile: HardwareProfile, **numbers: float) -> HardwareProfile:
    made = (Fitted(name=name, value=value, residual=0.0, runs=1, what="made up") for name, value in numbers.items())
    return replace(profile, fitted=tuple(made))


def seconds(plan: Plan, profile: HardwareProfile) -> float:
    priced = price(plan, GPT.build_model, GPT.example_inputs, profile=profile, loss=GPT.loss)
    return priced.predicted.step_time_s


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    return machine(**RATES)


@pytest.fixture(scope="module")
def plans(profile: HardwareProfile) -> list[Plan]:
    return [
        solve_example("gpt", profile, gpus=4, tp=tp, fsdp=fsdp, global_batch=batch, micro_batch=micro)
        for tp, fsdp, batch, micro in ((1, 4, 16, 4), (2, 2, 16, 2), (1, 4, 8, 2))
    ]


@pytest.mark.parametrize(("matmuls", "overlap"), [(1.7, 0.3), (0.8, 0.6), (1.0, 0.0)])
def test_the_numbers_that_made_the_runs_are_found(
    plans: list[Plan], profile: HardwareProfile, matmuls: float, overlap: float
) -> None:
    truth = with_numbers(profile, matmul_slowdown=matmuls, overlap_slowdown=overlap)
    runs = [Run(plan=plan, measured_s=seconds(plan, truth)) for plan in plans]
    found = calibrated(runs, GPT, profile, name="mine")
    numbers = {number.name: number for number in found.profile.fitted or ()}
    assert numbers["matmul_slowdown"].value == pytest.approx(matmuls, rel=0.02)
    assert numbers["overlap_slowdown"].value == pytest.approx(overlap, abs=0.04)
    assert numbers["matmul_slowdown"].runs == len(runs)
    for run, before, after in zip(runs, found.before_s, found.after_s, strict=True):
        assert before == pytest.approx(seconds(run.plan, profile))
        assert after == pytest.approx(run.measured_s, rel=0.01)
    assert not found.is_at_the_end
    assert HardwareProfile.from_dict(found.profile.to_dict(), "written") == found.profile


@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_one_run_fits_one_number_and_gives_no_bar_of_its_own(
    plans: list[Plan], profile: HardwareProfile, spread: float
) -> None:
    truth = with_numbers(profile, matmul_slowdown=1.4)
    run = Run(plan=plans[0], measured_s=seconds(plans[0], truth), spread=spread)
    found = calibrated([run], GPT, profile, name="mine")
    (number,) = found.profile.fitted or ()
    assert number.name == "matmul_slowdown"
    assert number.value == pytest.approx(1.4, rel=0.02)
    was_off_by = abs(math.log(seconds(plans[0], profile) / run.measured_s))
    assert was_off_by > 0.1
    assert number.residual == pytest.approx(max(was_off_by, spread), abs=1e-3)


def test_the_bar_of_several_runs_counts_the_numbers_fitted(plans: list[Plan], profile: HardwareProfile) -> None:
    truth = with_numbers(profile, matmul_slowdown=1.3, overlap_slowdown=0.3)
    runs = [
        Run(plan=plan, measured_s=seconds(plan, truth) * factor)
        for plan, factor in zip(plans, (1.0, 1.1, 0.9), strict=True)
    ]
    found = calibrated(runs, GPT, profile, name="mine")
    errors = [math.log(after / run.measured_s) for after, run in zip(found.after_s, runs, strict=True)]
    expected = math.sqrt(sum(error**2 for error in errors) / (len(runs) - 2))
    assert expected > 0.01
    assert [number.residual for number in found.profile.fitted or ()] == pytest.approx([expected] * 2, rel=0.05)


def test_a_machine_that_the_numbers_cannot_explain_is_said(plans: list[Plan], profile: HardwareProfile) -> None:
    run = Run(plan=plans[0], measured_s=100 * plans[0].predicted.step_time_s)
    found = calibrated([run], GPT, profile, name="mine")
    assert found.is_at_the_end
    (number,) = found.profile.fitted or ()
    assert number.residual == pytest.approx(math.log(100), rel=1e-3)
    assert found.after_s[0] < run.measured_s / 10


def test_solving_again_finds_the_same_plan_with_the_same_profile_and_another_where_links_cost_nothing() -> None:
    profile = machine(**RATES)
    plan = solve_example("gpt", profile, gpus=2, micro_batch="auto", recompute=None, reshard_after_forward=None)
    again = solved_again(plan, replace(GPT, has_length=True), profile)
    assert plan.batch.seq_len == again.batch.seq_len
    assert chooses_alike(plan, again)
    slow_links = machine(**{**RATES, "intra_bytes_per_s": 1e4})
    assert not chooses_alike(plan, solved_again(plan, GPT, slow_links))


def test_a_trace_is_held_against_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from forks import in_fork

    from tpplan.commands import main

    plan = solve_example("gpt", machine(), gpus=1, global_batch=4, micro_batch=2)
    plan_file, profile_file, trace = tmp_path / "one.json", tmp_path / "machine.json", tmp_path / "trace.json"
    plan.dump(plan_file)
    profile_file.write_text(machine().dumps())
    in_fork(trace_of_a_step, str(trace))
    assert main(["calibrate", *map(str, (plan_file, trace, FOLDER / "gpt.py")), "--profile", str(profile_file)]) == 0
    shown = capsys.readouterr().out
    assert "1 step in the trace" in shown
    assert "Ops that are predicted worst" in shown
    assert "linear 2x32x64, " in shown
    assert max(map(len, shown.splitlines())) <= 80


def trace_of_a_step(path: str) -> None:
    """A user's own loop under torch's profiler, without tpplan."""
    model, inputs = GPT.build_model(), GPT.example_inputs(2, 32)
    assert GPT.loss is not None
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            GPT.loss(model(inputs["tokens"]), inputs).backward()
        optimizer.step()
    profiler.export_chrome_trace(path)
