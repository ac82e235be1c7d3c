"""The four example models on real ranks: solved, applied, and compared with one process in loss and every gradient."""

import functools

import pytest
import torch
import torch.distributed as dist
from examples import NAMES, eager_to_shard, example, solve_example
from one_process import TOLERANCE, part, relative_errors
from ranks import run_ranks
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.plan.plan import Plan

BATCH, SEQ_LEN = 8, 32

Outcome = tuple[float, dict[str, torch.Tensor], list[str]]


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(7)
    return example(name).build_model()


def run(name: str, model: torch.nn.Module, plan: Plan | None, rank: int) -> float:
    """Forward and backward of the rank's share of the batch, in micro-batches; the mean loss of its share."""
    module = example(name)
    inputs = module.example_inputs(BATCH, SEQ_LEN)
    steps = 1
    if plan is not None:
        inputs = part(inputs, plan.mesh.data_rank(rank), plan.mesh.data_parallel)
        steps = plan.batch.accumulation_steps
    total = 0.0
    for step in range(steps):
        micro = part(inputs, step, steps)
        outputs = model(**tpplan.forward_inputs(model, micro))
        loss = module.loss(outputs, micro) / steps
        loss.backward()
        total += loss.item()
    return total


def one_process(name: str) -> Outcome:
    model = build(name)
    loss = run(name, model, None, 0)
    return loss, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}, list(model.state_dict())


def applied(name: str, plan: Plan) -> Outcome:
    model = tpplan.apply_plan(build(name), plan)
    loss = torch.tensor(run(name, model, plan, dist.get_rank()))
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    gradients = {}
    for key, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), key
        assert isinstance(parameter.grad, DTensor), key
        gradients[key] = parameter.grad.full_tensor()
    return loss.item() / dist.get_world_size(), gradients, list(model.state_dict())


#: (ranks, tp, fsdp) of every mesh of 2 or 4 ranks
MESHES = ((2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 2), (4, 2, 1), (4, 1, 4), (4, 1, 2))
#: on four ranks, what the default suite compares: every mesh of two axes, and one of four tp ranks
ON_FOUR_RANKS = (("llama", 4, 2, 2), ("llama", 4, 2, 1), ("llama", 4, 1, 2), ("nanogpt", 4, 4, 1))
CASES = [
    pytest.param(
        name,
        *mesh,
        id=f"{name}-{mesh}",
        marks=() if mesh[0] == 2 or (name, *mesh) in ON_FOUR_RANKS else pytest.mark.long,
    )
    for name in NAMES
    for mesh in MESHES
]


@functools.cache
def expected(name: str) -> Outcome:
    return one_process(name)


@functools.cache
def planned(name: str, ranks: int, tp: int, fsdp: int) -> Plan:
    """Micro-batches of 2, so plans accumulate as well."""
    options = {"global_batch": BATCH, "micro_batch": 2, "seq_len": SEQ_LEN}
    return solve_example(name, eager_to_shard(), gpus=ranks, tp=tp, fsdp=fsdp, **options)


@pytest.mark.parametrize(("name", "ranks", "tp", "fsdp"), CASES)
def test_applied_plans_equal_one_process(name: str, ranks: int, tp: int, fsdp: int) -> None:
    loss, gradients, keys = expected(name)
    outcomes = run_ranks(ranks, applied, name, planned(name, ranks, tp, fsdp))
    for applied_loss, applied_gradients, applied_keys in outcomes:
        assert abs(applied_loss - loss) < 1e-5 * abs(loss), (applied_loss, loss)
        assert applied_keys == keys
        assert applied_gradients.keys() == gradients.keys()
        errors = relative_errors(applied_gradients, gradients)
        worst = max(errors, key=lambda key: errors[key])
        assert errors[worst] < TOLERANCE, (worst, errors[worst])


@pytest.mark.parametrize(
    "mesh", [pytest.param({"tp": 2, "fsdp": 1}, marks=pytest.mark.long), {"tp": 2, "fsdp": 2}], ids=str
)
def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(mesh: dict[str, int]) -> None:
    """bfloat16 has 8 bits: gradients within a few percent of float32's. Also with tp alone, where FSDP only casts."""
    loss, gradients, _ = expected("llama")
    ranks = mesh["tp"] * mesh["fsdp"]
    options = {"global_batch": BATCH, "micro_batch": 2, "seq_len": SEQ_LEN, "precision": "bf16-mixed"}
    # Fast memory: a loss on slices of the classes makes more passes over them than one on the whole.
    plan = solve_example("llama", eager_to_shard(hbm_bytes_per_s=1e11), gpus=ranks, **mesh, **options)
    assert {c.dtype for c in plan.collectives if c.axis == "tp" and c.during != "step"} == {"bfloat16", "float32"}
    for applied_loss, applied_gradients, _ in run_ranks(ranks, applied, "llama", plan):
        assert abs(applied_loss - loss) < 0.01 * loss
        assert {gradient.dtype for gradient in applied_gradients.values()} == {torch.float32}
        assert max(relative_errors(applied_gradients, gradients).values()) < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_plans_do_shard(name: str) -> None:
    """What the comparison above compares: under tp most parameter elements are cut, or it would prove little."""
    plan = planned(name, 2, 2, 1)
    sizes = {name: torch.Size(p.shape).numel() for name, p in plan.parameter_plans().items()}
    cut = sum(sizes[name] for name, p in plan.parameter_plans().items() if str(p.placement).startswith("S"))
    assert cut > 0.5 * sum(sizes.values())
