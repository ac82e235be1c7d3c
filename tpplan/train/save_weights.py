"""Writes a model's weights as safetensors files in Hugging Face's layout, whole, from parameters that are sharded.

    tpplan.save_safetensors(model, "llama-trained/", dtype=torch.bfloat16)

`model.safetensors`, or with more than max_file_bytes `model-00001-of-00003.safetensors` and so on with
`model.safetensors.index.json`, which says in which file each name is. Tensors are gathered one at a time, and written
at once by the rank whose file it is: no rank holds more than one whole tensor. Of a model in stages each part of the
pipeline writes files of its own, and what several parts hold is in the first one's. The format is that of
https://github.com/huggingface/safetensors: the length of a JSON header (8 bytes, little endian), the header, the data.
"""

import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.apply.pipeline import group_of_stages
from tpplan.core.errors import UsageError, WeightsError
from tpplan.core.files import write_atomically
from tpplan.train.materialize import raise_together, targets_of

#: bytes of a file at most, unless one tensor is larger: Hugging Face's default of 5 GB
MAX_FILE_BYTES = 5 * 10**9
#: torch's dtypes by their names in the format
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: the header's length is a multiple of this, so that data is aligned
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tensor to be written: its name, the model's (sharded) tensor, and the dtype it has in the file."""

    name: str
    tensor: Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.tensor.shape) * self.dtype.itemsize

    @property
    def listed(self) -> "_Listed":
        return _Listed(self.name, self.num_bytes)

    def whole(self) -> Tensor:
        """Returns the whole tensor on the CPU; every rank must call this."""
        tensor = self.tensor.detach()
        whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.to(self.dtype).cpu().contiguous()


class _Listed(NamedTuple):
    """The name and bytes of a tensor, which may be another stage's."""

    name: str
    num_bytes: int


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes parameters and persistent buffers to safetensors files in `folder`, which all ranks see.

    Call it on all ranks. Names are those of the model's state_dict; a tied weight is written under its first name.
    `dtype` is what floating-point tensors are cast to. The folder is made; the files appear when all are complete, the
    index last. Raises WeightsError, on all ranks, where the folder has safetensors files already, where the model has
    no memory yet, or where the disk refuses, and UsageError for an impossible max_file_bytes.
    """
    place = Path(folder)
    entries: dict[str, _Entry] = {}
    error: Exception | None = None
    try:
        if max_file_bytes < 1:
            raise UsageError(f"save_safetensors: expected max_file_bytes >= 1, got {max_file_bytes}")
        entries = {entry.name: entry for entry in _entries(model, dtype)}
        if _rank() == 0:
            _make_folder(place)
    except Exception as found:
        error = found
    raise_together(error)
    group = group_of_stages(model)
    by_part = _by_part([entry.listed for entry in entries.values()], group)
    files = [(part, file) for part, own in enumerate(by_part) for file in _files(own, max_file_bytes)]
    named = dict(zip(_file_names(len(files)), files, strict=True))
    mine = group.rank() if group is not None else 0
    own = {name: [entries[one.name] for one in file] for name, (part, file) in named.items() if part == mine}
    raise_together(_write_all(place, own, _num_ranks() // len(by_part)))
    try:
        if _rank() == 0:
            _publish(place, {name: file for name, (_, file) in named.items()})
    except (OSError, WeightsError) as found:
        error = WeightsError(f"{place}: the files cannot be finished: {found}; check space and permissions")
    raise_together(error)


def _entries(model: nn.Module, dtype: torch.dtype | None) -> list[_Entry]:
    entries = []
    for target in targets_of(model):
        name, tensor = target.names[0], target.tensor
        kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.is_meta:
            raise WeightsError(f"{name} has no memory yet: fill the model first (init_weights, load_safetensors)")
        if kept not in _DTYPES:
            raise WeightsError(f"{name} is {kept}, which safetensors files cannot hold: pass dtype=")
        entries.append(_Entry(name=name, tensor=tensor, dtype=kept))
    return entries


def _by_part(own: list[_Listed], group: dist.ProcessGroup | None) -> list[list[_Listed]]:
    """The tensors that each part of a pipeline writes: those of its stages that no part before it has. `group` are the
    ranks of all parts that hold the same shards."""
    if group is None:
        return [own]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    known: set[str] = set()
    found = []
    for listed in everyone:
        found.append([one for one in listed if one.name not in known])
        known |= {one.name for one in listed}
    return found


def _files(entries: Sequence[_Listed], max_file_bytes: int) -> list[list[_Listed]]:
    """Returns the entries of each file, in order; a file takes entries as long as they fit."""
    files: list[list[_Listed]] = [[]]
    left = max_file_bytes
    for entry in entries:
        if files[-1] and entry.num_bytes > left:
            files.append([])
            left = max_file_bytes
        files[-1].append(entry)
        left -= entry.num_bytes
    return files


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _make_folder(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(f"{place}: the folder cannot be made: {error}; pass another one") from error
    if there := sorted(path for path in place.glob("*.safetensors*") if not path.name.startswith(".")):
        raise WeightsError(f"{place}: has {there[0].name} already: pass another folder, or remove the old files")


def _write_all(place: Path, files: Mapping[str, Sequence[_Entry]], ranks: int) -> Exception | None:
    """Gathers and writes every tensor, each file by one of the `ranks` ranks that hold it, in turn. Returns this rank's
    error.

    A rank that fails goes on gathering, for the others' sake.
    """
    error: Exception | None = None
    for number, (name, entries) in enumerate(files.items()):
        wholes = (entry.whole() for entry in entries)
        try:
            if number % ranks == _rank() % ranks and error is None:
                _write(_unfinished(place, name), entries, wholes)
        except Exception as found:  # the others wait for this rank's part of every tensor
            error = WeightsError(f"{place / name}: cannot be written: {found}; check space and permissions")
        deque(wholes, maxlen=0)
    return error


def _write(path: Path, entries: Sequence[_Entry], wholes: Iterable[Tensor]) -> None:
    with path.open("wb") as file:
        file.write(_header(entries))
        for whole in wholes:
            file.write(whole.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(entries: Sequence[_Entry]) -> bytes:
    """Returns the length and the JSON of a file's header: dtype, shape and place of each tensor."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        shape = list(entry.tensor.shape)
        table[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _unfinished(place: Path, name: str) -> Path:
    return place / f".{name}.unfinished"


def _publish(place: Path, files: Mapping[str, Sequence[_Listed]]) -> None:
    """Gives the complete files their names, and writes the index where there are several."""
    for name in files:
        _unfinished(place, name).replace(place / name)
    if len(files) == 1:
        return
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
    index = place / "model.safetensors.index.json"
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    write_atomically(index, text, error=WeightsError)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
