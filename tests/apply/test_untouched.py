"""Parameters that FSDP and DTensor leave alone, on real ranks against one process: those without dims, and all of a
model whose code would miss them if others took their place."""

import contextlib
import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from examples import eager_to_shard
from one_process import relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.apply.modules.applied_mesh import mesh_of
from tpplan.core.errors import UsageError
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.plan.report import render
from tpplan.verify.checks import Outcome
from tpplan.verify.collective_log import CollectiveLog, differences, listed
from tpplan.verify.prove_plan import prove_plan
from tpplan.verify.verify import verify_plan

DIM, HIDDEN, ROWS = 8, 32, 4


class MLP(nn.Module):
    """What could be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


class Tempered(MLP):
    """A parameter without dims, read by the module around the one that has it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.5))})
        self.bias = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.inner["scale"]) + self.bias * x.mean()


class InClosure(MLP):
    """A function that has a weight of its module."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.up.weight
        self.turned = lambda h: h @ weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x + self.turned(self.up(x)))).square().mean()


class Frozen(InClosure):
    """A weight that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.up.bias.requires_grad_(False)


class Clipped(MLP):
    """A gradient is clipped as soon as it is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_post_accumulate_grad_hook(self.clip)

    @staticmethod
    def clip(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.div_(100 * weight.grad.norm())


def batch(seed: int) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))


def example_inputs(rows: int, _seq_len: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, DIM, generator=torch.Generator().manual_seed(0))}


def solve(build: Callable[[], nn.Module], gpus: int, **options: object) -> Plan:
    return tpplan.solve(
        build,
        example_inputs,
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus, profile=eager_to_shard()),
        **{"global_batch": ROWS * gpus, "micro_batch": ROWS, "seq_len": 1, "precision": "fp32", **options},  # type: ignore[arg-type]
    )


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(build: Callable[[], nn.Module], plan: Plan | None, data_ranks: int) -> dict[str, Tensor]:
    """Gradients after two micro-batches, and parameters after a clipped step; of one process, with all batches."""
    torch.manual_seed(0)
    model = build()
    own = range(data_ranks)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
        own = range(plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_rank(dist.get_rank()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def backward(step: int) -> None:
        sum(model(batch(10 * step + rank)) for rank in own).div(len(own)).backward()

    if plan is not None:
        with tpplan.no_sync(model):
            backward(1)
    else:
        backward(1)
    backward(2)
    found = {f"{name}.grad": whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return found | {name: whole(p).detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("gpus", "options"),
    [(2, {"fsdp": 2}), pytest.param(4, {"tp": 2, "fsdp": 1}, marks=pytest.mark.long), (4, {"tp": 2, "fsdp": 2})],
)
def test_parameters_without_dims_train_beside_fsdp(gpus: int, options: dict[str, int]) -> None:
    plan = solve(Tempered, gpus, all_gpus=True, **options)
    assert plan.proof.status is ProofStatus.PROVEN
    expected = train(Tempered, None, plan.mesh.data_parallel)
    for found in run_ranks(gpus, train, Tempered, plan, plan.mesh.data_parallel):
        assert found.keys() == expected.keys()
        assert max(relative_errors(found, expected).values()) < 1e-4


def forward_of_mixed(plan: Plan) -> tuple[float, torch.dtype, torch.dtype]:
    torch.manual_seed(0)
    model = tpplan.apply_plan(Tempered(), plan)
    loss = model(batch(1))
    loss.backward()
    assert model.bias.grad is not None
    return loss.item(), loss.dtype, whole(model.bias.grad).dtype


def test_parameters_without_dims_are_read_in_the_dtype_of_the_others() -> None:
    plan = solve(Tempered, 2, fsdp=2, precision="bf16-mixed")
    torch.manual_seed(0)
    expected = Tempered()(batch(1)).item()
    for loss, dtype, of_gradient in run_ranks(2, forward_of_mixed, plan):
        assert (dtype, of_gradient) == (torch.bfloat16, torch.float32)
        assert loss == pytest.approx(expected, rel=0.05)


def issued_otherwise(build: Callable[[], nn.Module], plan: Plan) -> list[str]:
    """How a step's collectives differ from the plan's list."""
    model = tpplan.apply_plan(build(), plan)
    mesh = mesh_of(model)
    assert mesh is not None
    log = CollectiveLog(model, mesh)
    for number in range(plan.batch.accumulation_steps):
        is_last = number + 1 == plan.batch.accumulation_steps
        with contextlib.nullcontext() if is_last else tpplan.no_sync(model), log:
            model(batch(number)).backward()
    return [str(found) for found in differences(plan, listed(plan), log.issued)]


@pytest.mark.parametrize("build", [InClosure, Clipped, Frozen])
def test_an_untouched_plan_lists_what_is_issued(build: type[nn.Module]) -> None:
    plan = solve(build, 2, tp=1, all_gpus=True, global_batch=3 * ROWS * 2)
    assert plan.untouched is not None
    counts = {row.dtype: row.count for row in plan.collectives}
    # Hooks run at the end of every backward, and see the mean over ranks.
    assert counts == dict.fromkeys(("int32", "float32"), 3 if build is Clipped else 1)
    assert run_ranks(2, issued_otherwise, build, plan) == [[], []]
    prove_plan(plan, build, example_inputs)


MODEL = """
import torch
from test_untouched import {0} as build_model, example_inputs
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("build", [InClosure, Clipped])
def test_an_untouched_plan_is_verified(build: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(build.__name__))
    plan = solve(build, 2, tp=1, all_gpus=True, global_batch=3 * ROWS * 2)
    for options in ({"ranks": 2}, {"dry": True}):
        report = verify_plan(plan, str(file), **options)  # type: ignore[arg-type]
        assert [check for check in report.checks if check.outcome is not Outcome.PASS] == []


def train_copy(plan: Plan) -> dict[str, Tensor]:
    """Gradients of a copy, of a pickled copy, and of the model."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(Clipped(), plan)
    found = {}
    for twin, label in ((copy.deepcopy(model), "copied"), (pickle.loads(pickle.dumps(model)), "pickled")):
        twin(batch(dist.get_rank())).backward()
        found |= {f"{label} {name}": whole(p.grad).clone() for name, p in twin.named_parameters() if p.grad is not None}
    return found


def test_copies_of_an_untouched_model_average_without_its_hooks() -> None:
    plan = solve(Clipped, 2, tp=1, all_gpus=True)
    torch.manual_seed(0)
    reference = copy.deepcopy(Clipped())
    sum(reference(batch(rank)) for rank in range(2)).div(2).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for found in run_ranks(2, train_copy, plan):
        for label in ("copied", "pickled"):
            own = {name: found[f"{label} {name}"] for name in expected}
            assert max(relative_errors(own, expected).values()) < 1e-4


def unfreeze(plan: Plan) -> None:
    model = tpplan.apply_plan(Frozen(), plan)
    model.requires_grad_(True)
    with pytest.raises(UsageError, match=r"parameter up\.bias trains, and was frozen"):
        model(batch(0))


def test_what_was_frozen_is_not_trained_unaveraged() -> None:
    run_ranks(2, unfreeze, solve(Frozen, 2, tp=1, all_gpus=True))


@pytest.mark.parametrize("build", [InClosure, Clipped])
def test_a_model_whose_parameters_must_stay_trains_on_replicas(build: type[nn.Module]) -> None:
    plan = solve(build, 2, tp=1, all_gpus=True)
    assert plan.proof.status is ProofStatus.PROVEN
    assert (plan.mesh.replicate, plan.mesh.shard) == (2, 1)
    assert plan.fsdp.units == ()
    expected = train(build, None, 2)
    for found in run_ranks(2, train, build, plan, 2):
        assert found.keys() == expected.keys()
        assert max(relative_errors(found, expected).values()) < 1e-4


def test_the_plan_says_why_parameters_stay() -> None:
    plan = solve(InClosure, 2, tp=2)
    assert plan.untouched is not None
    assert "reads parameter up.weight past the module that has it" in plan.untouched
    assert Plan.from_dict(plan.to_dict()) == plan
    shown = " ".join(render(plan, width=200).split())
    assert "replicated parameters stay as they are, whole on each rank" in shown
    with pytest.raises(UsageError, match="plan with --precision bf16 or fp32"):
        solve(InClosure, 2, precision="bf16-mixed")
    with pytest.raises(UsageError, match="--fsdp 1"):
        solve(InClosure, 2, fsdp=2)
