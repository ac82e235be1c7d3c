"""Notes on what a plan makes otherwise than one process that reads all rows of a batch at once.

A rank runs one micro-batch of its own rows at a time, and the gradients of the mean losses are averaged. That is the
same where the loss is a mean over rows and backward is linear in the gradient, which is what a proof takes for granted.
Where code does something else with rows or gradients, it is given those of a part of the batch, as in any data-parallel
training and under gradient accumulation; a plan says where.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tpplan.core.graph import ModelGraph, Op
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules.reduction import BATCH_NORM, STATISTICS
from tpplan.search.models.rows import rows_together
from tpplan.search.models.trace_cache import Traced
from tpplan.torch_internals.modules import has_backward_hooks

#: largest number of places that a note names
_SHOWN = 3
#: the op around what an autograd.Function is given and gives
_OF_FUNCTION = "tpplan.whole.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a global batch that ranks read at a time: data-parallel ranks x micro-batches."""

    data_parallel: int
    accumulation_steps: int

    @classmethod
    def of(cls, assignment: Assignment) -> "Parts":
        """The parts that the ranks of an assignment read."""
        return cls(data_parallel=assignment.mesh.data_parallel, accumulation_steps=assignment.accumulation_steps)

    @property
    def one(self) -> str:
        """One part in words."""
        if self.data_parallel == 1:
            return f"one of {self.accumulation_steps} micro-batches"
        of_rank = f"one of {self.data_parallel} data-parallel ranks"
        return of_rank if self.accumulation_steps == 1 else f"one micro-batch of {of_rank}"


def notes_on_rows(traced: Traced, parts: Parts) -> Iterator[str]:
    """Yields the notes; none where one rank reads the whole batch at once."""
    if parts.data_parallel * parts.accumulation_steps > 1:
        yield from _on_statistics(traced, parts)
        yield from _on_buffers(traced, parts)
        yield from _on_rows_together(traced, parts)
        yield from _on_backward(traced, parts)


def _on_statistics(traced: Traced, parts: Parts) -> Iterator[str]:
    """Yields a note on running statistics of norms, which training writes and does not read."""
    writes = traced.buffers_written()
    modules = dict.fromkeys(own.module or ROOT for own in writes if own.target in STATISTICS and not own.is_read)
    if modules:
        apart = ", and evaluation reads those of the rank that it runs on" if parts.data_parallel > 1 else ""
        yield f"running statistics ({listed(modules)}) are {_whose(parts)}: training does not read them{apart}"


def _on_buffers(traced: Traced, parts: Parts) -> Iterator[str]:
    """Yields a note on the other buffers that the forward writes to from rows, by whether training reads them."""
    writes = [own for own in traced.buffers_written() if own.is_read or own.target not in STATISTICS]
    for is_read, text in ((False, "training does not read them"), (True, "training reads them")):
        if labels := [own.label for own in writes if own.is_read is is_read]:
            yield f"buffers that the forward writes to ({listed(labels)}) are {_whose(parts)}: {text}"


def _whose(parts: Parts) -> str:
    """The rows of which a buffer tells."""
    if parts.data_parallel > 1:
        return "of each rank's own rows"
    return f"updated {parts.accumulation_steps} times a step, from one micro-batch each"


def _on_rows_together(traced: Traced, parts: Parts) -> Iterator[str]:
    """Yields notes on ops that make of a row something else beside other rows: norms over rows, pairs of rows, and a
    loss that is their sum."""
    graph = traced.graph
    normed = [own.module or ROOT for own in traced.buffers_written() if own.target == BATCH_NORM and not own.is_read]
    if normed:
        yield f"norms over rows ({listed(dict.fromkeys(normed))}) take mean and variance of the rows of {parts.one}"
    together = rows_together(graph)
    if together.pairs:
        places = dict.fromkeys(_place(graph, op) for op in together.pairs)
        yield f"rows are paired with each other ({listed(places)}): each with those of {parts.one} alone"
    if together.sum is not None and parts.data_parallel > 1:
        yield (
            f"the loss is a sum over rows ({_place(graph, together.sum)}): {parts.data_parallel} data-parallel ranks "
            f"average the gradients of their own, so that a step's are those of one process divided by "
            f"{parts.data_parallel}"
        )


def _place(graph: ModelGraph, op: Op) -> str:
    return graph.lines.get(op.name) or f"{op.target} in {op.module or ROOT}"


def _on_backward(traced: Traced, parts: Parts) -> Iterator[str]:
    """Yields a note on code that computes with gradients, which need not be linear in them."""
    found = dict.fromkeys(_backward_code(traced))
    if found:
        yield (
            f"code of the model in backward ({listed(found)}) is given the gradient of {parts.one}: where it is not "
            "linear in that, as one that clips or normalizes it, training is not that of one process with the whole "
            "batch"
        )


def _backward_code(traced: Traced) -> Iterator[str]:
    """Yields the lines of autograd.Functions and of hooks on gradients, and the modules and parameters with hooks."""
    graph, observed = traced.graph, traced.opaques.by_key()
    for op in graph.ops:
        if op.target == _OF_FUNCTION and op.args[1] and op.name in graph.lines:
            yield graph.lines[op.name]
    for call in observed.values():
        yield from call.backward_code
    for name, module in traced.model.named_modules():
        if has_backward_hooks(module):
            yield f"hook of {name or ROOT}"
    if traced.opaques.hooked_weight:
        yield f"hook of {traced.opaques.hooked_weight}"


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    every: Sequence[str] = list(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
