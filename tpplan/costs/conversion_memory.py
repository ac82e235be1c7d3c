"""Measures the memory that a conversion holds while it runs, by running its own code on meta tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tpplan.apply.collectives.redistribute import Converter, TpGroup, local_rows, mask_rows
from tpplan.core.layout import ROWS, Conversion, local_shape
from tpplan.torch_internals.operators import collectives
from tpplan.torch_internals.pytree import tree_map_only
from tpplan.torch_internals.recording import TorchDispatchMode
from tpplan.trace.hooks.live_storages import Storages


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionMemory:
    """Bytes on one rank besides the converted tensor: the most that is held at once, and the result's."""

    held_bytes: int
    result_bytes: int


NO_MEMORY = ConversionMemory(held_bytes=0, result_bytes=0)


class _StorageLog(TorchDispatchMode):
    """Logs the storages that operators make."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = Storages(without=[given])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is collectives().wait_tensor.default:  # on meta tensors it would make a new tensor
            return args[0]
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.made.add, result)
        return result


@cache
def forward_move(conversion: Conversion, shape: tuple[int, ...], dtype: str, tp: int) -> ConversionMemory:
    """Returns the memory of a conversion's forward, for a value of this whole shape."""
    if not conversion.forward or tp == 1:
        return NO_MEMORY
    local = local_shape(shape, conversion.source, tp)
    if conversion.target == ROWS:
        return _executed(lambda ids: local_rows(ids, 1, _rank_of(tp)), local, dtype)
    if conversion.source == ROWS:
        return _executed(_masked, local, dtype)
    return _executed(Converter(conversion, _rank_of(tp), where="").forward, local, dtype)


@cache
def backward_move(conversion: Conversion, shape: tuple[int, ...], dtype: str, tp: int) -> ConversionMemory:
    """Returns the memory of a conversion's backward, for a value of this whole shape."""
    if not conversion.backward or tp == 1:
        return NO_MEMORY
    local = local_shape(shape, conversion.target, tp)
    if ROWS in (conversion.source, conversion.target):
        return _executed(_masked, local, dtype)
    return _executed(Converter(conversion, _rank_of(tp), where="").backward, local, dtype)


def _masked(x: torch.Tensor) -> torch.Tensor:
    return mask_rows(x, torch.empty(x.shape[:1], dtype=torch.bool, device="meta"))


def _rank_of(tp: int) -> TpGroup:
    return TpGroup(name="", size=tp, rank=0)


def _executed(step: Callable[[torch.Tensor], Any], shape: tuple[int, ...], dtype: str) -> ConversionMemory:
    x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    with _StorageLog(x) as log:
        result = step(x)
        held_bytes = log.made.peak_bytes
        result_bytes = log.made.live_bytes
    del result
    return ConversionMemory(held_bytes=held_bytes, result_bytes=result_bytes)
