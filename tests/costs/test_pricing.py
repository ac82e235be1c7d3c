"""tpplan.price: a solved plan costs what its solver said, another machine's price is that machine's, and recomputation
costs and saves what torch is seen to run, to keep and to send."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples import eager_to_shard, example, machine, solve_eagerly, solve_example
from gpu_scripts import gpu
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tpplan
from tpplan.core.errors import PlanMismatchError, ProfileError
from tpplan.costs.prediction import memory_replay, step_time
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.memory_ledger import Peak
from tpplan.machine.profile import Estimate, HardwareProfile
from tpplan.plan.parts import RECOMPUTATION
from tpplan.plan.plan import Compile, Pass, Plan, Recompute, WorkKind
from tpplan.torch_internals.groups import fake_group

#: bytes of a loss and of its gradient, which a plan's prediction leaves out
SCALARS = 16

#: the modes that run anything again; the selective ones are slow to hold against torch
RECOMPUTED = [mode for mode in Recompute if mode is not Recompute.NONE]
ONE_FAST = [pytest.param(mode, marks=pytest.mark.long) if mode.is_selective else mode for mode in RECOMPUTED]

#: of a plan, by its name here: what it is solved for
SOLVED = {
    "with FSDP": {"gpus": 4, "tp": 2, "fsdp": 2},
    "mixed precision": {"gpus": 2, "tp": 1, "precision": "bf16-mixed"},
}


def price(name: str, plan: Plan, profile: HardwareProfile) -> Plan:
    module = example(name)
    return tpplan.price(plan, module.build_model, module.example_inputs, profile=profile, loss=module.loss)


def recomputing(plan: Plan, mode: Recompute) -> Plan:
    (block,) = plan.blocks
    return dataclasses.replace(plan, recompute={block: mode})


@pytest.fixture(scope="module")
def gpt() -> Plan:
    """On two ranks of tp, in two micro-batches."""
    plan = solve_example("gpt", eager_to_shard(), gpus=2, tp=2, global_batch=8, micro_batch=4, prove=False)
    assert plan.collectives
    return plan


@pytest.fixture(scope="module")
def mlp() -> Plan:
    """On two ranks of tp."""
    plan = solve_example("mlp", eager_to_shard(), gpus=2, tp=2, global_batch=16, micro_batch=16, prove=False)
    assert plan.collectives
    return plan


def assert_same_price(name: str, plan: Plan) -> None:
    """But for the limit, which was not asked for."""
    priced = price(name, plan, eager_to_shard())
    assert dataclasses.replace(priced, solver=plan.solver) == plan
    assert priced.predicted.step_time_s == priced.solver.objective_s == pytest.approx(plan.solver.objective_s)


def test_a_solved_plan_costs_what_its_solver_said(gpt: Plan) -> None:
    assert_same_price("gpt", gpt)


@pytest.mark.parametrize("case", SOLVED)
def test_so_it_does_on_other_meshes(case: str) -> None:
    assert_same_price("mlp", solve_example("mlp", eager_to_shard(), prove=False, **SOLVED[case]))


def test_another_machine_has_its_own_price(mlp: Plan) -> None:
    slow = eager_to_shard(flop_per_s=1e8, hbm_bytes_per_s=1e8, launch_s=1e-8, name="slow")
    here, there = price("mlp", mlp, eager_to_shard()), price("mlp", mlp, slow)
    assert there.predicted.time_s["compute"] == pytest.approx(10 * here.predicted.time_s["compute"], rel=0.01)
    assert there.predicted.memory_bytes == here.predicted.memory_bytes
    assert (there.cluster.profile, there.cluster.profile_fingerprint) == ("slow", slow.fingerprint)
    assert (there.solver.bound_s, there.solver.gap) == (0.0, 1.0)  # nothing says that it is the best one there


def test_a_node_of_fewer_gpus_puts_tp_across_nodes(mlp: Plan) -> None:
    priced = price("mlp", mlp, machine(gpus_per_node=1, inter_bytes_per_s=1e6))
    assert priced.cluster.gpus_per_node == 1
    in_a_node = price("mlp", mlp, machine())
    part = "tensor-parallel collectives"
    assert priced.predicted.time_s[part] > 10 * in_a_node.predicted.time_s[part]


def test_what_the_profile_lacks_is_an_error(mlp: Plan) -> None:
    alone = dataclasses.replace(machine(), collectives=())
    with pytest.raises(ProfileError, match="within a node"):
        price("mlp", mlp, alone)


def test_a_plan_of_another_model_is_refused(mlp: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="made for another model"):
        price("gpt", mlp, machine())


def test_a_plan_that_does_not_type_is_refused(mlp: Plan) -> None:
    module, boundary = next((m, b) for m, b in mlp.boundaries.items() if b.outputs)
    broken = dataclasses.replace(mlp, boundaries={**mlp.boundaries, module: dataclasses.replace(boundary, outputs={})})
    with pytest.raises(PlanMismatchError, match=r"does not fit the model: .*(rule allows|expected|converts)"):
        price("mlp", broken, machine())


def test_units_that_stay_gathered_are_priced_as_solve_prices_them() -> None:
    options = {"gpus": 2, "tp": 1, "fsdp": 2, "prove": False}
    plan = solve_example("mlp", eager_to_shard(), reshard_after_forward=False, **options)
    resharded = solve_example("mlp", eager_to_shard(), **options)
    assert_same_price("mlp", plan)
    assert plan.predicted != resharded.predicted


def test_a_plan_for_compiled_layers_says_so_and_is_priced_so() -> None:
    options = {"gpus": 1, "prove": False}
    slow_memory = eager_to_shard(hbm_bytes_per_s=1e8)
    plan = solve_example("gpt", slow_memory, compile=True, **options)
    eager = solve_example("gpt", slow_memory, **options)
    assert (plan.compile, eager.compile) == (Compile.BLOCKS, Compile.NONE)
    assert plan.predicted.step_time_s < 0.98 * eager.predicted.step_time_s
    assert price("gpt", plan, slow_memory).predicted == plan.predicted
    undone = price("gpt", dataclasses.replace(plan, compile=Compile.NONE), slow_memory)
    assert undone.predicted.step_time_s == pytest.approx(eager.predicted.step_time_s)


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_solve_and_price_agree_on_recomputation(mode: Recompute) -> None:
    """To the last digit: there is one pricer."""
    plan = solve_example("gpt", eager_to_shard(), gpus=2, tp=2, recompute=mode, prove=False)
    priced = price("gpt", plan, eager_to_shard())
    assert plan.recompute == {"layers.*": mode}
    assert priced.collectives == plan.collectives
    assert priced.predicted == plan.predicted
    assert priced.collectives == plan.collectives


# Recomputation, against what torch does


@contextmanager
def applied(name: str, plan: Plan) -> Iterator[tuple[nn.Module, Any]]:
    """The model as rank 0 of a fake group, and a step's forward and backward."""
    dist.init_process_group("fake", rank=0, world_size=plan.mesh.num_gpus, store=FakeStore())
    try:
        module = example(name)
        torch.manual_seed(0)
        model = tpplan.apply_plan(module.build_model(), plan)
        inputs = module.example_inputs(plan.batch.micro_batch, plan.batch.seq_len)

        def step() -> None:
            for _ in range(plan.batch.accumulation_steps):
                module.loss(model(**tpplan.forward_inputs(model, inputs)), inputs).backward()
            model.zero_grad(set_to_none=True)

        yield model, step
    finally:
        dist.destroy_process_group()


class CountsFlop(HardwareProfile):
    """A machine on which a second is a FLOP of a product, and nothing else takes time."""

    def matmul(self, *, m: int, n: int, k: int, batch: int = 1, dtype: str, alignment: int = 16) -> Estimate:
        return Estimate(seconds=2.0 * m * n * k * batch, error_s=0.0)

    def attention(self, **_shape: object) -> Estimate:
        return Estimate.zero()

    def memory_bound(self, *, num_bytes: float) -> Estimate:
        return Estimate.zero()


def counts_flop() -> HardwareProfile:
    fields = {field.name: getattr(machine(), field.name) for field in dataclasses.fields(HardwareProfile)}
    return CountsFlop(**fields)


def flop_of(step: Any) -> int:
    """FLOP of a step's products, attention aside."""
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return sum(flop for op, flop in counts.items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm"))


@pytest.mark.parametrize("mode", ONE_FAST)
def test_what_runs_again_is_what_torch_runs_again(gpt: Plan, mode: Recompute) -> None:
    again = recomputing(gpt, mode)
    predicted = price("gpt", again, counts_flop()).predicted.time_s
    with applied("gpt", gpt) as (_, step):
        before = flop_of(step)
    with applied("gpt", again) as (_, step):
        after = flop_of(step)
    assert predicted["compute"] == before
    assert predicted.get(RECOMPUTATION, 0.0) == after - before
    assert (after > before) == (WorkKind.PRODUCT not in mode.keeps)


class Sent(TorchDispatchMode):
    """Counts functional collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {
            "all_reduce": "all_reduce",
            "all_gather_into_tensor": "all_gather",
            "reduce_scatter_tensor": "reduce_scatter",
            "all_to_all_single": "all_to_all",
        }
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name in names:
            self.counts[names[name]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ONE_FAST)
def test_collectives_that_run_again_are_listed(gpt: Plan, mode: Recompute) -> None:
    priced = price("gpt", recomputing(gpt, mode), machine())
    listed: Counter[str] = Counter()
    for collective in priced.collectives:
        if collective.during is not Pass.STEP:
            listed[collective.kind] += collective.count
    with applied("gpt", priced) as (_, step), Sent() as sent:
        step()
    assert sent.counts == listed


class FusedBlock(nn.Module):
    """Its first product's columns are two halves, so that ranks exchange rows of the weight at each reading."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 8 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Fused(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(dim, dim), nn.Linear(dim, dim)
        self.layers = nn.ModuleList(FusedBlock(dim) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("mode", list(Recompute))
def test_a_weight_whose_parts_ranks_exchange_is_exchanged_again_unless_that_is_kept(mode: Recompute) -> None:
    def inputs(batch: int, seq_len: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.zeros(batch, seq_len, dtype=torch.long)}

    def loss(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), inputs["ids"].flatten())

    # Neither a batch of 1 nor an odd length is divided: columns are.
    plan = solve_eagerly(Fused, inputs, batch=1, seq_len=511, loss=loss, recompute=mode, prove=False)
    read = plan.parameters["layers.*.up.weight"].reads["layers.*.up"]
    assert str(read) == "S(0; 128, 128)"
    exchanges = {
        during: sum(c.count for c in plan.collectives if c.kind == "all_to_all" and c.during is during)
        for during in (Pass.FORWARD, Pass.BACKWARD)
    }
    each = 3  # a layer: its bias rests whole
    assert exchanges == {Pass.FORWARD: each, Pass.BACKWARD: each * (2 if mode is Recompute.FULL else 1)}
    with fake_group(2):
        model, batch = tpplan.apply_plan(Fused(), plan), inputs(1, 511)
        with Sent() as sent:
            loss(model(**batch), batch).backward()
    assert sent.counts["all_to_all"] == sum(exchanges.values())


def kept_bytes(tracker: Any, name: str, plan: Plan) -> int:
    """What lies there between forward and backward, besides the parameters."""
    with applied(name, plan) as (model, _):
        module = example(name)
        inputs = module.example_inputs(plan.batch.micro_batch, plan.batch.seq_len)
        for parameter in model.parameters():
            tracker.add(parameter)
        before = tracker.made.live_bytes
        with tracker:
            loss = module.loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
        assert loss.requires_grad
        return tracker.made.live_bytes - before


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_what_is_freed_is_what_torch_frees(mlp: Plan, mode: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[float] = []

    def noting(lifetimes: Lifetimes) -> Peak:
        kept.append(memory_replay.kept_bytes(lifetimes.assignment, lifetimes.executor))
        return memory_replay.memory(lifetimes)

    monkeypatch.setattr(step_time, "memory", noting)
    again = recomputing(mlp, mode)
    for plan in (mlp, again):
        price("mlp", plan, machine())
    without, predicted = kept
    seen, tracked = (kept_bytes(gpu.Tracker(), "mlp", p) for p in (mlp, again))
    # Selectively, a block's first product is held beside what its relu keeps of it; the second is let go once summed.
    assert without - predicted == seen - tracked
    assert predicted < without


def test_one_module_is_made_again_at_a_time() -> None:
    plan = solve_example(
        "mlp", eager_to_shard(), gpus=1, global_batch=2048, micro_batch=2048, optimizer="sgd", prove=False
    )
    again = price("mlp", recomputing(plan, Recompute.FULL), machine())
    with applied("mlp", again) as (model, step):
        step()
        inputs = example("mlp").example_inputs(2048, again.batch.seq_len)
        tracked = gpu.tracked_peak(step, (*gpu.held_by(model), *inputs.values()))
    assert tracked - SCALARS <= again.predicted.peak_memory_bytes <= 1.1 * tracked
