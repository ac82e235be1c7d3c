"""Compares the calls of the first training forward on ranks with those made while the plan was traced and proven.

Code may take another branch on ranks than in the trace: because of an environment variable, a counter, another library
or another batch size. The proof covers only the traced branch, and a wrong result would show no sign. So the plan
holds digests of what each module calls (tpplan.trace.noted_calls), and the first forward in training mode is compared
with them before the optimizer steps. One all-reduce tells whether any rank differs; then all ranks raise. The hooks are
removed after that forward, so later steps cost nothing.

Not compared: modules that run whole, modules whose data decides what runs, forwards under an autocast that the plan
does not name, or without one that it names, and models of which torch.compile compiles a part, whose calls cannot be
seen.
"""

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from tpplan.apply.model_match import plan_name
from tpplan.apply.modules.input_shapes import OnMismatch
from tpplan.core.errors import PlanMismatchError
from tpplan.core.name_patterns import ROOT
from tpplan.plan.plan import Plan, Precision, ProofStatus
from tpplan.torch_internals.modules import hooks_of, is_compiled
from tpplan.torch_internals.tensors import without_modes
from tpplan.trace.noted_calls import CallNotes, Calls, digest, first_difference

#: number of calls that the error shows before the first one that differs
_SHOWN = 3


def check_calls(
    model: nn.Module, plan: Plan, device_type: str, check: OnMismatch, group: dist.ProcessGroup | None = None
) -> None:
    """Installs hooks that compare the first training forward with the calls that the plan was proven for.

    Where a module calls something else on any rank, that forward raises PlanMismatchError on all ranks, or warns
    (`check`). The comparison also holds on a device type other than the planned one, unless code asks for its device.
    `group` has the ranks that the plan is for: all ranks by default.
    """
    planned = plan.called()
    if check is OnMismatch.NOTHING or plan.proof.status is not ProofStatus.PROVEN or not planned:
        return
    if dist.get_backend() == "fake":
        return
    first = _FirstCalls(
        planned=planned,
        whole=frozenset(plan.opaque_modules()),
        proven_device=(plan.proof.device or "").partition(" ")[0],
        device_type=device_type,
        check=check,
        is_autocast=plan.precision is Precision.BF16_AUTOCAST,
        group=group,
    )
    first.handles = (
        model.register_forward_pre_hook(first.before),
        model.register_forward_hook(first.after, prepend=True, always_call=True),
    )


def warn_of_hooks(model: nn.Module, plan: Plan) -> None:
    """Installs a hook by which the first training forward warns of hooks on modules that were registered since then,
    where tensor-parallel ranks would give them slices and summands."""
    if plan.mesh.tp == 1 or dist.get_backend() == "fake":
        return
    known = frozenset(id(hook) for module in model.modules() for hook in hooks_of(module))
    warning = _HookWarning(known)
    warning.handle = model.register_forward_pre_hook(warning)


@final
@dataclass(slots=True, eq=False)
class _HookWarning:
    """A forward pre-hook of the root. `known` are the ids of hooks that were there before."""

    known: frozenset[int]
    handle: RemovableHandle | None = None

    def __call__(self, model: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        assert self.handle is not None
        self.handle.remove()
        hooked = (name for name, own in model.named_modules() if any(map(self._is_of_user, hooks_of(own))))
        if (name := next(hooked, None)) is not None:
            warnings.warn(
                f"module {name or ROOT} has a hook that was registered after apply_plan: under tensor parallelism it "
                "is given what this rank has, a slice or a summand, and what it gives to a loss or changes has another "
                "gradient than in one process; compute that in the model's forward",
                stacklevel=2,
            )

    def _is_of_user(self, hook: Any) -> bool:
        module = str(getattr(hook, "__module__", None) or type(hook).__module__)
        return id(hook) not in self.known and module.partition(".")[0] not in ("torch", "tpplan")


@final
@dataclass(slots=True, kw_only=True, eq=False)
class _FirstCalls:
    """The forward pre-hook and forward hook of the model that note its calls and compare them with the plan's.

    `planned` has the digests by module name, `whole` the names of modules that run whole, `proven_device` the device
    type that the code was told while it was proven, `device_type` the one it runs on.
    """

    planned: Mapping[str, tuple[str, ...]]
    whole: frozenset[str]
    proven_device: str
    device_type: str
    check: OnMismatch
    is_autocast: bool
    group: dist.ProcessGroup | None
    handles: tuple[RemovableHandle, ...] = ()
    calling: CallNotes | None = None
    noting: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def before(self, model: nn.Module, _args: object) -> None:
        """Starts noting calls in a training forward that can be compared."""
        is_training = model.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not is_training or self.calling is not None:
            return
        if torch.is_autocast_enabled(self.device_type) != self.is_autocast or any(map(is_compiled, model.modules())):
            return
        self.calling = CallNotes(model, lambda name: plan_name(name) in self.whole)
        self.noting.enter_context(self.calling.noting())
        self.noting.enter_context(self.calling.forward_of(""))

    def after(self, _model: nn.Module, _args: object, output: Any) -> None:
        """Compares and removes both hooks. After a forward that raised, the next one is compared."""
        if self.calling is None:
            return
        calling, self.calling = self.calling, None
        self.noting.close()
        if output is None:
            return
        for handle in self.handles:
            handle.remove()
        if problem := self._agreed(self.problem(calling)):
            if self.check is OnMismatch.RAISE:
                raise PlanMismatchError(problem)
            warnings.warn(problem, stacklevel=2)

    def problem(self, calling: CallNotes) -> str:
        """Returns the message about the first module on this rank whose calls differ, or ""."""
        for name, found in calling.found.items():
            planned = self.planned.get(plan_name(name) or ROOT)
            for calls in found if planned is not None else ():
                if planned is not None and digest(calls) not in planned:
                    return f"{_difference(plan_name(name) or ROOT, calls, planned)}{self._remedy()}"
        return ""

    def _remedy(self) -> str:
        if self.proven_device == self.device_type:
            return "make it take the same path while planning, or call apply_plan(check='warn')"
        return (
            f"the plan was proven for code that is told that it runs on {self.proven_device or 'no device'}, and it "
            f"runs on {self.device_type}: plan with a profile of a {self.device_type} machine, or call "
            "apply_plan(check='warn')"
        )

    def _agreed(self, problem: str) -> str:
        """Returns, on all ranks, the message of the first rank that has one; "" where none has. One all-reduce."""
        with torch.no_grad(), without_modes():
            differs = torch.tensor([bool(problem)], device=self.device_type, dtype=torch.int32)
            dist.all_reduce(differs, dist.ReduceOp.MAX, group=self.group)
            if not differs.item():
                return ""
            ranks = dist.get_process_group_ranks(self.group)
            everyone: list[Any] = [""] * len(ranks)
            dist.all_gather_object(everyone, problem, group=self.group)
        return next(f"rank {rank}: {one}" for rank, one in zip(ranks, everyone, strict=True) if one)


def _difference(name: str, calls: Calls, planned: tuple[str, ...]) -> str:
    place = max(first_difference(calls, one) for one in planned)
    here = f"call {place + 1} there is {calls[place]}" if place < len(calls) else f"it ends after {len(calls)} calls"
    before = ", ".join(calls[max(0, place - _SHOWN) : place])
    after = f", after {before}" if before else ""
    return (
        f"module {name} calls here what it did not while the plan was proven: {here}{after}. Its code takes another "
        "path on ranks (its device, the environment, a count of calls, another version of a library, values of this "
        "batch), for which the plan is not proven: "
    )
