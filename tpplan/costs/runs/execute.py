"""Runs ops on meta tensors of the local shapes, forward and backward, and logs their kernels.

The same run shows which tensors autograd saves, by storage, and how much memory the op holds while it runs. Runs are
cached by signature: ops with the same target, literals and local operands cost the same. Ops of a graph that was grown
from those of smaller micro-batches may have executions that are grown too (tpplan.costs.runs.grown_executions).
"""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, TypeVar, cast

import torch

from tpplan.core.errors import ModelError, first_line
from tpplan.core.graph import Argument, ModelGraph, Op, Ref
from tpplan.core.layout import R, local_shape
from tpplan.core.name_patterns import ROOT
from tpplan.core.repeated_blocks import like_ops, unlike_ops
from tpplan.costs.runs.execution import Execution, Gradient, local_bytes
from tpplan.costs.runs.gpu_kernels import callable_of, operator_of
from tpplan.costs.runs.grown_executions import GrownExecutions
from tpplan.costs.runs.kernels import WORK, Kernel, KernelLog, MemoryBound, bytes_of, is_view, tensors_in
from tpplan.layouts.rules import FLEX_ATTENTION, OPAQUE, Call, Strategy, localized_arguments, size_places
from tpplan.torch_internals.operators import is_op
from tpplan.torch_internals.tensors import storage_key
from tpplan.trace.answers.data_dependent_sizes import COUNTING, counting_by
from tpplan.trace.whole.opaque import OpaqueTrace, OpRecord

T = TypeVar("T")


#: end of messages about an op whose kernels are not seen
_BY_BYTES = "priced by bytes alone"
#: by target: what is guessed of an op whose kernels are seen
_GUESSES = {FLEX_ATTENTION: ("flex_attention is priced as full attention: blocks that its mask leaves out count too",)}


@dataclass(slots=True)
class Executor:
    """Runs calls on meta tensors and caches their executions."""

    #: by signature of the call
    _cache: dict[Hashable, Execution] = field(default_factory=dict)
    #: executions that were not run but extrapolated
    _grown: GrownExecutions = field(default_factory=GrownExecutions)
    #: executions of opaque modules, by the key of the call
    _observed: dict[str, Execution] = field(default_factory=dict)
    #: executions by the call's id; the call is held, so that its id is not reused
    _known: dict[tuple[int, Strategy, int], tuple[Call, Execution]] = field(default_factory=dict)
    #: results of `once` by key, with the object that the key names by its id, held for the same reason
    _memo: dict[Hashable, tuple[object, object]] = field(default_factory=dict)

    def once(self, key: Hashable, about: object, make: Callable[[], T]) -> T:
        """Returns make(), computed once per key. The key contains the id of `about`, which is held."""
        if key not in self._memo:
            self._memo[key] = (about, make())
        return cast(T, self._memo[key][1])

    def observe(self, calls: Mapping[str, OpaqueTrace], modules: Mapping[str, str]) -> None:
        """Stores the executions of opaque modules' calls, by key, as observed; `modules` names the module of each call.
        Warns about guesses among them."""
        for key, observed in calls.items():
            if key in self._observed:
                continue
            self._observed[key] = seen = _execution_of(observed)
            for guess in seen.guesses:
                warnings.warn(f"module {modules.get(key) or ROOT}, which runs whole: {guess}", stacklevel=2)

    def whole(self, graph: ModelGraph, op: Op) -> Execution:
        """Returns the execution of an op where nothing is sharded, found once for the ops at one place of like blocks.

        Raises ModelError like `execute`.
        """
        known: dict[str, Execution] = self.once((Execution, id(graph)), graph, dict)
        name = like_ops(graph)[op.name]
        if name not in known:
            call = Call.of(graph, op)
            known[name] = self.execute(call, whole_strategy(call), 1)
        return known[name]

    def saving(self, graph: ModelGraph) -> Hashable:
        """Returns a key that is equal for graphs of which the same storages are kept and the same ops run again: what
        each op saves, and the kinds of work that it does, where nothing is sharded."""
        return self.once(
            (Executor.saving, id(graph)),
            graph,
            lambda: tuple(_saving(self.whole(graph, op)) for op in unlike_ops(graph)),
        )

    def execute(self, call: Call, strategy: Strategy, tp: int) -> Execution:
        """Returns one rank's execution of a call under a strategy.

        Warns where the op or its backward cannot run on meta tensors, and prices it by its bytes then. Raises
        ModelError for a call of an opaque module that was not observed.
        """
        if call.target == OPAQUE:
            seen = self._observed.get(str(call.args[2]))
            if seen is None:
                raise ModelError(
                    f"{call.target}: the call {call.args[2]} of a module that runs whole was not observed: trace the "
                    "model again"
                )
            return _with_gradients(seen, call)
        known = self._known.get((id(call), strategy, tp))
        if known is None:
            known = self._known[id(call), strategy, tp] = (call, self._executed(call, strategy, tp))
        return known[1]

    def _executed(self, call: Call, strategy: Strategy, tp: int) -> Execution:
        """Returns the execution of a call, run once for all calls of the same signature, or grown."""
        shapes = tuple(map(local_shape, (value.shape for value in call.operands), strategy.operands, repeat(tp)))
        args = localized_arguments(call, strategy, tp)
        own, others = self.once((_anywhere, id(call)), call, lambda: _anywhere(call))
        function = callable_of(call, strategy)
        key = function, own if args == call.args else _without_names(args), shapes, others
        if key in self._cache:
            return self._cache[key]
        made = tuple(map(local_shape, (value.shape for value in call.results), strategy.results, repeat(tp)))
        form, literals = _without_sizes(call.target, args)
        about = function, form, tuple(map(len, (*shapes, *made))), others
        sizes = *shapes, *made, literals
        grown = self._grown.at(about, sizes) if call.is_grown else None
        if grown is not None:
            return grown
        try:
            found = replace(_run(call, function, args, shapes), guesses=_GUESSES.get(call.target, ()))
        except ModelError as error:
            found = _by_bytes(call, strategy, tp, first_line(error))
            warnings.warn(found.guesses[0], stacklevel=2)
        self._cache[key] = found
        self._grown.add(about, sizes, found)
        return found


def _saving(execution: Execution) -> Hashable:
    works = frozenset(WORK[type(kernel)] for kernel in execution.forward)
    return execution.saves, execution.saves_results, execution.saved_bytes > 0, works


def _execution_of(observed: OpaqueTrace) -> Execution:
    """Returns the execution of an opaque module's call from the ops that it was observed to run."""
    return Execution(
        forward=tuple(kernel for ran in observed.forward for kernel in _kernels_of(ran)),
        backward=tuple(kernel for ran in observed.backward for kernel in _kernels_of(ran)),
        saves=observed.keeps,
        saves_results=observed.keeps_results,
        saved_bytes=observed.kept_bytes,
        held=((observed.forward_bytes, 0), (0, observed.backward_bytes)),
        guesses=tuple(_guesses_of(observed)),
    )


def _with_gradients(seen: Execution, call: Call) -> Execution:
    """Adds to the execution of an opaque module's call a gradient for each operand that carries one."""
    carries = any(value.carries_gradient for value in call.results)
    return replace(
        seen,
        gradients=tuple(
            Gradient(value.num_bytes, False) if carries and value.carries_gradient else None for value in call.operands
        ),
    )


def _guesses_of(observed: OpaqueTrace) -> Iterator[str]:
    """Yields messages about ops of an opaque module that are priced by a guess."""
    unseen = sorted({str(ran.op) for ran in (*observed.forward, *observed.backward) if _is_guess(ran)})
    if unseen:
        yield f"{', '.join(unseen)}: {_BY_BYTES}"
    if not observed.is_bounded:
        yield "a size that data decides is priced as 1"


def _kernels_of(ran: OpRecord) -> tuple[Kernel, ...]:
    """Returns the kernels of an operator that ran on fake tensors; by its bytes where meta tensors cannot run it."""
    name = str(ran.op)
    num_bytes = bytes_of(tensors_in(ran.args)) + bytes_of(iter(ran.results))
    log = KernelLog(any(argument is True for argument in ran.args), ())
    if "flex_attention" in name:
        is_backward = "backward" in name
        return (log.attention(name, (None, *ran.args[:3]) if is_backward else ran.args),)
    if not is_op(ran.op):
        return (MemoryBound(num_bytes=num_bytes),)
    if not _runs(ran, log):
        return () if is_view(ran.op) else (MemoryBound(num_bytes=num_bytes),)
    return tuple(log.kernels)


def _is_guess(ran: OpRecord) -> bool:
    """True for an operator with results whose kernels are not seen, because it does not run on meta tensors.

    Higher-order operators (loops, branches) are no guess: the ops that they run are observed one by one. Nor are those
    whose results have a size that data decides: all that they do is to read and write.
    """
    is_seen = is_op(ran.op) and ran.op not in COUNTING and "flex_attention" not in str(ran.op)
    return is_seen and bool(ran.results) and not is_view(ran.op) and not _runs(ran, contextlib.nullcontext())


def _runs(ran: OpRecord, log: contextlib.AbstractContextManager[object]) -> bool:
    """Runs an operator on meta tensors under `log`, and returns whether that succeeded."""
    try:
        with torch.no_grad(), log:
            ran.op(*ran.args, **_on_meta(ran.kwargs))
    except Exception:
        return False
    return True


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.device("meta") if name == "device" else value for name, value in kwargs.items()}


def _anywhere(call: Call) -> tuple[object, Hashable]:
    """Returns the parts of a call's cache key that are equal under all strategies: its positional arguments, if none is
    a size, and all else that decides which kernels it runs, without shapes."""
    flags = tuple((value.dtype, value.carries_gradient) for value in call.operands)
    carries = tuple(value.carries_gradient for value in call.results)
    return _without_names(call.args), (_without_names(call.kwargs), flags, carries, _makes_storage(call))


def _without_names(argument: object) -> object:
    """Returns an argument with all references made equal, for a cache key that holds shapes instead of names."""
    if isinstance(argument, Ref):
        return Ref("")
    return tuple(map(_without_names, argument)) if isinstance(argument, tuple) else argument


def _without_sizes(target: str, args: tuple[Argument, ...]) -> tuple[object, tuple[int, ...]]:
    """Returns a call's positional arguments without names and the literals that are sizes of tensors, and these."""
    places, form, sizes = size_places(target), list[object](), list[int]()
    for place, argument in enumerate(args):
        if place not in places:
            form.append(_without_names(argument))
            continue
        own = argument if isinstance(argument, tuple) else (argument,)
        sizes += [item for item in own if type(item) is int]
        form.append(tuple(int if type(item) is int else _without_names(item) for item in own))
    return tuple(form), tuple(sizes)


def _run(
    call: Call, function: Callable[..., Any], args: tuple[Argument, ...], shapes: tuple[tuple[int, ...], ...]
) -> Execution:
    """Runs a call on meta tensors of these shapes. Raises ModelError where it, or its backward, fails."""
    leaves = _meta_operands(call, shapes)
    # In-place ops may not write to leaves that require grad; a clone's backward runs no kernel.
    operands = [leaf.clone() for leaf in leaves] if call.is_in_place else leaves
    supply = iter(operands)
    real_args = tuple(_materialize(argument, supply) for argument in args)
    real_kwargs = {name: _materialize(value, supply) for name, value in call.kwargs}
    is_causal = bool(call.target.startswith("aten.scaled_dot_product_attention") and call.argument(5, "is_causal"))
    log = KernelLog(is_causal, operands)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    carries = any(value.carries_gradient for value in call.results)
    try:
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with _counting_as(call), torch.set_grad_enabled(carries), saving, log:
            output = function(*real_args, **real_kwargs)
        forward = tuple(log.kernels) or _hidden_copy(call, output)
        left_bytes = log.made.live_bytes
        held = (*log.held, left_bytes)
        log.restart()
        results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients: tuple[Gradient | None, ...] = ()
        if carries and results and wanted:
            with log:
                given = [_empty_like(result) for result in results]
                found = iter(torch.autograd.grad(results, wanted, given, allow_unused=True))
            gradients = tuple(_gradient(next(found), given) if leaf.requires_grad else None for leaf in leaves)
    except Exception as error:
        shown = ", ".join(f"{value.dtype}{list(shape)}" for value, shape in zip(call.operands, shapes, strict=True))
        raise ModelError(f"{call.target} on ({shown}) cannot be costed on meta tensors: {error}") from error
    execution = _execution(forward, tuple(log.kernels), saved, operands, list(tensors_in(output)))
    return replace(execution, held=(held, (left_bytes, *log.held)), gradients=gradients)


def _meta_operands(call: Call, shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    return [
        torch.empty(shape, dtype=getattr(torch, value.dtype), device="meta", requires_grad=value.carries_gradient)
        for shape, value in zip(shapes, call.operands, strict=True)
    ]


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns torch.empty_like(tensor), which is slow on meta tensors; most are contiguous, where this is the same."""
    if tensor.layout is torch.strided and tensor.is_contiguous():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_like(tensor)


def _by_bytes(call: Call, strategy: Strategy, tp: int, reason: str) -> Execution:
    """Returns an execution of an op that cannot be run: it reads operands, writes results and keeps both.

    Its backward moves the same bytes twice. `reason` becomes part of the guess.
    """
    given = [local_bytes(value, layout, tp) for value, layout in zip(call.operands, strategy.operands, strict=True)]
    made = [local_bytes(value, layout, tp) for value, layout in zip(call.results, strategy.results, strict=True)]
    carries = any(value.carries_gradient for value in call.results)
    moved = MemoryBound(num_bytes=sum(given) + sum(made))
    return Execution(
        forward=(moved,),
        backward=(moved, moved) if carries else (),
        saves=frozenset(range(len(given))) if carries else frozenset(),
        saves_results=frozenset(range(len(made))) if carries else frozenset(),
        saved_bytes=0,
        held=((0,), (0, sum(given) if carries else 0)),
        gradients=tuple(
            Gradient(size, False) if carries and value.carries_gradient else None
            for value, size in zip(call.operands, given, strict=True)
        ),
        guesses=(f"{reason}: {_BY_BYTES}",),
    )


def _gradient(found: torch.Tensor | None, given: list[torch.Tensor]) -> Gradient | None:
    if found is None:
        return None
    storage = found.untyped_storage()
    is_view = any(storage_key(tensor) == storage_key(found) for tensor in given)
    return Gradient(storage.nbytes(), is_view)


def _counting_as(call: Call) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which results whose size data decides have the size that they have in the graph."""
    if operator_of(call) not in COUNTING:
        return contextlib.nullcontext()
    indices = call.argument(1, "indices") if call.target == "aten.index.Tensor" else ()
    dim = next((i for i, index in enumerate(indices) if isinstance(index, Ref)), 0) if isinstance(indices, tuple) else 0
    sizes = call.results[0].shape
    return counting_by(lambda _op, counting, args, kwargs: sizes[dim or counting.dim(*args, **kwargs)])


def _hidden_copy(call: Call, output: Any) -> tuple[Kernel, ...]:
    """Returns the copy of a reshape of a transposed operand, which is a view of a contiguous operand here; else ()."""
    return (MemoryBound(num_bytes=2 * bytes_of(tensors_in(output))),) if _makes_storage(call) else ()


def _makes_storage(call: Call) -> bool:
    """True for a call on tensors whose first result lies in a storage of its own."""
    return bool(call.results) and bool(call.operands) and call.results[0].storage == call.results[0].name


def _execution(
    forward: tuple[Kernel, ...],
    backward: tuple[Kernel, ...],
    saved: list[torch.Tensor],
    operands: list[torch.Tensor],
    results: list[torch.Tensor],
) -> Execution:
    """Returns the execution with the saved tensors sorted, by storage, into operands, results and others."""
    kept = {storage_key(tensor): tensor for tensor in saved}
    own = {storage_key(operand): i for i, operand in reversed(list(enumerate(operands)))}
    made = {
        storage_key(result): i for i, result in reversed(list(enumerate(results))) if storage_key(result) not in own
    }
    extra = [tensor for key, tensor in kept.items() if key not in own and key not in made]
    return Execution(
        forward=forward,
        backward=backward,
        saves=frozenset(own[key] for key in kept if key in own),
        saves_results=frozenset(made[key] for key in kept if key in made),
        saved_bytes=sum(tensor.untyped_storage().nbytes() for tensor in extra),
        held=((), ()),
    )


def _materialize(argument: Argument, operands: Iterator[torch.Tensor]) -> Any:
    match argument:
        case Ref():
            return next(operands)
        case tuple():
            return [_materialize(item, operands) for item in argument]
        case str() if argument.startswith(("dtype:", "torch:")):
            return getattr(torch, argument.partition(":")[2])
        case str() if argument.startswith("device:"):
            return torch.device("meta")
        case _:
            return argument


def whole_strategy(call: Call) -> Strategy:
    """Returns the strategy in which every rank runs the whole op: all operands and results are R."""
    return Strategy((R,) * len(call.operands), (R,) * len(call.results))
