"""A model's parameters as they were before a plan was applied, where others took their place.

An optimizer that was made of them would go on without a sign, and train nothing. So the first training forward looks
for such, among all objects of the process, once, and their next step raises. And it refuses hooks on the gradients of
what FSDP2 shards: FSDP2 makes those gradients past autograd, and never calls them.
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
    """The parameters by name, not held. A copied model has none."""

    def __init__(self, model: nn.Module | None = None) -> None:
        named = model.named_parameters() if model is not None else ()
        self._refs = [(name, weakref.ref(parameter)) for name, parameter in named]

    def __reduce__(self) -> tuple[type["Originals"], tuple[()]]:
        return Originals, ()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Originals":
        return Originals()

    def replaced(self, model: nn.Module) -> dict[int, tuple[str, Tensor]]:
        """Those that something holds still and the model does not, by id."""
        kept = {id(parameter) for parameter in model.parameters()}
        alive = ((name, ref()) for name, ref in self._refs)
        return {id(found): (name, found) for name, found in alive if found is not None and id(found) not in kept}


def stop_optimizers(model: nn.Module, originals: Originals) -> None:
    """Optimizers of parameters that others have replaced raise UsageError from now on when they step."""
    replaced = originals.replaced(model)
    if not replaced:
        return
    for optimizer in [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        name = next((replaced[id(parameter)][0] for parameter in held if id(parameter) in replaced), None)
        if name is not None:
            optimizer.register_step_pre_hook(_Stop(name))


@final
@dataclass(frozen=True, slots=True)
class _Stop:
    """A hook of an optimizer; `name` is a parameter that it holds as it was."""

    name: str

    def __call__(self, optimizer: torch.optim.Optimizer, _args: object, _options: object) -> None:
        raise UsageError(
            f"{type(optimizer).__name__} was made before apply_plan and holds parameter {self.name} as it was, which "
            "nothing trains any more: make the optimizer after apply_plan"
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
