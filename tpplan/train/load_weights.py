"""Filling a model with values: from a state_dict, from safetensors files, or as its constructor would.

    with torch.device("meta"):
        model = build_model()                                     # no memory
    model = tpplan.apply_plan(model, "plan.json")                 # local shapes, no memory
    tpplan.init_weights(model, build_model, seed=0)               # or
    tpplan.load_safetensors(model, "llama-8b/", build_model=build_model)

Each rank makes room for its own parts of the parameters, and reads or makes those. Buffers that no file holds (rotary
frequencies) are made as the constructor makes them (tpplan.train.deferred_init). A model that has memory is filled in
place. What is missing, left over, or of another shape is named, on all ranks, before anything is touched.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.core.errors import ModelError, WeightsError
from tpplan.core.strict_json import read_json
from tpplan.train.deferred_init import Recording, record
from tpplan.train.materialize import (
    Box,
    Target,
    agree,
    held_tensor,
    listed,
    local_box,
    materialize,
    others_on_meta,
    raise_together,
    targets_of,
)

BuildModel = Callable[[], nn.Module]
#: a name in the model -> its name in the source
Rename = Callable[[str], str]


class Source(Protocol):
    """Where whole tensors come from, part by part."""

    @property
    def origin(self) -> str:
        """Its name in messages."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What it has."""

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """The part of each named tensor, in the source's own order."""


def load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    *,
    build_model: BuildModel | None = None,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Fills the model with a whole state_dict, which every rank gives (`torch.load(..., mmap=True)` takes no memory).

    Values are cast to the model's dtypes. Of a tied weight one name is enough. `build_model` is needed where the model
    has buffers on the meta device that the state_dict does not hold; `rename` gives the name there of a name in the
    model; `ignore` are patterns of names that may be left over. Raises WeightsError, on all ranks, for what is missing,
    left over, of another shape or kind, and for ties that differ.
    """
    fill(model, _Given("the state_dict", state_dict), build_model=build_model, rename=rename, ignore=ignore)


def load_safetensors(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    build_model: BuildModel | None = None,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Fills the model from a folder as Hugging Face saves it (one file, or several with an index), or from one file.

    Of each tensor a rank reads its own part alone. Otherwise as load_state_dict. Needs the package safetensors.
    """
    source: Source | None = None
    error: Exception | None = None
    try:
        source = SafetensorsFiles.open(Path(path))
    except Exception as found:
        error = found
    raise_together(error)
    assert source is not None
    fill(model, source, build_model=build_model, rename=rename, ignore=ignore)


def init_weights(model: nn.Module, build_model: BuildModel, *, seed: int = 0) -> None:
    """Fills the model with the values that build_model gives it: by reset_parameters, by `apply`, or otherwise.

    The values depend on seed alone, and are the same on every mesh and in one process. Each parameter is made whole on
    the host, one at a time, and a rank keeps its part: every rank draws all of the model's random numbers, in memory
    for one parameter and what that is made of. Raises ModelError where build_model makes another model, or leaves a
    parameter unset, and WeightsError where the ranks give different seeds.
    """
    made: _Constructed | None = None
    error: Exception | None = None
    try:
        made = _Constructed(record(build_model, seed=seed))
    except Exception as found:
        error = found
    raise_together(error)
    assert made is not None
    agree("seeds or constructors", f"seed {seed} with {made.recording.tape.num_draws} random ops")
    fill(model, made, recording=made.recording)


def fill(
    model: nn.Module,
    source: Source,
    *,
    build_model: BuildModel | None = None,
    recording: Recording | None = None,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Gives the model memory where it has none, and the source's values. Errors are raised on all ranks."""
    wanted: dict[str, Target] = {}
    error: Exception | None = None
    try:
        wanted = _matched(targets_of(model), source, rename or str, ignore)
        recording = prepare_buffers(model, recording, build_model)
    except Exception as found:
        error = found
    raise_together(error)
    agree(f"tensors in {source.origin}", _digest(source.shapes()))
    make_memory(model, recording)
    try:
        _copy(source, wanted)
    except Exception as found:
        error = found
    raise_together(error)


def prepare_buffers(model: nn.Module, recording: Recording | None, build_model: BuildModel | None) -> Recording | None:
    """How the buffers are made that no state_dict holds, where there are such without memory; nothing is changed yet.

    Raises ModelError where nobody says how, or where the constructor draws them and no recording says from which seed:
    then what they were is not known.
    """
    held = set().union(*(target.names for target in targets_of(model)))
    missing = {name: tensor for name, tensor in others_on_meta(model).items() if name not in held}
    if not missing:
        return recording
    made = recording
    if made is None and build_model is not None:
        made = record(build_model, seed=0)
    if made is None:
        raise ModelError(
            f"buffers without memory, which no state_dict holds: {listed(sorted(missing))}; pass build_model=, which "
            "makes them anew"
        )
    for name, tensor in missing.items():
        anew = held_tensor(made.model, name)
        if anew.shape != tensor.shape:
            raise ModelError(f"build_model makes {name} as {list(anew.shape)}, and the model has {list(tensor.shape)}")
        if recording is None and made.is_drawn(anew):
            raise ModelError(
                f"{name} is drawn at random by the constructor and saved nowhere, so that its values are lost: "
                "register it as a persistent buffer, or draw it from a generator of its own with a fixed seed"
            )
    return made


def make_memory(model: nn.Module, recording: Recording | None) -> None:
    """Gives every tensor of the model memory; buffers and attributes that had none get the constructor's values."""
    others = others_on_meta(model)
    materialize(model)
    if recording is None:
        return
    values: dict[int, Tensor] = {}
    for name, tensor in others.items():
        if id(tensor) not in values:
            values[id(tensor)] = recording.value(held_tensor(recording.model, name))
            tensor.copy_(values[id(tensor)])


def _matched(targets: list[Target], source: Source, rename: Rename, ignore: Sequence[str]) -> dict[str, Target]:
    """What each tensor of the source fills. Raises WeightsError for all that does not match, by name."""
    shapes = source.shapes()
    found: dict[str, Target] = {}
    missing, misshapen = [], []
    for target in targets:
        present = [renamed for name in target.names if (renamed := rename(name)) in shapes]
        if not present:
            missing.append(target.names[0])
        misshapen += [
            f"{name} is {list(shapes[name])} there and {list(target.tensor.shape)} in the model"
            for name in present
            if shapes[name] != tuple(target.tensor.shape)
        ]
        found |= dict.fromkeys(present, target)
    left = [name for name in shapes if name not in found and not any(fnmatchcase(name, known) for known in ignore)]
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (("missing there", missing), ("not in the model", left), ("of another shape", misshapen))
        if names
    ]
    if problems:
        hint = "; `ignore` takes patterns of names to leave out, `rename` translates names" if missing or left else ""
        raise WeightsError(f"{source.origin} does not fit the model: {'; '.join(problems)}{hint}")
    return found


@torch.no_grad()
def _copy(source: Source, wanted: Mapping[str, Target]) -> None:
    boxes = {name: local_box(target.tensor) for name, target in wanted.items()}
    mine = {name: box for name, box in boxes.items() if all(part.stop > part.start for part in box)}
    filled: dict[int, str] = {}
    for name, part in source.parts(mine):
        local = wanted[name].local
        if part.dtype.is_floating_point != local.dtype.is_floating_point:
            raise WeightsError(f"{source.origin}: {name} is {part.dtype} there and {local.dtype} in the model")
        first = filled.setdefault(id(wanted[name]), name)
        if first == name:
            local.copy_(part)
        elif not torch.equal(local, part.to(local)):
            raise WeightsError(f"{source.origin}: {first} and {name} are tied in the model, and differ there")
    if lost := sorted({id(wanted[name]) for name in mine} - filled.keys()):
        raise AssertionError(f"{source.origin} gave nothing for {len(lost)} tensors")


def _digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    text = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return f"{len(shapes)} tensors, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


# ---- sources


@final
class _Given:
    """Whole tensors in memory, or mapped to it."""

    def __init__(self, origin: str, tensors: Mapping[str, Tensor]) -> None:
        self.origin = origin
        self.tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Raises WeightsError for what is no whole tensor."""
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
                raise WeightsError(f"{self.origin}: {name}: expected a whole tensor, got {type(tensor).__name__}")
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """Views."""
        yield from ((name, self.tensors[name][box]) for name, box in boxes.items())


@final
class _Constructed:
    """What a constructor makes, each made when it is asked for."""

    def __init__(self, recording: Recording) -> None:
        self.origin = "what build_model makes"
        self.recording = recording
        self.tensors = {name: target.tensor for target in targets_of(recording.model) for name in target.names}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Raises ModelError for what the constructor leaves unset."""
        if unset := [name for name, tensor in self.tensors.items() if not self._is_set(tensor)]:
            raise ModelError(
                f"build_model leaves parameters as it found them in memory: {listed(unset)}; set them there, with "
                "model.apply(function) if need be"
            )
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def _is_set(self, tensor: Tensor) -> bool:
        return not tensor.is_meta or tensor.numel() == 0 or self.recording.is_set(tensor)

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """A tied weight is made once."""
        groups: dict[int, list[str]] = {}
        for name in boxes:
            groups.setdefault(id(self.tensors[name]), []).append(name)
        for names in groups.values():
            whole = self.recording.value(self.tensors[names[0]])
            yield from ((name, whole[boxes[name]]) for name in names)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFiles:
    """Files of tensors, and which tensor stands in which."""

    origin: str
    files: Mapping[str, Path]
    sizes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFiles":
        """Reads the headers. Raises WeightsError for files that are missing, unreadable or say the same twice."""
        safetensors_package()
        files: dict[str, Path] = {}
        sizes: dict[str, tuple[int, ...]] = {}
        for file, names in _files(path).items():
            with _opened(file) as opened:
                present = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            for name in present if names is None else names:
                if name not in present:
                    raise WeightsError(f"{file}: the index says that it holds {name}, and it does not")
                if name in files:
                    raise WeightsError(f"{name} stands in {files[name]} and in {file}: give the folder an index")
                files[name], sizes[name] = file, present[name]
        return cls(origin=str(path), files=files, sizes=sizes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By the headers."""
        return self.sizes

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """File by file; of each tensor no more is read than its part."""
        for file in dict.fromkeys(self.files[name] for name in boxes):
            with _opened(file) as opened:
                for name, box in boxes.items():
                    if self.files[name] == file:
                        yield name, opened.get_slice(name)[box] if box else opened.get_tensor(name)


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The files to read, with the names to take from each; None for all."""
    if path.is_file():
        return {path: None}
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise WeightsError(f"{path}: {len(indices)} indices ({listed([i.name for i in indices])}): name one file")
    if indices:
        return _indexed(indices[0])
    single = path / "model.safetensors"
    files: list[Path] = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{path}: no *.safetensors there")
    return dict.fromkeys(files)


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    try:
        named: Any = read_json(index, origin=str(index), error=WeightsError)
        named = named["weight_map"]
        pairs = [(str(name), index.parent / _plain_name(file)) for name, file in named.items()]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WeightsError(f"{index}: expected JSON with a weight_map of names to files: {error!r:.200}") from error
    found: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        names = found.setdefault(file, [])
        assert names is not None
        names.append(name)
    return found


def _plain_name(file: object) -> str:
    """The name of a file in the index's own folder. Raises ValueError for a path that leads elsewhere."""
    if not isinstance(file, str) or Path(file).name != file or "\0" in file:
        raise ValueError(f"expected names of files beside the index, got {file!r:.80}")
    return file


def safetensors_package() -> Any:
    """The package. Raises WeightsError where it is not installed."""
    try:
        import safetensors
    except ImportError as error:
        raise WeightsError(
            f"reading it needs the package safetensors: pip install 'tpplan[safetensors]' ({error})"
        ) from None
    return safetensors


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise WeightsError(f"{file}: no such file, or not a regular one")
    try:
        return safetensors_package().safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # its own error class is made in Rust and derives from Exception
        raise WeightsError(f"{file}: cannot be read as safetensors: {error}") from error
