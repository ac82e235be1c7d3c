"""One step of a subject, alone and on a rank, for scripts/evidence/adversary.py; and what it should give."""

import contextlib
import json
import logging
import math
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from adversary_parts.models import Inputs, Spec, Subject, draw, subject_of
from adversary_parts.ranks import join_group
from adversary_parts.subjects import example_subject, trap_subject
from tpplan.apply.apply import apply_plan
from tpplan.apply.model_match import plan_name
from tpplan.core.errors import InternalError, TpplanError
from tpplan.plan.plan import Plan
from tpplan.trace.forward_arguments import forward_inputs

#: of the loss, and of a gradient relative to its largest element or to this share of the model's largest
TOLERANCE, GRADIENT_NOISE = 1e-4, 1e-3
SHOWN_CHARACTERS = 300

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What names a subject: a random model by number, an example, a trap, or a spec itself."""

    kind: str
    seed: int = 0
    number: int = 0
    name: str = ""
    spec: Spec | None = None

    def subject(self) -> Subject:
        match self.kind:
            case "model":
                return subject_of(draw(self.seed, self.number))
            case "spec":
                assert self.spec is not None
                return subject_of(self.spec)
            case "trap":
                return trap_subject(self.name)
        return example_subject(self.name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A loss and every gradient, whole; None of what a model has none."""

    loss: float
    gradients: Mapping[str, Tensor | None]


# ---- a step


def whole(gradient: Tensor | None) -> Tensor | None:
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def widened(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def step(model: nn.Module, subject: Subject, shape: Shape, *, in_double: bool) -> Outcome:
    """One forward and backward; chance is the same in each process."""
    torch.manual_seed(1)
    inputs: Inputs = subject.inputs(*shape)
    if in_double:
        inputs = {name: widened(value) for name, value in inputs.items()}
    model.zero_grad()
    loss = subject.loss(model(**forward_inputs(model, inputs)), inputs)
    loss.backward()
    weights = model.named_parameters()
    return Outcome(loss.item(), {plan_name(name): whole(weight.grad) for name, weight in weights})


def built(subject: Subject, *, in_double: bool) -> nn.Module:
    model = subject.build()
    return model.double() if in_double else model


def worst_error(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest relative error of the loss and of any gradient, and whose it is; infinite for one that is missing."""
    present = [gradient.abs().max().item() for gradient in expected.gradients.values() if gradient is not None]
    floor = GRADIENT_NOISE * max(present, default=0.0)
    errors = {"loss": abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-30)}
    for name in {*expected.gradients, *found.gradients}:
        theirs, ours = expected.gradients.get(name), found.gradients.get(name)
        if theirs is not None and ours is not None and theirs.shape == ours.shape:
            scale = max(theirs.abs().max().item(), floor, 1e-30)
            errors[name] = (ours - theirs).abs().max().item() / scale
        elif theirs is not None or ours is not None:
            only = theirs if theirs is not None else ours
            errors[name] = 0.0 if only is not None and not only.any() else math.inf
    errors = {name: math.inf if math.isnan(error) else error for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def expected_of(subject: Subject, *, in_double: bool) -> list[Outcome | None]:
    """What one process gives at the planned and the other shapes: a rank alone, as the model is trained on ranks, and
    code that asks whether torch.distributed is initialized is another model where it is not."""
    found: list[Outcome | None] = []
    with alone():
        for shape in ((subject.batch, subject.seq_len), *subject.others):
            try:
                found.append(step(built(subject, in_double=in_double), subject, shape, in_double=in_double))
            except Exception:
                found.append(None)
    return found


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank, and what ranks find in the environment; gone at the end."""
    with patch.dict(os.environ), tempfile.TemporaryDirectory(prefix="alone-") as folder:
        join_group(0, 1, Path(folder) / "store")
        try:
            yield
        finally:
            dist.destroy_process_group()


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


# ---- on a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A plan to apply to a subject, and what each of these shapes should give."""

    key: Key
    plan: str
    shapes: tuple[Shape, ...]
    expected: tuple[Outcome, ...]
    in_double: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AtShape:
    """What a rank found at a shape: an error against one process, or what was raised."""

    error: float = 0.0
    worst: str = ""
    raised: str = ""
    is_own: bool = False


def on_rank(task: Task) -> list[AtShape]:
    """One step per shape on the model with the plan applied, up to the first that raises. Runs on every rank."""
    quiet()
    subject = task.key.subject()
    found: list[AtShape] = []
    try:
        plan = Plan.from_dict(json.loads(task.plan))
        # In 64 bits dtypes that code names are others than planned.
        model = apply_plan(built(subject, in_double=task.in_double), plan, check=not task.in_double)
        for shape, expected in zip(task.shapes, task.expected, strict=True):
            error, worst = worst_error(step(model, subject, shape, in_double=task.in_double), expected)
            found.append(AtShape(error=error, worst=worst))
    except Exception as error:
        text = f"{type(error).__name__}: {(str(error).strip() or '-')}"
        is_own = isinstance(error, TpplanError) and not isinstance(error, InternalError)
        if not is_own:
            frames = traceback.extract_tb(error.__traceback__)
            text = f"{text.splitlines()[0]} at {Path(frames[-1].filename).name}:{frames[-1].lineno}"
        found.append(AtShape(raised=text[:SHOWN_CHARACTERS], is_own=is_own))
    return found


def raises(found: Sequence[AtShape]) -> bool:
    return any(each.raised for each in found)


def judged(found: Sequence[AtShape | None]) -> tuple[str, str]:
    """Verdict and detail of what all ranks found at one shape; None of one that did not come so far."""
    raised = [each for each in found if each is not None and each.raised]
    if raised and len(raised) < len(found):
        return "WRONG", f"one rank alone raises: {raised[0].raised}"
    if raised:
        return ("refused" if all(each.is_own for each in raised) else "crash"), f"on ranks: {raised[0].raised}"
    there = [each for each in found if each is not None]
    if len(there) < len(found):
        return "hang", "a rank did not come to this shape"
    worst = max(there, key=lambda each: each.error)
    said = f"error {worst.error:.1e} in {worst.worst}"
    return ("right" if worst.error <= TOLERANCE else "WRONG"), said
