"""Values that a run on meta tensors can still know: those made of numbers in the code, and of the example inputs.

Code that runs eagerly may ask tensors for their values: are these positions consecutive, is that mask all true? On meta
tensors there are none. While `KnownValues` is on, each tensor remembers the call that made it, and a question is
answered by making it once more on the CPU, from constructors and inputs down. What depends on a parameter, a buffer or
a random number is not known, nor what has been written to. An answer that depends on the inputs is one of several: such
questions are noted, and can be answered the other way in another run.
"""

import linecache
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
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
#: code that asks on behalf of other code
_NOT_ASKING = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))


class UnknownValueError(RuntimeError):
    """A question was asked that only real data can answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """Something that code asked of what depends on the inputs, and what it was told. `where` is a line of code."""

    where: str
    answer: object


class KnownValues(TorchFunctionMode):
    """While it is on, questions about tensors that depend on no weights and no chance are answered.

    `inputs` are (meta tensor, its value); the questions in `otherwise` (by their number, and only those with two
    answers) are answered the other way.
    """

    def __init__(self, inputs: Iterable[tuple[Tensor, Tensor]] = (), otherwise: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.questions: list[Question] = []
        self._otherwise = otherwise
        self._inputs = {id(tensor): (tensor, value) for tensor, value in inputs if not value.is_meta}
        #: by id: the tensor, which keeps the id taken, its place among a call's results, and the call
        self._made: dict[int, tuple[Tensor, int, Any, tuple[Any, ...], dict[str, Any]]] = {}
        #: by id: a tensor's version, which counts writes through it or any view, when it was first seen
        self._versions = {key: tensor._version for key, (tensor, _) in self._inputs.items()}
        #: storages that were written to through `.data` or the like, which counts as a version of its own
        self._written: set[int] = set()
        self._reads_inputs = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS and isinstance(args[0], Tensor) and (args[0].is_meta or is_own_code_running()):
            return self._answer(func, args, kwargs)
        results = func(*args, **kwargs)
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
            written = [leaf for leaf in (*args[:1], kwargs.get("out")) if isinstance(leaf, Tensor)]
            self._written.update(tensor.untyped_storage()._cdata for tensor in written)
            return results
        for place, result in enumerate(pytree.tree_leaves(results)):
            if isinstance(result, Tensor) and result.is_meta:
                self._made.setdefault(id(result), (result, place, func, args, kwargs))
                self._versions.setdefault(id(result), result._version)
        return results

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self._reads_inputs = False
        with disable_proxy_modes_tracing(), torch.no_grad(), torch.device("cpu"):
            answer: object = func(self._value(args[0]), *map(self._on_cpu, args[1:]), **kwargs)
        if not self._reads_inputs:
            return answer
        is_other = len(self.questions) in self._otherwise and isinstance(answer, bool)
        self.questions.append(Question(_asking_line(), answer))
        return not answer if is_other else answer

    def _value(self, tensor: Tensor) -> Tensor:
        """The tensor on the CPU. Raises UnknownValueError."""
        if not tensor.is_meta:
            return tensor
        is_old = self._versions.get(id(tensor)) == tensor._version
        is_written = not is_old or tensor.untyped_storage()._cdata in self._written
        if id(tensor) in self._inputs and not is_written:
            self._reads_inputs = True
            return self._inputs[id(tensor)][1]
        if id(tensor) not in self._made or is_written:
            raise UnknownValueError(
                "a tensor was asked for its values, which depend on weights, buffers or what was written to it"
            )
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


def _asking_line() -> str:
    """The innermost line of code that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_ASKING):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}"
