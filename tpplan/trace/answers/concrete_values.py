"""Values that a run on meta tensors can know: those computed from numbers in the code and from the example inputs.

Code that runs eagerly may ask tensors for their values: are these positions consecutive, is that mask all true? Meta
tensors have none. While `ConcreteValues` is on, each tensor remembers the call that made it, and a question is answered
by making the calls again on the CPU, from constructors and inputs on. Values that depend on a parameter, a buffer or a
random number are not known, nor those of tensors that were written to, or that a plan has converted. An answer that
depends on the inputs is one of several: the question is noted, and can be answered the other way in another run."""

import contextlib
import linecache
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import ModelError, first_line
from tpplan.torch_internals import pytree
from tpplan.torch_internals.recording import unrecorded
from tpplan.torch_internals.tensors import storage_key, version_of
from tpplan.trace.answers.constants import digest_of_constant
from tpplan.trace.answers.even_shares import Call, calls_behind, places_of_call, values_compared
from tpplan.trace.answers.planned_device import (
    ADDRESSES,
    DeviceAnswers,
    asking_line,
    is_foreign,
    is_model_asking,
    is_model_calling,
    line_of,
    planned_device,
)
from tpplan.trace.answers.unbacked_int import UnknownNumber, UnknownValueError, with_parts
from tpplan.trace.hooks.call_rewriting import is_own_code_running

#: functions that ask a tensor for its values
QUESTIONS = frozenset({"__bool__", "__contains__", "__float__", "__index__", "__int__", "item", "tolist",
                       "equal", "allclose", "is_nonzero"})  # fmt: skip
#: functions that ask for a tensor's shape, type and the like; `__get__` for an attribute such as dtype
DESCRIPTIONS = frozenset({"__get__", "size", "dim", "numel", "nelement", "ndimension", "stride", "element_size",
                           "is_floating_point", "is_complex", "is_contiguous", "get_device", "type", "__len__",
                           "__hash__", "__repr__", "__format__"})  # fmt: skip
#: functions that ask where a tensor's data is, or how it is held: each rank has its own answer, and a trace has none
_PLACES = frozenset({"untyped_storage", "storage", "_typed_storage", "storage_type", "is_set_to",
                        "is_pinned", "is_shared", "__dlpack__", "__dlpack_device__"})  # fmt: skip
_ATTRIBUTES = frozenset({*ADDRESSES, vars(Tensor)["__cuda_array_interface__"].__get__})
#: parts of messages of errors that meta tensors alone raise
_ONLY_HERE = ("meta tensor", "'Meta' backend", "Meta tensors", "meta device", "meta and", "and meta")
#: how messages of UnknownValueError begin
_ASKED = "the code asks a tensor for its values"
#: types of arguments that nobody changes, or that are remembered as they are
_KEPT = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device})
#: dtypes whose numbers may be sizes
_COUNTS = frozenset({torch.int64, torch.int32})


#: single values that integers are compared with, by line of code and the number of the integers among those there
Compared = Mapping[tuple[str, int], frozenset[int]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question of the code about values that depend on the inputs: its line of code, the answer, and whether the
    answer was yes or no."""

    where: str
    answer: str
    is_choice: bool


class AtRestError(ModelError):
    """Code of an applied model computed with a sharded parameter that it read past the module's attribute."""


class ConcreteValues(TorchFunctionMode):
    """A mode that answers questions about the values of tensors that depend on neither weights nor random numbers.

    inputs: (meta tensor, its value). otherwise: numbers of the yes-or-no questions to answer the other way.
    extra: 0, or 1 to split into parts of other sizes where the sizes of parts are not known; such parts are about
    equal, and in `guessed` by line of code. compared: what an earlier run's `compared` has, the single values that
    integers are compared with, one after the other. `constant` is a digest of the values that the code gave the running
    call.
    """

    #: questions answered so far in this process
    num_answered: ClassVar[int] = 0

    def __init__(
        self,
        inputs: Iterable[tuple[Tensor, Tensor]] = (),
        otherwise: frozenset[int] = frozenset(),
        extra: int = 0,
        compared: Compared | None = None,
    ) -> None:
        super().__init__()
        planned = planned_device()
        self._device_answers = DeviceAnswers(planned, "meta") if planned is not None else None
        #: the last question that no trace can answer, with its line of code; the code may catch the error
        self.missed = ""
        self.guessed: dict[str, str] = {}
        self._extra = extra
        self._before = compared or {}
        self.compared: dict[tuple[str, int], frozenset[int]] = {}
        #: the last integers that were taken to meet values evenly, by id, and these; what was computed of them, by id
        self._evenly: tuple[object, dict[int, Tensor]] = (None, {})
        #: by line of code the ids of the integers that it compared with single values, in order
        self._integers: dict[str, list[int]] = {}
        self.questions: list[Question] = []
        #: (line of code, answer) of every question
        self.answers: list[tuple[str, object]] = []
        self.constant = ""
        self._otherwise = otherwise
        self._inputs = {id(tensor): (tensor, value) for tensor, value in inputs if not value.is_meta}
        #: (tensor, its position among a call's results, the call) by the tensor's id; holding the tensor keeps its id
        #: from being used again
        self._made: dict[int, tuple[Tensor, int, Call]] = {}
        #: a tensor's version, which counts writes to it through any view, when it was first met, by the tensor's id
        self._versions = {key: _version(tensor) for key, (tensor, _) in self._inputs.items()}
        #: storages that the code reached by `.data`, writes to which no version counts
        self._laid_bare: set[int] = set()
        #: values computed for the present question, by the tensor's id, and whether they depend on the inputs
        self._values: dict[int, Tensor] = {}
        self._reads_inputs = False

    def __enter__(self) -> Self:
        _RUNNING.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        _RUNNING.remove(self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_own_code_running():
            return self._run_own(func, args, kwargs)
        self.check_all_answered()
        if self._device_answers is not None:
            if (found := self._device_answers.answer(func, args)) is not NotImplemented:
                return found
            func, args, kwargs = self._device_answers.placed(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in QUESTIONS and args and isinstance(args[0], Tensor):
            return self._answer(func, args, kwargs)
        if (name in _PLACES or func in _ATTRIBUTES) and is_model_calling():
            problem = "the code asks a tensor where its data is, which a trace does not know"
            self.miss(problem)
            raise UnknownValueError(problem)
        if (split := with_parts(name, args, kwargs, self._extra)) is not None:
            self.guessed[asking_line()] = "about equal parts"
            func, args, kwargs = torch.Tensor.split, split, {}
        self._refuse_hidden_code(func, name, args, kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.data and func.__name__ == "__get__":
            self.lay_bare(args[0])
            func = torch.Tensor.detach  # which the trace sees, unlike `.data`: the same tensor otherwise
        before, self.constant = self.constant, digest_of_constant(name, args, kwargs) or self.constant
        try:
            results = func(*args, **kwargs)
        except Exception as error:
            unknown = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, UnknownNumber))
            if (number := next(unknown, None)) is not None:  # torch's own code takes no such object, as in mask[i]
                number.ask()
            if any(word in str(error) for word in _ONLY_HERE):
                self.miss(first_line(error))
            raise
        finally:
            self.constant = before
        self.note_made(results, func, args, kwargs)
        return results

    def _refuse_hidden_code(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ModelError for calls by which code puts hooks, or reads parameters, where no trace or plan sees it."""
        if name == "register_hook":
            raise ModelError(f"{asking_line()}: a hook on a gradient is code that no trace sees; remove it")
        if getattr(func, "__self__", None) is torch.Tensor.grad_fn and is_model_asking():
            raise ModelError(
                f"{asking_line()}: reads grad_fn, through which code may put hooks that no trace sees; remove it"
            )
        if name not in DESCRIPTIONS and any(map(_is_at_rest, (*args, *kwargs.values()))):
            raise AtRestError(f"{asking_line()}: reads parameters past their modules' attributes (parameters())")

    def note_made(self, results: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remembers a call for each tensor that it made."""
        is_plain = all(type(argument) in _KEPT for argument in (*args, *kwargs.values()))
        call = (tuple(args), dict(kwargs)) if is_plain else pytree.tree_map(_kept, (args, kwargs))
        for place, result in enumerate((results,) if type(results) is Tensor else pytree.tree_leaves(results)):
            if isinstance(result, Tensor) and id(result) not in self._made:
                self._made[id(result)] = (result, place, (func, *call))
                self._versions.setdefault(id(result), _version(result))

    def lay_bare(self, tensor: Tensor) -> None:
        """Notes that the tensor's storage may be written to from now on without being seen."""
        self._laid_bare.add(storage_key(tensor))

    def miss(self, problem: str) -> None:
        """Notes a question that only training can answer. Code that catches its error takes another branch than in
        training, so whatever the code calls next raises."""
        self.missed = f"{asking_line()} ({problem})"

    def check_all_answered(self) -> None:
        """Raises UnknownValueError where the code went on after a question that had no answer."""
        if self.missed:
            raise UnknownValueError(
                f"code goes on after {self.missed}, which has an answer in training but none while a model is planned"
            )

    def _run_own(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of tpplan's own code. Questions are about real tensors (seeds drawn on the CPU), and are not
        recorded."""
        if getattr(func, "__name__", "") not in QUESTIONS:
            return func(*args, **kwargs)
        with unrecorded():
            return func(*args, **kwargs)

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> tuple[int, bool]:
        """The size of `dim` of a call's first result, and whether the inputs decide it, which notes a question.

        Raises UnknownValueError where the size is not known.
        """
        size = pytree.tree_leaves(self.on_real(func, args, kwargs))[0].shape[dim]
        ConcreteValues.num_answered += 1
        if self._reads_inputs:
            self.questions.append(Question(asking_line(), f"{size} elements", False))
        return size, self._reads_inputs

    def count_evenly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> int | None:
        """The size of `dim` of a call's first result where it follows from integers that are not known, and that code
        compares with values that are, as experts chosen for tokens with the numbers of experts: if each value is met as
        often. At least 2, as other ops may run on a dim of size 1; None where it does not follow from such."""
        compared = next(self._compared(pytree.tree_leaves((args, kwargs))), None)
        if compared is None:
            return None
        integers, values = compared
        if len(values) == 1:
            values = self._one_of(integers, int(values))
            if len(values) == 1:
                return None
        each = math.ceil(integers.numel() / len(values))
        if self._evenly[0] != (key := (id(integers), tuple(values.tolist()))):
            even = values[torch.arange(integers.numel()) % len(values)].reshape(integers.shape).to(integers.dtype)
            self._evenly = key, {id(integers): even}
        try:
            found = self.on_real(func, args, kwargs, assumed=self._evenly[1])
        except UnknownValueError:
            return None
        size: int = pytree.tree_leaves(found)[0].shape[dim]
        return max(2, each if each - size in (0, 1) else size)  # as many for each value, also where they do not divide

    def _one_of(self, integers: Tensor, value: int) -> Tensor:
        """The values that integers are compared with at the running line of code, one of which is `value`: those that
        another run met, as far as it is known."""
        line = asking_line()
        numbers = self._integers.setdefault(line, [])
        if id(integers) not in numbers:
            numbers.append(id(integers))
        place = line, numbers.index(id(integers))
        self.compared[place] = self.compared.get(place, frozenset()) | {value}
        return torch.tensor(sorted(self._before.get(place, frozenset()) | {value}), device="cpu")

    def _compared(self, leaves: list[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pairs (integers that are not known, the values [E] that they are compared with) among what leaves were
        computed from."""
        for call in calls_behind(leaves, self._made):
            own = values_compared(*call)
            for integers in own:
                if isinstance(integers, Tensor) and integers.dtype in _COUNTS and self._known(integers) is None:
                    values = self._known(next((one for one in own if one is not integers), None))
                    if values is not None and values.numel():
                        distinct: Callable[..., Tensor] = torch.unique
                        yield integers, distinct(values)

    def places(self, tensor: Tensor) -> int:
        """The number of places that indices among what a tensor was computed from were taken from, as by topk along a
        dim of that size; 0 where there are none."""
        found = (places_of_call(func, args, kwargs) for func, args, kwargs in calls_behind([tensor], self._made))
        return next((places for places in found if places), 0)

    def _known(self, argument: object) -> Tensor | None:
        """An argument's values; None where they are not known."""
        try:
            found: Tensor = self.on_real(torch.as_tensor, (argument,), {})
        except (UnknownValueError, TypeError, RuntimeError):
            return None
        return found

    def item(self, tensor: Tensor) -> object:
        """The one number in a tensor. Raises UnknownValueError where it is not known."""
        answer = self._answer(torch.Tensor.item, (tensor,), {})
        if isinstance(answer, UnknownNumber):
            raise UnknownValueError(answer.problem)
        return answer

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """The answer to a question, noted. Numbers that are not known are UnknownNumber for item() and lists of sizes;
        for any other question UnknownValueError is raised."""
        try:
            answer: object = self.on_real(func, args, kwargs)
        except UnknownValueError as error:
            if func is torch.Tensor.item:
                return UnknownNumber(str(error), self.miss)
            if func is not torch.Tensor.tolist or args[0].dim() != 1 or args[0].dtype not in _COUNTS:
                self.miss(str(error))
                raise
            return [UnknownNumber(str(error), self.miss) for _ in range(len(args[0]))]
        ConcreteValues.num_answered += 1
        self.answers.append((asking_line(), answer))
        if not self._reads_inputs:
            return answer
        is_other = len(self.questions) in self._otherwise and isinstance(answer, bool)
        self.questions.append(Question(asking_line(), reprlib.repr(answer), isinstance(answer, bool)))
        return not answer if is_other else answer

    def on_real(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, assumed: dict[int, Tensor] | None = None
    ) -> Any:
        """The result of a call on the CPU, of tensors computed there; `assumed` has values of some by their ids, and
        gets those that are computed. Raises UnknownValueError where one is not known."""
        self._reads_inputs, self._values = False, {} if assumed is None else assumed
        with unrecorded(), torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
            state = torch.get_rng_state()
            try:
                given = pytree.tree_map(self._on_cpu, (args, kwargs))
            except RecursionError:
                raise UnknownValueError(f"{_ASKED}, which too many calls have made") from None
            found = func(*given[0], **given[1])
            if not torch.equal(state, torch.get_rng_state()):
                raise UnknownValueError(f"{_ASKED}, which depend on random numbers")
        return found

    def _value(self, tensor: Tensor) -> Tensor:
        """The tensor computed on the CPU. Raises UnknownValueError where its values are not known."""
        if id(tensor) in self._values:
            if id(tensor) in self._made:
                self._check_unwritten(tensor)
            return self._values[id(tensor)]
        if id(tensor) in self._inputs:
            self._check_unwritten(tensor)
            self._reads_inputs = True
            return self._inputs[id(tensor)][1]
        if id(tensor) not in self._made:
            if tensor.is_meta:
                raise UnknownValueError(f"{_ASKED}, which depend on weights or buffers")
            return tensor
        self._check_unwritten(tensor)
        _, place, (func, args, kwargs) = self._made[id(tensor)]
        if "empty" in getattr(func, "__name__", ""):
            raise UnknownValueError(f"{_ASKED}, which {func.__name__} leaves undefined")
        args, kwargs = pytree.tree_map(self._on_cpu, (args, kwargs))
        value = pytree.tree_leaves(func(*args, **kwargs))[place]
        assert isinstance(value, Tensor)
        if value.is_meta:
            raise UnknownValueError(f"{_ASKED}, which a module that runs whole computes")
        self._values[id(tensor)] = value
        return value

    def _check_unwritten(self, tensor: Tensor) -> None:
        version = _version(tensor)
        is_seen = version is not None and self._versions.get(id(tensor)) == version
        if not is_seen or storage_key(tensor) in self._laid_bare:
            raise UnknownValueError(f"{_ASKED}, which have been written to")

    def _on_cpu(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._value(argument)
        is_meta = (isinstance(argument, str) and argument == "meta") or (
            isinstance(argument, torch.device) and argument.type == "meta"
        )
        return torch.device("cpu") if is_meta else argument


#: the modes that are on, the innermost last
_RUNNING: list[ConcreteValues] = []


def places_of(tensor: Tensor) -> int:
    """As ConcreteValues.places, by the innermost mode that is on; 0 where none is."""
    return _RUNNING[-1].places(tensor) if _RUNNING else 0


@contextlib.contextmanager
def misses_forgotten() -> Iterator[None]:
    """Lets code go on after an error inside that a question without an answer has raised."""
    before = [mode.missed for mode in _RUNNING]
    try:
        yield
    except Exception:
        for mode, missed in zip(_RUNNING, before, strict=True):
            mode.missed = missed
        raise


def _is_at_rest(argument: Any) -> bool:
    """True for a parameter of an applied model as a DTensor, and for a list that holds one."""
    if isinstance(argument, list | tuple):
        return any(map(_is_at_rest, argument))
    return isinstance(argument, DTensor) and isinstance(argument, torch.nn.Parameter)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to through any view; None for an inference tensor, which does not count writes."""
    return None if tensor.is_inference() else version_of(tensor)


def _kept(argument: Any) -> Any:
    """An argument as it is now: a NumPy array copied; containers of arguments are new already."""
    return argument.copy() if isinstance(argument, np.ndarray) else argument


def raising_line(error: BaseException) -> str:
    """The innermost line of code, neither torch's nor tpplan's, that an error came through; "" where there is none."""
    found, step = "", error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if is_foreign(file) and linecache.getline(file, step.tb_lineno).strip():
            found = line_of(step.tb_frame, step.tb_lineno)
        step = step.tb_next
    return found
