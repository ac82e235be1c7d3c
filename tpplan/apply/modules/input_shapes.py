"""Checks in each forward of an applied model that the plan is proven for the shapes of its inputs.

A plan may hold numbers that are right for one batch size or length only (parts of a table that is sliced at the
length, a size in a view), and a wrong one would show no sign. The plan says for which other sizes it was proven
(tpplan.plan.plan's OtherShapes). A forward of any other size raises before its first collective, on each rank of the
tensor-parallel group, since all read the same inputs. Planned shapes cost one comparison each.

Not compared: inputs that were not tensors when the plan was made, and models that torch.compile compiles whole, whose
shapes are symbolic.
"""

import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor, nn

from tpplan.apply.modules.local_sizes import dim_of
from tpplan.core.errors import PlanMismatchError, UsageError
from tpplan.plan.plan import SHAPE, OtherShapes, Plan, ProofStatus, SizePlan
from tpplan.plan.sections.input_dims import BATCH, BOTH, LENGTH, Dim
from tpplan.plan.sections.ranks import RECEIVED
from tpplan.trace.forward_arguments import positional_names, tensors_by_path


class OnMismatch(Enum):
    """The reaction to a running model that differs from the proven one: raise, warn, or look for nothing."""

    RAISE = True
    WARN = "warn"
    NOTHING = False

    @classmethod
    def of(cls, check: object) -> "OnMismatch":
        """The reaction that apply_plan's argument `check` says. Raises UsageError for any other value."""
        try:
            return cls(check)
        except ValueError:
            raise UsageError(f"apply_plan: expected check=True, False or 'warn', got {check!r:.80}") from None


def check_shapes(model: nn.Module, plan: Plan, check: OnMismatch) -> None:
    """Installs a hook that raises PlanMismatchError in forwards whose input shapes the plan is not proven for.

    With OnMismatch.WARN each message is shown once as a warning instead.
    """
    shapes = plan.proof.other_shapes
    if check is not OnMismatch.NOTHING and plan.proof.status is ProofStatus.PROVEN and shapes is not None:
        names = positional_names(model)
        model.register_forward_pre_hook(_Shapes(shapes, plan, names, check), prepend=True, with_kwargs=True)


@final
class _Shapes:
    """The forward pre-hook; `names` are the forward's positional arguments, `by_path` the planned shapes.

    A path starts with the argument's name where example inputs were a dict, with its number where they were a tuple.
    """

    def __init__(self, shapes: OtherShapes, plan: Plan, names: tuple[str, ...], check: OnMismatch) -> None:
        self.shapes, self.batch, self.check = shapes, plan.batch, check
        self.looks_like = _sizes_that_look_like_a_number(plan)
        planned = (plan.batch.micro_batch, plan.batch.seq_len)
        self.by_path = {path: torch.Size(dim.size(*planned) for dim in dims) for path, dims in shapes.inputs.items()}
        for i, one in enumerate(plan.stage.receives if plan.stage is not None else ()):
            self.by_path[f"{RECEIVED}.{i}"] = torch.Size(one.on_a_rank(plan.mesh.tp).shape)
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
                if self.check is OnMismatch.RAISE:
                    raise PlanMismatchError(f"{problem}, or call apply_plan(check=False)")
                if problem not in self.warned:
                    self.warned.add(problem)
                    warnings.warn(problem, stacklevel=2)

    def problem(self, path: str, shape: torch.Size) -> str:
        """Returns why the plan is not proven for an input of this shape; "" where it is."""
        dims = self.shapes.inputs[path]
        reason = "it has another number of dims" if len(dims) != len(shape) else ""
        reasons = (self._not_proven(i, dim, size) for i, (dim, size) in enumerate(zip(dims, shape, strict=False)))
        reason = reason or next(filter(None, reasons), "")
        if not reason:
            return ""
        batch, length = self.batch.micro_batch, self.batch.seq_len
        return (
            f"input {path} has the shape {list(shape)}, and the plan is proven for {list(self.by_path[path])} (batch "
            f"{batch}, length {length}): {reason}. Results may be wrong: pad the input, solve again for this shape"
        )

    def _not_proven(self, place: int, dim: Dim, size: int) -> str:
        planned = dim.size(self.batch.micro_batch, self.batch.seq_len)
        if size == planned:
            return ""
        count = dim.count(size)
        if count is None:
            return f"dim {place} was {planned} in the example inputs of every batch and length"
        kinds = {BATCH: (self.shapes.batch,), LENGTH: (self.shapes.length,)}
        multiple = 1
        for one in kinds.get(dim.grows_with, (self.shapes.batch, self.shapes.length)):
            if one.multiple is None:
                return one.reason or f"the plan is proven for no other {dim.grows_with}"
            multiple *= one.multiple
        if where := self.looks_like.get(count):
            return f"a {dim.grows_with} of {count} looks like a number that the plan replaces in {where}"
        if count % multiple:
            what = "batch times length" if dim.grows_with == BOTH else dim.grows_with
            return f"a {what} of {count} is no multiple of {multiple}, and the plan is proven for multiples only"
        return ""


def _sizes_that_look_like_a_number(plan: Plan) -> dict[int, str]:
    """The batches and lengths, whole or as a rank's share, that code cannot give in a call, or be told of a tensor,
    without their being taken for a number that the plan replaces there (heads, in a view of scores), and where."""
    found: dict[int, str] = {}
    for size in (size for sizes in plan.size_plans().values() for size in sizes):
        if size.call == SHAPE:
            found |= dict.fromkeys((size.local, plan.mesh.tp * size.local), "what code is told of a tensor's shape")
        elif size.dims is None and stands_for_any_size(size):
            found |= dict.fromkeys((size.written, plan.mesh.tp * size.written), size.call)
    return found


def stands_for_any_size(size: SizePlan) -> bool:
    """True where a planned number stands for a dim that the plan knows at no size, or for none of the tensor, so that
    another call of the same kind may have a batch or a length there. A dim of a known size tells the calls apart."""
    dim = dim_of(size)
    return size.call in ("view", "expand", "slice", "narrow", "new") and (dim is None or size.of[dim] == 0)


def _tensors(given: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in the arguments with their paths."""
    for name, value in given.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, dict | list | tuple):
            yield from tensors_by_path({name: value}).items()
