"""Values that a run on meta tensors can still know: those made of numbers in the code, and of the example inputs.

Code that runs eagerly may ask tensors for their values: are these positions consecutive, is that mask all true? On meta
tensors there are none. While `KnownValues` is on, each tensor remembers the call that made it, and a question is
answered by making it once more on the CPU, from constructors and inputs down. What depends on a parameter, a buffer or
a random number is not known, nor what has been written to, nor what a plan has converted. An answer that depends on the
inputs is one of several: such questions are noted, and can be answered the other way in another run.
"""

import hashlib
import linecache
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import ModelError
from tpplan.torch_internals import pytree
from tpplan.torch_internals.recording import unrecorded
from tpplan.torch_internals.tensors import storage_key, version_of
from tpplan.trace.answers.planned_device import (
    ADDRESSES,
    Seen,
    asking_line,
    is_foreign,
    is_model_asking,
    is_model_calling,
    planned_device,
)
from tpplan.trace.answers.unbacked_int import UnknownValueError, Unsaid, with_parts
from tpplan.trace.hooks.call_rewriting import is_own_code_running

#: what asks a tensor for its values
QUESTIONS = frozenset({"__bool__", "__contains__", "__float__", "__index__", "__int__", "item", "tolist",
                       "equal", "allclose", "is_nonzero"})  # fmt: skip
#: calls that are given the values of a tensor by the code
_CONSTANTS = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "scalar_tensor"})
#: calls that ask a tensor what it is, `__get__` those of an attribute such as dtype
DESCRIPTIONS = frozenset({"__get__", "size", "dim", "numel", "nelement", "ndimension", "stride", "element_size",
                           "is_floating_point", "is_complex", "is_contiguous", "get_device", "type", "__len__",
                           "__hash__", "__repr__", "__format__"})  # fmt: skip
#: what asks a tensor where its data is, or how it is held: each rank has its own answer, and a trace has none
_PLACES = frozenset({"untyped_storage", "storage", "_typed_storage", "storage_type", "is_set_to",
                        "is_pinned", "is_shared", "__dlpack__", "__dlpack_device__"})  # fmt: skip
_ATTRIBUTES = frozenset({*ADDRESSES, vars(Tensor)["__cuda_array_interface__"].__get__})
#: of errors that tensors without values raise, and others do not
_ONLY_HERE = ("meta tensor", "'Meta' backend", "Meta tensors", "meta device", "meta and", "and meta")
#: types of numbers that may be sizes
_COUNTS = frozenset({torch.int64, torch.int32})


@dataclass(frozen=True, slots=True)
class Question:
    """Something that code asked of what depends on the inputs, and what it was told. `where` is a line of code."""

    where: str
    answer: str
    is_choice: bool


class AtRestError(ModelError):
    """Code of an applied model read a parameter as it rests, past its module's attribute, and computed with it."""


class KnownValues(TorchFunctionMode):
    """While it is on, questions about tensors that depend on no weights and no chance are answered.

    `inputs` are (meta tensor, its value); the questions in `otherwise` (by their number, and only those with two
    answers) are answered the other way. `constant` is a digest of the values that a running call was given by the code.
    Parts whose sizes are not known are about equal, in `guessed` with the line of code, and others if `extra` is 1.
    """

    #: questions ever answered, of whatever kind
    num_answered: ClassVar[int] = 0

    def __init__(
        self,
        inputs: Iterable[tuple[Tensor, Tensor]] = (),
        otherwise: frozenset[int] = frozenset(),
        extra: int = 0,
    ) -> None:
        super().__init__()
        planned = planned_device()
        self._seen = Seen(planned, "meta") if planned is not None else None
        #: a question that no trace can answer, whose error the code may catch
        self._missed = ""
        self.guessed: dict[str, str] = {}
        self._extra = extra
        self.questions: list[Question] = []
        #: all that was asked, with the line of code
        self.answers: list[tuple[str, object]] = []
        self.constant = ""
        self._otherwise = otherwise
        self._inputs = {id(tensor): (tensor, value) for tensor, value in inputs if not value.is_meta}
        #: by id: the tensor, which keeps the id taken, its place among a call's results, and the call
        self._made: dict[int, tuple[Tensor, int, Any, tuple[Any, ...], dict[str, Any]]] = {}
        #: by id: a tensor's version, which counts writes through it or any view, when it was first seen
        self._versions = {key: _version(tensor) for key, (tensor, _) in self._inputs.items()}
        #: storages that `.data` reaches, past the count of versions
        self._laid_bare: set[int] = set()
        #: what has been made for the question at hand
        self._values: dict[int, Tensor] = {}
        self._reads_inputs = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_own_code_running():
            return self._ask_as_it_is(func, args, kwargs)
        self.check_all_answered()
        if self._seen is not None:
            if (found := self._seen.answer(func, args)) is not NotImplemented:
                return found
            func, args, kwargs = self._seen.placed(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in QUESTIONS and args and isinstance(args[0], Tensor):
            return self._answer(func, args, kwargs)
        if (name in _PLACES or func in _ATTRIBUTES) and is_model_calling():
            problem = "a tensor was asked where its data is, which a trace does not know"
            self.miss(problem)
            raise UnknownValueError(problem)
        if (split := with_parts(name, args, kwargs, self._extra)) is not None:
            self.guessed[asking_line()] = "about equal parts"
            func, args, kwargs = torch.Tensor.split, split, {}
        if name == "register_hook":
            raise ModelError(f"{asking_line()}: a hook on a gradient is code that no plan can follow; remove it")
        if getattr(func, "__self__", None) is torch.Tensor.grad_fn and is_model_asking():
            raise ModelError(f"{asking_line()}: a node of autograd's graph takes hooks that no plan can follow")
        if name not in DESCRIPTIONS and any(map(_is_at_rest, (*args, *kwargs.values()))):
            raise AtRestError(f"{asking_line()}: reads parameters past their modules' attributes (parameters())")
        if getattr(func, "__self__", None) is torch.Tensor.data:
            self._laid_bare.add(storage_key(args[0]))
        before, self.constant = self.constant, _digest((args, kwargs)) if name in _CONSTANTS else self.constant
        try:
            results = func(*args, **kwargs)
        except Exception as error:
            if any(word in str(error) for word in _ONLY_HERE):
                self.miss(str(error).splitlines()[0])
            raise
        finally:
            self.constant = before
        call = pytree.tree_map(_kept, (args, kwargs))
        for place, result in enumerate(pytree.tree_leaves(results)):
            if isinstance(result, Tensor) and id(result) not in self._made:
                self._made[id(result)] = (result, place, func, *call)
                self._versions.setdefault(id(result), _version(result))
        return results

    def miss(self, problem: str) -> None:
        """Something was asked that only training can answer: code that catches the error goes another way than there,
        so whatever it calls next raises."""
        self._missed = f"{asking_line()} ({problem})"

    def check_all_answered(self) -> None:
        """Raises UnknownValueError where code went on after a question that had no answer."""
        if self._missed:
            raise UnknownValueError(f"code goes on after {self._missed}, which fails while a model is planned alone")

    def _ask_as_it_is(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Code of ours draws seeds on the CPU."""
        if getattr(func, "__name__", "") not in QUESTIONS:
            return func(*args, **kwargs)
        with unrecorded():
            return func(*args, **kwargs)

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> tuple[int, bool]:
        """The size of dim of a call's first result, and whether inputs decide it; then it is noted as an answer.

        Raises UnknownValueError.
        """
        size = pytree.tree_leaves(self._on_real(func, args, kwargs))[0].shape[dim]
        KnownValues.num_answered += 1
        if self._reads_inputs:
            self.questions.append(Question(asking_line(), f"{size} elements", False))
        return size, self._reads_inputs

    def item(self, tensor: Tensor) -> object:
        """The one number in a tensor. Raises UnknownValueError."""
        answer = self._answer(torch.Tensor.item, (tensor,), {})
        if isinstance(answer, Unsaid):
            raise UnknownValueError(answer.problem)
        return answer

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        try:
            answer: object = self._on_real(func, args, kwargs)
        except UnknownValueError as error:
            if func is torch.Tensor.item:
                return Unsaid(str(error), self.miss)
            if func is not torch.Tensor.tolist or args[0].dim() != 1 or args[0].dtype not in _COUNTS:
                self.miss(str(error))
                raise
            return [Unsaid(str(error), self.miss) for _ in range(len(args[0]))]
        KnownValues.num_answered += 1
        self.answers.append((asking_line(), answer))
        if not self._reads_inputs:
            return answer
        is_other = len(self.questions) in self._otherwise and isinstance(answer, bool)
        self.questions.append(Question(asking_line(), reprlib.repr(answer), isinstance(answer, bool)))
        return not answer if is_other else answer

    def _on_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call with its tensors made on the CPU. Raises UnknownValueError."""
        self._reads_inputs, self._values = False, {}
        with unrecorded(), torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
            state = torch.get_rng_state()
            try:
                given = pytree.tree_map(self._on_cpu, (args, kwargs))
            except RecursionError:
                raise UnknownValueError("a tensor was asked for its values, which too many calls have made") from None
            found = func(*given[0], **given[1])
            if not torch.equal(state, torch.get_rng_state()):
                raise UnknownValueError("a tensor was asked for its values, which chance gives")
        return found

    def _value(self, tensor: Tensor) -> Tensor:
        """The tensor on the CPU. Raises UnknownValueError."""
        if id(tensor) in self._values:
            return self._values[id(tensor)]
        if id(tensor) in self._inputs:
            self._check_unwritten(tensor)
            self._reads_inputs = True
            return self._inputs[id(tensor)][1]
        if id(tensor) not in self._made:
            if tensor.is_meta:
                raise UnknownValueError("a tensor was asked for its values, which depend on weights or buffers")
            return tensor
        self._check_unwritten(tensor)
        _, place, func, args, kwargs = self._made[id(tensor)]
        if "empty" in getattr(func, "__name__", ""):
            raise UnknownValueError(f"a tensor was asked for its values, which {func.__name__} leaves open")
        args, kwargs = pytree.tree_map(self._on_cpu, (args, kwargs))
        value = pytree.tree_leaves(func(*args, **kwargs))[place]
        assert isinstance(value, Tensor)
        if value.is_meta:
            raise UnknownValueError("a tensor was asked for its values, which a module makes that runs whole")
        self._values[id(tensor)] = value
        return value

    def _check_unwritten(self, tensor: Tensor) -> None:
        version = _version(tensor)
        is_seen = version is not None and self._versions.get(id(tensor)) == version
        if not is_seen or storage_key(tensor) in self._laid_bare:
            raise UnknownValueError("a tensor was asked for its values, which have been written to")

    def _on_cpu(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._value(argument)
        is_meta = (isinstance(argument, str) and argument == "meta") or (
            isinstance(argument, torch.device) and argument.type == "meta"
        )
        return torch.device("cpu") if is_meta else argument


def _is_at_rest(argument: Any) -> bool:
    """True for a parameter of an applied model that is no local tensor, and for a list of such."""
    if isinstance(argument, list | tuple):
        return any(map(_is_at_rest, argument))
    return isinstance(argument, DTensor) and isinstance(argument, torch.nn.Parameter)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to, through any view; inference tensors do not count."""
    return None if tensor.is_inference() else version_of(tensor)


def _kept(argument: Any) -> Any:
    """An argument as it is now; containers are new already."""
    return argument.copy() if isinstance(argument, np.ndarray) else argument


def _digest(arguments: Any) -> str:
    """Of the numbers in a constructor's arguments."""
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if not isinstance(leaf, Tensor)]
    data = [leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode() for leaf in leaves]
    return hashlib.sha256(b"\0".join(data)).hexdigest()[:16]


def raising_line(error: BaseException) -> str:
    """The innermost line of code that is neither torch's nor ours among those that an error came through, or ""."""
    found, step = "", error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if is_foreign(file) and (code := linecache.getline(file, step.tb_lineno).strip()):
            found = f"{Path(file).name}:{step.tb_lineno}: {code}"
        step = step.tb_next
    return found
