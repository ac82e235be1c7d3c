"""Code that asks where it runs: told while it is traced what it is told on ranks, run whole, or refused by name."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples import eager_to_shard
from one_process import relative_errors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.core.errors import ModelError, PlanError, TpplanError
from tpplan.machine.profile import load_profile
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.trace.answers.planned_device import PlannedDevice, planning_for
from tpplan.trace.trace import trace

DIM, HIDDEN, ROWS = 32, 128, 4
Between = Callable[["Mlp", Tensor], Tensor]


class Mlp(nn.Module):
    """Up and down, and what is between: on a slice of the hidden dim softmax is wrong, ReLU is right."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, self.up(x))).square().mean()


def chosen(on_ranks: bool, h: Tensor) -> Tensor:
    """What ranks take is not what a trace that was told otherwise would."""
    return h.softmax(-1) if on_ranks else F.relu(h)


def by_caught_numpy(_: Mlp, h: Tensor) -> Tensor:
    try:
        h.detach().numpy()
    except (RuntimeError, TypeError):
        return F.relu(h)
    return h.softmax(-1)


def by_caught_item(_: Mlp, h: Tensor) -> Tensor:
    try:
        is_finite = h.sum().item() < float("inf")
    except RuntimeError:
        return F.relu(h)
    return chosen(is_finite, h)


def by_caught_question(_: Mlp, h: Tensor) -> Tensor:
    try:
        found = bool((h == h).all())
    except Exception:
        return F.relu(h)
    return chosen(found, h)


def by_caught_rank(_: Mlp, h: Tensor) -> Tensor:
    """A refusal that the code catches is one all the same."""
    try:
        return chosen(dist.get_rank() > 0, h)
    except Exception:
        return F.relu(h)


def by_caught_bytes(_: Mlp, h: Tensor) -> Tensor:
    try:
        bytes(h.untyped_storage())
    except Exception:
        return F.relu(h)
    return h.softmax(-1)


def in_a_device_context(_: Mlp, h: Tensor) -> Tensor:
    with torch.device(h.device):
        scale = torch.arange(1.0, ROWS + 1)
    return F.relu(h) * scale[:, None]


def made_on_devices(_: Mlp, h: Tensor) -> Tensor:
    first = torch.zeros(ROWS, 1, device=h.device) + torch.ones(ROWS, 1, device="cpu")
    second = torch.tensor([2.0]).to(h.device) + h.new_ones(1, device=h.device)
    return F.relu(h.to(h.device)).cpu().to("cpu") * first * second.to(device=torch.device("cpu"))


ASKING: dict[str, Between] = {
    "device.type": lambda _, h: chosen(h.device.type == "cpu", h),
    "device": lambda _, h: chosen(h.device == torch.device("cpu"), h),
    "str(device)": lambda _, h: chosen(str(h.device) == "cpu", h),
    "is_meta": lambda _, h: chosen(not h.is_meta, h),
    "is_cpu": lambda _, h: chosen(h.is_cpu, h),
    "get_device": lambda _, h: chosen(h.get_device() == -1, h),
    "type": lambda _, h: chosen(h.type() == "torch.FloatTensor", h),
    "of a weight": lambda mlp, h: chosen(mlp.up.weight.device.type == "cpu", h),
    "of something made": lambda _, h: chosen(torch.zeros(1, device=h.device).is_cpu, h),
    "is_initialized": lambda _, h: chosen(dist.is_initialized(), h),
    "cuda": lambda _, h: chosen(not torch.cuda.is_available(), h),
    "class": lambda _, h: chosen(type(h) is Tensor, h),
    "class of a weight": lambda mlp, h: chosen(not isinstance(mlp.up.weight, nn.Parameter), h),
    "caught numpy": by_caught_numpy,
    "caught question": by_caught_question,
    "caught bytes": by_caught_bytes,
    "bytes of the storage": lambda _, h: chosen(h.untyped_storage().nbytes() == 4 * ROWS * HIDDEN, h),
    "pinned": lambda _, h: chosen(not h.is_pinned(), h),
    "device of DLPack": lambda _, h: chosen(h.__dlpack_device__()[0] == 1, h),
    "accelerator": lambda _, h: chosen(torch.accelerator.current_accelerator() is None, h),
    "GPUs": lambda _, h: chosen(torch.cuda.device_count() == 0, h),
    "a device context": in_a_device_context,
    "made on devices": made_on_devices,
    "moves modules": lambda mlp, h: F.relu(h) if mlp.down.to(h.device).cpu().to(device="cpu") is mlp.down else h,
}


def inputs(batch: int = ROWS, _seq_len: int = 1) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, DIM, generator=torch.Generator().manual_seed(1))}


def solve(between: Between) -> Plan:
    return tpplan.solve(
        lambda: Mlp(between),
        inputs,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=replace(eager_to_shard(), device_type="cpu")),
        global_batch=ROWS,
        micro_batch=ROWS,
        seq_len=1,
        tp=2,
        precision="fp32",
    )


def step(between: Between, plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model: nn.Module = Mlp(between)
    model = model if plan is None else tpplan.apply_plan(model, plan)
    loss = model(**inputs())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


@pytest.mark.parametrize("between", ASKING.values(), ids=ASKING)
def test_code_that_asks_equals_one_process(between: Between) -> None:
    """In one process without a group, `is_initialized` is another model: there the ranks agree with a rank alone."""
    plan = solve(between)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.device == "cpu"
    ((loss, gradients),) = run_ranks(1, step, between, None)
    for applied_loss, applied in run_ranks(2, step, between, plan):
        assert applied_loss == pytest.approx(loss, rel=1e-5)
        assert max(relative_errors(applied, gradients).values()) < 1e-5


ON_A_GPU: dict[str, Between] = {
    "device.type": lambda _, h: chosen(h.device.type == "cuda", h),
    "index": lambda _, h: chosen(h.device.index == 0 == h.get_device(), h),
    "is_cuda": lambda _, h: chosen(h.is_cuda and not h.is_cpu and not h.is_meta, h),
    "type": lambda _, h: chosen(h.type() == "torch.cuda.FloatTensor", h),
    "is_available": lambda _, h: chosen(torch.cuda.is_available() and torch.accelerator.is_available(), h),
    "capability": lambda _, h: chosen(torch.cuda.get_device_capability(h.device) == (9, 0), h),
    "moved": lambda _, h: chosen(h.cuda().to("cuda:0").to(device=0).to(torch.device("cuda")).is_cuda, h.cuda()),
    "made": lambda _, h: chosen(torch.arange(3, device="cuda").is_cuda, h * torch.ones(1, device=h.device)),
}


@pytest.mark.parametrize("between", ON_A_GPU.values(), ids=ON_A_GPU)
def test_code_is_told_of_the_gpu_that_is_planned_for(between: Between) -> None:
    with planning_for(PlannedDevice.of(load_profile("h100-sxm"))):
        graph = trace(Mlp(between), inputs())
    assert any("softmax" in op.target for op in graph.ops)


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (lambda _, h: h * (dist.get_rank() + 1), r"test_planned_device.py:\d+.*get_rank\(\)"),
        (by_caught_item, r"code goes on after test_planned_device.py:\d+: is_finite = "),
        (lambda _, h: h / dist.get_world_size(), r"get_world_size\(\)"),
        (lambda _, h: (dist.all_reduce(h), h)[1], r"all_reduce\(\)"),
        (by_caught_rank, r"get_rank\(\), which a plan cannot depend on"),
        (lambda _, h: h.relu() if h.data_ptr() % 64 else h, "the code asks a tensor where its data is"),
        (lambda _, h: h.relu() if h._cdata % 64 else h, "the code asks a tensor where its data is"),
        (lambda _, h: h.relu() if h.untyped_storage().data_ptr() % 64 else h, "asks a tensor where its data is"),
        (lambda _, h: h.relu() if h.storage().data_ptr() % 64 else h, "asks a tensor where its data is"),
    ],
)
def test_what_no_plan_can_know_is_refused_by_name(between: Between, message: str) -> None:
    with pytest.raises(TpplanError, match=message):
        solve(between)


@pytest.mark.parametrize("name", ["device_count", "memory_allocated", "get_device_name", "mem_get_info"])
def test_what_no_profile_says_of_a_gpu_is_refused_by_name(name: str) -> None:
    asking: Between = lambda _, h: h.relu() if getattr(torch.cuda, name)() else h  # noqa: E731
    with (
        planning_for(PlannedDevice(type="cuda")),
        pytest.raises(ModelError, match=rf"torch.cuda.{name}\(\), which the profile does not say"),
    ):
        trace(Mlp(asking), inputs())


@pytest.mark.parametrize("name", ["memory_allocated", "synchronize", "get_device_capability"])
def test_a_gpu_may_be_named_by_keyword(name: str) -> None:
    with planning_for(PlannedDevice(type="cuda", capability=(9, 0))):
        trace(Mlp(lambda _, h: (getattr(torch.cuda, name)(device=0), h)[1]), inputs())


def test_no_accelerator_is_available_on_a_planned_cpu_whatever_torch_was_built_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built_for = lambda check_available=False: None if check_available else torch.device("cuda")  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for)
    asking: Between = lambda _, h: chosen(torch.accelerator.current_accelerator(check_available=True) is None, h)  # noqa: E731
    with planning_for(PlannedDevice(type="cpu")):
        graph = trace(Mlp(asking), inputs())
    assert any("softmax" in op.target for op in graph.ops)


def test_what_no_profile_says_of_a_gpu_may_be_printed() -> None:
    with planning_for(PlannedDevice(type="cuda")):
        trace(Mlp(lambda _, h: (f"{torch.cuda.memory_allocated()}", h)[1]), inputs())


def test_outside_of_a_trace_nothing_is_told() -> None:
    asked = dist.is_initialized, torch.cuda.is_available
    address = torch.UntypedStorage.data_ptr
    with planning_for(PlannedDevice(type="cuda")):
        trace(Mlp(lambda _, h: h), inputs())
        with pytest.raises(ModelError, match="compute capability, which the profile does not say"):
            trace(Mlp(lambda _, h: h * torch.cuda.get_device_capability()[0]), inputs())
    assert (dist.is_initialized, torch.cuda.is_available) == asked
    assert torch.UntypedStorage.data_ptr == address
    assert not dist.is_initialized()


def test_a_device_is_read_as_it_is_written() -> None:
    for text in ("cpu", "cuda", "cuda 9.0"):
        assert str(PlannedDevice.parse(text, plan_path="proof.device")) == text
    with pytest.raises(PlanError, match=r"^proof\.device: expected a device.*got 'cuda 9'$"):
        PlannedDevice.parse("cuda 9", plan_path="proof.device")
    assert str(PlannedDevice.of(load_profile("a100-sxm-80gb"))) == "cuda 8.0"
