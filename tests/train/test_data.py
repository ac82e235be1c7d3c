"""Who reads what: shares of a global batch, the sampler under torch's DataLoader, resuming within an epoch."""

import dataclasses

import pytest
import torch
from plans import handmade_plan
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tpplan
from tpplan.core.errors import UsageError
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import BatchPlan, Plan

SAMPLES = 53


def plan_for(mesh: Mesh, *, micro_batch: int, accumulation_steps: int) -> Plan:
    batch = BatchPlan(
        global_batch=micro_batch * accumulation_steps * mesh.data_parallel,
        micro_batch=micro_batch,
        accumulation_steps=accumulation_steps,
        seq_len=4,
    )
    return dataclasses.replace(handmade_plan(nn.Linear(2, 2), mesh), batch=batch)


class Numbers(Dataset):
    """Sample i is i, as a dict."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"tokens": index}


def steps_of(plan: Plan, rank: int, **options: object) -> list[list[list[int]]]:
    """What a rank reads in an epoch: steps of micro-batches of samples."""
    share = plan.batch_for(rank)
    loader = DataLoader(Numbers(), batch_sampler=tpplan.PlanSampler(share, SAMPLES, **options))
    return [[micro["tokens"].tolist() for micro in step] for step in tpplan.by_step(loader, share)]


def test_data_ranks_share_a_global_batch_and_tp_ranks_read_the_same() -> None:
    mesh = Mesh(replicate=2, shard=2, tp=2)
    plan = plan_for(mesh, micro_batch=3, accumulation_steps=2)
    numbers = torch.arange(24)
    read = [plan.batch_for(rank).micro_batches({"tokens": numbers}) for rank in range(mesh.num_gpus)]
    assert [len(micro_batches) for micro_batches in read] == [2] * 8
    for rank in range(0, 8, 2):
        assert plan.batch_for(rank) == plan.batch_for(rank + 1)
    of_data_ranks = [micro["tokens"] for micro_batches in read[::2] for micro in micro_batches]
    assert torch.equal(torch.cat(of_data_ranks), numbers)
    assert plan.batch_for(5).rows == (range(12, 15), range(15, 18))  # data rank 2 of 4


def test_what_has_no_rows_is_in_every_micro_batch() -> None:
    share = tpplan.BatchShare(global_batch=4, seq_len=1, micro_batch=2, accumulation_steps=2)
    others = {"is_causal": True, "scale": 0.5, "mode": "sums", "cache": None, "temperature": torch.tensor(2.0)}
    read = share.micro_batches({"tokens": torch.arange(4), "names": ["a", "b", "c", "d"], **others})
    assert [micro["tokens"].tolist() for micro in read] == [[0, 1], [2, 3]]
    assert [micro["names"] for micro in read] == [["a", "b"], ["c", "d"]]
    assert all(micro[name] is value for micro in read for name, value in others.items())


def test_what_does_not_fit_a_plan_is_refused() -> None:
    plan = plan_for(Mesh(shard=2, tp=2), micro_batch=1, accumulation_steps=3)
    with pytest.raises(UsageError, match=r"rank 4: expected 0 to 3, the ranks of the plan's mesh .*shard 2 x tp 2"):
        plan.batch_for(4)
    with pytest.raises(UsageError, match="tokens: expected a global batch of 6 rows, got 5"):
        plan.batch_for(0).micro_batches({"tokens": torch.arange(5)})
    with pytest.raises(UsageError, match="global batch 12 is not 1 data-parallel ranks x 1"):
        tpplan.BatchShare(global_batch=12, seq_len=1, micro_batch=2)
    with pytest.raises(UsageError, match="data rank 2: expected 0 to 1"):
        tpplan.BatchShare(global_batch=2, seq_len=1, micro_batch=1, data_parallel=2, data_rank=2)
    with pytest.raises(UsageError, match="5 samples are less than one global batch, 6"):
        tpplan.PlanSampler(plan.batch_for(0), 5)
    with pytest.raises(UsageError, match="the last step has 1 micro-batches of 3"):
        list(tpplan.by_step(range(4), plan.batch_for(0)))


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_the_same_global_batches_on_any_mesh(shuffle: bool) -> None:
    alone = steps_of(plan_for(Mesh(tp=2), micro_batch=12, accumulation_steps=1), 0, shuffle=shuffle, seed=3)
    batches = [sorted(step[0]) for step in alone]
    assert len(batches) == SAMPLES // 12
    seen = [sample for batch in batches for sample in batch]
    assert len(set(seen)) == len(seen)  # no sample twice
    assert (seen == list(range(48))) is not shuffle
    for mesh, micro_batch, steps in ((Mesh(shard=3, tp=2), 2, 2), (Mesh(replicate=2, shard=2), 1, 3)):
        plan = plan_for(mesh, micro_batch=micro_batch, accumulation_steps=steps)
        ranks = [steps_of(plan, rank, shuffle=shuffle, seed=3) for rank in range(0, mesh.num_gpus, mesh.tp)]
        together = [
            sorted(sample for rank in ranks for micro in rank[step] for sample in micro) for step in range(len(batches))
        ]
        assert together == batches


def test_epochs_differ_and_one_can_be_entered_in_the_middle() -> None:
    plan = plan_for(Mesh(shard=2), micro_batch=2, accumulation_steps=2)
    sampler = tpplan.PlanSampler(plan.batch_for(1), SAMPLES, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    assert len(second) == len(sampler) == 2 * sampler.num_steps == 2 * (SAMPLES // 8)
    sampler.set_epoch(1, first_step=4)
    assert list(sampler) == second[2 * 4 :]
    assert len(sampler) == len(second) - 8
    with pytest.raises(UsageError, match="step 7 is none of an epoch of 6 steps"):
        sampler.set_epoch(0, first_step=7)


def test_drawing_an_order_touches_no_random_state() -> None:
    share = plan_for(Mesh(tp=2), micro_batch=2, accumulation_steps=1).batch_for(0)
    state = torch.get_rng_state()
    list(tpplan.PlanSampler(share, SAMPLES))
    assert torch.equal(torch.get_rng_state(), state)
