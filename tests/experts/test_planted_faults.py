"""Faults that are planted in how divided experts are run on real ranks: refused, or seen in the gradients."""

import re
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from moe_models import LENGTH, OwnMoe, text
from one_process import gradients, relative_errors
from ranks import RankError, run_ranks
from test_expert_parallel import TOLERANCE, backwards, one_process, solved
from torch import Tensor

import tpplan
from tpplan.apply import expert_parallel
from tpplan.core.mesh import Axis
from tpplan.experts import exchange, expert_share
from tpplan.experts.exchange import Counts, EpGroup
from tpplan.plan.plan import Plan
from tpplan.trace.hooks.call_rewriting import own_code

PLANT = Callable[[], object]
exchanged_counts, moved = exchange.exchanged_counts, exchange._moved


class OverDifferentExperts:
    """The axes, of which that of ranks with the same experts is the one of ranks with different ones."""

    REPLICATE, EXPERT_SHARD, EP, TP = Axis.REPLICATE, Axis.EP, Axis.EP, Axis.TP


@own_code
def with_next_expert(chosen: Tensor, experts: int, group: EpGroup) -> tuple[Tensor, Counts]:
    """Rows arrive with the index of the next expert of their rank."""
    arrived, counts = exchanged_counts(chosen, experts, group)
    return (arrived + 1) % (experts // group.ranks), counts


@own_code
def with_gradients_of_all_ranks(rows: Tensor, counts: Counts, is_back: bool) -> Tensor:
    """What goes back is as many times as large as there are ranks."""
    return moved(rows, counts, is_back) * (counts.group.ranks if is_back else 1)


def step_with(plant: PLANT, plan: Plan) -> dict[str, Tensor]:
    """This rank's gradients of a step in which a fault is planted."""
    with plant():  # type: ignore[attr-defined]
        torch.manual_seed(0)
        model = tpplan.apply_plan(OwnMoe(), plan)
        backwards(model, text(8, LENGTH), plan)
        return gradients(model)


def test_gradients_averaged_over_ranks_with_other_experts_are_refused() -> None:
    plant = partial(patch.object, expert_parallel, "Axis", OverDifferentExperts)
    with pytest.raises(RankError) as error:
        run_ranks(4, step_with, plant, solved(OwnMoe, gpus=4, ep=2, fsdp=4))
    assert re.search("overlapping meshes", error.value.traceback)


@pytest.mark.parametrize(
    "plant",
    [
        partial(patch.object, expert_share, "exchanged_counts", with_next_expert),
        partial(patch.object, exchange, "_moved", with_gradients_of_all_ranks),
    ],
    ids=["index off by one", "gradients added up"],
)
def test_the_comparison_with_one_process_sees_a_fault(plant: PLANT) -> None:
    """What all tests of experts on real ranks lean on: their comparison tells a wrong exchange from rounding."""
    expected = one_process(OwnMoe)[1]
    for found in run_ranks(4, step_with, plant, solved(OwnMoe, gpus=4, ep=2, fsdp=4)):
        assert max(relative_errors(found, expected).values()) > 1000 * TOLERANCE
