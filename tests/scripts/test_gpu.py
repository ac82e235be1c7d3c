"""scripts/gpu/gpu.py: it runs without a solver, its plans are what its maker makes, its numbers those it measured.

What it says of a GPU needs one; here it runs at toy size on a CPU."""

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from gpu_scripts import SCRIPTS, gpu, kernels, make_plans, results
from torch import nn

from tpplan.machine.profile import load_profile
from tpplan.plan.plan import Plan, ProofStatus, Recompute

CPU = torch.device("cpu")
#: an interpreter to which pulp and highspy are not installed
WITHOUT_SOLVERS = """
import importlib.machinery, runpy, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ("pulp", "highspy") else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
import tpplan
from tpplan import solvers
for name in tpplan.__all__:
    getattr(tpplan, name)
assert solvers.available() == ("brute-force",), solvers.available()
try:
    solvers.solve(None)
except tpplan.core.errors.SolverError as error:
    assert "pip install highspy" in str(error)
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_it_runs_where_no_solver_is_installed(tmp_path: Path) -> None:
    """Measured, priced, applied, run: one plan of the six, with the sequence split and recomputation."""
    command = [sys.executable, "-c", WITHOUT_SOLVERS, str(SCRIPTS / "gpu.py"), "--toy", "--out", str(tmp_path)]
    ran = subprocess.run(
        [*command, "--plans", "tp8-sp-recompute"], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    profile = load_profile(tmp_path / "profile.json")
    assert profile.collectives == ()  # those of a fake group are no machine's
    found = json.loads((tmp_path / "results.json").read_text())
    assert [(row["name"], row["tp"], row["sequence_parallel"], row["recompute"]) for row in found["plans"]] == [
        ("tp8-sp-recompute", 8, True, {"layers.*": "full"})
    ]
    assert found["profile"] == {"name": profile.name, "fingerprint": profile.fingerprint}
    for row in found["plans"]:
        plan = Plan.load(tmp_path / row["plan"])
        assert plan.predicted.peak_memory_bytes == row["predicted_bytes"]
        assert min(row["measured_s"], row["predicted_s"], row["measured_bytes"]) > 0
        assert row["time_relative_error"] == row["predicted_s"] / row["measured_s"] - 1
        # Norms keep more on a CPU, where they are several ops.
        assert abs(row["memory_relative_error"]) < 0.1
        assert row["name"] in ran.stdout
    assert found["summary"]["keeps_time_bar"] is None


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", "nowhere"])
    assert (gpu.main(), torch.cuda.is_available()) == (2, False)
    assert "--toy" in capsys.readouterr().err


def test_a_plan_that_is_not_there_is_named() -> None:
    with pytest.raises(gpu.UsageError, match=r"no plan 'tp3'.*tp1, tp1-recompute, tp2"):
        gpu.plans(gpu.FULL, ["tp1", "tp3"])


def test_the_plans_are_those_that_were_to_be_made() -> None:
    plans = gpu.plans(gpu.FULL)
    assert list(plans) == [case.name for case in make_plans.CASES]
    for case in make_plans.CASES:
        plan = plans[case.name]
        assert plan.mesh.tp == case.tp
        assert results.splits_sequence(plan) == case.splits_sequence == ("-sp" in case.name)
        assert set(plan.recomputed_modules().values()) <= {case.recompute}
        assert bool(plan.recompute) == ("-recompute" in case.name) == (case.recompute is Recompute.FULL)
        assert plan.proof.status is ProofStatus.PROVEN
    assert {case.tp for case in make_plans.CASES} == {1, 2, 4, 8}


def choices(plan: Plan) -> Plan:
    """The plan without its prices, and without who made it."""
    reference = gpu.plans(gpu.FULL, ["tp1"])["tp1"]
    fields = (
        "tpplan_version",
        "torch_version",
        "predicted",
        "solver",
        "proof",
        "unruled_ops",
        "cluster",
        "collectives",
    )
    return dataclasses.replace(plan, **{name: getattr(reference, name) for name in fields})


@pytest.mark.long
@pytest.mark.parametrize("case", make_plans.CASES, ids=lambda case: case.name)
def test_the_plans_are_what_the_script_makes(case: make_plans.Case) -> None:
    """Where a change to costs or rules changes an optimum, run scripts/gpu/make_plans.py again."""
    made, shipped = make_plans.make(case), gpu.plans(gpu.FULL, [case.name])[case.name]
    assert choices(made).dumps() == choices(shipped).dumps()
    assert made.collectives == shipped.collectives


def test_the_toy_is_the_same_plan() -> None:
    full, toy = (gpu.plans(size, ["tp4-sp"])["tp4-sp"] for size in (gpu.FULL, gpu.TOY))
    assert {name: p.placement for name, p in toy.parameters.items()} == {
        name: p.placement for name, p in full.parameters.items()
    }
    assert toy.parameters["lm_head.weight"].shape == (256, 64)
    assert toy.proof.status is ProofStatus.UNPROVEN


def test_the_tracker_counts_each_storage_while_it_lives() -> None:
    tracker = gpu.Tracker()
    with tracker:
        first = torch.ones(1000)
        view = first.view(10, 100)
        second = first + 1
        del second
        third = torch.ones(500)
    assert view.numel() == 1000
    assert (tracker.made.live_bytes, tracker.made.peak_bytes) == (4 * 1500, 4 * 2000)
    del first, view, third
    assert tracker.made.live_bytes == 0


def test_a_step_with_a_planted_tensor_is_seen() -> None:
    """What is measured is what runs: a tensor that a step makes besides is in its peak."""
    plan = gpu.plans(gpu.TOY, ["tp2"])["tp2"]
    with gpu.fake_group(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gpu.tpplan.apply_plan(gpu.TOY.build_model(), plan)
        step, held = gpu.step_of(model, plan, gpu.batch(gpu.TOY, plan, CPU)), list(gpu.held_by(model))
        step()

        def wasteful() -> None:
            more = torch.ones(1_000_000)
            step()
            assert more.numel()

        assert gpu.tracked_peak(wasteful, held) - gpu.tracked_peak(step, held) == 4_000_000
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("times", "memory", "kept"),
    [
        ((1.05, 0.96, 1.5), (1.0, 1.02, 1.045), (True, True)),
        ((1.05, 0.85, 1.5), (1.0, 1.02, 1.055), (False, False)),
        ((1.0, 1.0, 1.0), (0.99, 1.0, 1.0), (True, False)),
    ],
)
def test_bars(times: tuple[float, ...], memory: tuple[float, ...], kept: tuple[bool, bool]) -> None:
    """Predicted over measured: half of the times within a tenth, every peak from 0 to 5 % above."""
    plan = gpu.plans(gpu.FULL, ["tp1"])["tp1"]
    rows = []
    for i, (time_ratio, memory_ratio) in enumerate(zip(times, memory, strict=True)):
        time_s = {"compute": time_ratio, "optimizer": 7.0}  # which does not run
        predicted = dataclasses.replace(
            plan.predicted, step_time_s=time_ratio + 7.0, time_s=time_s, peak_memory_bytes=1000.0 * memory_ratio
        )
        measured = results.Measured(steps_s=(0.5, 1.0, 2.0), kernels={"gemm": (3, 0.9)}, peak_bytes=1000)
        rows.append(results.Row(name=str(i), plan=dataclasses.replace(plan, predicted=predicted), measured=measured))
    summary = results.Summary.of(rows)
    assert (summary.keeps_time_bar, summary.keeps_memory_bar) == kept
    assert rows[0].measured.spread == 1.5
    assert rows[0].to_dict()["time_relative_error"] == pytest.approx(0.05 if times[0] > 1 else 0.0)
    assert summary.lines(judges=True).count("missed") == kept.count(False)
    assert "missed" not in summary.lines(judges=False)


@pytest.mark.long
@pytest.mark.parametrize("name", [case.name for case in make_plans.CASES])
def test_the_peak_at_full_size_is_the_tracked_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors in full width, with the fused kernels of a GPU where meta tensors would take other paths."""
    plan = gpu.plans(gpu.FULL, [name])[name]
    priced = gpu.tpplan.price(
        plan, gpu.FULL.build_model, gpu.llama.example_inputs, profile="h100-sxm", loss=gpu.llama.loss
    )
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    norm = torch.nn.functional.layer_norm
    monkeypatch.setattr(gpu.llama.F, "scaled_dot_product_attention", lambda q, k, v, **_: flash(q, k, v, 0.0, True)[0])
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: norm(x, self.normalized_shape, self.weight, None, 1e-5))
    with gpu.fake_group(plan.mesh.num_gpus):
        with torch.device("meta"):
            model = gpu.FULL.build_model()
        model = gpu.tpplan.apply_plan(model, priced)
        tokens = torch.empty(1, gpu.FULL.seq_len, dtype=torch.long, device="meta")
        step = gpu.step_of(model, priced, {"tokens": tokens, "targets": tokens})
        tracked = gpu.tracked_peak(step, (*gpu.held_by(model), tokens))
    low, high = results.MEMORY_BAR
    assert low <= priced.predicted.peak_memory_bytes / tracked - 1 <= high


def test_single_kernels_are_priced_and_timed_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a profile on which every byte takes so long, the ratio of two cases is that of their bytes."""
    monkeypatch.setattr(kernels, "WINDOW_S", 1e-3)
    profile = load_profile("cpu-gloo")
    cases = {case.name: case for case in kernels.cases(CPU, toy=True)}
    assert not any("grouped" in name for name in cases)  # a kernel of GPUs
    rows = {name: list(kernels.rows_of(cases[name], profile, CPU)) for name in ("silu(a) * b", "conv 1x1")}
    for name, (forward, backward) in rows.items():
        assert (forward.name, forward.direction, backward.direction) == (name, "forward", "backward")
        assert forward.measured_s > 0
        assert backward.measured_s > 0
        assert forward.ratio == forward.predicted_s / forward.measured_s
    one_product = kernels.kernel_time(profile, kernels.Matmul(m=2 * 64, n=8, k=8, batch=1, dtype="float32"))
    assert rows["conv 1x1"][0].predicted_s == pytest.approx(one_product.seconds)
    assert rows["conv 1x1"][1].predicted_s > rows["conv 1x1"][0].predicted_s
