"""Plans on real ranks: every rank times the same steps, and a trace has the ops and collectives of the plan."""

from pathlib import Path

import pytest
import torch
from examples import FOLDER, eager_to_shard, machine, solve_example
from ranks import run_ranks

from tpplan.core.errors import PlanMismatchError
from tpplan.plan.parts import COMPUTE, DATA_PARALLEL, OPTIMIZER, TENSOR_PARALLEL
from tpplan.plan.plan import Plan
from tpplan.search.models.subject import Subject
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.search.models.user_model import load_model_file
from tpplan.torch_internals.tensors import local_part
from tpplan.trial.trainee import Trainee
from tpplan.trial.turns import Tried, in_turns, profiled
from tpplan.trial.worst_predicted import Row, collective_rows, op_rows

GPT, LLAMA = str(FOLDER / "gpt.py"), str(FOLDER / "llama.py")
CPU = torch.device("cpu")
TURNS, STEPS = 2, 2


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [
        solve_example("gpt", eager_to_shard(), gpus=2, tp=2, global_batch=4, micro_batch=2),
        solve_example("gpt", machine(), gpus=2, tp=1, fsdp=2, global_batch=4, micro_batch=2),
    ]


def test_plans_take_turns_and_all_ranks_measure_the_slowest(plans: list[Plan]) -> None:
    def tried() -> list[Tried]:
        return in_turns(plans, load_model_file(GPT), CPU, turns=TURNS, steps=STEPS)

    first, second = run_ranks(2, tried)
    assert [one.turns for one in first] == [one.turns for one in second]
    for one, plan in zip(first, plans, strict=True):
        assert one.plan == plan
        assert [len(turn) for turn in one.turns] == [STEPS] * TURNS
        assert one.peak_bytes is None
        assert sum(one.measured_parts.values()) == pytest.approx(one.step_time_s)
        assert sum(one.predicted_parts.values()) == pytest.approx(plan.predicted.step_time_s)
    by_tp, by_fsdp = (one.parts for one in first)
    assert by_tp[TENSOR_PARALLEL] > 0 == by_fsdp[TENSOR_PARALLEL]
    assert by_fsdp[DATA_PARALLEL] > 0 == by_tp[DATA_PARALLEL]
    assert min(by_tp[COMPUTE], by_tp[OPTIMIZER], by_fsdp[COMPUTE], by_fsdp[OPTIMIZER]) > 0


def test_plans_of_another_number_of_ranks_are_refused(plans: list[Plan]) -> None:
    with pytest.raises(PlanMismatchError, match=r"plan 1 is for 2 GPUs .* and 1 ranks"):
        in_turns(plans, load_model_file(GPT), CPU, turns=1, steps=1)


def test_the_trace_of_a_step_has_the_plans_ops_and_collectives(plans: list[Plan]) -> None:
    plan, profile = plans[0], eager_to_shard()

    def rows() -> tuple[list[Row], list[Row]]:
        spec = load_model_file(GPT)
        trainee = Trainee.of(plan, spec, CPU)
        trainee.step()  # the first one also compares ranks
        trace = profiled(trainee, CPU)
        subject = Subject.of_plan(plan, spec.build_model, spec.example_inputs, spec.loss, profile=profile)
        traces = TraceCache(subject, Reuse())
        assignment = traces.traced(plan.batch.micro_batch).assignment_of(plan)
        ops = op_rows(trace, assignment, profile, 2, traces.reuse.executor)  # type: ignore[arg-type]
        return ops, collective_rows(trace, plan, profile)

    ops, collectives = run_ranks(2, rows)[0]
    linears = {row.what: row.calls for row in ops if row.what.startswith("linear ")}
    # 2 layers x 2 micro-batches; on a rank half of the heads' and the MLP's columns and rows
    assert linears, [row.what for row in ops]
    assert sum(linears.values()) == sum(_linear_calls(GPT)) * plan.batch.accumulation_steps
    assert all(row.measured_s > 0 for row in ops)
    planned = sum(row.count for row in plan.collectives)
    assert sum(row.calls for row in collectives) == planned


def _linear_calls(source: str) -> list[int]:
    """For each linear layer of a model, 1."""
    model = load_model_file(source).build_model()
    return [1 for module in model.modules() if isinstance(module, torch.nn.Linear)]


def test_made_up_weights_are_the_same_on_ranks_that_hold_the_same(plans: list[Plan]) -> None:
    def sums() -> dict[str, float]:
        model = Trainee.of(plans[0], load_model_file(GPT), CPU).model
        return {name: float(local_part(weight).double().sum()) for name, weight in model.named_parameters()}

    first, second = run_ranks(2, sums)
    halves = plans[0].parameter_plans()
    whole = [name for name, own in halves.items() if str(own.placement) == "R"]
    cut = [name for name in halves if name not in whole]
    assert whole
    assert cut
    assert all(first[name] == second[name] for name in whole)
    assert all(first[name] != second[name] for name in cut)
    assert all(abs(value) < 1e3 for value in first.values())


def test_a_plan_is_tried_on_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tpplan.commands import main

    plan = solve_example("gpt", machine(), gpus=1, global_batch=4, micro_batch=2)
    path, profile = tmp_path / "one.json", tmp_path / "machine.json"
    plan.dump(path)
    profile.write_text(machine().dumps())
    out = tmp_path / "mine.json"
    words = ["try", str(path), GPT, "--steps", "1", "--turns", "1", "--device", "cpu"]
    assert main([*words, "--calibrate", "-o", str(out), "--profile", str(profile)]) == 0
    shown = capsys.readouterr().out
    assert "one.json: a step by part" in shown
    assert "matmul_slowdown" in shown
    assert "solved again with this profile" in shown
    assert '"matmul_slowdown"' in out.read_text()
