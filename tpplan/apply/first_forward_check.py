"""The first training forward on ranks: does the code call what it called while the plan was made and proven?

Code may take another way on ranks than in a trace, for a reason that nobody foresaw: an environment variable, a count
of calls, another library, a batch of another size. What is right for the one way may be wrong for the other, and
nothing shows it. So the plan carries digests of what each module calls (tpplan.trace.noted_calls), and the first
forward in training mode is compared with them, before the optimizer steps. One reduction says whether any rank differs;
then all raise. Then the hooks go, and later steps pay nothing.

Not compared are modules that run whole or in which data decides what runs, forwards under autocast that is none of the
plan's, and models of which torch.compile takes a part, where there is nothing to see.
"""

import contextlib
import warnings
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from tpplan.apply.model_match import plan_name
from tpplan.apply.modules.input_shapes import Check
from tpplan.core.errors import PlanMismatchError
from tpplan.core.name_patterns import ROOT
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.torch_internals.modules import is_compiled
from tpplan.torch_internals.recording import without_modes
from tpplan.trace.noted_calls import Calling, Calls, digest, first_difference

#: calls shown around the first that differs
_SHOWN = 3


def check_calls(model: nn.Module, plan: Plan, device_type: str, check: Check) -> None:
    """The model's first training forward raises PlanMismatchError, or warns, on all ranks, where what a module calls on
    one is not what the plan was proven for. Kinds of devices agree on that, unless the code asks for its device."""
    planned = plan.called()
    if check is Check.NOTHING or plan.proof.status is not ProofStatus.PROVEN or not planned:
        return
    if dist.get_backend() == "fake":
        return
    told = (plan.proof.device or "").partition(" ")[0]
    first = _FirstCalls(planned, frozenset(plan.opaque_modules()), told, device_type, check)
    first.handles = (
        model.register_forward_pre_hook(first.before),
        model.register_forward_hook(first.after, prepend=True, always_call=True),
    )


@final
class _FirstCalls:
    """Both hooks."""

    def __init__(
        self,
        planned: dict[str, tuple[str, ...]],
        whole: frozenset[str],
        told: str,
        device_type: str,
        check: Check,
    ) -> None:
        self.planned, self.whole, self.told, self.device_type, self.check = planned, whole, told, device_type, check
        self.handles: tuple[RemovableHandle, ...] = ()
        self.calling: Calling | None = None
        self.noting = contextlib.ExitStack()

    def before(self, model: nn.Module, _args: object) -> None:
        """Begins to note."""
        is_training = model.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not is_training or self.calling is not None:
            return
        if torch.is_autocast_enabled(self.device_type) or any(map(is_compiled, model.modules())):
            return
        self.calling = Calling(model, lambda name: plan_name(name) in self.whole)
        self.noting.enter_context(self.calling.noting())
        self.noting.enter_context(self.calling.forward_of(""))

    def after(self, _model: nn.Module, _args: object, output: Any) -> None:
        """Compares. Where the forward raised, the next one is the first."""
        if self.calling is None:
            return
        calling, self.calling = self.calling, None
        self.noting.close()
        if output is None:
            return
        for handle in self.handles:
            handle.remove()
        if problem := self._agreed(self.problem(calling)):
            if self.check is Check.RAISE:
                raise PlanMismatchError(problem)
            warnings.warn(problem, stacklevel=2)

    def problem(self, calling: Calling) -> str:
        """What the first module that differs calls; "" where none does."""
        for name, found in calling.found.items():
            planned = self.planned.get(plan_name(name) or ROOT)
            for calls in found if planned is not None else ():
                if planned is not None and digest(calls) not in planned:
                    return f"{_difference(plan_name(name) or ROOT, calls, planned)}{self._remedy()}"
        return ""

    def _remedy(self) -> str:
        """What to do about a difference."""
        if self.told == self.device_type:
            return "make it take the same way while planning, or say apply_plan(check='warn')"
        return (
            f"the plan was proven for code that is told that it runs on {self.told or 'no device'}, and it runs on "
            f"{self.device_type}: plan with a profile of a {self.device_type} machine, or say apply_plan(check='warn')"
        )

    def _agreed(self, problem: str) -> str:
        """The first rank's problem, on all."""
        with torch.no_grad(), without_modes():
            differs = torch.tensor([bool(problem)], device=self.device_type, dtype=torch.int32)
            dist.all_reduce(differs, dist.ReduceOp.MAX)
            if not differs.item():
                return ""
            everyone: list[Any] = [""] * dist.get_world_size()
            dist.all_gather_object(everyone, problem)
        rank = next(rank for rank, one in enumerate(everyone) if one)
        return f"rank {rank}: {everyone[rank]}"


def _difference(name: str, calls: Calls, planned: tuple[str, ...]) -> str:
    place = max(first_difference(calls, one) for one in planned)
    here = f"call {place + 1} there is {calls[place]}" if place < len(calls) else f"it ends after {len(calls)} calls"
    before = ", ".join(calls[max(0, place - _SHOWN) : place])
    after = f", after {before}" if before else ""
    return (
        f"module {name} calls here what it did not while the plan was proven: {here}{after}. Its code takes another "
        "way on ranks (its device, the environment, a count of calls, another version of a library, values of this "
        "batch), and nothing says that the plan is right for that one: "
    )
