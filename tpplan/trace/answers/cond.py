"""torch.cond in a trace: both branches run, and the result is a torch.where of their results.

In training torch.cond compiles its branches when it is called, and the conversions of a plan cannot be compiled into
them. So every tensor that a branch reads is whole on every rank, and a branch calls no module and reads no parameter.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import ModelError
from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import flex_attention_anywhere, flex_masks_by, higher_order_ops_by
from tpplan.trace.answers.flex_attention import attend, mask_of
from tpplan.trace.hooks import custom_ops


@contextlib.contextmanager
def higher_order_ops_traced(chosen: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Makes torch.cond run both branches and call chosen(), and flex_attention be one operator. Other higher-order ops
    raise ModelError."""

    def opened(name: str) -> Callable[..., Any]:
        if name == "cond":
            chosen()
            return _choose
        if name == "flex_attention":
            return attend
        raise ModelError(f"{name}: of torch's higher-order ops, tpplan traces torch.cond and flex_attention alone")

    with higher_order_ops_by(opened), flex_attention_anywhere(), flex_masks_by(mask_of):
        yield


def _choose(
    condition: Tensor, if_true: Callable[..., Any], if_false: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """The result of torch.cond: torch.where of both branches' tensors. Raises ModelError where a branch reads a
    parameter."""
    with _WholeOperands() as whole:
        one, spec = pytree.tree_flatten(if_true(*operands))
        other = pytree.tree_leaves(if_false(*operands))
        chosen = [a if a is None else torch.where(condition, a, b) for a, b in zip(one, other, strict=True)]
        return pytree.tree_unflatten([leaf if leaf is None else whole.made(leaf) for leaf in chosen], spec)


class _WholeOperands(TorchFunctionMode):
    """A mode that marks the tensor operands of every call as whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        #: (tensor, its marked view) by the tensor's id; holding the tensor keeps its id from being used again
        self._marked: dict[int, tuple[Tensor, Tensor]] = {}

    def made(self, argument: Any) -> Any:
        """The argument, a tensor as its marked view. Raises ModelError for a parameter."""
        if not isinstance(argument, Tensor):
            return argument
        if isinstance(argument, nn.Parameter):
            raise ModelError(
                "a branch of torch.cond reads a parameter, or calls a module that does: compute both results before, "
                "and choose between them with torch.where"
            )
        marked = self._marked.get(id(argument))
        if marked is None:
            marked = self._marked[id(argument)] = (argument, custom_ops.whole(argument, argument.requires_grad))
        return marked[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self.made, (args, kwargs or {}))
        results = func(*args, **kwargs)
        for result in pytree.tree_leaves(results):
            if isinstance(result, Tensor):
                self._marked[id(result)] = (result, result)
        return results
