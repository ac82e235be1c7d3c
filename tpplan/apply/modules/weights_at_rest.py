"""Keeps a model's weights between forwards as the plan placed them: in FSDP's shards, and no other tensors in place."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tpplan.core.errors import PlanMismatchError
from tpplan.core.graph import joined_name
from tpplan.torch_internals.modules import own_parameters


def keep_at_rest(model: nn.Module, reduced: Iterable[tuple[nn.Module, str]]) -> None:
    """Installs hooks by which a forward without gradients leaves no weight gathered, so that `model.parameters()` are
    the ones to train, and by which a forward raises PlanMismatchError where others are in their place: with gradients,
    and always under FSDP, which would gather its own.

    reduced: module and name of the parameters whose gradients are reduced as they arrive; under FSDP all of them are.
    """
    every = isinstance(model, FSDPModule)
    names = {id(module): name for name, module in model.named_modules()}
    of_model = ((module, own) for module in model.modules() for own in own_parameters(module))
    slots = {
        joined_name(names[id(module)], own): (own_parameters(module), own)
        for module, own in (of_model if every else reduced)
    }
    check = OwnWeights(tuple((label, *slot) for label, slot in slots.items()), is_gathered=every)
    model.register_forward_pre_hook(check, prepend=True)
    if every:
        model.register_forward_hook(_free_gathered)


@final
@dataclass(frozen=True, slots=True, eq=False)
class OwnWeights:
    """A forward pre-hook of the root. `slots` are a parameter's name, the table that has it, and its name there."""

    slots: tuple[tuple[str, Mapping[str, Tensor | None], str], ...]
    is_gathered: bool

    def __call__(self, _model: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling() or not (self.is_gathered or torch.is_grad_enabled()):
            return
        for label, table, name in self.slots:
            own = table.get(name)
            # A DTensor is a parameter by this mark alone (torch.nn.parameter).
            if own is not None and type(own) is not nn.Parameter and not getattr(own, "_is_param", False):
                raise PlanMismatchError(
                    f"another tensor is in place of parameter {label}, as torch.func.functional_call puts it there: "
                    "ranks would read their own, or have the gradient of a part of the batch; write the values into "
                    "the parameters under torch.no_grad, or compute them inside the model's forward"
                )


def _free_gathered(model: nn.Module, _args: Any, _output: Any) -> None:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
