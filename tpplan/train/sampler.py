"""Distributes a data set to the ranks of a plan, for torch's DataLoader.

    share = plan.batch_for(rank)
    sampler = tpplan.PlanSampler(share, len(dataset), seed=seed)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
    for micro_batches in tpplan.by_step(loader, share): ...

Step s of an epoch is the same global batch of samples on any mesh, so that training resumed under another plan
continues with the same data.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar, final

import torch
from torch.utils.data import Sampler

from tpplan.core.errors import UsageError
from tpplan.plan.batch_share import BatchShare

T = TypeVar("T")


@final
class PlanSampler(Sampler[list[int]]):
    """Yields the sample indices of one rank's micro-batches, in order: accumulation_steps micro-batches make a step.

    Every rank draws the same order of the num_samples samples, from `seed` and the epoch, and takes its part of each
    global batch. Samples after the last whole global batch are left out; `shuffle` leaves out others each epoch.
    Raises UsageError for fewer samples than one global batch.
    """

    def __init__(self, share: BatchShare, num_samples: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if num_samples < share.global_batch:
            raise UsageError(
                f"{num_samples} samples are less than one global batch, {share.global_batch}: use more data, or solve "
                "for a smaller --global-batch"
            )
        self.share = share
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    @property
    def num_steps(self) -> int:
        """Optimizer steps in an epoch."""
        return self.num_samples // self.share.global_batch

    def set_epoch(self, epoch: int, *, first_step: int = 0) -> None:
        """Sets the epoch to draw next and its first step, which is above 0 where training resumes within an epoch.

        Raises UsageError for a step that the epoch does not have.
        """
        if not 0 <= first_step <= self.num_steps:
            raise UsageError(
                f"step {first_step} is none of an epoch of {self.num_steps} steps: pass epoch and first_step as "
                f"divmod(step, {self.num_steps})"
            )
        self.epoch = epoch
        self.first_step = first_step

    def __len__(self) -> int:
        """Number of this rank's micro-batches in the epoch, from first_step on."""
        return (self.num_steps - self.first_step) * self.share.accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step in range(self.first_step, self.num_steps):
            batch = order[step * self.share.global_batch : (step + 1) * self.share.global_batch]
            for rows in self.share.rows:
                yield batch[rows.start : rows.stop].tolist()

    def _order(self) -> torch.Tensor:
        """Returns sample indices [num_samples], equal on every rank; leaves torch's random state alone."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator)


def by_step(micro_batches: Iterable[T], share: BatchShare) -> Iterator[list[T]]:
    """Yields lists of the micro-batches of one optimizer step. Raises UsageError where they end within a step."""
    coming = iter(micro_batches)
    while step := list(islice(coming, share.accumulation_steps)):
        if len(step) < share.accumulation_steps:
            raise UsageError(
                f"the last step has {len(step)} micro-batches of {share.accumulation_steps}: use PlanSampler, or leave "
                "out what does not fill a step"
            )
        yield step
