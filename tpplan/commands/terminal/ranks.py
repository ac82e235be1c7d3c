"""The device and the process group of a verb that runs under torchrun."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tpplan.core.errors import UsageError

if TYPE_CHECKING:
    import torch


def is_first_rank() -> bool:
    """True on the first rank under torchrun, and without torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def own_device(wanted: str | None, *, alone_too: bool = False) -> "Iterator[torch.device]":
    """Yields this rank's device; under torchrun within the default process group. A rank on CPUs uses one thread.
    With `alone_too` a process without torchrun is a group of one.

    Raises UsageError where --device cuda is given and torch sees no GPU.
    """
    import torch
    import torch.distributed as dist

    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here: leave --device out to use the CPU")
    if (wanted or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        torch.set_num_threads(1)
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    is_launched = dist.is_torchelastic_launched()
    if not (is_launched or alone_too):
        yield device
        return
    backend, own_gpu = ("gloo", None) if device.type == "cpu" else ("nccl", device)
    if is_launched:
        dist.init_process_group(backend, device_id=own_gpu)
    else:
        dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield device
    finally:
        dist.destroy_process_group()
