"""A folder of checkpoints in which every name stands for a whole one, whenever the writer was killed.

    checkpoints/
      step-00000100/                a checkpoint
      step-00000200-2/              another, the second one that was saved of step 200
      step-00000300.incomplete/     being written, or left by a writer that was killed; removed by the next save
      latest                        the name of the last one saved

What is written gets its name by one rename when all of it has reached the disk, and `latest` is replaced afterwards in
the same way. Where that file is missing or names what is gone, the checkpoint of the last step is the latest.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpplan.core.errors import WeightsError

_POINTER = "latest"
_COMPLETE = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_INCOMPLETE, _REMOVED = ".incomplete", ".removed"


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that was saved last, None where there is none."""
    complete = complete_checkpoints(Path(folder))
    try:
        named = Path(folder) / (Path(folder) / _POINTER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = None
    return named if named in complete else max(complete, key=_order, default=None)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Those that can be loaded, by step and number."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()), key=_order)


def _order(path: Path) -> tuple[int, int]:
    found = _COMPLETE.fullmatch(path.name)
    assert found is not None, path
    return int(found[1]), int(found[2] or 1)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint of a step into. What killed writers left is removed first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.suffix in (_INCOMPLETE, _REMOVED) and _COMPLETE.fullmatch(path.stem):
                _remove(path)
        place = folder / (_free_name(folder, step) + _INCOMPLETE)
        place.mkdir()
    except OSError as error:
        raise WeightsError(f"{folder}: no checkpoint can be written: {error}") from error
    return place


def _free_name(folder: Path, step: int) -> str:
    numbers = [number for found, number in map(_order, complete_checkpoints(folder)) if found == step]
    return f"step-{step:08}" + (f"-{max(numbers) + 1}" if numbers else "")


def commit(place: Path) -> Path:
    """Gives a checkpoint whose files are on the disk its name, and makes it the latest."""
    folder, complete = place.parent, place.with_suffix("")
    sync_folder(place)
    os.rename(place, complete)
    sync_folder(folder)
    with written(folder / _POINTER) as pointer:
        pointer.write_text(complete.name + "\n", encoding="utf-8")
    return complete


def keep_last(folder: Path, number: int) -> None:
    """Removes all but those that were written last, so many, and never the latest."""
    latest = latest_checkpoint(folder)
    by_age = sorted(complete_checkpoints(folder), key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[:-number]:
        if path != latest:
            gone = path.with_suffix(_REMOVED)  # in one step, so that a half is never taken for a whole
            os.rename(path, gone)
            _remove(gone)


def _remove(path: Path) -> None:
    """Removes a folder with all in it; of a link the link alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A path to write to; what it holds in the end is put in the other's place, on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    if temporary.exists() or temporary.is_symlink():  # left by a writer that was killed, or a link to something else
        _remove(temporary)
    yield temporary
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The folder's own list of names reaches the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
