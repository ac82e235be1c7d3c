"""Values that a run on meta tensors can still know: those made of nothing but numbers in the code.

Code that runs eagerly may ask tensors for their values: are these positions consecutive, is that mask all true? On meta
tensors there are none. While `KnownValues` is on, each tensor remembers the call that made it, and a question is
answered by making it once more on the CPU, from constructors down. What depends on an input, a parameter, a buffer or a
random number is not known, nor what has been written to. Code of tpplan's own draws on the CPU, and may ask.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tpplan.rewrite import is_own_code_running

#: what asks a tensor for its values
_QUESTIONS = frozenset({"__bool__", "__contains__", "__float__", "__index__", "__int__", "item", "tolist"})
#: constructors that give other values each time
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "empty")


class UnknownValueError(RuntimeError):
    """A question was asked that only real data can answer."""


class KnownValues(TorchFunctionMode):
    """While it is on, questions about tensors that depend on no data are answered."""

    def __init__(self) -> None:
        super().__init__()
        #: by id: the tensor, which keeps the id taken, its place among a call's results, and the call
        self._made: dict[int, tuple[Tensor, int, Any, tuple[Any, ...], dict[str, Any]]] = {}
        self._written: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS and isinstance(args[0], Tensor) and (args[0].is_meta or is_own_code_running()):
            with disable_proxy_modes_tracing(), torch.no_grad(), torch.device("cpu"):
                return func(self._value(args[0]), *args[1:], **kwargs)
        results = func(*args, **kwargs)
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
            written = [leaf for leaf in (*args[:1], kwargs.get("out")) if isinstance(leaf, Tensor)]
            self._written.update(tensor.untyped_storage()._cdata for tensor in written)
            return results
        for place, result in enumerate(pytree.tree_leaves(results)):
            if isinstance(result, Tensor) and result.is_meta:
                self._made.setdefault(id(result), (result, place, func, args, kwargs))
        return results

    def _value(self, tensor: Tensor) -> Tensor:
        """The tensor on the CPU. Raises UnknownValueError."""
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in self._made or tensor.untyped_storage()._cdata in self._written:
            raise UnknownValueError("a tensor was asked for its values, which depend on the model's inputs or weights")
        _, place, func, args, kwargs = self._made[id(tensor)]
        if any(word in getattr(func, "__name__", "") for word in _RANDOM):
            raise UnknownValueError(f"a tensor was asked for its values, which {func.__name__} gives")
        args, kwargs = pytree.tree_map(self._on_cpu, (args, kwargs))
        value = pytree.tree_leaves(func(*args, **kwargs))[place]
        assert isinstance(value, Tensor)
        return value

    def _on_cpu(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._value(argument)
        is_meta = argument == "meta" or (isinstance(argument, torch.device) and argument.type == "meta")
        return torch.device("cpu") if is_meta else argument
