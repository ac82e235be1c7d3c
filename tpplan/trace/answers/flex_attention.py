"""torch's flex_attention in a trace: one operator, with the functions that change scores or mask them as text.

Such a function is run once on index tensors without values, to see what it computes from the batch's and the head's
number: where it names neither, attention may be cut by both. What it reads besides is an operand, whole on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import ModelError
from tpplan.torch_internals import pytree
from tpplan.torch_internals.recording import untraced
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.call_rewriting import is_own_code_running

#: functions that make a tensor of another's dtype and device
_NEW = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"})
_SCORE, _BATCH, _HEAD, _QUERY, _KEY = "score", "batch", "head", "query", "key"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: Sequence[Any],
    scale: float,
    _kernel_options: object,
) -> tuple[Tensor, ...]:
    """The operator of flex_attention as tpplan.flex_attention: query [B, H, T, D], key [B, G, J, D], value
    [B, G, J, E]; gives the output [B, H, T, E], and the log of the sums and the maxima of scores [B, H, T]."""
    scores, masks = _Followed.of(score_mod, (_SCORE, _BATCH, _HEAD, _QUERY, _KEY)), followed_mask(block_mask[-1])
    blocks = [leaf for leaf in block_mask[:-1] if isinstance(leaf, Tensor)]
    named = scores.named | masks.named
    by_batch = _BATCH not in named and all(block.shape[0] == 1 for block in blocks if block.dim() > 1)
    by_heads = _HEAD not in named and all(block.shape[1] == 1 for block in blocks if block.dim() > 1)
    others = [*blocks, *scores.read, *masks.read]
    code = f"score: {scores}; mask: {masks}"
    return custom_ops.flex_attention(query, key, value, others, code, by_batch, by_heads, scale)


def mask_of(
    mask_mod: Callable[..., Any], num_batches: int | None, num_heads: int | None, queries: int, keys: int, *_: object
) -> Tensor:
    """The mask [B, H, T, J] that torch.nn.attention.flex_attention.create_mask makes, as tpplan.flex_mask."""
    mask = followed_mask(mask_mod)
    return custom_ops.flex_mask(mask.read, str(mask), [num_batches or 1, num_heads or 1, queries, keys])


def followed_mask(mask_mod: Callable[..., Any]) -> "_Followed":
    """Follows a function that says which keys a query sees: mask_mod(batch, head, query, key)."""
    return _Followed.of(mask_mod, (_BATCH, _HEAD, _QUERY, _KEY))


class _Followed(TorchFunctionMode):
    """Follows a function from its arguments, numbers of one element each, to its result.

    `read`: the tensors that it reads besides. `named`: the arguments that its result depends on; all of them where it
    writes into a tensor, which others may view. As text, its calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []
        self.named: frozenset[str] = frozenset()
        self._calls: list[str] = []
        self._writes = False
        #: (tensor, its name, what it depends on, itself without values) by the tensor's id; the tensor keeps its id
        self._known: dict[int, tuple[Tensor, str, frozenset[str], Tensor]] = {}

    @classmethod
    def of(cls, function: Callable[..., Any], names: Sequence[str]) -> "_Followed":
        """The function, called once with arguments of these names."""
        found = cls()
        with untraced():
            dtypes = (torch.float32 if name == _SCORE else torch.int32 for name in names)
            given = [torch.empty((), dtype=dtype, device="meta") for dtype in dtypes]
        for name, tensor in zip(names, given, strict=True):
            found._know(tensor, name, frozenset({name}))
        with found:
            result = function(*given)
        found.named = found._known[id(result)][2] if id(result) in found._known else frozenset()
        if found._writes:
            found.named = frozenset(names)
        if isinstance(result, Tensor) and id(result) not in found._known:  # a tensor that is read as it is
            found._operand(result)
        return found

    def __str__(self) -> str:
        return ", ".join(self._calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_own_code_running():
            raise ModelError(
                "a function that flex_attention is given reads a parameter of a module, which torch cannot compile "
                "where a plan is applied: read it before, and let the function use that tensor"
            )
        with untraced((TorchFunctionMode,)), torch.no_grad():
            return self._follow(func, args, kwargs)

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", str(func))
        given = [self._operand(leaf) for leaf in _tensors((args, kwargs))]
        shown = pytree.tree_map(self._shown, (args, kwargs))
        args, kwargs = pytree.tree_map(self._without_values, (args, kwargs))
        result = _element(*args) if func is Tensor.__getitem__ else func(*args, **kwargs)
        self._writes |= result is None or "out" in kwargs or _is_in_place(name)
        is_new = name in _NEW or name.endswith("_like")  # takes no values from its first operand
        depends = frozenset[str]().union(*(self._known[id(tensor)][2] for tensor in given[is_new:]))
        made = list(_tensors(result))
        if made:
            self._calls.append(f"{name}{shown}")
        for i, tensor in enumerate(made):
            self._know(tensor, f"_{len(self._calls)}" + (f".{i}" if len(made) > 1 else ""), depends)
        return result

    def _know(self, tensor: Tensor, name: str, depends: frozenset[str]) -> None:
        plain = tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
        self._known[id(tensor)] = (tensor, name, depends, plain)

    def _operand(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._known:
            self._know(tensor, f"read{len(self.read)}", frozenset())
            self.read.append(tensor)
        return tensor

    def _shown(self, leaf: Any) -> Any:
        return _Name(self._known[id(leaf)][1]) if isinstance(leaf, Tensor) else leaf

    def _without_values(self, leaf: Any) -> Any:
        return self._known[id(leaf)][3] if isinstance(leaf, Tensor) else leaf


class _Name(str):
    """A name that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _element(x: Tensor, index: Any) -> Tensor:
    """x[index], where tensors without dims in the index stay tensors: torch would ask them for their values."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, Tensor) for item in items):
        return x[index]
    found: Tensor = x[tuple(item.reshape(1) if isinstance(item, Tensor) and not item.dim() else item for item in items)]
    return found.reshape(found.shape[1:])


def _is_in_place(name: str) -> bool:
    """True for the name of a function that writes into an operand: `add_`, `__iadd__`, `__setitem__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__invert__", "__int__"))
    return name.endswith("_")


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
