"""Classes and functions that torch.distributed.checkpoint names in a checkpoint's pickled `.metadata` file."""

import dataclasses

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMATS
from torch.serialization import _get_layout as layout_named

from tpplan.torch_internals.probes import Probe

__all__ = ["MEMORY_FORMATS", "PROBES", "StorageInfo", "layout_named"]


def _written() -> bool:
    fields = {field.name for field in dataclasses.fields(StorageInfo)}
    layout: object = layout_named("torch.strided")  # type: ignore[no-untyped-call]
    return {"relative_path", "offset", "length"} <= fields and layout is torch.strided


PROBES = (
    Probe(
        name="metadata of distributed checkpoints",
        uses="torch.distributed.checkpoint's _StorageInfo and _MEM_FORMAT_ENCODING, torch.serialization._get_layout",
        needed_for="loading checkpoints without running code that they name",
        works=_written,
    ),
)
