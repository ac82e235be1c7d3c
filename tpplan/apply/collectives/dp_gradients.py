"""Averages gradients of parameters that FSDP does not hold over data-parallel ranks, at the end of each backward.

With G the gradient that earlier backwards left, equal on every rank, and g_i what this backward adds on rank i, the
mean over ranks of (G + g_i) is G + the mean of g_i: accumulation needs no bookkeeping. Inside `no_sync` gradients stay
unaveraged until the next backward outside it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES
from tpplan.apply.collectives.redistribute import TpGroup, all_reduce_in_place
from tpplan.apply.collectives.tp_gradients import Slot, buckets, change_as_one
from tpplan.core.errors import UsageError
from tpplan.torch_internals.autograd import NO_BACKWARD, at_end_of_backward, running_backward
from tpplan.torch_internals.modules import own_parameters
from tpplan.torch_internals.tensors import accumulated_hooks

#: a function that register_post_accumulate_grad_hook takes
AccumulatedHook = Callable[[Tensor], object]


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Averager:
    """Averages the gradients of its slots over `groups`, one for each data-parallel axis; no_sync disables it.

    `hooks` are the user's hooks on accumulated gradients, by index of the slot. They run after the averaging and so see
    the gradient of one process; where there are any, every backward averages, in no_sync too.
    """

    groups: tuple[TpGroup, ...]
    slots: list[Slot] = field(default_factory=list)
    hooks: dict[int, tuple[AccumulatedHook, ...]] = field(default_factory=dict)
    is_enabled: bool = True
    #: the backward (autograd's graph task) at whose end gradients are averaged, and the indices of the slots that got
    #: gradients in it
    backward: int = NO_BACKWARD
    came: set[int] = field(default_factory=set)

    def __reduce__(self) -> tuple[Callable[..., "Averager"], tuple[Any, ...]]:
        """Copies the slots without hooks, as torch does not copy the hooks of a parameter either."""
        return _averager, (self.groups, self.slots)

    def watch(self, model: nn.Module) -> None:
        """Makes each trainable plain parameter of a model a slot, and averages it from now on.

        Hooks on their accumulated gradients move to this Averager: autograd would call them with one rank's gradient.
        """
        seen: set[int] = set()
        for module, name, parameter in _trainable(model):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            place = len(self.slots)
            self.slots.append(Slot(module=module, name=name))
            own = accumulated_hooks(parameter)
            if own:
                self.hooks[place] = tuple(own.values())
                own.clear()
        model.register_forward_pre_hook(self.before_forward)

    def before_forward(self, model: nn.Module, _inputs: object) -> None:
        """Registers this Averager on slots' parameters that lack its hook, as in a copied model or after loading.

        Raises UsageError for a trainable parameter that is no slot.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        own = {id(slot.parameter()): place for place, slot in enumerate(self.slots)}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if id(parameter) not in own:
                raise UsageError(
                    f"parameter {name} trains, and was frozen or another parameter when the plan was applied: its "
                    "gradient would not be averaged; unfreeze or add it before apply_plan"
                )
            hooks = accumulated_hooks(parameter)
            if not any(isinstance(hook, _Arrival) for hook in hooks.values()):
                parameter.register_post_accumulate_grad_hook(_Arrival(self, own[id(parameter)]))  # type: ignore[no-untyped-call]

    def gradient_comes(self, place: int | None = None) -> None:
        """Queues the averaging at the end of the running backward; `place` is the index of the slot whose gradient
        came, None for a gradient on which no hooks of the user wait."""
        if place is not None:
            self.came.add(place)
        running = running_backward()
        if running != self.backward and (self.is_enabled or self.hooks):
            self.backward = running
            at_end_of_backward(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        came = self._averaged()
        self.came.clear()
        for place in sorted(came & self.hooks.keys()):
            for hook in self.hooks[place]:
                hook(self.slots[place].parameter())

    def _averaged(self) -> set[int]:
        """Averages every gradient that any rank has, and returns the slots whose gradients came on any rank.

        A rank without a gradient, whose loss did not depend on that parameter, contributes zeros.
        """
        if all(group.size == 1 for group in self.groups):
            return set(self.came)
        places = range(len(self.slots))
        flags = [[slot.gradient() is not None for slot in self.slots], [place in self.came for place in places]]
        has_any, came = self.ranks_with(flags)
        wanted = [_gradient_of(slot) for slot, count in zip(self.slots, has_any, strict=True) if count]
        for bucket in buckets(wanted, BUCKET_BYTES):
            change_as_one(bucket, self._average)
        return {place for place in places if came[place]}

    def ranks_with(self, flags: list[list[bool]]) -> list[list[int]]:
        """Returns for each flag the number of ranks on which it is True."""
        found: list[list[int]] = self.summed(flags).tolist()
        return found

    def summed(self, flags: list[list[bool]]) -> Tensor:
        """Returns for each flag the number of ranks on which it is True, as an int32 tensor."""
        counted = torch.tensor(flags, dtype=torch.int32, device=self.slots[0].parameter().device)
        self._sum(counted)
        return counted

    def _average(self, x: Tensor) -> None:
        self._sum(x)
        for group in self.groups:
            x.div_(group.size)

    def _sum(self, x: Tensor) -> None:
        for group in self.groups:
            if group.size > 1:
                all_reduce_in_place(x, group)


def _averager(groups: tuple[TpGroup, ...], slots: list[Slot]) -> Averager:
    return Averager(groups=groups, slots=slots)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """A hook on a slot's accumulated gradient that tells the Averager."""

    averager: Averager
    place: int

    def __call__(self, _: Tensor) -> None:
        self.averager.gradient_comes(self.place)


def _gradient_of(slot: Slot) -> Tensor:
    """Returns the local part of a slot's gradient, after setting `.grad` to zeros where it was None."""
    parameter = slot.parameter()
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = slot.gradient()
    assert gradient is not None
    return gradient


def _trainable(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter.requires_grad:
                yield module, name, parameter
