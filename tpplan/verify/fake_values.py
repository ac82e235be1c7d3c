"""Answers for code that asks tensors for their values in a run on fake tensors, which have none.

Nor may code see that they are fake: some takes another way then than in training (transformers builds masks that it
does without otherwise). A forward on meta tensors, as a trace runs it, says what each line of code asks and is told; a
run on fake tensors tells it the same.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import seeming_real
from tpplan.trace.answers.concrete_values import QUESTIONS, KnownValues
from tpplan.trace.answers.planned_device import asking_line
from tpplan.trace.trace import Inputs, Loss, forward_inputs, quiet

#: what the lines of code were told, each in order
Answers = Mapping[str, tuple[object, ...]]


def answers_of(model: nn.Module, inputs: Inputs, loss: Loss) -> Answers | None:
    """What a model on the meta device asks in one forward and loss; None where it cannot run so without a plan."""
    leaves, spec = pytree.tree_flatten(inputs)
    placed = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    known = KnownValues((p, v) for p, v in zip(placed, leaves, strict=True) if isinstance(v, Tensor))
    given = pytree.tree_unflatten(placed, spec)
    accepted = forward_inputs(model, given)
    try:
        with known, quiet():
            outputs = model(**accepted) if isinstance(accepted, Mapping) else model(*accepted)
            loss(outputs, given)
    except Exception:  # of any kind: it is the model's own code, and its step says what is wrong
        return None
    found: dict[str, list[object]] = {}
    for line, answer in known.answers:
        found.setdefault(line, []).append(answer)
    return {line: tuple(answers) for line, answers in found.items()}


@contextlib.contextmanager
def answered(answers: Answers | None) -> Iterator[None]:
    """While it lasts, fake tensors do not show that they are, and their values are those of the answers. A line that
    asks more often than it did is told the same again. Without answers nothing is changed."""
    if answers is None:
        yield
        return
    with seeming_real(), _Answering(answers):
        yield


class _Answering(TorchFunctionMode):
    """Gives the answers."""

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
