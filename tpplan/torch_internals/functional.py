"""Functions of torch.nn.functional that are written in Python, without their first step: asking modes to run them.

Such a function is one call to a mode, and the mode is off while it runs, so that the mode does not see what it calls.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from tpplan.torch_internals.probes import Probe

#: the functions by which Python code of torch asks whether a mode is to run it
_GUARDS = frozenset({"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"})
#: methods of tensors that take sizes
_SHAPING = frozenset({"view", "reshape", "expand"})


def hides_sizes(function: object) -> bool:
    """True for a function of torch.nn.functional that hands itself to modes, and calls others with sizes."""
    if not isinstance(function, FunctionType) or getattr(F, function.__name__, None) is not function:
        return False
    names = frozenset(function.__code__.co_names)
    return not names.isdisjoint(_GUARDS) and not names.isdisjoint(_SHAPING)


def seen_by(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under its own name, so that modes around take it for one call, with all that it calls handed to the
    mode. To be called while the mode is off."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return _body(function)(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        is_on = has_torch_function((None,))  # of what is no tensor's class it asks whether a mode is on
        return handle_torch_function(run, (), *args, **kwargs) if is_on else run(*args, **kwargs)

    return call


@functools.cache
def _body(function: FunctionType) -> Callable[..., Any]:
    """The function with guards that say no."""
    names = function.__globals__ | dict.fromkeys(_GUARDS, lambda *_: False)
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _calls_are_seen() -> bool:
    seen: list[object] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            run = seen_by(self, func) if hides_sizes(func) else func
            return run(*args, **(kwargs or {}))

    x = torch.ones(1, 2, 4)
    weight, bias = torch.ones(12, 4), torch.ones(12)
    with Noting():
        F.multi_head_attention_forward(
            x, x, x, 4, 2, weight, bias, None, None, False, 0.0, weight[:4], bias[:4], need_weights=False
        )
    return {F.multi_head_attention_forward, F.linear, torch.Tensor.view, torch.Tensor.unflatten} <= set(seen)


PROBES = (
    Probe(
        name="calls inside of torch's functions",
        uses="torch.overrides.has_torch_function in torch.nn.functional, handle_torch_function",
        needed_for="sizes of heads in nn.MultiheadAttention",
        works=_calls_are_seen,
    ),
)
