"""A data set dealt out to ranks as a plan says, for torch's DataLoader.

    share = plan.batch_for(rank)
    sampler = tpplan.PlanSampler(share, len(dataset), seed=seed)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
    for micro_batches in tpplan.by_step(loader, share): ...

Step s of an epoch is the same global batch of samples on any mesh: what follows from a step is the model and the seed,
and training that goes on under another plan reads on where it was.
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
    """Indices of one rank's micro-batches, in order: accumulation_steps of them make a step.

    Every rank draws the same order of the num_samples samples, from `seed` and the epoch, and takes its part of each
    global batch. Samples after the last whole global batch are left out; with `shuffle` those are others each epoch.
    Raises UsageError where there is not one global batch.
    """

    def __init__(self, share: BatchShare, num_samples: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if num_samples < share.global_batch:
            raise UsageError(f"{num_samples} samples are less than one global batch, {share.global_batch}")
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
        """What is drawn next: this epoch, from a step on, as when training is resumed there.

        Raises UsageError for a step that the epoch does not have.
        """
        if not 0 <= first_step <= self.num_steps:
            raise UsageError(f"step {first_step} is none of an epoch of {self.num_steps} steps")
        self.epoch = epoch
        self.first_step = first_step

    def __len__(self) -> int:
        """Micro-batches still to come in this epoch."""
        return (self.num_steps - self.first_step) * self.share.accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step in range(self.first_step, self.num_steps):
            batch = order[step * self.share.global_batch : (step + 1) * self.share.global_batch]
            for rows in self.share.rows:
                yield batch[rows.start : rows.stop].tolist()

    def _order(self) -> torch.Tensor:
        """Sample indices [num_samples], the same on every rank; no rank's random state is touched."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator)


def by_step(micro_batches: Iterable[T], share: BatchShare) -> Iterator[list[T]]:
    """The micro-batches of one optimizer step after another. Raises UsageError where they end within a step."""
    coming = iter(micro_batches)
    while step := list(islice(coming, share.accumulation_steps)):
        if len(step) < share.accumulation_steps:
            raise UsageError(f"the last step has {len(step)} micro-batches of {share.accumulation_steps}")
        yield step
