"""What crosses between stages crosses as slices over tensor-parallel ranks where that is faster."""

import json
from dataclasses import replace
from typing import Any

import pytest
from stage_models import LENGTH, WIDTH, Stack, loss, text
from stage_runs import FAR, assert_as_one_process, solved
from torch import Tensor

from tpplan.core.errors import PlanError
from tpplan.layouts.typecheck import Mistyped, typecheck
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.report.stages import stage_lines, stage_sentence
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.search.pipelines.rank_memory import num_bytes
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.request import Request


def sum_of(outputs: tuple[Tensor, ...], _inputs: object) -> Tensor:
    (sent,) = outputs
    return sent.sum()


def sliced(**options: Any) -> PipelinePlan:
    """Two stages on two nodes, of which each tensor-parallel rank sends slices of the sequence."""
    own = {"stages": 2, "gpus": 4, "gpus_per_node": 2, "tp": 2, "machine": FAR, **options}
    plan = solved(Stack, **own)
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        assert before.stage is not None
        assert after.stage is not None
        (sent,) = before.stage.sends
        assert (sent.shape, sent.sliced, after.stage.receives) == ((1, LENGTH, WIDTH), 1, (sent,))
        assert num_bytes((sent,), 2) == LENGTH * WIDTH * 4 // 2
    return plan


@pytest.mark.parametrize(
    "options", [{}, {"virtual": 2}, {"recompute": "full"}, {"gpus": 8, "gpus_per_node": 4, "fsdp": 2}], ids=str
)
def test_ranks_that_send_slices_equal_one_process(options: dict[str, Any]) -> None:
    assert_as_one_process(Stack, sliced(**options))


@pytest.mark.parametrize(
    ("ends", "dim", "message"),
    [
        (("sends",), None, r"stages\[1\].stage.receives: not what stages\[0\] sends"),
        (("sends",), 2, r"stages\[1\].stage.receives: not what stages\[0\] sends"),
        (("sends", "receives"), 3, r"slices of dim 3 of \[1, 16, 32\]: expected 0 to 2"),
        (("sends", "receives"), 0, r"dim 0 of \[1, 16, 32\] does not divide among 2 tensor-parallel ranks"),
    ],
)
def test_slices_that_do_not_fit_together_are_refused(ends: tuple[str, ...], dim: int | None, message: str) -> None:
    data = json.loads(sliced(prove=False).dumps())
    for stage, end in zip(data["stages"], ("sends", "receives"), strict=True):
        if end in ends:
            (tensor,) = stage["stage"][end]
            del tensor["sliced"]
            tensor |= {"sliced": dim} if dim is not None else {}
    with pytest.raises(PlanError, match=message):
        PipelinePlan.from_dict(data)


@pytest.mark.parametrize("dim", [None, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_another_layout_than_planned_for_what_crosses_does_not_type(dim: int | None, index: int) -> None:
    plan = sliced(prove=False).stages[index]
    assert plan.stage is not None
    subject = replace(
        Request.of(Stack, text, Cluster(gpus=2, profile=FAR), Batch(4, 1, LENGTH), Options(loss=loss), None).subject,
        stage=plan.stage.bare,
        loss=loss if plan.stage.last is None else sum_of,
    )
    graph = TraceCache(subject, Reuse()).really_traced(1).graph
    assert typecheck(graph, plan) is None
    assert isinstance(typecheck(graph, replace(plan, stage=plan.stage.with_slices(dim))), Mistyped)


def test_the_report_says_what_crosses_in_slices() -> None:
    plan = sliced(prove=False)
    (line,) = (line for line in stage_lines(plan) if line.startswith("sends"))
    assert "float32[1, 16, 32] in slices of dim 1: each tensor-parallel rank" in line
    assert stage_sentence(plan.stages[0]).count("1.00 KiB of each micro-batch") == 1
