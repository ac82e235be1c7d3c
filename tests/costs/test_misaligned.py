"""A plan names the modules that sizes make slow, and what that costs is what the profile says."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpplan
from profiles import full_profile, misaligned
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan

ROWS, WIDTH, ODD, EVEN = 512, 256, 1021, 1024


class Classes(nn.Module):
    """x [B, WIDTH] -> scores of classes [B, classes]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(x)))


def planned(classes: int, *, slow: bool, **options: object) -> Plan:
    """A plan of two GPUs, whose matmuls on rows at multiples of 2 bytes are 40 times as slow, or no slower."""
    entries = [misaligned(2, 1e13)] if slow else []
    profile = HardwareProfile.from_dict(full_profile() | {"misaligned_matmuls": entries}, "made up")
    return tpplan.solve(
        lambda: Classes(classes),
        lambda batch: {"x": torch.randn(batch, WIDTH)},
        cluster=tpplan.Cluster(gpus=2, profile=profile),
        global_batch=4 * ROWS,
        micro_batch=ROWS,
        precision="bf16",
        unused_outputs=("output",),
        loss=lambda output, inputs: output.float().logsumexp(-1).mean(),
        **options,
    )


def test_a_note_says_which_module_has_a_slow_size_and_what_it_costs() -> None:
    slow, other = (planned(ODD, slow=slow, tp=1) for slow in (True, False))
    assert other.notes is None
    (note,) = slow.notes or ()
    assert note.startswith("head: on each rank its matmuls have a size of 1021, no multiple of 8, and take ")
    # Two micro-batches, and three products in each: the output, and the gradients of input and weight.
    longer_s = 2 * 3 * 2 * ROWS * WIDTH * ODD * (1 / 1e13 - 1 / 4e14)
    assert slow.predicted.step_time_s - other.predicted.step_time_s == pytest.approx(longer_s, rel=1e-6)
    assert f" take {1e6 * longer_s:.0f} us of the step longer " in note


def test_a_size_that_is_aligned_costs_nothing_more() -> None:
    slow, other = (planned(EVEN, slow=slow, tp=1) for slow in (True, False))
    assert slow.notes is other.notes is None
    assert slow.predicted.step_time_s == other.predicted.step_time_s


def test_what_tensor_parallel_ranks_have_is_what_counts() -> None:
    """1,024 classes on two ranks are 512 on each; 1,018 are 509."""
    pins = {"up": "columns", "head": "columns"}
    assert planned(EVEN, slow=True, tp=2, pins=pins).notes is None
    (note,) = planned(1018, slow=True, tp=2, pins=pins).notes or ()
    assert "head: on each rank its matmuls have a size of 509, " in note
