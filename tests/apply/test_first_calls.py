"""The first training forward on ranks calls what was called while the plan was made, or raises on every rank."""

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from ranks import run_ranks
from test_traps import Normalizing
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tpplan
from tpplan.core.errors import PlanMismatchError
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan
from tpplan.trace.noted_calls import digest, first_difference

DIM, HIDDEN, TEXTS, SEQ = 32, 64, 4, 8
VARIABLE = "TPPLAN_TEST_OTHER_WAY"


class Layer(nn.Module):
    """What is between may go another way."""

    def __init__(self, between: Callable[["Layer", Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.between, self.num_calls = between, 0

    def scaled(self, h: Tensor) -> Tensor:
        return F.gelu(h) * torch.tensor(2.0, device=str(h.device))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + self.down(self.between(self, self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, between: Callable[[Layer, Tensor], Tensor], *, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Layer(between)) for _ in range(2))
        self.dropout, self.recomputes = nn.Dropout(0.0), recomputes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.dropout(x).square().mean()


def plain(_: Layer, h: Tensor) -> Tensor:
    return F.gelu(h)


def by_variable(_: Layer, h: Tensor) -> Tensor:
    return h.softmax(-1) if VARIABLE in os.environ else F.gelu(h)


def by_count(layer: Layer, h: Tensor) -> Tensor:
    return h.softmax(-1) if layer.num_calls > 1 else F.gelu(h)


def by_length(_: Layer, h: Tensor) -> Tensor:
    return h.cumsum(1) if h.shape[1] > 2 * SEQ else F.gelu(h)


def by_threads(_: Layer, h: Tensor) -> Tensor:
    """Of a world that no trace has."""
    return F.gelu(h, approximate="tanh" if VARIABLE in os.environ else "none")


def by_device(_: Layer, h: Tensor) -> Tensor:
    return h.softmax(-1) if h.device.type == "cpu" else F.gelu(h)


def by_flag(_: Layer, h: Tensor) -> Tensor:
    return h.softmax(-1) if h.is_cpu else F.gelu(h)


def by_gpu(_: Layer, h: Tensor) -> Tensor:
    return F.gelu(h) if torch.cuda.is_available() else h.softmax(-1)


def naming_devices(layer: Layer, h: Tensor) -> Tensor:
    name = str(h.device)
    with torch.autocast(h.device.type, enabled=False):
        h = h.to(name) * torch.ones(1, device=name)
    return layer.scaled(h.to(h.device.type, torch.float32))


def inputs(batch: int = TEXTS, length: int = SEQ) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(length))}


def solve(
    between: Callable[[Layer, Tensor], Tensor],
    *,
    tp: int = 2,
    profile: HardwareProfile | None = None,
    model: type[Model] | None = None,
    **options: bool,
) -> Plan:
    profile = profile or replace(eager_to_shard(), device_type="cpu")
    return tpplan.solve(
        lambda: (model or Model)(between, **options),
        inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=profile),
        global_batch=2 * TEXTS // tp,
        micro_batch=TEXTS if tp == 2 else TEXTS // 2,
        seq_len=SEQ,
        tp=tp,
        precision="fp32",
    )


def step(model: nn.Module, shape: tuple[int, int] = (TEXTS, SEQ)) -> None:
    model(**inputs(*shape)).backward()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("between", [by_variable, by_threads, by_count, by_length])
def test_another_way_is_an_error_on_every_rank(between: Callable[[Layer, Tensor], Tensor], tp: int) -> None:
    plan = solve(between, tp=tp)

    def run() -> str:
        os.environ[VARIABLE] = "1"
        model = Model(between)
        if between is by_count:
            model.layers[1][1].num_calls = 1  # type: ignore[union-attr]
        model = tpplan.apply_plan(model, plan)
        with pytest.raises(PlanMismatchError) as raised:
            step(model, (TEXTS // 2 if tp == 1 else TEXTS, 4 * SEQ if between is by_length else SEQ))
        return str(raised.value)

    messages = run_ranks(2, run)
    assert len(set(messages)) == 1
    wanted = {by_variable: "softmax", by_threads: "gelu\\(tanh\\)", by_count: "softmax", by_length: "cumsum"}[between]
    assert f"module layers.{int(between is by_count)}.1 calls here" in messages[0]
    assert wanted.replace("\\", "") in messages[0]


def test_a_check_may_warn_or_be_left_out() -> None:
    plan = solve(by_variable)

    def run(check: bool | str) -> int:
        os.environ[VARIABLE] = "1"
        model = tpplan.apply_plan(Model(by_variable), plan, check=check)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model)
            step(model)
        return sum("calls here" in str(warning.message) for warning in caught)

    assert run_ranks(2, run, "warn") == [1, 1]
    assert run_ranks(2, run, False) == [0, 0]


def on_a_gpu() -> HardwareProfile:
    return replace(eager_to_shard(), device_type="cuda")


@pytest.mark.parametrize("between", [by_device, by_flag, by_gpu])
def test_code_that_asks_for_another_kind_of_device_is_an_error_on_every_rank(
    between: Callable[[Layer, Tensor], Tensor],
) -> None:
    plan = solve(between, profile=on_a_gpu())

    def run() -> str:
        model = tpplan.apply_plan(Model(between), plan)
        with pytest.raises(PlanMismatchError) as raised:
            step(model)
        return str(raised.value)

    messages = run_ranks(2, run)
    assert len(set(messages)) == 1
    assert "module layers.0.1 calls here" in messages[0]
    assert "call 3 there is softmax(-1), after module norm, module up" in messages[0]
    assert "is told that it runs on cuda, and it runs on cpu: plan with a profile of a cpu machine" in messages[0]


def test_a_plan_for_another_kind_of_device_runs_where_the_code_does_not_ask() -> None:
    """Devices that the code names are none of what is compared."""

    def run(plan: Plan, between: Callable[[Layer, Tensor], Tensor]) -> None:
        step(tpplan.apply_plan(Model(between), plan))

    for between in (plain, naming_devices):
        run_ranks(2, run, solve(between, profile=on_a_gpu()), between)


def in_another_dim(_: Layer, h: Tensor) -> Tensor:
    return h.softmax(-1 if VARIABLE in os.environ else 1)


def in_another_dim_by_name(_: Layer, h: Tensor) -> Tensor:
    return h.cumsum(dim=2 if VARIABLE in os.environ else 1)


def seen_otherwise(_: Layer, h: Tensor) -> Tensor:
    return h.view(*((TEXTS, -1) if VARIABLE in os.environ else (-1, HIDDEN))).view_as(h)


def turned(_: Layer, h: Tensor) -> Tensor:
    return h * (h.mT if VARIABLE in os.environ else h).sum()


def cast(_: Layer, h: Tensor) -> Tensor:
    return (h.type(torch.float64) if VARIABLE in os.environ else h).sin().float()


def without_gradient(_: Layer, h: Tensor) -> Tensor:
    with torch.no_grad() if VARIABLE in os.environ else contextlib.nullcontext():
        return F.gelu(h)


def beside_own_backward(_: Layer, h: Tensor) -> Tensor:
    h = Normalizing.apply(h)
    return h.softmax(-1) if VARIABLE in os.environ else F.gelu(h)


OTHERWISE = {
    in_another_dim: "softmax(-1)",
    in_another_dim_by_name: "cumsum(dim=2)",
    seen_otherwise: "view(n, -1)",
    turned: "mT()",
    cast: "to(torch.float64)",
    without_gradient: "_set_grad_enabled(False)",
    beside_own_backward: "softmax(-1)",
}


@pytest.mark.parametrize("between", OTHERWISE, ids=lambda between: between.__name__)
def test_dims_views_and_gradient_modes_are_compared(between: Callable[[Layer, Tensor], Tensor]) -> None:
    plan = solve(between)

    def run(is_other: bool) -> str:
        if is_other:
            os.environ[VARIABLE] = "1"
        model = tpplan.apply_plan(Model(between), plan)
        try:
            step(model)
        except PlanMismatchError as error:
            return str(error)
        return ""

    assert run_ranks(2, run, False) == ["", ""]
    messages = run_ranks(2, run, True)
    assert len(set(messages)) == 1
    assert f"there is {OTHERWISE[between]}" in messages[0]


class Skipping(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:] if VARIABLE in os.environ else self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_layer_that_is_not_called_is_an_error() -> None:
    plan = solve(plain, model=Skipping)

    def run() -> str:
        os.environ[VARIABLE] = "1"
        model = tpplan.apply_plan(Skipping(plain), plan)
        with pytest.raises(PlanMismatchError) as raised:
            step(model)
        return str(raised.value)

    assert all("module <root> calls here what it did not" in message for message in run_ranks(2, run))
    assert all("call 1 there is module 1" in message for message in run_ranks(2, run))


def no_cries(plan: Plan, recomputing: Plan) -> None:
    """What goes the proven way under other names: other batches, backends, modes, hooks."""
    call = nn.Module.__call__
    for shape in ((TEXTS, SEQ), (2, SEQ), (TEXTS, 2 * SEQ)):
        step(tpplan.apply_plan(Model(plain), plan), shape)
    model = tpplan.apply_plan(Model(plain), plan)
    model.eval()
    step(model)
    model.train()
    model.layers[0].register_forward_hook(lambda _m, _args, out: out.detach().float().std() and None)
    model.layers[0].register_forward_pre_hook(lambda _m, args: (args[0] + 0,))
    with sdpa_kernel(SDPBackend.MATH):
        step(model)
    with torch.autocast("cpu", torch.bfloat16):
        step(tpplan.apply_plan(Model(plain), plan))
    step(tpplan.apply_plan(Model(plain, recomputes=True), recomputing))
    model = tpplan.apply_plan(Model(plain), plan)
    with pytest.raises(TypeError):
        model(nothing=1)
    step(model)
    assert nn.Module.__call__ is call


def test_there_is_no_crying_wolf() -> None:
    run_ranks(2, no_cries, solve(plain), solve(plain, recomputes=True))


def test_a_plan_carries_what_its_modules_call() -> None:
    plan = solve(plain)
    assert plan.proof.calls is not None
    called = plan.called()
    assert {"layers.0.0", "layers.0.1", "layers.1.1.norm", "<root>"} <= called.keys()
    assert (
        called["layers.0.1"]
        == called["layers.1.1"]
        == (digest(("module norm", "module up", "gelu()", "module down", "add()")),)
    )
    assert Plan.from_dict(plan.to_dict()) == plan


def test_the_first_call_that_differs_is_found() -> None:
    planned = ("linear()", "gelu(none)", "linear()")
    assert first_difference(("linear()", "softmax()", "linear()"), digest(planned)) == 1
    assert first_difference(planned[:2], digest(planned)) == 2
    assert first_difference((*planned, "add()"), digest(planned)) == 3
