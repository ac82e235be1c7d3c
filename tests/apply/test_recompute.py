"""Recomputation and ZeRO-2 as they are priced, against what a model keeps and runs."""

import gc
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import eager_to_shard
from one_process import relative_errors
from ranks import run_ranks
from test_models import loss, run, text
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import tpplan
from tpplan.apply.recompute import recompute
from tpplan.core.errors import InfeasibleError, UsageError
from tpplan.costs.layer_activations import layer_activations
from tpplan.costs.prediction import memory_replay, step_time
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.memory_ledger import Peak
from tpplan.costs.runs.execute import Executor, whole_strategy
from tpplan.costs.runs.kernels import Matmul
from tpplan.layouts.build_space import build_space
from tpplan.layouts.rules import Call
from tpplan.layouts.typecheck import Mistyped, typecheck
from tpplan.plan.plan import Plan, Recompute
from tpplan.trace.trace import trace

BATCH, LENGTH, LAYERS = 2, 16, 4
#: every mode, from the least that runs again to the most
MODES = tuple(sorted(Recompute, key=lambda mode: len(mode.lighter)))


class Block(nn.Module):
    """Two products with something light between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Like blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def solved(mode: str, **options: object) -> Plan:
    cluster = tpplan.Cluster(gpus=1, gpus_per_node=1, profile="cpu-gloo")
    pinned = {"tp": 1, "cluster": cluster, "recompute": mode} | options
    return tpplan.solve(
        Stack,
        text,
        loss=loss,
        global_batch=8,
        micro_batch=BATCH,
        seq_len=LENGTH,
        precision="fp32",
        **pinned,
    )


def kept_bytes(mode: str) -> int:
    """What a forward leaves for its backward, by storage, besides parameters and inputs."""
    model, inputs = Stack(), text(BATCH, LENGTH)
    for layer in model.layers if mode != "none" else ():
        recompute(layer, Recompute(mode))
    kept: list[Tensor] = []
    before = {id(tensor) for tensor in tensors_alive()}

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss(model(inputs["tokens"]), inputs)
    # A region's own are behind its own hooks, and its states of random numbers are bytes.
    kept += [t for t in tensors_alive() if id(t) not in before and t is not value and t.dtype is not torch.uint8]
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *inputs.values())}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.is_floating_point()}
    return sum(size for pointer, size in storages.items() if pointer not in given)


def tensors_alive() -> list[Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is Tensor]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_is_counted(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []

    def noting(lifetimes: Lifetimes) -> Peak:
        found.append(memory_replay.kept_bytes(lifetimes.assignment, lifetimes.executor))
        return memory_replay.memory(lifetimes)

    monkeypatch.setattr(step_time, "memory", noting)
    solved(mode)
    kept = kept_bytes(mode)
    assert found[0] == pytest.approx(kept, abs=64)
    assert (kept < kept_bytes("none")) == (mode != "none")


def flop(mode: str) -> int:
    model, inputs = Stack(), text(BATCH, LENGTH)
    for layer in model.layers if mode != "none" else ():
        recompute(layer, Recompute(mode))
    with FlopCounterMode(display=False) as counter:
        loss(model(inputs["tokens"]), inputs).backward()
    return counter.get_total_flops()


def test_what_runs_again_is_priced() -> None:
    """The last product of a layer does not: all that it keeps is there before it."""
    model = Stack().to("meta")
    graph = trace(model, text(BATCH, LENGTH), loss=loss)
    space, executor = build_space(graph, 1, unused_outputs=frozenset({"output"})), Executor()
    layers = layer_activations(space, executor, tuple(f"layers.{i}" for i in range(LAYERS))).layers
    again = sum((Counter(layer.again) for layer in layers.values()), Counter())
    calls = {Call.of(graph, op): again[op.name] for op in graph.ops if op.name in again}
    assert {call.target.split(".")[1] for call in calls} == {"layer_norm", "linear", "gelu"}
    flop_again = sum(
        2 * kernel.m * kernel.n * kernel.k * kernel.batch * times
        for call, times in calls.items()
        for kernel in executor.execute(call, whole_strategy(call), 1).forward
        if isinstance(kernel, Matmul)
    )
    assert flop_again == flop("full") - flop("none")


def test_time_and_memory_are_traded() -> None:
    plans = [solved(mode).predicted for mode in MODES]
    assert len({plan.time_s["compute"] for plan in plans}) == 1
    again = [plan.time_s.get("recomputation", 0.0) for plan in plans]
    peaks = [plan.peak_memory_bytes for plan in plans]
    assert again == sorted(again)
    assert 0 == again[0] < again[1] < again[-1]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[1] > peaks[-1]


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_plan_that_recomputes_equals_one_process(mode: str) -> None:
    options = {"tp": 2, "cluster": tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())}
    plan = solved(mode, **options)
    assert plan.recompute == {"layers.*": Recompute(mode)}
    value, gradients = run(Stack, text(BATCH, LENGTH), None)
    for applied_value, applied in run_ranks(2, run, Stack, text(BATCH, LENGTH), plan):
        assert applied_value == pytest.approx(value, rel=1e-5)
        assert max(relative_errors(applied, gradients).values()) < 1e-4


def test_zero_2_keeps_layers_gathered_and_gathers_once() -> None:
    cluster = tpplan.Cluster(gpus=4, gpus_per_node=4, profile="cpu-gloo")
    three, two = (solved("none", cluster=cluster, fsdp=4, reshard_after_forward=reshard) for reshard in (True, False))
    assert (three.fsdp.reshard_after_forward, two.fsdp.reshard_after_forward) == (True, False)
    assert (
        two.predicted.time_s.get("exposed data-parallel collectives", 0.0)
        < three.predicted.time_s["exposed data-parallel collectives"]
    )
    assert two.predicted.peak_memory_bytes > three.predicted.peak_memory_bytes


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(UsageError, match="unknown recomputation 'some'; known: none, full, selective"):
        solved("some")


def held_after_forward(model_of: type[nn.Module], inputs: Mapping[str, Tensor], plan: Plan) -> int:
    """On a rank, bytes of the storages that are there between forward and backward and were not before."""
    torch.manual_seed(0)
    model = tpplan.apply_plan(model_of(), plan)
    before = {tensor.untyped_storage().data_ptr() for tensor in local_tensors()}
    value = loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local_tensors()}
    value.backward()
    return sum(size for pointer, size in found.items() if pointer not in before)


def local_tensors() -> list[Tensor]:
    """Those with memory: the parent's fake tensors were inherited."""
    gc.collect()
    found = (tensor for tensor in gc.get_objects() if issubclass(type(tensor), Tensor))
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found)
    return [tensor for tensor in local if not isinstance(tensor, FakeTensor)]


@pytest.mark.long
def test_some_layers_are_recomputed_and_some_resharded_on_real_ranks() -> None:
    """k of n layers, as the memory limit leaves it: one process's function, and less is held the lower the limit."""
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard(intra_bytes_per_s=1e8))
    options = {"cluster": cluster, "fsdp": 2, "recompute": None, "all_gpus": True}
    ample = solved("none", **options | {"recompute": "none", "reshard_after_forward": False})
    with pytest.raises(InfeasibleError) as caught:
        solved("any", **options | {"memory_limit_bytes": 1.0})
    least, most = caught.value.needed_bytes, ample.predicted.peak_memory_bytes
    plans = [
        ample,
        *(solved("any", **options | {"memory_limit_bytes": least + s * (most - least)}) for s in (0.4, 0.0)),
    ]
    mixed = plans[1]
    assert 0 < len(mixed.recomputed_modules()) < LAYERS or 0 < sum(mixed.resharded_units().values()) < LAYERS
    inputs = text(BATCH, LENGTH)
    value, gradients = run(Stack, inputs, None)
    held = []
    for plan in plans:
        for applied_value, applied in run_ranks(2, run, Stack, inputs, plan):
            assert applied_value == pytest.approx(value, rel=1e-5)
            assert max(relative_errors(applied, gradients).values()) < 1e-4
        held.append(run_ranks(2, held_after_forward, Stack, inputs, plan)[0])
    assert held == sorted(held, reverse=True)
    assert held[0] > held[1] > held[2]


class Draws(Block):
    """Noise from outside torch."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + torch.from_numpy(np.random.rand(32).astype(np.float32)))
        return super().forward(x) * (random.random() + 0.5)


class Follows(Block):
    """A mean that is followed in a buffer, written to; another one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(32))
        self.register_buffer("replaced", torch.zeros(32))
        self.register_buffer("constant", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        self.written.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        self.replaced = 0.5 * self.replaced + x.detach().mean((0, 1))
        return super().forward(x * (self.constant + self.written)) * (1 + self.replaced)


class Normalizes(Block):
    """A batch norm, which says to nobody that it writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


class Remembers(Block):
    """Numbers, lists and features on the module, which the next forward starts from."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.past = 0, []
        self.norm.state = torch.zeros(32)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.past.append(x.detach().mean())
        y = super().forward(x * self.calls + self.norm.state) + sum(self.past)
        self.norm.state, self.last = y.detach().mean((0, 1)), y
        return y


def trained_with(block: type[Block], mode: str) -> dict[str, Tensor]:
    """Three steps: losses, gradients, and what the model has then."""
    torch.manual_seed(0)
    layers = nn.Sequential(block(), block())
    if mode != "none":
        for layer in layers:
            recompute(layer, Recompute(mode))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    found = {}
    for step in range(3):
        np.random.seed(step)
        random.seed(step)
        x = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(step))
        value = layers(x).square().mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found |= {f"loss {step}": value.detach(), f"drawn {step}": torch.tensor([np.random.rand(), random.random()])}
        found |= {f"{name} {step}": weight.grad.clone() for name, weight in layers.named_parameters()}
    found |= dict(layers.named_buffers())
    for i, layer in enumerate(layers):
        found[f"calls {i}"] = torch.tensor([getattr(layer, "calls", 0), len(getattr(layer, "past", ()))])
        found[f"last {i}"] = getattr(layer, "last", torch.zeros(1)).detach()
    return found


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("block", [Draws, Follows, Normalizes, Remembers])
def test_what_runs_again_runs_as_it_ran_and_leaves_no_trace(block: type[Block], mode: str) -> None:
    expected, found = trained_with(block, "none"), trained_with(block, mode)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_a_buffer_that_is_written_to_later_alone_is_refused() -> None:
    class Late(Follows):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                self.constant.mul_(2)
            return super().forward(x)

    block = Late()
    recompute(block, Recompute.FULL)
    x = torch.ones(BATCH, LENGTH, 32)
    block(x).mean().backward()
    with pytest.raises(UsageError, match="buffer constant of a Late that is recomputed was written to"):
        block(x)


class Recurrent(Block):
    """torch's own, which writes to products of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.cells(x)[0])


class InPlace(Block):
    """A product that is written to."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu_())


@pytest.mark.parametrize(("block", "why"), [(Recurrent, "aten.gru"), (InPlace, "aten.relu_")])
def test_what_writes_to_products_is_recomputed_fully_or_not_at_all(block: type[Block], why: str) -> None:
    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(block() for _ in range(2))

    def solve(mode: str) -> Plan:
        cluster = tpplan.Cluster(gpus=1, gpus_per_node=1, profile="cpu-gloo")
        given = {"global_batch": BATCH, "micro_batch": BATCH, "seq_len": LENGTH, "precision": "fp32"}
        return tpplan.solve(Model, text, loss=loss, cluster=cluster, recompute=mode, **{"micro_batch": 1, **given})

    full = solve("full")
    assert set(full.recomputed_modules().values()) == {Recompute.FULL}
    with pytest.raises(UsageError, match=f"layers.0 cannot be recomputed selectively: {why}"):
        solve("selective")
    with torch.device("meta"):
        graph = trace(Model(), text(BATCH, LENGTH), loss=loss)
    edited = replace(full, recompute=dict.fromkeys(full.recompute, Recompute.SELECTIVE))
    problem = typecheck(graph, edited)
    assert isinstance(problem, Mistyped)
    assert f"is recomputed selectively: {why}" in problem.message


def test_a_recurrent_layer_that_is_recomputed_selectively_raises() -> None:
    block = Recurrent()
    recompute(block, Recompute.SELECTIVE)
    with pytest.raises(UsageError, match=r"unsafe_split\S* runs in a module that is recomputed selectively"):
        block(torch.ones(BATCH, LENGTH, 32)).mean().backward()
