"""What tpplan's own code, or torch's beneath it, raises is no counterexample; what a model's code raises is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.apply.collectives import redistribute
from tpplan.apply.modules import local_modules, parameter_reads
from tpplan.core.errors import InternalError
from tpplan.plan.plan import Plan
from tpplan.trace import record_fx
from tpplan.trace.answers import own_failure, planned_device
from tpplan.trace.whole import opaque_run

CLUSTER = tpplan.Cluster(gpus=2, gpus_per_node=2, profile="cpu-gloo")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 512)
        self.down = nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


class AsksItsWidth(Wide):
    """Code that fails on a slice, with an exception of its own: the plan is to blame."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        names = {512: "whole"}
        width: Any = names.get(hidden.shape[-1])
        return self.down(torch.relu(hidden) * len(width.upper())).square().mean()


class AsksForRoom(Wide):
    """Code that fails on a slice, in an op."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(hidden.as_strided((*x.shape[:2], 512), (x.shape[1] * 512, 512, 1))).square().mean()


def example_inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"x": torch.ones(batch, seq_len, 64)}


def solved(build: Callable[[], nn.Module] = Wide) -> Plan:
    """Megatron's pair."""
    pins = {"up": "columns", "down": "rows"}
    return tpplan.solve(build, example_inputs, cluster=CLUSTER, global_batch=8, seq_len=16, tp=2, pins=pins)


def raising(error: Exception) -> Callable[..., Any]:
    """A function of tpplan's that raises, as far as its traceback tells."""
    scope: dict[str, Any] = {"error": error}
    file = str(Path(tpplan.__file__).parent / "broken.py")
    exec(compile("def fail(*_, **__):\n    raise error", file, "exec"), scope)
    failing: Callable[..., Any] = scope["fail"]
    return failing


def test_the_model_is_sharded_where_nothing_fails() -> None:
    assert any(parameter.placement.dim is not None for parameter in solved().parameter_plans().values())


@pytest.mark.parametrize("build", [AsksItsWidth, AsksForRoom])
def test_a_model_whose_own_code_fails_on_slices_gets_another_plan(build: Callable[[], nn.Module]) -> None:
    assert solved(build).proof.status == "proven"


#: what breaks, as in a torch that lacks something: what an applied forward calls in tpplan, and the error
BREAKS = {
    "reading a parameter": (parameter_reads, "spec_of", AttributeError("'DTensor' object has no attribute '_spec'")),
    "a collective": (redistribute, "_run_collective", RuntimeError("no such operator")),
    "the order of arguments of a collective": (redistribute, "_wait", TypeError("got an unexpected argument 'group'")),
    "a module's forward": (local_modules, "Frame", KeyError("_parameters")),
}


def test_files_that_are_known_by_their_place_are_there() -> None:
    assert all(
        Path(file).is_file() for file in (*own_failure._APPLYING, *planned_device._MODES, *planned_device._METHODS)
    )


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_in_applying_ends_the_solve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, function, error = BREAKS[name]
    solved()  # prices the conversions, which run the same code, before it breaks
    monkeypatch.setattr(home, function, raising(error))
    with pytest.raises(InternalError, match=type(error).__name__) as caught:
        solved()
    assert torch.__version__ in str(caught.value)
    assert "tpplan doctor" in str(caught.value)


def test_what_breaks_in_the_trace_is_no_reason_to_run_a_module_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_fx, "is_own_code_running", raising(AttributeError("no such thing")))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    class Calls(Wide):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Function.apply(x))  # type: ignore[no-untyped-call]

    with pytest.raises(InternalError, match="AttributeError in broken"):
        solved(Calls)


def test_what_breaks_in_observing_a_module_is_no_reason_to_take_the_one_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.sum().item()

    class Reads(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.up = Asks(64, 512)

    assert solved_or_none(Reads) is not None
    monkeypatch.setattr(opaque_run, "version_of", raising(AttributeError("no such thing")))
    with pytest.raises(InternalError, match="AttributeError in broken"):
        solved_or_none(Reads)


def solved_or_none(build: Callable[[], nn.Module]) -> Plan:
    return tpplan.solve(build, example_inputs, cluster=CLUSTER, global_batch=8, seq_len=16)


def test_the_files_whose_failures_are_never_the_models_exist() -> None:
    assert all(Path(file).is_file() for file in (*own_failure._APPLYING, *planned_device._MODES))
