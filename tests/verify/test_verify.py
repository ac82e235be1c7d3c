"""tpplan verify: right plans pass on real ranks and on a fake group; every planted fault fails, and names the layer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from examples import FOLDER, eager_to_shard, solve_example
from ranks import run_ranks
from torch import nn

from tpplan.commands import main
from tpplan.core.errors import ModelError, UsageError, VerificationError
from tpplan.core.layout import R_STAR, Conversion, R, S
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import CrossingPlan, Plan
from tpplan.search.models.user_model import load_model_file
from tpplan.verify.checks import Check, Outcome, compare
from tpplan.verify.collective_log import differences, first_member, listed
from tpplan.verify.fake_step import mesh_of
from tpplan.verify.rank_task import Findings, Subject, applied, examine_model, reference_step, split
from tpplan.verify.shrink import in_float32, on_mesh, smaller_mesh, with_layers
from tpplan.verify.verify import verify_plan

GPT, MLP = str(FOLDER / "gpt.py"), str(FOLDER / "mlp.py")


@pytest.fixture(scope="module")
def gpt_plan() -> Plan:
    return solve_example("gpt", eager_to_shard(), gpus=4, tp=2, fsdp=2, global_batch=8, micro_batch=2)


@pytest.fixture(scope="module")
def mlp_plan() -> Plan:
    return solve_example("mlp", eager_to_shard(), gpus=2, tp=2, global_batch=8, micro_batch=4)


def outcomes(checks: tuple[Check, ...]) -> dict[str, Outcome]:
    return {check.name: check.outcome for check in checks}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out


# ---- right plans


def test_a_right_plan_passes_on_real_ranks(gpt_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    gpt_plan.dump(file)
    code, out = run(capsys, file, GPT)
    assert code == 0, out
    names = [line.split()[1] for line in out.splitlines() if line.startswith("pass")]
    assert names == ["proof", "parameters", "loss", "gradients", "collectives", "memory"]


def test_a_dry_run_tells_of_each_stage(gpt_plan: Plan) -> None:
    told: list[tuple[str, int, int]] = []
    report = verify_plan(gpt_plan, str(GPT), dry=True, progress=lambda *stage: told.append(stage))
    assert report.is_right
    assert told == [("prove", 0, 1), ("prove", 1, 1), ("fakes", 0, 1), ("fakes", 1, 1)]


@pytest.mark.long
@pytest.mark.slow
def test_a_plan_for_512_ranks_is_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = solve_example(
        "llama", eager_to_shard(), gpus=512, gpus_per_node=8, tp=4, fsdp=32, global_batch=512, micro_batch=2,
        precision="bf16-mixed", recompute="full",
    )  # fmt: skip
    assert plan.mesh == Mesh(replicate=4, shard=32, tp=4)
    file = tmp_path / "plan.json"
    plan.dump(file)
    code, out = run(capsys, file, FOLDER / "llama.py", "--dry", "--json")
    assert code == 0, out
    assert {check["name"]: check["outcome"] for check in json.loads(out)["checks"]} == dict.fromkeys(
        ("proof", "shapes", "collectives", "memory"), "pass"
    )


# ---- planted faults, by the command line


def test_a_wrong_conversion_fails_and_names_its_layer(
    gpt_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The value is right; its gradient would be a slice where it is to be a sum."""
    layer = "layers.1.feed_forward.up_proj"
    right = gpt_plan.boundary_plans()[layer]
    (crossing,) = right.inputs.values()
    assert crossing.conversion == Conversion(S(0), R_STAR)
    wrong = {path: CrossingPlan(Conversion(S(0), R), crossing.dtype) for path in right.inputs}
    file = tmp_path / "plan.json"
    replace(gpt_plan, boundaries={**gpt_plan.boundaries, layer: replace(right, inputs=wrong)}).dump(file)
    code, out = run(capsys, file, GPT)
    assert code == VerificationError.exit_code
    failed = out.splitlines()[2:4]
    assert failed[0].startswith("FAIL  proof")
    assert layer in failed[1], out


def test_a_missing_collective_fails_and_names_its_module(
    gpt_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = next(row for row in gpt_plan.collectives if "*" in row.where)
    rest = tuple(row for row in gpt_plan.collectives if row is not left_out)
    file = tmp_path / "plan.json"
    replace(gpt_plan, collectives=rest).dump(file)
    code, out = run(capsys, file, GPT, "--dry")
    assert code == VerificationError.exit_code
    assert f"collectives: {left_out.where}: {left_out.kind} of {left_out.num_bytes} bytes" in out
    assert f"listed 0, and the plan implies {left_out.count}" in out


# ---- planted faults, as ranks find them


def subject_of(source: str) -> Subject:
    return Subject(spec=load_model_file(source), dropped=frozenset())


@pytest.mark.parametrize("text", ["-5", "0", "nan"])
def test_a_timeout_is_above_zero(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "plan.json", "model.py", "--timeout", text])
    assert ended.value.code == UsageError.exit_code
    assert f"argument --timeout: expected seconds greater than 0, got '{text}'" in capsys.readouterr().err


def test_a_model_without_a_loss_is_a_model_error(tmp_path: Path) -> None:
    lines = "import torch", "def build_model(): return torch.nn.Linear(4, 4)", "def example_inputs(batch): return ()"
    (tmp_path / "model.py").write_text("\n".join(lines), encoding="utf-8")
    subject = subject_of(str(tmp_path / "model.py"))
    with pytest.raises(ModelError, match=r"model\.py: there is no loss to train with: define loss\(outputs, inputs\)"):
        subject.loss(torch.ones(4, requires_grad=True), ())


def found_by(plan: Plan, source: str, meddle: Callable[[nn.Module], None]) -> dict[str, Check]:
    """The checks of real ranks, with something done to the model on each once the plan is applied."""
    reference = reference_step(subject_of(source), plan)

    def rank() -> Findings:
        subject = subject_of(source)
        mesh = mesh_of(plan, "cpu")
        model = applied(subject, in_float32(plan), mesh)
        meddle(model)
        return examine_model(model, subject, plan, mesh, reference)

    return {check.name: check for check in compare(plan, reference, run_ranks(plan.mesh.num_gpus, rank))}


def corrupt(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("layers.2.up_proj.weight")._local_tensor[0, 0] += 1.0


def test_a_corrupted_weight_on_one_rank_is_found_by_name(mlp_plan: Plan) -> None:
    checks = found_by(mlp_plan, MLP, corrupt)
    assert checks["parameters"].outcome is Outcome.FAIL
    assert checks["parameters"].differences[0].startswith("layers.2.up_proj.weight differs on ranks")
    assert checks["loss"].outcome is Outcome.FAIL


def test_a_gradient_that_is_not_reduced_is_found_by_name(gpt_plan: Plan) -> None:
    """A norm's weight, read by ranks that see slices, as if they saw the whole."""
    name = next(name for name, own in gpt_plan.parameter_plans().items() if "R*" in map(str, own.reads.values()))
    own = gpt_plan.parameter_plans()[name]
    wrong = replace(own, reads=dict.fromkeys(own.reads, own.placement))
    checks = found_by(replace(gpt_plan, parameters={**gpt_plan.parameters, name: wrong}), GPT, lambda model: None)
    assert checks["parameters"].outcome is checks["loss"].outcome is Outcome.PASS
    assert checks["gradients"].outcome is checks["collectives"].outcome is Outcome.FAIL
    assert checks["gradients"].differences[0].startswith(f"{name}: ")


def test_a_collective_that_one_layer_alone_leaves_out_is_found_there(gpt_plan: Plan) -> None:
    planned = listed(gpt_plan)
    issued = [
        replace(one, where=name)
        for one, count in planned.items()
        for name, _ in gpt_plan.expand(one.where)
        for _ in range(count // len(list(gpt_plan.expand(one.where))))
    ]
    assert differences(gpt_plan, planned, issued) == []
    left_out = next(one for one in issued if one.where.startswith("layers.1."))
    rest = [one for one in issued if one is not left_out]
    (found,) = differences(gpt_plan, planned, rest)
    assert found.issued == found.planned - 1
    assert first_member(gpt_plan, found, rest) == left_out.where


# ---- smaller


@pytest.mark.parametrize(
    ("mesh", "ranks", "expected"),
    [
        (Mesh(replicate=2, shard=8, tp=4), 4, Mesh(tp=4)),
        (Mesh(replicate=2, shard=8, tp=4), 8, Mesh(shard=2, tp=4)),
        (Mesh(replicate=2, shard=8, tp=4), 16, Mesh(replicate=2, shard=2, tp=4)),
        (Mesh(shard=16), 4, Mesh(shard=4)),
        (Mesh(shard=6, tp=8), 4, Mesh(tp=4)),
        (Mesh(replicate=3, tp=2), 4, Mesh(tp=2)),
        (Mesh(shard=3, tp=2), 16, Mesh(shard=3, tp=2)),
    ],
)
def test_degrees_of_a_smaller_mesh_divide_the_plans(mesh: Mesh, ranks: int, expected: Mesh) -> None:
    assert smaller_mesh(mesh, ranks) == expected


def test_one_rank_is_no_tensor_parallelism() -> None:
    with pytest.raises(UsageError, match="give at least 2 ranks"):
        smaller_mesh(Mesh(shard=2, tp=4), 1)


@pytest.mark.long
@pytest.mark.slow
def test_a_plan_with_fewer_layers_and_ranks_passes(tmp_path: Path) -> None:
    plan = solve_example(
        "nanogpt", eager_to_shard(), gpus=8, tp=4, fsdp=2, global_batch=8, micro_batch=2, precision="bf16-mixed",
        recompute="selective",
    )  # fmt: skip
    report = verify_plan(plan, str(FOLDER / "nanogpt.py"), ranks=2, layers=1)
    assert report.is_right, report
    assert "replicate 1 x shard 1 x tp 2" in report.ran
    assert "the first 1 layers of transformer.h.*" in report.ran


def test_layers_and_ranks_are_left_out_by_name(gpt_plan: Plan) -> None:
    one = with_layers(gpt_plan, 1)
    assert {name for name in one.parameter_plans() if name.startswith("layers.")} == {
        name for name in gpt_plan.parameter_plans() if name.startswith("layers.0.")
    }
    smaller = on_mesh(gpt_plan, Mesh(tp=2))
    assert (smaller.batch.global_batch, smaller.mesh) == (gpt_plan.batch.global_batch // 2, Mesh(tp=2))


def test_inputs_are_cut_where_they_grow_with_the_batch() -> None:
    whole = {"tokens": torch.arange(12).view(6, 2), "positions": torch.arange(2), "scale": 3}
    one = {"tokens": torch.zeros(2, 2), "positions": torch.arange(2), "scale": 3}
    parts: list[Any] = split(whole, one, 3)
    assert torch.equal(torch.cat([part["tokens"] for part in parts]), whole["tokens"])
    assert all(part["scale"] == 3 and torch.equal(part["positions"], torch.arange(2)) for part in parts)
