"""Files that appear whole or not at all, what is read of files that anyone may have written, and JSON for people."""

import errno
import json
import os
import re
import stat
import tempfile
from pathlib import Path

from tpplan.core.errors import PlanError, TpplanError

#: the folder of this package, as its modules name it
PACKAGE = Path(__file__).parents[1]
#: more text than any plan, profile or configuration has
MAX_TEXT_BYTES = 2**26
#: names of files that are open already: /dev/stdout, where a shell may have put a regular file
_OPEN_FILE = re.compile(r"/dev/(?:stdin|stdout|stderr|fd/\d+)|/proc/[^/]+/fd/\d+")
_MOST_LINKS = 40


def write_atomically(path: Path, text: str, *, error: type[TpplanError] = PlanError) -> None:
    """Writes a file beside its final place and renames it: it appears whole or not at all, with the old one's mode.

    A link stays, and what it leads to is replaced. A device, a pipe or an open file is written to as it is.
    Raises `error` for a folder, and where nothing can be written.
    """
    try:
        if is_written_in_place(path):
            _write_in_place(path, text)
            return
        target = Path(os.path.realpath(path))
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
        _replace(target, text, mode)
    except (OSError, ValueError) as cause:
        raise error(f"{path}: cannot be written: {_reason(cause)}") from cause


def _replace(target: Path, text: str, mode: int) -> None:
    if target.is_dir():
        raise OSError(errno.EISDIR, "it is a folder")
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=".tpplan-", suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(target)
        temporary = None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def is_written_in_place(path: Path) -> bool:
    """True for what is there and must stay what it is: a device, a pipe, an open file such as /dev/stdout. Raises
    OSError for links in a circle."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return _is_open_file(path) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _is_open_file(path: Path) -> bool:
    """One of the names that a path leads to is that of an open file."""
    name = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        if _OPEN_FILE.fullmatch(name):
            return True
        if not os.path.islink(name):
            return False
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return False


def _write_in_place(path: Path, text: str) -> None:
    """Appends to a device or a pipe that is there. One that nobody reads is an error, and so is a disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "w", encoding="utf-8") as file:
        if stat.S_ISBLK(os.fstat(descriptor).st_mode):
            raise OSError(errno.EPERM, "it is a disk")
        os.set_blocking(descriptor, True)
        file.write(text)


def _reason(cause: OSError | ValueError) -> str:
    if isinstance(cause, OSError) and cause.errno == errno.ENXIO:
        return "nobody reads from it"
    return getattr(cause, "strerror", None) or str(cause)


def read_text(path: Path, *, error: type[TpplanError], origin: str) -> str:
    """A file's text, as UTF-8. Raises `error` for what cannot be read, and for more than MAX_TEXT_BYTES: of a device
    that never ends, say."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise error(f"{origin}: cannot be read: more than {MAX_TEXT_BYTES >> 20} MiB")
        return content.decode("utf-8")
    except (OSError, ValueError) as cause:  # a name with a zero byte is a ValueError
        raise error(f"{origin}: cannot be read: {_reason(cause)}") from cause


def read_regular(path: Path, *, error: type[TpplanError], origin: str | None = None) -> bytes:
    """The content of a regular file, or of what a link leads to. Raises `error` for a folder, a fifo or a device, which
    may never end, and for what cannot be read."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise error(f"{origin or path}: cannot be read: it is not a regular file")
            return file.read()
    except (OSError, ValueError) as cause:  # a name with a zero byte is a ValueError
        raise error(f"{origin or path}: cannot be read: {_reason(cause)}") from cause


def _without_waiting(name: str, flags: int) -> int:
    """Opens a fifo that nobody writes to, too."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def unwritable(path: Path) -> str | None:
    """Why no file can be written there; None where nothing is in the way."""
    try:
        if path.is_dir():
            return "it is a folder"
        if is_written_in_place(path):
            return None if os.access(path, os.W_OK) else "it is not writable"
        folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    except (OSError, ValueError) as cause:
        return _reason(cause)
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return None if os.access(folder, os.W_OK) else f"{folder} is not writable"


def format_json(value: object, indent: str = "") -> str:
    """JSON with sorted keys; an object or list of scalars stands on one line."""
    deeper = indent + "  "
    match value:
        case dict() if value and any(isinstance(member, dict | list) and member for member in value.values()):
            members = (f"{deeper}{json.dumps(key)}: {format_json(value[key], deeper)}" for key in sorted(value))
            return "{\n" + ",\n".join(members) + f"\n{indent}}}"
        case list() if any(isinstance(member, dict | list) for member in value):
            return "[\n" + ",\n".join(deeper + format_json(member, deeper) for member in value) + f"\n{indent}]"
        case _:
            return json.dumps(value, sort_keys=True, allow_nan=False)
