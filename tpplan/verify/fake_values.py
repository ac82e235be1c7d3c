"""Answers for code that asks tensors for their values in a run on fake tensors, which have none.

Code may also not see that tensors are fake, as some then takes other branches than in training (transformers builds
masks that training does without). A forward on meta tensors, as in a trace, gives the questions of each line of code
and their answers; the run on fake tensors gives the same answers.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import seeming_real
from tpplan.trace.answers.concrete_values import QUESTIONS, ConcreteValues
from tpplan.trace.answers.planned_device import asking_line
from tpplan.trace.forward_arguments import Inputs, called_on
from tpplan.trace.trace import Loss, quiet

#: by line of code, the answers that it got, in order
Answers = Mapping[str, tuple[object, ...]]


def answers_of(model: nn.Module, inputs: Inputs, loss: Loss) -> Answers | None:
    """The answers that a model on the meta device gets in one forward and loss; None where that fails."""
    leaves, spec = pytree.tree_flatten(inputs)
    placed = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    known = ConcreteValues((p, v) for p, v in zip(placed, leaves, strict=True) if isinstance(v, Tensor))
    given = pytree.tree_unflatten(placed, spec)
    try:
        with known, quiet():
            loss(called_on(model, given), given)
    except Exception:  # the model's own code may raise anything; the step that follows reports it
        return None
    found: dict[str, list[object]] = {}
    for line, answer in known.answers:
        found.setdefault(line, []).append(answer)
    return {line: tuple(answers) for line, answers in found.items()}


@contextlib.contextmanager
def answered(answers: Answers | None) -> Iterator[None]:
    """Hides that tensors are fake, and answers questions about their values. A line of code that asks more often than
    in `answers` gets its answers again from the first. With None nothing is changed."""
    if answers is None:
        yield
        return
    with seeming_real(), _Answering(answers):
        yield


class _Answering(TorchFunctionMode):
    """A mode that gives each line of code its answers in turn."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._next = {line: itertools.cycle(told) for line, told in answers.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in QUESTIONS and args and isinstance(args[0], Tensor):
            told = self._next.get(asking_line())
            if told is not None:
                return next(told)
        return func(*args, **(kwargs or {}))
