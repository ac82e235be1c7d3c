"""Records what a loss does to a sharded output as ops on a rank's slice, as DTensor runs them.

Outside of a model's forward a sharded output is a DTensor. Its ops are not recorded, so a loss that shifts, flattens or
casts one before it hands it to tpplan.cross_entropy could not be traced.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tpplan.torch_internals.recording import is_recording, untraced
from tpplan.torch_internals.tensors import local_part
from tpplan.trace.hooks.call_rewriting import own_code

#: functions that move or cast the elements of one tensor
_MOVES = frozenset({
    "__getitem__", "narrow", "select", "contiguous", "clone", "float", "bfloat16", "half", "double", "to", "type",
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "movedim", "swapaxes",
})  # fmt: skip
#: those of them that are given the sizes of their result
_SIZED = frozenset({"view", "reshape"})


class LossOnSlices(TorchFunctionMode):
    """A mode under which such functions run on the slice. DTensor says what the result is a slice of; where it would
    communicate first, the slice has another shape, and the function runs as it is."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given, name, kwargs = args[0] if args else None, getattr(func, "__name__", ""), kwargs or {}
        if not isinstance(given, DTensor) or name not in _MOVES or not is_recording():
            return func(*args, **kwargs)
        with untraced():
            like = func(given.detach(), *args[1:], **kwargs)
        is_sized = name in _SIZED and not any(isinstance(size, torch.dtype) for size in (*args[1:], *kwargs.values()))
        rest, named = ((tuple(local_part(like).shape),), {}) if is_sized else (args[1:], kwargs)
        found = func(_slice_of(given), *rest, **named)
        if not isinstance(found, Tensor) or found.shape != local_part(like).shape:
            return func(*args, **kwargs)
        return _as_dtensor(found, like)


@own_code
def _slice_of(given: DTensor) -> Tensor:
    local: Tensor = given.to_local()
    return local


@own_code
def _as_dtensor(found: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(found, like.device_mesh, like.placements, run_check=False)
