"""scripts/evidence/accuracy_parts/parallel_kernels.py: bytes by hand, and what recomputation runs again."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))
sys.path.append(str(Path(__file__).resolve().parent))

from accuracy_parts import parallel_code
from accuracy_parts.parallel_kernels import FURTHER, Kernels, Sizes, further_seconds
from accuracy_parts.parallel_price import pieces
from accuracy_parts.parallel_read import ParallelRun
from test_accuracy_parallel import CODE, EXPERTS, read

from tpplan.costs.runs.kernels import Kernel, MemoryBound
from tpplan.machine.profile import load_profile
from tpplan.plan.parts import COMPUTE, RECOMPUTATION
from tpplan.plan.plan import Recompute

SIZES = Sizes(
    scores=(2, 8, 512, 512),
    queries=(2, 8, 512, 128),
    keys=(2, 2, 512, 128),
    hidden=(1024, 1024),
    rows=4096,
    experts=4,
    moe_ffn=2048,
)
SCORES, QUERIES, KEYS = 2 * 8 * 512 * 512, 2 * 8 * 512 * 128, 2 * 2 * 512 * 128


def megabytes(kernels: tuple[Kernel, ...]) -> list[int]:
    """Bytes of kernels in units of 2^20, without those of less."""
    assert all(isinstance(kernel, MemoryBound) for kernel in kernels)
    sizes = [kernel.num_bytes for kernel in kernels if isinstance(kernel, MemoryBound)]
    return [round(size / 2**20) for size in sizes if size > 2**20]


def of(name: str) -> Kernels:
    return FURTHER[name](SIZES)


def test_every_name_of_the_table_has_kernels() -> None:
    assert set(FURTHER) == set(parallel_code.FURTHER)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # read and written in 16 bits, with a mask of a byte
        ("attention dropout", 5 * SCORES, 5 * SCORES),
        # a mask after attention and one after the feed-forward
        ("hidden dropout", 2 * 1024 * 1024, 2 * 1024 * 1024),
        # copied into the scores, and read by the product
        ("alibi", 4 * SCORES, 0),
        ("fused rotation", 4 * (QUERIES + KEYS), 4 * (QUERIES + KEYS)),
        ("query and key norms", 4 * (QUERIES + KEYS), 6 * (QUERIES + KEYS)),
    ],
)
def test_bytes_of_single_kernels(name: str, forward: int, backward: int) -> None:
    kernels = of(name)
    sums = [
        sum(kernel.num_bytes for kernel in own if isinstance(kernel, MemoryBound))
        for own in (kernels.forward, kernels.backward)
    ]
    assert sums == [forward, backward]


def test_a_rotation_op_by_op_moves_what_each_op_reads_and_writes() -> None:
    # of 2 MiB of queries: times cosines, minus a half, both halves joined, times sines, the sum, joined with nothing
    assert megabytes(of("rotation").forward)[:6] == [4, 2, 4, 4, 6, 4]
    assert sum(megabytes(of("rotation").backward)) >= sum(megabytes(of("rotation").forward)) / 2


def test_clamps_of_gates_move_what_each_op_reads_and_writes() -> None:
    # halves of 16 MiB, with masks of 8: two clamps and their join
    assert megabytes(of("clamped gates").forward) == [64 // 2, 64 // 2, 64]
    # >=, <=, and, where; <=, where; both gradients joined
    assert sorted(megabytes(of("clamped gates").backward)) == sorted([24, 24, 24, 40, 24, 40, 64])


def test_biases_of_experts_are_added_expert_by_expert() -> None:
    kernels = of("expert biases")
    # 2 MiB of an expert's rows: the weighted bias is written, then the sum; all parts are joined
    assert megabytes(kernels.forward) == [2, 6] * 4 + [16]
    # the gradients of a bias and of weights, a product and a sum each; those of all rows joined
    assert sorted(megabytes(kernels.backward)) == sorted([4, 2, 4, 2] * 4 + [16])


def run(recompute: Recompute, *further: str) -> ParallelRun:
    return dataclasses.replace(read(dataclasses.replace(CODE, further=further), **EXPERTS), recompute=recompute)


def test_recomputation_of_all_runs_all_again_and_of_activations_theirs() -> None:
    profile = load_profile(read().machine)
    for name, is_activation in (("rotation", False), ("clamped gates", True)):
        forward, backward, again = further_seconds(run(Recompute.NONE, name), profile)
        assert min(forward, backward) > 0
        assert again == 0
        assert further_seconds(run(Recompute.FULL, name), profile) == (forward, backward, forward)
        of_activations = forward if is_activation else 0.0
        assert further_seconds(run(Recompute.SELECTIVE, name), profile) == (forward, backward, of_activations)


def test_further_kernels_make_a_layer_longer_and_nothing_else() -> None:
    plain, longer = (pieces(run(Recompute.FULL, *further)) for further in ((), ("expert biases", "rotation")))
    forward, backward, again = further_seconds(
        run(Recompute.FULL, "expert biases", "rotation"), load_profile(read().machine)
    )
    assert longer.layer.forward_s == pytest.approx(plain.layer.forward_s + forward)
    assert longer.layer.time_s[COMPUTE] == pytest.approx(plain.layer.time_s[COMPUTE] + forward + backward)
    assert longer.layer.time_s[RECOMPUTATION] == pytest.approx(plain.layer.time_s[RECOMPUTATION] + again)
    assert (longer.head, longer.embedding) == (plain.head, plain.embedding)


def test_sizes_are_those_of_a_rank() -> None:
    sizes = Sizes.of(run(Recompute.NONE))
    assert sizes.scores == (2, 8 // 2, 512, 512)
    assert (sizes.rows, sizes.experts, sizes.moe_ffn) == (2 * 512 * 2, 8 // 4, 4096)
