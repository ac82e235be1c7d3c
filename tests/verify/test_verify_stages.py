"""tpplan verify with plans of stages: right plans pass on real ranks and on fake tensors; planted faults fail, and name
the stage."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import FOLDER, eager_to_shard
from ranks import run_ranks
from torch import nn

import tpplan
from tpplan.apply.pipeline import pipeline_of
from tpplan.commands import main
from tpplan.core.errors import UsageError, VerificationError
from tpplan.core.layout import R
from tpplan.core.mesh import Mesh
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Pass, Plan
from tpplan.plan.proof_hash import why_unproven
from tpplan.plan.sections.ranks import StagePlan, TensorPlan
from tpplan.search.models.user_model import load_model_file
from tpplan.search.points.options import Options
from tpplan.verify.checks import Check, Outcome
from tpplan.verify.collective_log import listed
from tpplan.verify.prove_stages import prove_stages
from tpplan.verify.rank_task import Reference, Subject, reference_step
from tpplan.verify.stage_steps import StageFindings, applied_stages, examine_stages, fake_part, stages_in_float32
from tpplan.verify.verify import verify_plan
from tpplan.verify.verify_stages import compare_parts, compare_stages, on_fewer_ranks, scheduled

MLP = str(FOLDER / "mlp.py")
TIED = """
import torch
from torch import nn
import tpplan

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        return x + self.inner(x).relu()

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

build_model = Tied

def example_inputs(batch, seq_len):
    drawn = torch.randint(64, (batch, seq_len + 1))
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}

def loss(outputs, inputs):
    return tpplan.cross_entropy(outputs, inputs["targets"])
"""


def solved(
    source: str,
    *,
    gpus: int = 2,
    virtual: int = 1,
    schedule: Schedule | None = None,
    batch: int = 4,
    prove: bool = True,
    **options: Any,
) -> PipelinePlan:
    """A plan of two parts."""
    spec = load_model_file(source)
    own = {"loss": spec.loss, "precision": "fp32", "recompute": "none", **options}
    return tpplan.solve_stages(
        spec.build_model,
        spec.example_inputs,
        stages=2,
        virtual_stages=virtual,
        schedule=schedule or (Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B),
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=eager_to_shard()),
        global_batch=batch,
        seq_len=16,
        micro_batch=1,
        options=Options(**own),
        prove=prove,
    )


@pytest.fixture(scope="module")
def plan() -> PipelinePlan:
    return solved(MLP)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PipelinePlan]:
    file = tmp_path_factory.mktemp("tied") / "model.py"
    file.write_text(TIED, encoding="utf-8")
    return str(file), solved(str(file))


def proven(plan: PipelinePlan, *, is_as_solved: bool = True) -> PipelinePlan:
    spec = load_model_file(MLP)
    made = prove_stages(plan, spec.build_model, spec.example_inputs, loss=spec.loss, is_as_solved=is_as_solved)
    return made.plan


def subject_of(source: str) -> Subject:
    return Subject(spec=load_model_file(source), dropped=frozenset())


def found_by(
    plan: PipelinePlan, source: str, meddle: Callable[[nn.Module], None] = lambda model: None
) -> tuple[Reference, list[StageFindings]]:
    """What real ranks find, with something done to the model on each once the plan is applied."""
    reference = reference_step(subject_of(source), plan.stages[0])

    def rank() -> StageFindings:
        subject = subject_of(source)
        model = applied_stages(subject, stages_in_float32(plan), "cpu")
        meddle(model)
        return examine_stages(model, subject, plan, "cpu", reference)

    return reference, run_ranks(plan.num_gpus, rank)


def checks_of(plan: PipelinePlan, found: tuple[Reference, list[StageFindings]]) -> dict[str, Check]:
    return {check.name: check for check in compare_stages(plan, *found)}


def failed(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.outcome is not Outcome.PASS}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out


# ---- right plans


def test_a_right_plan_passes_on_real_ranks(
    plan: PipelinePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    plan.dump(file)
    code, out = run(capsys, file, MLP)
    assert code == 0, out
    names = [line.split()[1] for line in out.splitlines() if line.startswith("pass")]
    assert names == ["proof", "parameters", "loss", "evaluation", "gradients", "collectives", "sends", "memory"]
    assert "2 stages on 2 parts of replicate 1 x shard 1 x tp 1, 1f1b, fp32" in out


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "virtual": 2},
        {"tp": 1, "fsdp": 2, "virtual": 2, "reshard_after_forward": True},
        {"tp": 1, "fsdp": 2, "precision": "bf16-mixed", "recompute": "full", "reshard_after_forward": True},
        {"tp": 1, "fsdp": 2, "schedule": Schedule.ZERO_BUBBLE, "reshard_after_forward": True, "batch": 8},
        {"tp": 2, "virtual": 2, "schedule": Schedule.ZERO_BUBBLE},
    ],
    ids=["tp-interleaved", "fsdp-interleaved", "fsdp-mixed", "fsdp-zero-bubble", "tp-zero-bubble"],
)
def test_other_right_plans_pass(options: dict[str, Any]) -> None:
    """On real ranks, and each part on fake tensors."""
    plan = solved(MLP, gpus=4, **options)
    checks = checks_of(plan, found_by(plan, MLP))
    assert not failed(checks), [checks[name] for name in failed(checks)]
    parts = [fake_part(subject_of(MLP), plan, part) for part in range(plan.parts)]
    rehearsed = {check.name: check for check in compare_parts(plan, range(plan.parts), parts)}
    assert list(rehearsed) == ["shapes", "collectives", "sends", "memory"]
    assert not failed(rehearsed), rehearsed


def test_what_fsdp_keeps_is_gathered_in_the_pass_that_the_schedule_has() -> None:
    """With gathers in every micro-batch, of units that stay gathered after forward: of two forwards in a row the second
    gathers nothing, and so one backward does."""
    once = solved(MLP, gpus=4, tp=1, fsdp=2, virtual=2, batch=8, reshard_after_forward=False, prove=False)
    assert all(own.fsdp.gathered_once for own in once.stages)
    often = [replace(own, fsdp=replace(own.fsdp, gathered_once=None, whole_gradients=None)) for own in once.stages]
    plan = proven(replace(once, stages=tuple(often)), is_as_solved=False)
    first = plan.stages[0]
    passes = [
        sum(count for one, count in table.items() if one.kind == "all_gather" and one.during is Pass.BACKWARD)
        for table in (listed(first), scheduled(plan, first))
    ]
    assert passes[0] < passes[1]
    checks = checks_of(plan, found_by(plan, MLP))
    assert not failed(checks), [checks[name] for name in failed(checks)]


def test_weights_that_stages_share_pass(tied: tuple[str, PipelinePlan]) -> None:
    source, plan = tied
    assert all(own.stage is not None and own.stage.ties for own in plan.stages)
    found = found_by(plan, source)
    assert not failed(checks_of(plan, found))
    assert all("embedding.weight" in one.held for one in found[1])


def test_a_dry_run_mends_a_plan(plan: PipelinePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = (replace(own, proof=replace(own.proof, plan_hash=None)) for own in plan.stages)
    replace(plan, stages=tuple(without)).dump(tmp_path / "plan.json")
    code, out = run(capsys, tmp_path / "plan.json", MLP, "--dry", "--json", "-o", tmp_path / "mended.json")
    assert code == 0, out
    checks = {check["name"]: check["outcome"] for check in json.loads(out)["checks"]}
    assert checks == dict.fromkeys(("proof", "shapes", "collectives", "sends", "memory"), "pass")
    assert PipelinePlan.load(tmp_path / "mended.json") == plan
    assert not any(map(why_unproven, plan.stages))


# ---- what cannot be run


def test_ranks_are_no_fewer_than_parts(plan: PipelinePlan) -> None:
    with pytest.raises(UsageError, match=r"2 parts of a pipeline and --ranks 1 are fewer than the 2 .*--dry"):
        verify_plan(plan, MLP, ranks=1)
    with pytest.raises(UsageError, match="--layers: each stage of the plan has layers of its own"):
        verify_plan(plan, MLP, layers=1)


def test_a_stage_runs_on_fewer_ranks() -> None:
    plan = solved(MLP, gpus=16, tp=2, batch=16, prove=False)
    assert plan.ranks_per_stage == 8
    smaller = on_fewer_ranks(plan, None)
    assert (smaller.num_gpus, {own.mesh for own in smaller.stages}) == (4, {Mesh(tp=2)})
    assert on_fewer_ranks(plan, 16) is plan
    with pytest.raises(UsageError, match="tp = 2, and --ranks 3 are fewer than the 4 that they need"):
        on_fewer_ranks(plan, 3)


def test_what_is_deferred_on_fewer_ranks_is_counted_anew() -> None:
    plan = solved(MLP, gpus=16, tp=4, schedule=Schedule.ZERO_BUBBLE, batch=16, prove=False)
    smaller = proven(on_fewer_ranks(plan, 4), is_as_solved=False)
    sections = [(own.stage, made.stage) for own, made in zip(plan.stages, smaller.stages, strict=True)]
    ((_, first), (before, after)) = sections
    assert first
    assert before
    assert after
    assert first.deferred.kept_bytes == 0
    assert after.deferred.kept_bytes == pytest.approx(2 * before.deferred.kept_bytes, rel=0.5)
    assert after.deferred.largest_bytes == 2 * before.deferred.largest_bytes


# ---- planted faults, in the plan


def with_stage(plan: PipelinePlan, index: int, change: Callable[[Plan], Plan]) -> PipelinePlan:
    return replace(plan, stages=tuple(change(own) if i == index else own for i, own in enumerate(plan.stages)))


def with_section(**changes: Any) -> Callable[[Plan], Plan]:
    def change(own: Plan) -> Plan:
        assert isinstance(own.stage, StagePlan)
        return replace(own, stage=replace(own.stage, **changes))

    return change


def with_one_gather_more(own: Plan) -> Plan:
    row, *rest = own.collectives
    return replace(own, collectives=(replace(row, count=row.count + 1), *rest))


def with_another_layout(own: Plan) -> Plan:
    name = next(name for name, parameter in own.parameters.items() if parameter.placement != R)
    return replace(own, parameters={**own.parameters, name: replace(own.parameters[name], placement=R)})


WRONG: list[tuple[int, Callable[[Plan], Plan], str]] = [
    (0, with_section(last="layers.9"), r"stages\[0\]\.stage\.last: the model runs no module 'layers.9'"),
    (0, with_section(last="layers.0"), r"stages\[0\]\.stage\.absent: .* lacks layers\.1"),
    (1, with_section(received="layers.0"), r"stages\[1\]\.stage\.received: the plan says layers\.0, .* layers\.1"),
    (1, with_section(absent=("layers.0",)), r"stages\[1\]\.stage\.absent: .* lacks layers\.1$"),
    (1, with_section(receives=()), r"stages\[1\]\.stage\.receives: .* lacks float32\[1, 64\]"),
    (0, with_section(sends=(TensorPlan(shape=(1, 32), dtype="float32"),)), r"stages\[0\]\.stage\.sends: .*\[1, 32\]"),
    (0, with_section(in_flight=1), r"stages\[0\]\.stage\.in_flight: the plan says 1, .* keeps 2"),
    (1, with_one_gather_more, r"stages\[1\]\.collectives\[0\]: "),
    (1, with_another_layout, r"stages\[1\]\.(parameters|boundaries|collectives)"),
]


@pytest.fixture(scope="module")
def of_two_tp_ranks() -> PipelinePlan:
    return solved(MLP, gpus=4, tp=2)


@pytest.mark.parametrize(("index", "change", "said"), WRONG)
def test_a_wrong_stage_is_not_proven(
    of_two_tp_ranks: PipelinePlan, index: int, change: Callable[[Plan], Plan], said: str
) -> None:
    with pytest.raises(VerificationError, match=said):
        proven(with_stage(of_two_tp_ranks, index, change))


def test_the_command_line_says_what_is_wrong(
    plan: PipelinePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that both stages have."""
    with_stage(plan, 1, with_section(absent=("layers.0",))).dump(tmp_path / "plan.json")
    code, out = run(capsys, tmp_path / "plan.json", MLP)
    assert code == VerificationError.exit_code
    assert re.search(r"^FAIL  proof .*\n +stages\[1\]\.stage\.absent: .* lacks layers\.1$", out, re.MULTILINE), out


# ---- planted faults, as ranks find them


def wrong_scale(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name == "layers.2.up_proj.weight":
            parameter.register_hook(lambda gradient: gradient * 1.01)  # type: ignore[no-untyped-call]


def test_a_wrong_gradient_is_found_by_name(plan: PipelinePlan) -> None:
    checks = checks_of(plan, found_by(plan, MLP, wrong_scale))
    assert failed(checks) == {"gradients"}
    assert checks["gradients"].differences[0].startswith("layers.2.up_proj.weight: 1.0e-02")


def corrupt(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("head.weight")[0, 0] += 1.0


def test_a_wrong_weight_is_found_by_name(plan: PipelinePlan) -> None:
    checks = checks_of(plan, found_by(plan, MLP, corrupt))
    assert failed(checks) >= {"parameters", "loss", "evaluation", "gradients"}
    assert checks["parameters"].differences == ("head.weight differs on ranks 1",)


def not_added_up(model: nn.Module) -> None:
    pipeline_of(model).tied = []


def test_gradients_that_stages_do_not_add_up_are_found(tied: tuple[str, PipelinePlan]) -> None:
    source, plan = tied
    checks = checks_of(plan, found_by(plan, source, not_added_up))
    assert failed(checks) == {"gradients", "sends"}
    assert checks["gradients"].differences[0].startswith("embedding.weight: ")
    said = f"rank 0: send of {64 * 32 * 4} bytes (float32) to another stage: planned 1, issued 0"
    assert said in checks["sends"].differences


def test_other_lists_than_what_ranks_do_are_found(of_two_tp_ranks: PipelinePlan) -> None:
    plan = of_two_tp_ranks
    reference, found = found_by(plan, MLP)
    assert not failed(checks_of(plan, (reference, found)))
    checks = checks_of(with_stage(plan, 1, with_one_gather_more), (reference, found))
    assert failed(checks) == {"collectives"}
    assert all(re.match(r"rank [23], stage 1: ", line) for line in checks["collectives"].differences)
    stage = plan.stages[0].stage
    assert stage is not None
    other = with_stage(plan, 0, with_section(sends=(replace(stage.sends[0], dtype="bfloat16"),)))
    assert failed(checks_of(other, (reference, found))) == {"sends"}
    parameters = {**reference.parameters, "forgotten": torch.zeros(2)}
    checks = checks_of(plan, (replace(reference, parameters=parameters), found))
    assert checks["parameters"].differences == ("forgotten is in no stage",)
    late = [replace(found[0], evaluated=found[0].evaluated + 1.0), *found[1:]]
    assert failed(checks_of(plan, (reference, late))) == {"evaluation"}


def test_what_fake_tensors_show_is_compared(plan: PipelinePlan) -> None:
    parts = [fake_part(subject_of(MLP), plan, part) for part in range(plan.parts)]

    def failing(changed: PipelinePlan) -> Iterator[str]:
        return (check.name for check in compare_parts(changed, (0, 1), parts) if check.outcome is not Outcome.PASS)

    assert not [*failing(plan)]
    small = with_stage(plan, 1, lambda own: replace(own, predicted=replace(own.predicted, peak_memory_bytes=1e6)))
    assert [*failing(small)] == ["memory"]
    assert [*failing(with_stage(plan, 0, with_section(sends=())))] == ["sends"]
