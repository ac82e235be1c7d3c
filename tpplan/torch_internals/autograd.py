"""Autograd: the running backward and its end, torch.autograd.Function, hooks on saved tensors."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import BuiltinMethodType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tpplan.torch_internals.probes import Probe

#: the result of running_backward where no backward runs
NO_BACKWARD = -1
#: the functions that switch gradients, and that begin and end autocast, in a recorded graph
SET_GRAD_ENABLED = torch._C._set_grad_enabled
AUTOCAST_ENDS = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


def running_backward() -> int:
    """The number of the backward that runs in this thread, unique to it; NO_BACKWARD where none runs."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the running backward, after callbacks queued earlier."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_captured(node: Any) -> bool:
    """True during torch.autograd.grad for the node of a leaf whose gradient is returned instead of accumulated."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch's answer for a leaf whose gradient is returned
        return True
    return False


#: nodes whose backward reads no tensor of the forward
_READ_NOTHING = frozenset({"ToCopyBackward0", "ViewBackward0", "TBackward0", "PermuteBackward0", "TransposeBackward0",
                           "SelectBackward0", "AliasBackward0"})  # fmt: skip


def leaf_only_copied(tensor: Tensor) -> Tensor | None:
    """The leaf that a tensor is, or is made of by functions which keep no tensors for backward and read no other: of
    such a tensor a backward may begin any number of times. None for any other tensor."""
    node = tensor.grad_fn
    if node is None:
        return tensor
    while not hasattr(node, "variable"):
        kept = getattr(node, "_raw_saved_tensors", None)
        if kept if kept is not None else node.name() not in _READ_NOTHING:
            return None
        following = [before for before, _ in node.next_functions if before is not None]
        if len(following) != 1:
            return None
        (node,) = following
    found: Tensor = node.variable
    return found


def below_autograd() -> contextlib.AbstractContextManager[object]:
    """A context in which ops skip autograd: their results carry no gradient."""
    found: contextlib.AbstractContextManager[object] = torch._C._AutoDispatchBelowAutograd()
    return found


@contextlib.contextmanager
def functions_run_by(run: Callable[..., Any]) -> Iterator[None]:
    """Makes cls.apply(...) of every autograd Function call run(cls, apply, ...), `apply` being torch's own for cls.

    So do names of a Function's own file for its `apply` (`f = cls.apply`), which keep torch's when that is replaced.
    Function.apply is a Python method up to torch 2.13, and a C method from 2.14 on.
    """
    own = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return run(cls, own.__get__(None, cls), *args, **kwargs)

    with patch.object(Function, "apply", classmethod(apply)), contextlib.ExitStack() as patched:
        for cls in dict.fromkeys(_defined_elsewhere(Function)):
            file = sys.modules.get(cls.__module__)
            names = [name for name, value in vars(file).items() if _is_apply_of(value, cls)] if file is not None else ()
            for name in names:
                patched.enter_context(patch.object(file, name, cls.apply))
        yield


def _is_apply_of(value: object, cls: type[Function]) -> bool:
    is_method = isinstance(value, MethodType | BuiltinMethodType)
    return is_method and getattr(value, "__self__", None) is cls and getattr(value, "__name__", "") == "apply"


@contextlib.contextmanager
def forwards_seen_by(see: Callable[[type[Function]], None]) -> Iterator[None]:
    """Calls see(cls), which may raise, before the forward of an autograd Function runs that neither torch nor tpplan
    defines. cls is the class that defines it, of which the Function that runs may be a subclass."""
    with contextlib.ExitStack() as patched:
        for cls in dict.fromkeys(_defined_elsewhere(Function)):
            own = vars(cls)["forward"].__func__
            patched.enter_context(patch.object(cls, "forward", staticmethod(_seen(own, functools.partial(see, cls)))))
        yield


def _defined_elsewhere(base: type[Function]) -> Iterator[type[Function]]:
    """Yields the subclasses, at any depth, with a static forward of their own, but torch's and tpplan's."""
    for cls in base.__subclasses__():
        is_elsewhere = cls.__module__.partition(".")[0] not in ("torch", "tpplan")
        if is_elsewhere and isinstance(vars(cls).get("forward"), staticmethod):
            yield cls
        yield from _defined_elsewhere(cls)


def _seen(forward: Callable[..., Any], see: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        see()
        return forward(*args, **kwargs)

    return run


@contextlib.contextmanager
def saved_hooks_seen_by(see: Callable[[Callable[..., Any], Callable[..., Any]], None]) -> Iterator[None]:
    """Calls see(pack, unpack), which may raise, before any torch.autograd.graph.saved_tensors_hooks, or a context made
    of it, is entered with these two hooks."""
    push = torch._C._autograd._push_saved_tensors_default_hooks

    def pushed(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        see(pack, unpack)
        push(pack, unpack)

    with patch.object(torch._C._autograd, "_push_saved_tensors_default_hooks", pushed):
        yield


@contextlib.contextmanager
def gradient_hooks_seen_by(see: Callable[[], None]) -> Iterator[None]:
    """Calls see() before code puts a hook on the gradient of a tensor (register_hook)."""
    own = Tensor.register_hook

    def register(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        see()
        return own(x, hook)  # type: ignore[no-untyped-call]

    with patch.object(Tensor, "register_hook", register):
        yield


# ---- probes


class _Twice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def _backward_known() -> bool:
    """Two backwards have different numbers, and a queued callback runs at the end, after gradients are accumulated."""
    x = torch.ones(1, requires_grad=True)
    numbers: list[int] = []
    ends: list[bool] = []

    def hook(_: Tensor) -> None:
        numbers.append(running_backward())
        at_end_of_backward(lambda: ends.append(x.grad is not None))

    x.register_hook(hook)  # type: ignore[no-untyped-call]
    for _ in range(2):
        (2 * x).backward()  # type: ignore[no-untyped-call]
    return ends == [True, True] and len({*numbers, NO_BACKWARD, running_backward()}) == 3


def _captured() -> bool:
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    seen: list[bool] = []
    assert y.grad_fn is not None
    leaf = y.grad_fn.next_functions[0][0]
    y.register_hook(lambda _: seen.append(is_captured(leaf)))  # type: ignore[no-untyped-call]
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward()  # type: ignore[no-untyped-call]
    return seen == [True, False]


def _functions() -> bool:
    x = torch.ones(1, requires_grad=True)
    seen: list[type] = []

    def run(cls: type, apply: Callable[..., Any], *args: Any) -> Any:
        seen.append(cls)
        return apply(*args)

    with functions_run_by(run):
        inside = _Twice.apply(x)  # type: ignore[no-untyped-call]
    after = _Twice.apply(x)  # type: ignore[no-untyped-call]
    return seen == [_Twice] and torch.equal(inside, after) and "Twice" in str(inside.grad_fn)


def _gradient_hooks() -> bool:
    x = torch.ones(1, requires_grad=True)
    seen: list[bool] = []
    with gradient_hooks_seen_by(lambda: seen.append(True)):
        x.register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]
    x.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    x.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return seen == [True] and x.grad.item() == 6


def _copied() -> bool:
    leaf = torch.ones(2, 3, requires_grad=True)
    copies = (leaf, leaf.to(torch.float64), leaf.T, leaf[0], leaf.view(3, 2), _Twice.apply(leaf))  # type: ignore[no-untyped-call]
    others = (leaf * leaf, leaf.sigmoid(), torch.cat([leaf, leaf]))
    return all(leaf_only_copied(own) is leaf for own in copies) and not any(map(leaf_only_copied, others))


def _below() -> bool:
    x = torch.ones(1, requires_grad=True)
    with below_autograd():
        return (2 * x).grad_fn is None


def _saved_hooks() -> bool:
    """Hooks are seen when entered, not when made, and still work; those of save_on_cpu are seen, too."""
    seen: list[object] = []
    hooks = saved_tensors_hooks(lambda tensor: 2 * tensor, lambda tensor: tensor)
    x = torch.ones(1, requires_grad=True)
    with saved_hooks_seen_by(lambda pack, unpack: seen.append((pack, unpack))):
        before = list(seen)
        with hooks:
            y = x * x
        with save_on_cpu():
            pass
    with hooks:
        pass
    y.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return not before and len(seen) == 2 and seen[0] == (hooks.pack_hook, hooks.unpack_hook) and x.grad.item() == 4


PROBES = (
    Probe(
        name="the running backward",
        uses="torch._C._current_graph_task_id, Variable._execution_engine.queue_callback",
        needed_for="reducing gradients once, at the end of each backward",
        works=_backward_known,
    ),
    Probe(
        name="gradients that are returned",
        uses="torch._C._will_engine_execute_node",
        needed_for="torch.autograd.grad on an applied model",
        works=_captured,
    ),
    Probe(
        name="functions with their own backward",
        uses="torch.autograd.Function.apply, replaced",
        needed_for="tracing torch.autograd.Function and reentrant checkpoints",
        works=_functions,
    ),
    Probe(
        name="hooks on gradients, when they are put",
        uses="torch.Tensor.register_hook, replaced",
        needed_for="naming code in backward that is given the gradient of a part of the batch",
        works=_gradient_hooks,
    ),
    Probe(
        name="leaves of copies",
        uses="names of autograd's nodes, Node.variable, _raw_saved_tensors",
        needed_for="zero-bubble schedules, which compute weights' gradients apart",
        works=_copied,
    ),
    Probe(
        name="ops below autograd",
        uses="torch._C._AutoDispatchBelowAutograd",
        needed_for="collectives of conversions, which have their own backward",
        works=_below,
    ),
    Probe(
        name="hooks on what autograd saves",
        uses="torch._C._autograd._push_saved_tensors_default_hooks, replaced",
        needed_for="modules whose code enters saved_tensors_hooks, which run whole",
        works=_saved_hooks,
    ),
)
