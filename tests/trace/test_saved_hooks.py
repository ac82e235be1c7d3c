"""Hooks on what autograd saves, entered in a model's own forward: they see what one process sees, or are refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_process import relative_errors
from ranks import run_ranks
from test_traps import MLP, PLAIN, solve, step
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tpplan.plan.plan import ProofStatus


class Quantized(saved_tensors_hooks):
    """Saves 8 bits an element, scaled by the largest of all."""

    def __init__(self) -> None:
        super().__init__(coarse, lambda saved: saved[0] * saved[1])


def coarse(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scale = tensor.detach().abs().amax() / 4
    return (tensor.detach() / scale).round(), scale


def centered(power: int, tensor: Tensor) -> Tensor:
    return tensor.detach() - tensor.detach().mean() ** power


class Packs:
    """Hooks that are methods, and objects that are called."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.detach() * tensor.numel()

    def pack(self, tensor: Tensor) -> Tensor:
        return self(tensor)


class Hooked(MLP):
    """Squares what is between the layers while hooks are entered, which autograd saves."""

    def hooks(self) -> Any:
        raise NotImplementedError

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        with self.hooks():
            return h.square() * h


class BySubclass(Hooked):
    def hooks(self) -> Any:
        return Quantized()


class ByLambdas(Hooked):
    def hooks(self) -> Any:
        return saved_tensors_hooks(lambda t: t.detach() / t.detach().norm(), lambda t: t)


class ByPartials(Hooked):
    def hooks(self) -> Any:
        return saved_tensors_hooks(functools.partial(centered, 1), torch.Tensor.clone)


class ByObjects(Hooked):
    def hooks(self) -> Any:
        return saved_tensors_hooks(Packs(), lambda t: t)


class ByMethods(Hooked):
    def hooks(self) -> Any:
        return saved_tensors_hooks(Packs().pack, lambda t: t)


class Unpacking(Hooked):
    def hooks(self) -> Any:
        return saved_tensors_hooks(lambda t: t, lambda t: t / t.norm())


class Inside(nn.Module):
    """A module of its own."""

    def forward(self, h: Tensor) -> Tensor:
        with Quantized():
            return h.square() * h


class InAModule(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Inside()

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return self.inside(h)


class Checkpointed(MLP):
    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return checkpoint(self.hooked, h, use_reentrant=False)

    def hooked(self, h: Tensor) -> Tensor:
        with Quantized():
            return h.square() * h


class OnANode(MLP):
    """A hook on autograd's node."""

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        h = h.square()
        if h.requires_grad:
            h.grad_fn.register_prehook(lambda given: (given[0] / given[0].norm(),))
        return h


class OnWhatANodeSaves(MLP):
    """Hooks on one saved tensor."""

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        h = h.sigmoid()
        if h.requires_grad:
            h.grad_fn._raw_saved_result.register_hooks(lambda t: t.detach() / t.detach().norm(), lambda t: t)
        return h


class OnCpu(Hooked):
    def hooks(self) -> Any:
        return save_on_cpu()


class TorchsCheckpoint(MLP):
    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        return checkpoint(F.gelu, h, use_reentrant=False)


class Asking(MLP):
    """Asks for a number, which it has not while it is planned."""

    def between(self, h: Tensor, *_: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.detach() * t.detach().abs().max().item(), lambda t: t):
            return h.square() * h


WHOLE = [BySubclass, ByLambdas, ByPartials, ByObjects, ByMethods, Unpacking, InAModule, Checkpointed]


@pytest.mark.parametrize("model", [*WHOLE, OnANode, OnWhatANodeSaves, Asking, OnCpu], ids=lambda model: model.__name__)
def test_hooks_that_see_whole_tensors_run_whole(model: Callable[[], nn.Module]) -> None:
    plan = solve(model, PLAIN)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.opaque_modules()
    same_as_one_process(model, plan)


def test_the_plan_says_why_and_what_to_do() -> None:
    said = repr(solve(InAModule, PLAIN).opaque)
    assert "with Quantized():: the hooks of saved_tensors_hooks would be given slices" in said
    assert "enter them around the training step" in said


def test_a_checkpoint_is_no_reason_to_run_whole() -> None:
    plan = solve(TorchsCheckpoint, PLAIN)
    assert not plan.opaque_modules()
    same_as_one_process(TorchsCheckpoint, plan)


def same_as_one_process(model: Callable[[], nn.Module], plan: Any) -> None:
    loss, gradients = step(model, PLAIN, None)
    for applied_loss, applied in run_ranks(2, step, model, PLAIN, plan):
        assert applied_loss == pytest.approx(loss, rel=1e-5)
        assert max(relative_errors(applied, gradients).values()) < 1e-5
