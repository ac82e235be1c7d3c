"""Reads `.metadata` of torch.distributed.checkpoint (DCP), which is a pickle, without running code that it names.

DCP reads the file with pickle.load, which calls any function that the file names. This reader accepts only what DCP
writes for tensors: opcodes (_OPCODES), dataclasses (_RECORDS, built by setting their fields), and five calls with plain
arguments (torch.Size, a layout by name, an enum's member by number or by name, a path). It refuses everything else by
name, then checks the type of every value, and that every file is in the checkpoint's own folder. torch 2.11 to 2.14.1
were seen to write this form.
"""

import dataclasses
import io
import pickle
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from tpplan.core.errors import WeightsError
from tpplan.core.files import read_regular
from tpplan.torch_internals.checkpoint_files import MEMORY_FORMATS, StorageInfo, layout_named
from tpplan.train.materialize import listed

METADATA = ".metadata"
#: prefixes of parameters and buffers, and of optimizer states, among the tensors of a checkpoint
MODEL_PREFIX, STATE_PREFIX = "model.", "optimizer."
#: dataclasses that a file may build, and the fields that it may set
_RECORDS: dict[type, frozenset[str]] = {
    kind: frozenset(field.name for field in dataclasses.fields(kind))
    for kind in (
        Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, ChunkStorageMetadata,
        StorageInfo,
    )
}  # fmt: skip


def _member(kind: object, name: object) -> object:
    """Returns a member of torch's memory formats by name; Python 3.11.0 to 3.11.3 pickle members as getattr calls."""
    if kind is not MEMORY_FORMATS or type(name) is not str or name not in MEMORY_FORMATS.__members__:
        _refuse(f"it asks {kind!r:.80} for {name!r:.80}")
    return MEMORY_FORMATS[name]


_PATHS: dict[str, type] = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}
_CALLED: dict[tuple[str, str], Callable[..., object]] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): layout_named,
    (MEMORY_FORMATS.__module__, MEMORY_FORMATS.__name__): MEMORY_FORMATS,
    ("builtins", "getattr"): _member,
    **{(module, name): path for module in ("pathlib", "pathlib._local") for name, path in _PATHS.items()},
}
_ALLOWED: dict[tuple[str, str], object] = {**{(kind.__module__, kind.__name__): kind for kind in _RECORDS}, **_CALLED}
_OPCODES = (
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE",
)  # fmt: skip
#: a file name without a path
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class _RefusedError(Exception):
    """A file holds something that DCP does not write; the message says what."""


#: the unpickler written in Python, whose opcodes can be restricted; the one in C accepts all
_PYTHON_UNPICKLER: Any = pickle._Unpickler


class _Unpickler(_PYTHON_UNPICKLER):  # type: ignore[misc]
    """Builds the objects that DCP writes. Raises _RefusedError for anything else."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: _PYTHON_UNPICKLER.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES)
    }

    def find_class(self, module: str, name: str) -> object:
        """Returns what a file may name: a record class, one of the five functions, or a dtype of torch."""
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(own := getattr(torch, name, None), torch.dtype):
            return own
        return found if found is not None else _refuse(f"it names {module}.{name}")

    def load_newobj(self) -> None:
        """Makes a record without fields."""
        arguments, kind = self.stack.pop(), self.stack[-1]
        if not isinstance(kind, type) or kind not in _RECORDS or arguments != ():
            _refuse(f"it makes {kind!r:.80}")
        self.stack[-1] = object.__new__(kind)

    def load_build(self) -> None:
        """Sets a record's fields; TensorProperties does so by its own __setstate__."""
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is TensorProperties and type(state) is tuple:
            made.__setstate__(state)  # type: ignore[no-untyped-call]
            return
        if type(state) is not dict or not state.keys() <= _RECORDS.get(type(made), frozenset()):
            _refuse(f"it sets unknown fields of {type(made).__name__}")
        made.__dict__.update(state)

    def load_reduce(self) -> None:
        """Calls one of the five functions. Arguments must be numbers and strings; getattr also takes its enum."""
        arguments, called = self.stack.pop(), self.stack[-1]
        plain = arguments[0] if called is torch.Size and len(arguments) == 1 else arguments
        plain = plain[1:] if called is _member else plain
        if called not in _CALLED.values() or not all(type(one) in (int, str) for one in plain):
            _refuse(f"it calls {called!r:.80}")
        self.stack[-1] = called(*arguments)

    def load_setitem(self) -> None:
        """Sets one entry of a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        _set(self.stack[-1], key, value)

    def load_setitems(self) -> None:
        """Sets several entries of a dict."""
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            _set(self.stack[-1], key, value)

    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def _set(made: object, key: object, value: object) -> None:
    """Sets an entry of a dict. Keys must be plain, because hashing deeply nested tuples could take for ever."""
    is_index = type(key) is MetadataIndex and type(vars(key).get("fqn")) is str
    is_plain = type(key) is str or (is_index and type(vars(key).get("offset")) in (torch.Size, type(None)))
    if type(made) is not dict or not is_plain:
        _refuse(f"it has a key of {type(key).__name__}")
    made[key] = value


def _refuse(what: str) -> NoReturn:
    raise _RefusedError(f"{what}, which torch.distributed.checkpoint writes for no tensor")


def read_metadata(place: Path) -> Metadata:
    """Returns a checkpoint's tensors and the places of their chunks. Raises WeightsError for a malformed file."""
    path = place / METADATA
    content = read_regular(path, error=WeightsError)
    try:
        return _checked(_Unpickler(io.BytesIO(content)).load())
    except _RefusedError as error:
        raise WeightsError(f"{path}: {error}; pass another checkpoint") from None
    except Exception as error:
        raise WeightsError(
            f"{path}: cannot be read: {type(error).__name__}: {error}; pass another checkpoint"
        ) from error


def name_in(state_key: str) -> str:
    """The name of the parameter in the key of an optimizer state of it: STATE_PREFIX, the name, "/", the state."""
    return state_key.removeprefix(STATE_PREFIX).rpartition("/")[0]


def tensors_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Returns the tensors of the metadata by name, without other entries."""
    entries = metadata.state_dict_metadata.items()
    return {name: tensor for name, tensor in entries if isinstance(tensor, TensorStorageMetadata)}


def _checked(found: object) -> Metadata:
    """Returns the metadata after checking the type of every part, without the parts that loading does not read."""
    if type(found) is not Metadata:
        _refuse(f"it holds {type(found).__name__}")
    tensors, places = found.state_dict_metadata, found.storage_data
    _expect(type(tensors) is dict and type(places) is dict, "tables of tensors and of their files")
    for name, tensor in tensors.items():
        if type(name) is not str or type(tensor) is not TensorStorageMetadata:
            raise _RefusedError("expected tensors by name")
        _expect(_is_tensor(tensor), f"{name!r:.80}: a tensor's dtype, size and chunks")
        _expect(_is_covered(tensor), f"{name!r:.80}: chunks that make up {list(tensor.size)}")
    for index, place in places.items():
        _expect(type(index) is MetadataIndex and type(place) is StorageInfo, "files by tensor")
        _expect(_is_place(place), f"{index.fqn!r:.80}: a part of a file in the checkpoint's folder")
    version = found.version if type(found.version) is str else None
    return Metadata(state_dict_metadata=tensors, storage_data=places, version=version)


def _is_tensor(tensor: TensorStorageMetadata) -> bool:
    fields: Mapping[str, Any] = vars(tensor)
    chunks, properties = fields.get("chunks"), fields.get("properties")
    return (
        type(fields.get("size")) is torch.Size
        and type(properties) is TensorProperties
        and type(vars(properties).get("dtype")) is torch.dtype
        and type(chunks) is list
        and all(type(chunk) is ChunkStorageMetadata and _is_chunk(vars(chunk)) for chunk in chunks)
    )


def _is_covered(tensor: TensorStorageMetadata) -> bool:
    """True where the chunks are inside the tensor, start apart and add up to its elements, so that all are loaded."""
    size = tensor.size
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return False
        dims = zip(chunk.offsets, chunk.sizes, size, strict=True)
        if any(not 0 <= start <= start + n <= whole for start, n, whole in dims):
            return False
    filled = [chunk for chunk in tensor.chunks if prod(chunk.sizes)]
    is_apart = len({chunk.offsets for chunk in filled}) == len(filled)
    return is_apart and sum(prod(chunk.sizes) for chunk in filled) == prod(size)


def _is_chunk(fields: Mapping[str, Any]) -> bool:
    return type(fields.get("offsets")) is torch.Size and type(fields.get("sizes")) is torch.Size


def _is_place(place: StorageInfo) -> bool:
    fields: Mapping[str, Any] = vars(place)
    name, numbers = fields.get("relative_path"), (fields.get("offset"), fields.get("length"))
    is_plain = type(name) is str and _FILE_NAME.fullmatch(name) is not None
    return is_plain and all(type(n) is int and n >= 0 for n in numbers) and not fields.get("transform_descriptors")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise _RefusedError(f"expected {what}")


class CheckpointReader(FileSystemReader):
    """DCP's reader of a folder, with metadata from read_metadata. It reads tensors only, never pickled objects."""

    def __init__(self, place: Path, metadata: Metadata) -> None:
        super().__init__(place)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:  # without **kwargs in its signature DCP asks for no metadata file per rank
        """Returns the metadata that was read and checked before."""
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the plan's tensors. Raises WeightsError for an object, which DCP would unpickle."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise WeightsError(f"{self.path}: {item.dest_index.fqn} is a pickled object, expected a tensor")
            file = Path(self.path) / self.storage_data[item.storage_index].relative_path
            if not file.is_file():
                raise WeightsError(f"{file}: no such file, or not a regular one: the checkpoint is incomplete")
        return super().read_data(plan, planner)


def check_model(place: Path, own: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightsError where the model's names and shapes (`own`) are not the checkpoint's (`stored`)."""
    there = {name: shape for name, shape in stored.items() if name.startswith(MODEL_PREFIX)}
    problems = [
        f"{what}: {listed([name.removeprefix(MODEL_PREFIX) for name in names])}"
        for what, names in (
            ("missing there", sorted(own.keys() - there.keys())),
            ("not in the model", sorted(there.keys() - own.keys())),
            ("of another shape", [name for name in sorted(own.keys() & there.keys()) if own[name] != there[name]]),
        )
        if names
    ]
    if problems:
        raise WeightsError(
            f"{place} is of another model: {'; '.join(problems)}; load it into the model that it was saved from"
        )


def check_optimizer(
    place: Path,
    of_groups: list[list[str]],
    saved: Mapping[str, Any],
    own: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises WeightsError where the optimizer's parameter groups (`of_groups`, names) or states are not the saved ones.

    `own` and `stored` are shapes by name, of the model's and of the checkpoint's tensors.
    """
    groups = [sorted(group["params"]) for group in saved["groups"]]
    own_groups = [sorted(group) for group in of_groups]
    if len(groups) != len(own_groups):
        raise WeightsError(
            f"{place}: the optimizer had {len(groups)} groups of parameters, this one has {len(own_groups)}: make it "
            "with the same groups"
        )
    for number, (theirs, ours) in enumerate(zip(groups, own_groups, strict=True)):
        if theirs != ours:
            differing = sorted({*theirs} ^ {*ours})
            raise WeightsError(
                f"{place}: the optimizer's group {number} held other parameters: {listed(differing)}: make it with the "
                "same groups"
            )
    shapes = {name: own[MODEL_PREFIX + name] for group in own_groups for name in group if MODEL_PREFIX + name in own}
    states = [full for full in stored if full.startswith(STATE_PREFIX)]
    others = [full for full in states if stored[full] != shapes.get(name_in(full))]
    others += [str(name) for name in saved["scalars"] if name not in shapes]
    if others:
        raise WeightsError(
            f"{place}: the checkpoint has states of parameters that this optimizer does not hold, or in another shape: "
            f"{listed(others)}; make it for the same parameters, or load without the optimizer"
        )
