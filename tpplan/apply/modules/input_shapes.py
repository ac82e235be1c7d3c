"""Each forward of an applied model: is the plan proven for inputs of these shapes?

What a plan holds of a batch or a length (parts of a table that is cut at the length, a size written into a view) is
right for that one alone, and on ranks nothing shows it. The plan says for which others it was proven
(tpplan.plan.plan's OtherShapes); a forward of any other raises, before its first collective, on each rank of the
tensor-parallel group, since all of them read the same inputs. Where shapes are the planned ones, that is all that is
looked at.

Inputs that were no tensors when the plan was made are not compared, nor is anything inside a model that torch.compile
takes as one: shapes are symbols there.
"""

import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor, nn

from tpplan.core.errors import PlanMismatchError
from tpplan.plan.input_dims import BATCH, BOTH, LENGTH, Dim
from tpplan.plan.plan import BatchPlan, OtherShapes, Plan, ProofStatus
from tpplan.trace.forward_arguments import named_tensors, positional_names


class Check(Enum):
    """What is done about a difference between what was proven and what runs."""

    RAISE = True
    WARN = "warn"
    NOTHING = False


def check_shapes(model: nn.Module, plan: Plan, check: Check) -> None:
    """From now on a forward whose inputs have shapes that the plan is not proven for raises PlanMismatchError; with
    Check.WARN the first of each shape warns."""
    shapes = plan.proof.other_shapes
    if check is not Check.NOTHING and plan.proof.status is ProofStatus.PROVEN and shapes is not None:
        names = positional_names(model)
        model.register_forward_pre_hook(_Shapes(shapes, plan.batch, names, check), prepend=True, with_kwargs=True)


@final
class _Shapes:
    """The hook. `names` are those of the forward's positional arguments, `by_path` the planned shapes: an input of a
    dict is called by its argument's name, one of a tuple by its number."""

    def __init__(self, shapes: OtherShapes, batch: BatchPlan, names: tuple[str, ...], check: Check) -> None:
        self.shapes, self.batch, self.check = shapes, batch, check
        planned = (batch.micro_batch, batch.seq_len)
        self.by_path = {path: torch.Size(dim.size(*planned) for dim in dims) for path, dims in shapes.inputs.items()}
        is_tuple = any(path.partition(".")[0].isdecimal() for path in self.by_path)
        self.by_number = tuple(str(i) if is_tuple else name for i, name in enumerate(names))
        self.by_name = dict(zip(names, self.by_number, strict=True))
        self.warned: set[str] = set()

    def __call__(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        given = dict(zip(self.by_number, args, strict=False))
        given |= {self.by_name.get(name, name): value for name, value in kwargs.items()}
        for path, tensor in _tensors(given):
            planned = self.by_path.get(path)
            if planned is None or tensor.shape == planned:
                continue
            if problem := self.problem(path, tensor.shape):
                if self.check is Check.RAISE:
                    raise PlanMismatchError(f"{problem}, or say apply_plan(check=False)")
                if problem not in self.warned:
                    self.warned.add(problem)
                    warnings.warn(problem, stacklevel=2)

    def problem(self, path: str, shape: torch.Size) -> str:
        """Why the plan is not proven for an input of this shape; "" where it is."""
        dims = self.shapes.inputs[path]
        reason = "it has another number of dims" if len(dims) != len(shape) else ""
        reasons = (self._not_proven(i, dim, size) for i, (dim, size) in enumerate(zip(dims, shape, strict=False)))
        reason = reason or next(filter(None, reasons), "")
        if not reason:
            return ""
        batch, length = self.batch.micro_batch, self.batch.seq_len
        return (
            f"input {path} has the shape {list(shape)}, and the plan is proven for {list(self.by_path[path])} (batch "
            f"{batch}, length {length}): {reason}. Nothing says that results are right: pad it, solve again for it"
        )

    def _not_proven(self, place: int, dim: Dim, size: int) -> str:
        planned = dim.size(self.batch.micro_batch, self.batch.seq_len)
        if size == planned:
            return ""
        count = dim.count(size)
        if count is None:
            return f"dim {place} was {planned} for every batch and length of the example inputs"
        kinds = {BATCH: (self.shapes.batch,), LENGTH: (self.shapes.length,)}
        multiple = 1
        for one in kinds.get(dim.grows_with, (self.shapes.batch, self.shapes.length)):
            if one.multiple is None:
                return one.reason or f"the plan is proven for no other {dim.grows_with}"
            multiple *= one.multiple
        if count % multiple:
            what = "batch times length" if dim.grows_with == BOTH else dim.grows_with
            return f"a {what} of {count} is no multiple of {multiple}, and the plan is proven for no other"
        return ""


def _tensors(given: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the arguments, by path."""
    found: list[tuple[str, Tensor]] = []

    def take(path: str, tensor: Tensor) -> Tensor:
        found.append((path, tensor))
        return tensor

    for name, value in given.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, dict | list | tuple):
            named_tensors({name: value}, take)
    yield from found
