"""Recomputation: a generated subclass whose forward runs again in backward, keeping its inputs and little else.

torch.utils.checkpoint is put around the class's own forward, conversions included; a wrapper module would put its name
into those of parameters.

torch.utils.checkpoint restores torch's random states and no others. A forward may draw from NumPy or Python, too; it
may count its calls, follow a mean in a buffer, put features on a module. Run again it would draw other numbers, start
from other values, and do all of that twice. Here the second run starts from what the first one found, on copies of the
buffers that it writes to, and leaves everything as it is by then. What containers hold is compared one level deep. The
first forward copies all buffers, and shows which are written to.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tpplan.core.errors import PlanMismatchError, UsageError
from tpplan.core.name_patterns import ROOT
from tpplan.plan.plan import Recompute
from tpplan.torch_internals.modules import follows_statistics, own_buffers
from tpplan.torch_internals.tensors import version_of
from tpplan.trace.hooks.generated_class import subclass
from tpplan.trace.hooks.host_rng import restored, states_of_generators

#: ops whose results selective recomputation keeps: they cost more to do again than their results take to keep
KEPT = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm",
    "aten::convolution", "aten::_convolution", "aten::mkldnn_linear", "mkldnn::_linear_pointwise",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward",
    "_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_to_all_single",
})  # fmt: skip

#: views that torch does not know for views: it would not see that a kept result is written to
_UNSAFE = ("aten::unsafe_chunk", "aten::unsafe_split")


def check_recomputable(module: nn.Module, name: str) -> None:
    """Raises PlanMismatchError for a module without a forward."""
    if type(module).forward is nn.Module.forward:
        kind = type(module).__name__
        raise PlanMismatchError(f"recompute.{name or ROOT}: {kind} has no forward of its own that could run again")


def recompute(module: nn.Module, mode: Recompute) -> None:
    """From now on the module's forward runs again in backward, wherever it is called with gradients on."""
    module.__class__ = recomputed_class(type(module), mode)  # type: ignore[arg-type]


@functools.cache
def recomputed_class(cls: type[nn.Module], mode: Recompute) -> type[nn.Module]:
    """The subclass of cls whose forward is recomputed. It bears cls's own name."""
    contexts: dict[str, Any] = {}
    if mode is Recompute.SELECTIVE:
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        run: Callable[..., Any] = functools.partial(cls.forward, self)
        if not torch.compiler.is_compiling():  # which runs what it compiles once, and keeps what it draws elsewhere
            run = RunAgain(self, run)
        return checkpoint(run, *args, use_reentrant=False, **contexts, **kwargs)

    return subclass(cls, {"forward": forward}, recomputed_class, (mode,))


def _policy(_context: object, op: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    if op.name().startswith(_UNSAFE):
        raise UsageError(
            f"{op.name()} runs in a module that is recomputed selectively: what is written to its results would be "
            "written to products that are kept; recompute that module fully"
        )
    return CheckpointPolicy.MUST_SAVE if op.name().partition(".")[0] in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


#: where a module keeps the buffers below it that its forward writes to, by their names
_WRITTEN = "_tpplan_written_buffers"
#: what each module has, besides its parameters and modules, which a forward may not replace
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class _Missing:
    """Of an attribute that is not there."""


_MISSING = _Missing()


@dataclass(slots=True, eq=False)
class RunAgain:
    """A module's forward. Its first call runs it, any later one runs it again as it ran then."""

    module: nn.Module
    run: Callable[..., Any]
    #: states of generators before the first call
    draws: tuple[Any, ...] = ()
    #: what the first call changed, as it was before: a dict, its key and the value; containers and what they held
    changed: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    filled: list[tuple[Any, Any]] = field(default_factory=list)
    #: buffers that it wrote to, as they were before, by dict and key
    written: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    has_run: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_run:
            return self._first(*args, **kwargs)
        with restored(self.draws), self._as_before():
            return self.run(*args, **kwargs)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        self.draws = states_of_generators()
        tables = list(_tables(self.module))
        before = [(table, dict(table)) for table in tables]
        values = (value for _, own in before for key, value in own.items() if key not in _OF_ANY_MODULE)
        held = [(value, _copied(value)) for value in values if _is_container(value)]
        known: frozenset[str] | None = vars(self.module).get(_WRITTEN)

        def is_copied(name: str, owner: nn.Module) -> bool:
            return known is None or name in known or follows_statistics(owner)

        buffers = [
            (
                name,
                own_buffers(owner),
                key,
                buffer,
                version_of(buffer),
                buffer.clone() if is_copied(name, owner) else None,
            )
            for name, owner, key, buffer in _buffers(self.module)
        ]
        output = self.run(*args, **kwargs)
        self.changed = [change for table, own in before for change in _changes(table, own)]
        self.filled = [(value, then) for value, then in held if not _holds(value, then)]
        written = [
            (name, table, key, copy)
            for name, table, key, buffer, version, copy in buffers
            if version_of(buffer) != version or (copy is not None and (known is not None or _differ(buffer, copy)))
        ]
        for name, table, key, copy in written:
            if copy is None:
                raise UsageError(
                    f"buffer {name} of a {type(self.module).__name__} that is recomputed was written to in this "
                    "forward and not in the first, so that it cannot run again as it ran: plan with --recompute none"
                )
            self.written.append((table, key, copy))
        vars(self.module)[_WRITTEN] = frozenset(name for name, *_ in written) | (known or frozenset())
        self.has_run = True
        return output

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        now = [(table, key, table.get(key, _MISSING)) for table, key, _ in (*self.changed, *self.written)]
        held = [(value, _copied(value)) for value, _ in self.filled]
        for table, key, value in self.changed:
            _put(table, key, value)
        for value, then in self.filled:
            _fill(value, then)
        for table, key, copy in self.written:
            table[key] = copy.clone()  # it may run a third time
        try:
            yield
        finally:
            for table, key, value in now:
                _put(table, key, value)
            for value, then in held:
                _fill(value, then)


def _tables(module: nn.Module) -> Iterator[dict[str, Any]]:
    """What code of a module's may set: attributes and buffers."""
    for inner in module.modules():
        yield vars(inner)
        if buffers := own_buffers(inner):
            yield buffers


def _changes(table: dict[str, Any], before: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for key in table.keys() | before.keys():
        then = before.get(key, _MISSING)
        if table.get(key, _MISSING) is not then and key not in _OF_ANY_MODULE and key != _WRITTEN:
            yield table, key, then


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for name, inner in module.named_modules():
        for key, buffer in own_buffers(inner).items():
            if buffer is not None and not buffer.is_inference():
                yield f"{name}.{key}".removeprefix("."), inner, key, buffer


def _differ(buffer: Tensor, copy: Tensor) -> bool:
    """True where a copy shows that a buffer was written to, of which a batch norm tells nobody."""
    return not buffer.is_meta and type(buffer) is Tensor and not torch.equal(buffer, copy)


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, set)


def _copied(value: Any) -> Any:
    return type(value)(value)


def _holds(value: Any, then: Any) -> bool:
    """True where a container holds what it held, in order."""
    if len(value) != len(then):
        return False
    pairs = zip(value.items(), then.items(), strict=True) if isinstance(value, dict) else zip(value, then, strict=True)
    if isinstance(value, dict):
        return all(own[0] is other[0] and own[1] is other[1] for own, other in pairs)
    return all(own is other for own, other in pairs)


def _fill(value: Any, then: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(then)
    else:
        value.update(then)
