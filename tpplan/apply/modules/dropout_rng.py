"""Dropout on slices: each rank of a tensor-parallel group draws for its own, and the group stays in step.

On a whole value all ranks must drop the same elements, and do, as their random states are equal. On slices equal masks
would repeat across the value. Here a seed is drawn from the state that all share, which goes on alike everywhere; a
rank's own is that seed and its number, used for one call. Recomputation restores the shared state, and so all of it.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpplan.trace.hooks.call_rewriting import own_code

_DROPOUT = (F.dropout, torch.dropout, torch.dropout_)


@dataclass(frozen=True, slots=True)
class DrawByRank:
    """Rewrites calls: what drops elements runs on this rank's own random state."""

    rank: int

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        if not _drops(func, args, kwargs):
            return NotImplemented
        first = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        with _own_state(self.rank, first.device):
            return func(*args, **kwargs)


class WithoutDropout(TorchFunctionMode):
    """While it is on, nothing is dropped at random, for what is to be compared."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not _drops(func, args, kwargs):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
                return func(*args, **kwargs)
            return func(*args, **kwargs | {"dropout_p": 0.0})
        return args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func is F.dropout:
        given = inspect.signature(F.dropout).bind(*args, **kwargs)
        given.apply_defaults()
        return bool(given.arguments["training"] and given.arguments["p"])
    return func in _DROPOUT and bool(kwargs.get("train", args[2] if len(args) > 2 else False))


@contextlib.contextmanager
def _own_state(rank: int, device: torch.device) -> Iterator[None]:
    """Another state of the device's generator; the seed comes from the CPU's, so no device is waited for."""
    seed = _next_seed()
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed + rank)
    try:
        yield
    finally:
        generator.set_state(state)


@own_code
def _next_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))
