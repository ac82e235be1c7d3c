"""Sources of whole tensors to fill a model from: a state_dict, a recorded constructor, or safetensors files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from torch import Tensor
from torch.distributed.tensor import DTensor

from tpplan.core.errors import ModelError, WeightsError
from tpplan.core.strict_json import read_json
from tpplan.train.deferred_init import Recording
from tpplan.train.materialize import Box, listed, targets_of


class TensorSource(Protocol):
    """A source of whole tensors, of which parts can be read."""

    @property
    def origin(self) -> str:
        """The source's name in messages."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of all tensors by name."""

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """Yields the part `box` of each named tensor, in the order that suits the source."""


@final
class StateDictSource:
    """A source of whole tensors in memory or memory-mapped."""

    def __init__(self, origin: str, tensors: Mapping[str, Tensor]) -> None:
        self.origin = origin
        self.tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns all shapes by name. Raises WeightsError for an entry that is not a whole tensor."""
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
                raise WeightsError(
                    f"{self.origin}: {name}: expected a whole tensor, got {type(tensor).__name__}; full_tensor() "
                    "gathers a DTensor"
                )
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """Yields views of the tensors."""
        yield from ((name, self.tensors[name][box]) for name, box in boxes.items())


@final
class ConstructorSource:
    """A source of the tensors that a recorded constructor makes, computed one at a time."""

    def __init__(self, recording: Recording) -> None:
        self.origin = "what build_model makes"
        self.recording = recording
        self.tensors = {name: target.tensor for target in targets_of(recording.model) for name in target.names}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns all shapes by name. Raises ModelError for tensors that the constructor leaves uninitialized."""
        if unset := [name for name, tensor in self.tensors.items() if not self._is_set(tensor)]:
            raise ModelError(
                f"build_model leaves parameters as it found them in memory: {listed(unset)}; initialize them inside "
                "build_model, for example with model.apply(function)"
            )
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def _is_set(self, tensor: Tensor) -> bool:
        return not tensor.is_meta or tensor.numel() == 0 or self.recording.is_set(tensor)

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """Yields the part of each tensor; computes a tied weight once."""
        groups: dict[int, list[str]] = {}
        for name in boxes:
            groups.setdefault(id(self.tensors[name]), []).append(name)
        for names in groups.values():
            whole = self.recording.value(self.tensors[names[0]])
            yield from ((name, whole[boxes[name]]) for name in names)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFiles:
    """A source of tensors in safetensors files: the file and the shape of each tensor by name."""

    origin: str
    files: Mapping[str, Path]
    sizes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFiles":
        """Reads the headers. Raises WeightsError for files that are missing or unreadable, or hold a name twice."""
        safetensors_package()
        files: dict[str, Path] = {}
        sizes: dict[str, tuple[int, ...]] = {}
        for file, names in _files(path).items():
            with _opened(file) as opened:
                present = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            for name in present if names is None else names:
                if name not in present:
                    raise WeightsError(
                        f"{file}: the index says that it holds {name}, and it does not: fetch the files again"
                    )
                if name in files:
                    raise WeightsError(f"{name} is in {files[name]} and in {file}: give the folder an index")
                files[name], sizes[name] = file, present[name]
        return cls(origin=str(path), files=files, sizes=sizes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes in the files' headers by name."""
        return self.sizes

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """Yields the parts, file by file, reading no more of each tensor than its part."""
        for file in dict.fromkeys(self.files[name] for name in boxes):
            with _opened(file) as opened:
                for name, box in boxes.items():
                    if self.files[name] == file:
                        yield name, opened.get_slice(name)[box] if box else opened.get_tensor(name)


def _files(path: Path) -> dict[Path, list[str] | None]:
    """Returns the files to read, each with the tensor names to take from it; None for all."""
    if path.is_file():
        return {path: None}
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise WeightsError(
            f"{path}: {len(indices)} index files ({listed([i.name for i in indices])}): pass the path of one "
            "safetensors file, or leave one index there"
        )
    if indices:
        return _indexed(indices[0])
    single = path / "model.safetensors"
    files: list[Path] = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{path}: no *.safetensors there: pass a safetensors file, or a folder with some")
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
    """Returns a file name from an index. Raises ValueError for a path that leads out of the index's folder."""
    if not isinstance(file, str) or Path(file).name != file or "\0" in file:
        raise ValueError(f"expected names of files beside the index, got {file!r:.80}")
    return file


def safetensors_package() -> Any:
    """Returns the package safetensors. Raises WeightsError where it is not installed."""
    try:
        import safetensors
    except ImportError as error:
        raise WeightsError(
            f"reading safetensors files needs the package safetensors: pip install 'tpplan[safetensors]' ({error})"
        ) from None
    return safetensors


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise WeightsError(f"{file}: no such file, or not a regular one: fetch the files again")
    try:
        return safetensors_package().safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # its own error class is made in Rust and derives from Exception
        raise WeightsError(f"{file}: cannot be read as safetensors: {error}; fetch the file again") from error
