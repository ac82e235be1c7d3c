"""Checkpoints from someone else: nothing in them runs, reads elsewhere, or takes for ever; one error names the file."""

import os
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import tpplan
from tpplan.core.errors import WeightsError
from tpplan.torch_internals.checkpoint_files import MEMORY_FORMATS
from tpplan.train.checkpoint_metadata import _OPCODES, read_metadata

RAN = "ran"


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def saved(folder: Path) -> Path:
    """A checkpoint of a model and an optimizer that made a step."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return tpplan.save_checkpoint(folder, model, optimizer, step=3, extras={"samples": 5})


def load(place: Path) -> None:
    model = build()
    tpplan.load_checkpoint(place, model, torch.optim.AdamW(model.parameters()))


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    place = saved(tmp_path)
    load(place)
    ours = read_metadata(place)
    theirs = pickle.loads((place / ".metadata").read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert {op.name for op, _, _ in pickletools.genops((place / ".metadata").read_bytes())} <= {*_OPCODES}


@pytest.mark.parametrize(
    "written", [lambda one, _: (getattr, (type(one), one.name)), lambda one, _: (type(one), (one.value,))]
)
def test_an_enumeration_s_member_is_read_as_any_python_writes_it(
    written: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEMORY_FORMATS, "__reduce_ex__", written)
    load(saved(tmp_path))


@dataclass(frozen=True)
class Calls:
    """Pickles as the call of a function."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        return self.function, self.arguments


def ran(place: Path) -> tuple[str]:
    return (f"touch {place.parent / RAN}",)


def with_state(change: Callable[[Metadata], object]) -> Callable[[Path], bytes]:
    """The metadata as saved, with something changed."""

    def make(place: Path) -> bytes:
        metadata = pickle.loads((place / ".metadata").read_bytes())
        made = change(metadata)
        return pickle.dumps(metadata if made is None else made)

    return make


def first(table: dict[Any, Any]) -> Any:
    return table[next(iter(table))]


def put(metadata: Metadata, **fields: object) -> None:
    vars(metadata).update(fields)


def bomb(depth: int) -> bytes:
    """A dict whose key is a pair of a pair twice, and so on: its hash takes 2^depth steps."""
    pairs = b"".join(b"h" + bytes([number, ord("h"), number]) + b"\x86\x94" for number in range(depth))
    return b"\x80\x04()\x94" + pairs + b"t}h" + bytes([depth]) + b"Ns."


HUGE_MEMO = b"\x80\x04}r\xff\xff\xff\xff."  # 34 GB of a memo, in the unpickler of C
FILES: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda place: pickle.dumps(Calls(os.system, ran(place))),
    "os.system, protocol 0": lambda place: pickle.dumps(Calls(os.system, ran(place)), protocol=0),
    "eval": lambda place: pickle.dumps(Calls(eval, (f"__import__('os').system({ran(place)[0]!r})",))),
    "torch.load": lambda place: pickle.dumps(Calls(torch.load, (str(place / "state.pt"),))),
    "torch.hub": lambda place: b"\x80\x04\x8c\x09torch.hub\x94\x8c\x04load\x94\x93\x94.",
    "a dotted name": lambda place: b"\x80\x04\x8c\x05torch\x94\x8c\x09os.system\x94\x93\x94.",
    "a function of torch": lambda place: b"\x80\x04\x8c\x05torch\x94\x8c\x05zeros\x94\x93\x94K\x05\x85R.",
    "an extension": lambda place: b"\x80\x04\x82\x01.",
    "an attribute of an enumeration": lambda place: pickle.dumps(Calls(getattr, (MEMORY_FORMATS, "__init__"))),
    "an attribute of a record": lambda place: pickle.dumps(Calls(getattr, (Metadata, "__init__"))),
    "an attribute of text": lambda place: pickle.dumps(Calls(getattr, ("text", "format"))),
    "inside the metadata": with_state(lambda m: put(m, planner_data=Calls(os.system, ("touch ran",)))),
    "in a tensor's size": with_state(lambda m: vars(first(m.state_dict_metadata)).update(size=Calls(print, (1,)))),
    "a module": lambda place: b"\x80\x04c__main__\n__dict__\n.",
    "an instance by INST": lambda place: b"(S'true'\nios\nsystem\n.",
    "a persistent id": lambda place: b"\x80\x04\x8c\x01aQ.",
    "a class's own attribute": lambda place: (
        b"\x80\x04\x8c" + bytes([len(Metadata.__module__)]) + Metadata.__module__.encode()
        + b"\x94\x8c\x08Metadata\x94\x93\x94N}\x8c\x08__init__\x94NsNs\x86b."
    ),
    "a key that takes for ever to hash": lambda place: bomb(60),
    "a memo of 34 GB": lambda place: HUGE_MEMO,
    "text of 2^60 bytes": lambda place: b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"x.",
    "bytes of 2^40 bytes": lambda place: b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"x.",
    "a frame of 2^60 bytes": lambda place: b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.",
    "an object among tensors": with_state(
        lambda m: m.state_dict_metadata.update({"model.0.weight": BytesStorageMetadata()})
    ),
    "a file above the folder": with_state(lambda m: put_place(m, relative_path="../../secret")),
    "a device": with_state(lambda m: put_place(m, relative_path="/dev/zero", length=2**40)),
    "a file of another rank's": with_state(lambda m: put_place(m, relative_path="nowhere.distcp")),
    "a place before the file": with_state(lambda m: put_place(m, offset=-5)),
    "a transform": with_state(lambda m: put_place(m, transform_descriptors=["stream.zstd/1"])),
    "tables that are lists": with_state(lambda m: put(m, storage_data=[1])),
    "chunks that are text": with_state(lambda m: vars(first(m.state_dict_metadata)).update(chunks="all")),
    "chunks elsewhere": with_state(
        lambda m: vars(first(m.state_dict_metadata)).update(
            chunks=[ChunkStorageMetadata(offsets=torch.Size([9, 9]), sizes=torch.Size([9, 9]))]
        )
    ),
    "no metadata": lambda place: pickle.dumps({"a": 1}),
    "nothing": lambda place: b"",
    "no pickle": lambda place: b"\x00" * 100,
    "half of it": lambda place: (place / ".metadata").read_bytes()[:200],
    "a state of another optimizer": with_state(
        lambda m: m.state_dict_metadata.update({"optimizer.none/exp_avg": first(m.state_dict_metadata)})
    ),
}  # fmt: skip


def put_place(metadata: Metadata, **fields: object) -> None:
    for place in metadata.storage_data.values():
        vars(place).update(fields)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_metadata_file_is_refused_and_runs_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = saved(tmp_path)
    content = FILES[name](place)
    (place / ".metadata").write_bytes(content)
    before = dict(vars(Metadata))
    with pytest.raises(WeightsError, match=str(place)):
        load(place)
    assert not (tmp_path / RAN).exists()
    assert dict(vars(Metadata)) == before


STATES: dict[str, Callable[[Path], object]] = {
    "a call": lambda place: Calls(os.system, ran(place)),
    "a call in the extras": lambda place: {
        "format": 1, "step": 1, "optimizer": None, "extras": Calls(os.system, ran(place)),
    },
    "a path": lambda place: {"format": 1, "step": 1, "optimizer": None, "extras": {"a": PurePosixPath("x")}},
    "no step": lambda place: {"format": 1, "extras": {}, "optimizer": None},
    "text as groups": lambda place: {"format": 1, "step": 1, "extras": {}, "optimizer": {"groups": "a", "scalars": {}}},
    "numbers as names": lambda place: {
        "format": 1, "step": 1, "extras": {}, "optimizer": {"groups": [{"params": [1]}], "scalars": {}},
    },
    "scalars of others": lambda place: {
        "format": 1, "step": 1, "extras": {},
        "optimizer": {
            "groups": [{"params": ["0.weight", "0.bias", "1.weight", "1.bias"]}], "scalars": {"x": {"step": 1}},
        },
    },
    "an optimizer that is a list": lambda place: {"format": 1, "step": 1, "extras": {}, "optimizer": [1]},
    "another format": lambda place: {"format": "x" * 100_000},
    "a list": lambda place: [1, 2],
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_hostile_state_file_is_refused_and_runs_nothing(name: str, tmp_path: Path) -> None:
    place = saved(tmp_path)
    torch.save(STATES[name](place), place / "state.pt")
    with pytest.raises(WeightsError) as raised:
        load(place)
    assert len(str(raised.value)) < 2_000
    assert not (tmp_path / RAN).exists()


def test_a_fifo_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path)
    (place / ".metadata").unlink()
    os.mkfifo(place / ".metadata")
    with pytest.raises(WeightsError, match="not a regular file"):
        load(place)


def test_a_fifo_in_place_of_a_rank_s_file_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path)
    (file,) = place.glob("*.distcp")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(WeightsError, match="not a regular one"):
        load(place)


def test_a_rank_s_file_is_read_without_running_anything(tmp_path: Path) -> None:
    place = saved(tmp_path)
    (file,) = place.glob("*.distcp")
    torch.save(Calls(os.system, ran(place)), tmp_path / "hostile")
    content = (tmp_path / "hostile").read_bytes()
    metadata = pickle.loads((place / ".metadata").read_bytes())
    put_place(metadata, offset=0, length=len(content))
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    file.write_bytes(content)
    with pytest.raises(WeightsError):
        load(place)
    assert not (tmp_path / RAN).exists()


def test_many_parts_are_read_in_seconds(tmp_path: Path) -> None:
    """256 ranks' parts of 100 tensors."""
    tensors, places = {}, {}
    template = pickle.loads((saved(tmp_path) / ".metadata").read_bytes())
    properties = first(template.state_dict_metadata).properties
    for number in range(100):
        name = f"model.{number}"
        offsets = [torch.Size([rank, 0]) for rank in range(256)]
        chunks = [ChunkStorageMetadata(offsets=offset, sizes=torch.Size([1, 8])) for offset in offsets]
        tensors[name] = TensorStorageMetadata(properties=properties, size=torch.Size([256, 8]), chunks=chunks)
        for rank, offset in enumerate(offsets):
            places[MetadataIndex(name, offset)] = _StorageInfo(f"__{rank}_0.distcp", number * 100, 100)
    metadata = Metadata(state_dict_metadata=tensors, storage_data=places)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_metadata(tmp_path).storage_data == places
