"""Tensors that a forward leaves for the training loop to add to its loss: whole on every rank, with whole gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from one_process import relative_errors
from ranks import run_ranks
from test_traps import MLP, PLAIN, Named, solve
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.plan.plan import Plan, ProofStatus

LOSSES: list[Tensor] = []


@dataclass
class Kept:
    """An object that modules share."""

    losses: list[Tensor] = field(default_factory=list)


class Leaving(MLP):
    """Two layers; `leave` is given a loss of what is between them."""

    def leave(self, loss: Tensor) -> None:
        raise NotImplementedError

    def left(self) -> Tensor:
        raise NotImplementedError

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        h = F.relu(h)
        self.leave(h.softmax(-1).square().mean() + h.square().mean())
        return h


class OnItself(Leaving):
    aux: Tensor

    def leave(self, loss: Tensor) -> None:
        self.aux = loss

    def left(self) -> Tensor:
        return self.aux


class AsBuffer(Leaving):
    aux: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("aux", torch.zeros(()))

    def leave(self, loss: Tensor) -> None:
        self.aux = loss

    def left(self) -> Tensor:
        return self.aux


class InAList(Leaving):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def leave(self, loss: Tensor) -> None:
        self.losses.append(loss)

    def left(self) -> Tensor:
        return self.losses.pop()


class InADict(Leaving):
    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, dict[str, Tensor]] = {"by name": {}}

    def leave(self, loss: Tensor) -> None:
        self.losses["by name"]["aux"] = loss

    def left(self) -> Tensor:
        return self.losses["by name"]["aux"]


class InAnObject(Leaving):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def leave(self, loss: Tensor) -> None:
        self.kept.losses.append(loss)

    def left(self) -> Tensor:
        return self.kept.losses.pop()


class InAListOfTheFile(Leaving):
    def leave(self, loss: Tensor) -> None:
        LOSSES.append(loss)

    def left(self) -> Tensor:
        return LOSSES.pop()


class OnItsClass(Leaving):
    losses: ClassVar[list[Tensor]] = []

    def leave(self, loss: Tensor) -> None:
        self.losses[:] = [loss]

    def left(self) -> Tensor:
        return self.losses[0]


class OnAChild(Leaving):
    def leave(self, loss: Tensor) -> None:
        self.down.aux = loss  # type: ignore[assignment]

    def left(self) -> Tensor:
        return self.down.aux  # type: ignore[return-value]


class Logged(MLP):
    """What has no gradient is the code's own affair."""

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        h = F.relu(h)
        self.aux = h.detach().square().mean()
        return h


MODELS = [OnItself, AsBuffer, InAList, InADict, InAnObject, InAListOfTheFile, OnItsClass, OnAChild]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_the_loop_adds_has_whole_gradients(model: type[Leaving]) -> None:
    plan = solve(model, PLAIN)
    assert plan.proof.status is ProofStatus.PROVEN
    loss, gradients = step(model, None)
    for applied_loss, applied in run_ranks(2, step, model, plan):
        assert applied_loss == pytest.approx(loss, rel=1e-5)
        assert max(relative_errors(applied, gradients).values()) < 1e-5


def test_what_has_no_gradient_does_not_keep_weights_whole() -> None:
    layouts = {str(row.placement) for row in solve(Logged, PLAIN).parameter_plans().values()}
    assert layouts == {"S(0)", "S(1)"}


class LeftLarge(MLP):
    """What is between the layers is left as it is."""

    aux: Tensor

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        h = F.relu(h)
        self.aux = h
        return h


def test_what_is_declared_unused_may_be_left_sharded() -> None:
    kept, free = solve(LeftLarge, PLAIN), solve(LeftLarge, PLAIN, unused_outputs=("model.aux",))
    assert any("left" not in note and "leaves at model.aux" in note for note in kept.notes or ())
    assert not free.notes
    assert free.proof.status is ProofStatus.PROVEN
    assert free.predicted.step_time_s < kept.predicted.step_time_s
    _, gradients = plain_step(LeftLarge, None)
    for _, applied in run_ranks(2, plain_step, LeftLarge, free):
        assert max(relative_errors(applied, gradients).values()) < 1e-5


def plain_step(build: Callable[[], nn.Module], plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients of a step whose loop adds nothing."""
    return step(build, plan, adds=False)


def step(build: Callable[[], nn.Module], plan: Plan | None, adds: bool = True) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients of a step whose loop adds what was left, or nothing."""
    torch.manual_seed(0)
    own = build()
    model: nn.Module = Named(own)
    model = model if plan is None else tpplan.apply_plan(model, plan)
    loss = model(**PLAIN)
    if adds:
        loss = loss + own.left()  # type: ignore[operator]
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
