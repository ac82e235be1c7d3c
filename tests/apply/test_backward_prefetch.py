"""What FSDP's units gather in backwards that follow several forwards in a row, and when."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tpplan.apply.modules.backward_prefetch import noting_order
from tpplan.torch_internals.modules import group_of

LAYERS = 3


class Stack(nn.Module):
    """Linear layers, the first of which may run again at the end."""

    def __init__(self, *, is_twice: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.is_twice = is_twice

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers[: int(self.is_twice)]):
            x = torch.tanh(layer(x))
        return x


def backwards(is_noted: bool, is_twice: bool) -> list[list[str]]:
    """What happens in each of three backwards, of which the first two follow two forwards and the last one of its own:
    "gather 1" and "backward 1" of layer 1."""
    torch.manual_seed(0)
    model, events = Stack(is_twice=is_twice), list[str]()
    for number, layer in enumerate(model.layers):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
        group: Any = group_of(layer)  # type: ignore[arg-type]
        group.unshard = logged(group, group.unshard, events, f"gather {number}")
        layer.register_full_backward_pre_hook(lambda *_, number=number: events.append(f"backward {number}"))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found: list[list[str]] = []
    pending: list[Tensor] = []

    def forward() -> None:
        with noting_order(model) if is_noted and not pending else contextlib.nullcontext():
            pending.append(model(torch.ones(2, 4)).sum())

    def backward() -> None:
        events.clear()
        pending.pop(0).backward()
        found.append(list(events))

    for act in (forward, forward, backward, backward, forward, backward):
        act()
    return found


def logged(group: Any, unshard: Callable[..., None], events: list[str], event: str) -> Callable[..., None]:
    """`unshard` that logs where it gathers."""

    def noting(async_op: bool = False) -> None:
        was_there = group.is_unsharded or group._all_gather_result is not None
        unshard(async_op)
        if not was_there:
            events.append(event)

    return noting


def test_every_backward_gathers_each_unit_once_and_ahead() -> None:
    (found, _) = run_ranks(2, backwards, True, False)
    ahead = ["gather 2", "gather 1", "backward 2", "gather 0", "backward 1", "backward 0"]
    assert [sorted(events) for events in found] == [sorted(ahead)] * 3
    for events in found:
        assert events.index("gather 1") < events.index("backward 1")
        assert events.index("gather 0") < events.index("backward 0")
        assert events.index("gather 0") > events.index("gather 1") > events.index("gather 2")
    assert found[1] == found[2]


def test_by_itself_fsdp_gathers_too_much_and_then_nothing_ahead() -> None:
    """So that the test above can fail."""
    found, _ = run_ranks(2, backwards, False, False)
    assert found[0].count("gather 2") == 2
    assert found[1] != found[2]


def test_a_unit_that_runs_twice_is_left_to_fsdp() -> None:
    noted, _ = run_ranks(2, backwards, True, True)
    plain, _ = run_ranks(2, backwards, False, True)
    assert noted == plain
