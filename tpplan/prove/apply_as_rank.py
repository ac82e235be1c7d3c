"""Applies a plan in one process, without a process group, as a given rank would apply it.

The applied model runs on meta tensors: its collectives give shapes and send nothing.
"""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from tpplan.apply.apply import lay_out
from tpplan.core.errors import ModelError, first_line
from tpplan.plan.plan import Plan
from tpplan.torch_internals.groups import RankMesh
from tpplan.trace.hooks.generated_class import fold_forwards
from tpplan.trace.hooks.parameter_names import put_others
from tpplan.trace.hooks.rebind_closures import rebind

#: types of the tables that every module has
_TABLES = (dict, OrderedDict, set)


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device; functions that modules hold refer to the copy.

    Tensors that modules computed from weights when they were built (as torch.nn.utils.weight_norm does) are leaves in
    the copy, so that code that reads one before computing it again is noticed. Raises ModelError where a list or dict
    holds such a tensor.
    """
    images: dict[int, Any] = {}
    for value in (value for module in model.modules() for value in vars(module).values()):
        if type(value) in _TABLES and not value:  # tables of hooks: copying them would take most of the time
            images[id(value)] = type(value)()
        elif isinstance(value, torch.Tensor) and value.grad_fn is not None:
            images[id(value)] = value.detach().requires_grad_()
    try:
        found = copy.deepcopy(model, images)
    except RuntimeError as error:
        raise ModelError(
            "the model cannot be copied: a list or dict in a module holds a tensor that was computed from a weight "
            f"when the module was built; compute it in forward\n{first_line(error)}"
        ) from error
    rebind(found, images)
    fold_forwards(found)
    put_others(found)
    return found


def applied_as(model: nn.Module, plan: Plan, rank: int) -> nn.Module:
    """A copy of a model on the meta device, laid out with the plan's tensor parallelism as on a rank."""
    local = copied(model)
    if plan.untouched is None:
        lay_out(local, plan, RankMesh(plan.mesh.tp, rank))
    return local
