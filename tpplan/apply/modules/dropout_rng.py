"""Draws dropout masks on slices from a random state of each rank, while the tensor-parallel group stays in step.

The ranks of a group have equal random states, so that they drop the same elements of a value that all hold whole. On
slices equal states would repeat one mask across the value. So each call draws a seed from the shared state, which
advances alike on all ranks, and runs with seed + rank. Recomputation restores the shared state, so the masks repeat.
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

from tpplan.torch_internals.operators import hides_sizes, seen_by
from tpplan.trace.hooks.call_rewriting import own_code

_DROPOUT = (torch.dropout, torch.dropout_)


@dataclass(frozen=True, slots=True)
class DrawByRank:
    """A rewriter of calls that runs dropout, in attention too, under this rank's own random state."""

    rank: int

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        if not _drops(func, args, kwargs):
            return NotImplemented
        first = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        with _own_state(self.rank, first.device):
            return func(*args, **kwargs)


class WithoutDropout(TorchFunctionMode):
    """A mode that turns dropout off, in attention too, so that outputs can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not _drops(func, args, kwargs):
            return seen_by(self, func)(*args, **kwargs) if hides_sizes(func) else func(*args, **kwargs)
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
    """Seeds the device's generator with a shared seed + rank inside the context, and restores its state afterwards.

    The seed is drawn from the CPU's generator, so that no GPU has to be waited for.
    """
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
