"""Keeps a folder of checkpoints in which each named checkpoint is complete, even if a writer was killed at any time.

    checkpoints/
      step-00000100/                a checkpoint
      step-00000200-2/              the second checkpoint that was saved at step 200
      step-00000300.incomplete/     being written, or left by a killed writer; the next save removes it
      latest                        the name of the checkpoint saved last
      saving                        the process that writes one while it trains, until it has waited for it

A checkpoint gets its name by one rename after all its files have been synced to the disk; `latest` is replaced
afterwards in the same way. Where `latest` is missing or names no checkpoint, the one with the highest step counts.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpplan.core.errors import UsageError, WeightsError

_POINTER, _SAVING = "latest", "saving"
#: this process, on whatever machine
_PROCESS = uuid.uuid4().hex
_COMPLETE = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_INCOMPLETE, _REMOVED = ".incomplete", ".removed"


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Returns the path of the checkpoint that was saved last; None where the folder has none."""
    complete = complete_checkpoints(Path(folder))
    try:
        named = Path(folder) / (Path(folder) / _POINTER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = None
    return named if named in complete else max(complete, key=_order, default=None)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints of a folder, sorted by step and number."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()), key=_order)


def _order(path: Path) -> tuple[int, int]:
    found = _COMPLETE.fullmatch(path.name)
    assert found is not None, path
    return int(found[1]), int(found[2] or 1)


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Returns a new empty folder to write a checkpoint of a step into; removes what killed writers left.

    Raises WeightsError where the disk refuses, and UsageError while this process still saves one there (begin_saving).
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _is_saving(folder):
            raise UsageError(f"{folder}: a checkpoint is still being saved there: wait() for it first")
        for path in folder.iterdir():
            if path.suffix in (_INCOMPLETE, _REMOVED) and _COMPLETE.fullmatch(path.stem):
                _remove(path)
        place = folder / (_free_name(folder, step) + _INCOMPLETE)
        place.mkdir()
    except OSError as error:
        raise WeightsError(
            f"{folder}: no checkpoint can be written: {error}; check space and permissions, or pass another folder"
        ) from error
    return place


def _free_name(folder: Path, step: int) -> str:
    numbers = [number for found, number in map(_order, complete_checkpoints(folder)) if found == step]
    return f"step-{step:08}" + (f"-{max(numbers) + 1}" if numbers else "")


def begin_saving(folder: Path) -> str:
    """Notes that this process writes a checkpoint there while it goes on, until end_saving; the name of the note."""
    with atomic_write(folder / _SAVING) as path:
        path.write_text(_PROCESS, encoding="utf-8")
    return _SAVING


def end_saving(folder: Path) -> str:
    """Takes back begin_saving; the name of the note."""
    (folder / _SAVING).unlink(missing_ok=True)
    return _SAVING


def _is_saving(folder: Path) -> bool:
    """True where this process saves; what another one noted is of a killed one."""
    try:
        return (folder / _SAVING).read_text(encoding="utf-8") == _PROCESS
    except (OSError, UnicodeDecodeError):
        return False


def commit_checkpoint(place: Path) -> Path:
    """Renames an incomplete checkpoint whose files are synced to its final name, and makes it the latest."""
    folder, complete = place.parent, place.with_suffix("")
    sync_folder(place)
    os.rename(place, complete)
    sync_folder(folder)
    with atomic_write(folder / _POINTER) as pointer:
        pointer.write_text(complete.name + "\n", encoding="utf-8")
    return complete


def keep_last(folder: Path, number: int) -> None:
    """Removes all but the `number` checkpoints that were written last; never removes the latest."""
    latest = latest_checkpoint(folder)
    by_age = sorted(complete_checkpoints(folder), key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[:-number]:
        if path != latest:
            gone = path.with_suffix(_REMOVED)  # one rename, so that a half-removed folder never has a complete name
            os.rename(path, gone)
            _remove(gone)


def _remove(path: Path) -> None:
    """Removes a file, a folder with its content, or a link without its target."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, then syncs it to the disk and renames it to `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    if temporary.exists() or temporary.is_symlink():  # left by a writer that was killed, or a link to something else
        _remove(temporary)
    yield temporary
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
