"""What crosses between stages crosses as slices over tensor-parallel ranks where that is faster."""

from typing import Any

import pytest
from stage_models import LENGTH, WIDTH, Stack
from stage_runs import FAR, assert_as_one_process, solved

from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.search.pipelines.rank_memory import num_bytes


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
