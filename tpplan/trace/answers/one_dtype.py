"""Ops that devices run on operands of one dtype alone, which meta tensors let pass with several.

Under bfloat16 this is where a model's float32 buffer or mask meets an activation: a plan for it would be proven, and
its first step would fail."""

from typing import Any

import torch
from torch import Tensor

from tpplan.core.errors import ModelError
from tpplan.torch_internals import pytree
from tpplan.trace.answers.planned_device import planned_device, planned_precision
from tpplan.trace.hooks.call_rewriting import is_own_code_running

#: by name: products, convolutions, and writes of one tensor's elements into another
_NAMES = (
    *("linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_"),
)
#: overloads that name another dtype for their result, and may take several
_OF_OWN_DTYPE = frozenset({"dtype", "dtype_out"})
_ONE_DTYPE = frozenset(
    getattr(packet, overload)
    for packet in (getattr(torch.ops.aten, name) for name in _NAMES)
    for overload in packet.overloads()
    if overload not in _OF_OWN_DTYPE
)


class MixedDtypesError(ModelError):
    """An op of the model gets operands of several dtypes, and no device runs it so."""


def check_one_dtype(op: Any, args: tuple[Any, ...]) -> None:
    """Raises MixedDtypesError for an op that takes floating operands of one dtype and gets several. Under an autocast,
    which casts them, it does not."""
    if op not in _ONE_DTYPE:
        return
    leaves = (leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    dtypes = dict.fromkeys(str(leaf.dtype).removeprefix("torch.") for leaf in leaves)
    if len(dtypes) < 2 or is_own_code_running():
        return
    device, precision = planned_device(), planned_precision()
    if torch.is_autocast_enabled(device.type if device is not None else "cpu"):
        return
    under = f" under --precision {precision}" if precision else ""
    raise MixedDtypesError(f"{op.name().partition('::')[2]} gets {' and '.join(dtypes)}{under}, and takes one dtype")
