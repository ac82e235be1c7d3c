"""What a module that runs whole does, seen by running it once on fake tensors, forward and backward.

What comes out has a shape then, and what ran below autograd is its price. Functions that loops and choices are given
(torch.while_loop, torch.cond) run once each, whatever the data would say, and so does what they cost.
"""

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import ModelError
from tpplan.torch_internals import pytree
from tpplan.torch_internals.checkpoints import unfinished_ended
from tpplan.torch_internals.fakes import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    flex_attention_anywhere,
    unset_fake_temporarily,
    upper_bound,
)
from tpplan.torch_internals.modules import tensors_in_place
from tpplan.torch_internals.operators import is_higher_order, written_by
from tpplan.torch_internals.recording import TorchDispatchMode
from tpplan.torch_internals.tensors import gradient_hooks, storage_key, version_of
from tpplan.trace.answers.concrete_values import raising_line
from tpplan.trace.answers.own_failure import own_failure
from tpplan.trace.answers.planned_device import as_planned, machine_as_planned
from tpplan.trace.hooks.checkpoint_context import surrounded_again
from tpplan.trace.hooks.live_storages import Storages
from tpplan.trace.hooks.parameter_names import registered_name
from tpplan.trace.opaque import PLAIN, Observed, OpaqueCall, Ran, described

#: a size that data decides, and without bound, is counted as
UNKNOWN_SIZE = 1


class UnobservableError(ModelError):
    """A module cannot stand as one operator: it fails on fake tensors, or gives what no operator gives."""


class _ForeignError(UnobservableError):
    """It reads a tensor that is none of its own."""


def observe(module: nn.Module, call: OpaqueCall, *, is_untouched: bool = False) -> Observed:
    """Runs the module on fake tensors, forward and backward. Where it is the model, whose parameters are not touched,
    it may read them past their modules, and put others in their places. Raises UnobservableError."""
    try:
        try:
            return _observe(module, call, lambda _: contextlib.nullcontext(), is_untouched)
        except _ForeignError:
            weights = set(call.weights) if is_untouched else set()
            return _observe(
                module, call, lambda fakes: _Elsewhere({name: fakes[name] for name in weights}), is_untouched
            )
    except UnobservableError:
        raise
    except Exception as error:
        if (failure := own_failure(error, has_run=False)) is not None:
            raise failure from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = raising_line(error)
        where = f" at {line}" if line else ""
        raise UnobservableError(f"{type(error).__name__}: {reason}{where}") from error


def _observe(
    module: nn.Module,
    call: OpaqueCall,
    elsewhere: Callable[[Mapping[str, Tensor]], contextlib.AbstractContextManager[object]],
    is_untouched: bool,
) -> Observed:
    environment = ShapeEnv()
    with (
        FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True),
        _modes_of(call),
        flex_attention_anywhere(),
    ):
        weights = {name: _fake(weight) for name, weight in call.weights.items()}
        leaves = [_fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        # Code may write to what it is given, which for a leaf of autograd is an error of its own.
        given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        buffers = {name: _fake(buffer) for name, buffer in module.named_buffers()}
        log = _Log(environment, [*weights.values(), *buffers.values(), *(x for x in given if isinstance(x, Tensor))])
        args, kwargs = pytree.tree_unflatten(given, call.spec)

        others = elsewhere(weights)

        @contextlib.contextmanager
        def on_fakes() -> Iterator[None]:
            with _on_fakes(module, weights | buffers), others:
                yield

        modules = list(module.modules())
        storages = {name: storage_key(weight) for name, weight in weights.items()}
        refused: list[str] = []
        with (
            unfinished_ended(),
            surrounded_again(on_fakes),
            on_fakes(),
            log,
            as_planned("cpu", refused.append),
            machine_as_planned(refused.append),
        ):
            output = type(module).forward(module, *args, **kwargs)
            after = dict(module.named_parameters())
        if refused:  # and the code has caught it
            raise UnobservableError(refused[0])
        written = frozenset(name for name, storage in storages.items() if storage in log.written)
        replaced = frozenset(
            name for name in storages.keys() | after.keys() if _is_other(name, storages, weights, after)
        )
        if pytree.tree_structure((args, kwargs)) != call.spec:
            raise UnobservableError("it changes a list or dict that it is given")
        if replaced and not (is_untouched and list(module.modules()) == modules):
            raise UnobservableError(f"its forward puts a new parameter, or new data, at {min(replaced)!r}")
        found, spec = pytree.tree_flatten(output)
        _check(found, given, weights)
        outputs = tuple(_meta(leaf, environment) if isinstance(leaf, Tensor) else leaf for leaf in found)
        results = [leaf for leaf in found if isinstance(leaf, Tensor)]
        ends = {get_gradient_edge(result): _fake(result) for result in results if result.requires_grad}
        seen_given, seen_results = _watched(given, environment), _watched(results, environment)
        left, peak, forward = log.made.live_bytes, log.made.peak_bytes, tuple(log.ran)
        del args, kwargs, given, output, found, results  # what is there still, autograd keeps
        keeps, keeps_results = _living(seen_given), _living(seen_results)
        kept_results = {seen_results[i].key: seen_results[i].num_bytes for i in keeps_results}
        kept = log.made.live_bytes
        log.restart()
        wanted = [x for x in (*leaves, *weights.values()) if isinstance(x, Tensor) and x.requires_grad]
        if ends and wanted:
            with log:
                torch.autograd.backward(tuple(ends), [torch.empty_like(like) for like in ends.values()])
    return Observed(
        key=_digest(type(module), call, outputs, forward, log.ran),
        outputs=outputs,
        spec=spec,
        forward=forward,
        backward=tuple(log.ran),
        keeps=keeps,
        keeps_results=keeps_results,
        kept_bytes=max(0, kept - sum(kept_results.values())),
        forward_bytes=peak - left,
        backward_bytes=log.made.peak_bytes - kept,
        bodies=tuple(sorted(log.bodies)),
        is_bounded=log.is_bounded,
        written=written | (replaced & weights.keys()),
    )


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor's storage, which this does not keep."""

    storage: "weakref.ref[torch.UntypedStorage]"
    key: int
    num_bytes: int


def _watched(leaves: list[Any], environment: ShapeEnv) -> list[_Watched]:
    """Those of the tensors among leaves."""
    return [
        _Watched(weakref.ref(leaf.untyped_storage()), storage_key(leaf), _nbytes(leaf, environment))
        for leaf in leaves
        if isinstance(leaf, Tensor)
    ]


def _living(watched: list[_Watched]) -> frozenset[int]:
    """Which of them are there still, by position."""
    return frozenset(i for i, one in enumerate(watched) if one.storage() is not None)


def _is_other(
    name: str, storages: Mapping[str, int], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> bool:
    """True where a forward has put another parameter in the place of one, or other data into it (`.data = ...`)."""
    return after.get(name) is not before.get(name) or storage_key(after[name]) != storages[name]


def _check(found: list[Any], given: list[Any], weights: Mapping[str, Tensor]) -> None:
    """Raises UnobservableError for what no operator gives or does."""
    inputs = [leaf for leaf in given if isinstance(leaf, Tensor)]
    if not (inputs or weights) or not any(isinstance(leaf, Tensor) for leaf in found):
        raise UnobservableError("it is given no tensor, or returns none")
    storages = {storage_key(tensor) for tensor in inputs}
    for leaf in found:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise UnobservableError(f"it returns a {type(leaf).__name__}, which the code around it may depend on")
        if isinstance(leaf, Tensor) and not all(isinstance(size, int) for size in leaf.shape):
            raise UnobservableError("data decides the size of what it returns")
        if isinstance(leaf, Tensor) and storage_key(leaf) in storages:
            raise UnobservableError("it returns what it was given, or a view of it")
    if any(version_of(tensor) for tensor in inputs):
        raise UnobservableError("it writes to what it is given")
    if any(gradient_hooks(tensor) for tensor in (*inputs, *weights.values())):
        raise UnobservableError("it puts a hook on the gradient of what it is given")


class _Elsewhere(TorchFunctionMode):
    """While it is on, what code reads past its modules (from a closure, a list) is a fake, too: a constant, or one of
    those weights of the model that may be read so, by name."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = weights
        #: by id: the tensor, which keeps the id taken, and its fake
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor) or not leaf.is_meta:
            return leaf
        name = registered_name(leaf)
        if name is not None and name not in self.weights:
            raise UnobservableError(f"it reads parameter {name} past the module that has it")
        if id(leaf) not in self._known:
            self._known[id(leaf)] = (leaf, _fake(leaf) if name is None else self.weights[name])
        return self._known[id(leaf)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._fake, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Log(TorchDispatchMode):
    """What runs below autograd, and the bytes that live. Functions of loops and choices run once each."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch compiles functions of its higher-order operators while such a mode is on."""
        return True

    def __init__(self, environment: ShapeEnv, operands: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.environment = environment
        self.ran: list[Ran] = []
        self.bodies: set[str] = set()
        self.is_bounded = True
        self.made = Storages(without=operands)
        #: storages whose contents were changed
        self.written: set[int] = set()

    def restart(self) -> None:
        """Forgets what ran and the peak; what lives counts on."""
        self.ran = []
        self.made.forget_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in pytree.tree_leaves((args, kwargs)):
            is_foreign = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)
            if is_foreign and (tensor.is_meta or tensor.requires_grad):
                raise _ForeignError(f"it reads a tensor of shape {list(tensor.shape)} that it is not given")
        if is_higher_order(func):
            results = func(*(self._followed(str(func), argument) for argument in args), **kwargs)
        else:
            self.written.update(map(storage_key, written_by(func, args, kwargs)))
            results = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        if not str(func).startswith("prim."):
            noted = pytree.tree_map(self._noted, (tuple(args), kwargs))
            self.ran.append(Ran(op=func, args=noted[0], kwargs=noted[1], results=tuple(map(self._noted, made))))
        for tensor in made:
            self.made.add(tensor, _nbytes(tensor, self.environment))
        return results

    def _followed(self, name: str, argument: Any) -> Any:
        """A function that a higher-order operator is given: what runs in it is written down, too."""
        if isinstance(argument, Tensor) or not callable(argument):
            return argument
        self.bodies.add(name)

        def run(*args: Any) -> Any:
            with self:
                return argument(*args)

        return run

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            self.is_bounded &= all(_bound(size, self.environment) is not None for size in leaf.shape)
            return _meta(leaf, self.environment)
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return _known_size(leaf, self.environment)
        return None if callable(leaf) and not isinstance(leaf, torch.dtype) else leaf


def _known_size(size: Any, environment: ShapeEnv) -> int:
    """A size as a number: the most there can be where data decides, UNKNOWN_SIZE where that has no bound."""
    bound = _bound(size, environment)
    return UNKNOWN_SIZE if bound is None else bound


def _bound(size: Any, environment: ShapeEnv) -> int | None:
    """The most that a size can be; None where nothing says."""
    if isinstance(size, int):
        return size
    if not isinstance(size, torch.SymInt):
        return None
    return upper_bound(size, environment)


def _nbytes(tensor: Tensor, environment: ShapeEnv) -> int:
    """Bytes of a tensor's storage, as far as its own sizes tell."""
    return prod(_known_size(size, environment) for size in tensor.shape) * tensor.element_size()


def _meta(tensor: Tensor, environment: ShapeEnv) -> Tensor:
    """The like of a tensor on the meta device, no fake."""
    sizes = [_known_size(size, environment) for size in tensor.shape]
    is_known = all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))
    with unset_fake_temporarily():
        if is_known:
            return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device="meta")
        return torch.empty(sizes, dtype=tensor.dtype, device="meta")


def _fake(tensor: Tensor) -> Tensor:
    """The like of a tensor, a leaf of autograd, on the CPU."""
    fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _modes_of(call: OpaqueCall) -> Iterator[None]:
    is_enabled, *casts = call.modes
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(is_enabled))
        for device, is_on, dtype in casts:
            if is_on:
                stack.enter_context(torch.autocast(device, dtype))
        yield


@contextlib.contextmanager
def _on_fakes(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The module with these in place of parameters and buffers, and fakes in place of other tensors."""
    with _attributes_on_fakes(module), tensors_in_place(module, tensors):
        yield


@contextlib.contextmanager
def _attributes_on_fakes(module: nn.Module) -> Iterator[None]:
    """Tensors that modules hold as plain attributes are fakes; at the end each attribute is as it was."""
    before = [(inner, dict(inner.__dict__)) for inner in module.modules()]
    for inner, attributes in before:
        found = {name: value for name, value in attributes.items() if isinstance(value, Tensor) and value.is_meta}
        inner.__dict__.update({name: _fake(value) for name, value in found.items()})
    try:
        yield
    finally:
        for inner, attributes in before:
            inner.__dict__.clear()
            inner.__dict__.update(attributes)


def _digest(cls: type, call: OpaqueCall, outputs: tuple[Any, ...], *ran: Any) -> str:
    """Of what was seen, without the module's own name."""
    ops = [[(str(step.op), [described(x) for x in pytree.tree_leaves(step.args)]) for step in steps] for steps in ran]
    seen = (cls.__qualname__, call.signature[1:], [described(leaf) for leaf in outputs], ops)  # type: ignore[index]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
