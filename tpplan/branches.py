"""torch.cond, which picks one of two functions by a tensor's value.

Eager torch.cond compiles both functions when it is called, and a plan's code cannot be compiled into them. So a model
that a plan is applied to runs the one that is picked, as Python's `if` would. All ranks of a tp group hold the same
condition, and pick the same. A trace runs both, and the result is a `where`: what holds for both holds for either.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tpplan.errors import ModelError

#: the functions through which torch compiles and calls a higher-order op from eager code live here
_HIGHER_ORDER_OPS = "torch._higher_order_ops."

Condition = bool | int | float | Tensor
Operands = tuple[Any, ...] | list[Any]

_cond = torch.cond
#: how many functions of torch.cond are being traced, one inside another
_num_open = 0


def run_picked(
    pred: Condition, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Operands = ()
) -> Any:
    """torch.cond that compiles nothing, unless it is being compiled itself."""
    if isinstance(pred, Tensor) and not torch.compiler.is_dynamo_compiling():
        pred = bool(pred)
    return _cond(pred, true_fn, false_fn, operands)


def run_branches_eagerly() -> None:
    """From now on torch.cond is run_picked."""
    torch.cond = run_picked


@contextlib.contextmanager
def branches_in_the_open() -> Iterator[None]:
    """While it lasts, torch.cond runs both functions. Other higher-order ops raise ModelError."""
    before = torch.cond, torch.compile

    def compile_(model: Any = None, **options: Any) -> Any:
        if not getattr(model, "__module__", "").startswith(_HIGHER_ORDER_OPS):
            return before[1](model, **options)
        name = model.__module__.removeprefix(_HIGHER_ORDER_OPS)
        raise ModelError(f"{name}: of torch's higher-order ops, tpplan follows torch.cond alone, called by that name")

    torch.cond, torch.compile = _run_both, compile_
    try:
        yield
    finally:
        torch.cond, torch.compile = before


def is_in_branch() -> bool:
    """True while a function of torch.cond is traced."""
    return _num_open > 0


def _run_both(
    pred: Condition, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Operands = ()
) -> Any:
    if not isinstance(pred, Tensor):
        return _cond(pred, true_fn, false_fn, operands)
    global _num_open
    _num_open += 1
    try:
        one, spec = pytree.tree_flatten(true_fn(*operands))
        other = pytree.tree_leaves(false_fn(*operands))
    finally:
        _num_open -= 1
    chosen = [torch.where(pred, a, b) if isinstance(a, Tensor) else a for a, b in zip(one, other, strict=True)]
    return pytree.tree_unflatten(chosen, spec)
