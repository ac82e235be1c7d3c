"""A process group whose other ranks are not there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

# Importing it registers the backend.
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """This process as rank 0 of so many, none of which is there."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
