"""Errors of a model in stages: a stage does not run its part of the whole model, as their graphs show, two stages read
numbers that each draws for itself, or two stages of a rank write the same buffer."""

import functools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpplan.core.errors import ModelError, TpplanError, UsageError
from tpplan.core.graph import ModelGraph
from tpplan.layouts.rules import Call, draws, may_drop
from tpplan.plan.sections.ranks import StagePlan
from tpplan.search.models.trace_cache import TraceCache
from tpplan.stages.cut_proof import difference, written_buffers
from tpplan.stages.cuts import end_of
from tpplan.torch_internals.operators import draws_numbers


def cut_errors(
    whole: TraceCache, stages: Sequence[StagePlan], parts: int, micro_batch: int
) -> Iterator[tuple[StagePlan, TpplanError]]:
    """Yields a stage with a ModelError where it does not run its part of the whole model on the same values, or draws
    random numbers that an earlier stage draws, too, and with a UsageError where it writes a buffer that another stage
    of its rank writes. `whole` is the cache of the whole model, `parts` is the number of parts of the pipeline."""
    graph = whole.really_traced(micro_batch).graph
    ends = [0, *(end_of(graph, stage) for stage in stages[:-1]), len(graph.nodes)]
    written: dict[tuple[int, str], int] = {}
    undrawn = _draws(graph)
    for stage in stages:
        loss = whole.subject.loss if stage.last is None else loss_of_sent
        traces = TraceCache(replace(whole.subject, stage=stage.bare, loss=loss), whole.reuse)
        own = traces.really_traced(micro_batch).graph
        if problem := difference(graph, own, stage, range(ends[stage.index], ends[stage.index + 1])):
            yield stage, ModelError(f"the model in stages is not the model: {problem}; plan without --pp")
        undrawn.subtract(_draws(own))
        for place in [place for place, count in undrawn.items() if count < 0]:
            undrawn[place] = 0
            yield (
                stage,
                ModelError(
                    f"stage {stage.index} and an earlier one compute with the random numbers of {place}, and each "
                    "would draw its own: draw them in a module that one of them has, or give them to the model as an "
                    "input"
                ),
            )
        for label in written_buffers(own):
            other = written.setdefault((stage.index % parts, label), stage.index)
            if other != stage.index:
                yield (
                    stage,
                    UsageError(
                        f"stages {other} and {stage.index} of a rank write buffer {label}, which would be written "
                        "twice for each micro-batch: take one stage a rank (--virtual-stages 1)"
                    ),
                )


def _draws(graph: ModelGraph) -> Counter[str]:
    """How often a line of code draws random numbers from which something is computed."""
    read = (op for op in graph.ops if any(graph.values[name].is_read for name in op.results))
    drawing = (op for op in read if draws_numbers(op.target) and (not may_drop(op.target) or draws(Call.of(graph, op))))
    return Counter(graph.lines.get(op.name) or op.target for op in drawing)


def loss_of_sent(outputs: Any, _inputs: Mapping[str, Any]) -> Any:
    """The loss of a stage that is not the last: gradients of all that it sends come back."""
    return functools.reduce(operator.add, (tensor.sum() for tensor in outputs))
