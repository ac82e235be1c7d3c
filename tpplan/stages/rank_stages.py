"""The stages of one rank: a copy of the model for each, and the model itself as what they hold together.

    parts = stage_copies(model, stages, precision, layers, run) # of each stage its own modules, stubs for all others
    ...                                      # each is laid out on its own
    joined(model, parts)                     # the model now has the modules of all its rank's stages

Copies share parameters and buffers with the model, so that nothing is held twice: each parameter is in one stage alone.
Afterwards a module that one stage has is in the model under its name, and so are its parameters, in state_dict, for
optimizers and checkpoints. A module that several have, such as the root, is there as a shell, which does not run: its
copies in the stages do. `train` and `eval` reach the copies, and buffers of all copies are the same tensors.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tpplan.core.errors import PlanMismatchError, UsageError
from tpplan.core.graph import joined_name
from tpplan.plan.sections.modes import Precision
from tpplan.plan.sections.ranks import StagePlan
from tpplan.stages.stage_model import as_stage, keep_stages
from tpplan.stages.stub import Run, Stub
from tpplan.torch_internals.modules import own_buffers, own_children, own_parameters, share_parameters
from tpplan.trace.hooks.generated_class import subclass

#: key of a shell's __dict__ for its copies, which run
_COPIES = "_tpplan_copies"


def stage_copies(
    model: nn.Module, stages: Sequence[StagePlan], precision: Precision, units: Sequence[str], run: Run
) -> list[nn.Module]:
    """For each stage a copy of the model with that stage's modules; the model itself where there is one stage. `units`
    are the model's layers, `run` runs modules of stubs.

    Raises PlanMismatchError for a module or parameter that the model does not have, and UsageError for a model that
    cannot be copied.
    """
    if len(stages) == 1:
        return [as_stage(model, stages[0], precision, units, run)]
    return [as_stage(_copy(model, stage), stage, precision, units, run) for stage in stages]


def _copy(model: nn.Module, stage: StagePlan) -> nn.Module:
    """A copy that shares the tensors of a stage, with those that its stubs keep; parameters of other stages are copied
    without memory."""
    absent, tied = tuple(f"{name}." for name in stage.absent), {one.name for one in stage.ties}
    memo: dict[int, Tensor] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name in tied or not name.startswith(absent):
            memo[id(weight)] = weight
        elif id(weight) not in memo:
            memo[id(weight)] = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UsageError(
            f"a rank with several stages needs a copy of the model for each, and copy.deepcopy of it fails: {error}; "
            "take one stage a rank (--virtual-stages 1)"
        ) from error


def joined(model: nn.Module, parts: Sequence[nn.Module]) -> nn.Module:
    """Makes a model, in place, what its rank's stages hold together. Raises PlanMismatchError for a module whose own
    parameters are in several stages of the rank."""
    _join("", model, parts)
    keep_stages(model, parts)
    return model


def _join(name: str, module: nn.Module, parts: Sequence[nn.Module]) -> nn.Module:
    """Returns the module that stands for the copies `parts` of one: the only one that runs, a stub, or a shell."""
    held = [part for part in parts if not isinstance(part, Stub)]
    if len(held) < 2:
        return (held or sorted(parts, key=lambda part: not list(part.parameters())))[0]
    owners = [part for part in held if any(weight is not None for weight in own_parameters(part).values())]
    if len(owners) > 1:
        raise PlanMismatchError(
            f"module {name or 'the root'} has parameters of its own that several stages of a rank read: solve with one "
            "stage a rank (--virtual-stages 1)"
        )
    first = (owners or held)[0]
    share_parameters(module, first)
    _share_buffers(module, first, held)
    for child, own in own_children(module).items():
        if own is not None:
            copies = [part.get_submodule(child) for part in held]
            own_children(module)[child] = _join(joined_name(name, child), own, copies)
    module.__dict__[_COPIES] = tuple(held)
    module.__class__ = _shell_class(type(module))  # type: ignore[arg-type]
    return module


def _share_buffers(module: nn.Module, first: nn.Module, held: Sequence[nn.Module]) -> None:
    """Gives the shell and all copies the same buffers, but for parameters of other stages, which are buffers there."""
    for name in list(own_buffers(module)):
        buffer = own_buffers(first)[name]
        for one in (module, *held):
            own_buffers(one)[name] = buffer


@functools.cache
def _shell_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls, under its name, of a module that several stages of a rank have and that does not run."""

    def forward(self: nn.Module, *_args: Any, **_kwargs: Any) -> Any:
        raise UsageError(
            "this model is several stages of a pipeline, which run by a schedule: call model.step(micro_batches, loss) "
            "or model.evaluate(micro_batches, loss)"
        )

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        for part in self.__dict__[_COPIES]:
            part.train(mode)
        return cls.train(self, mode)

    return subclass(cls, {"forward": forward, "train": train}, _shell_class)
