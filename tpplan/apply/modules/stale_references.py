"""Finds optimizers and hooks that were made for parameters which applying the plan has replaced.

An optimizer that holds replaced parameters would train nothing, without a sign. So the first training forward looks
once for such optimizers among all objects of the process, and makes their next step raise. It also refuses hooks on
gradients of parameters that FSDP2 shards: FSDP2 sets those gradients outside autograd and never calls the hooks.
"""

import gc
import weakref
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tpplan.core.errors import UsageError
from tpplan.torch_internals.tensors import gradient_hooks


@final
class Originals:
    """Weak references, by name, to a model's parameters before a plan is applied. Copies and pickles are empty."""

    def __init__(self, model: nn.Module | None = None) -> None:
        named = model.named_parameters() if model is not None else ()
        self._refs = [(name, weakref.ref(parameter)) for name, parameter in named]

    def __reduce__(self) -> tuple[type["Originals"], tuple[()]]:
        return Originals, ()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Originals":
        return Originals()

    def replaced(self, model: nn.Module) -> dict[int, tuple[str, Tensor]]:
        """Returns (name, parameter) by id for originals that are still alive and no longer parameters of the model."""
        kept = {id(parameter) for parameter in model.parameters()}
        alive = ((name, ref()) for name, ref in self._refs)
        return {id(found): (name, found) for name, found in alive if found is not None and id(found) not in kept}


def stop_optimizers(model: nn.Module, originals: Originals) -> None:
    """Makes every optimizer that holds a replaced parameter raise UsageError at its next step."""
    replaced = originals.replaced(model)
    if not replaced:
        return
    for optimizer in [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        name = next((replaced[id(parameter)][0] for parameter in held if id(parameter) in replaced), None)
        if name is not None:
            optimizer.register_step_pre_hook(_RefuseStep(name))


@final
@dataclass(frozen=True, slots=True)
class _RefuseStep:
    """A pre-step hook that raises UsageError; `name` is a replaced parameter that the optimizer holds."""

    name: str

    def __call__(self, optimizer: torch.optim.Optimizer, _args: object, _options: object) -> None:
        raise UsageError(
            f"{type(optimizer).__name__} was made before apply_plan and holds parameter {self.name} from before, which "
            "the model no longer uses: make the optimizer after apply_plan"
        )


def check_hooks(model: nn.Module) -> None:
    """Raises UsageError for a hook on the gradient of a parameter that FSDP shards."""
    if not isinstance(model, FSDPModule):
        return
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.dim() and gradient_hooks(parameter):
            raise UsageError(
                f"parameter {name} has a hook on its gradient (register_hook), which FSDP2 never calls: use "
                "register_post_accumulate_grad_hook"
            )
