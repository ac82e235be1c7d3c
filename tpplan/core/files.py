"""Writes files atomically, reads untrusted files with limits, formats JSON for people, and tells packages' versions."""

import errno
import json
import os
import re
import stat
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tpplan.core.errors import PlanError, TpplanError

#: the folder of the package tpplan, spelled as in its modules' __file__
PACKAGE = Path(__file__).parents[1]
#: upper limit of a text file's size; far more than any plan, profile or configuration needs
MAX_TEXT_BYTES = 2**26
#: names of open file descriptors, such as /dev/stdout, which a shell may have redirected to a regular file
_OPEN_FILE = re.compile(r"/dev/(?:stdin|stdout|stderr|fd/\d+)|/proc/[^/]+/fd/\d+")
#: symbolic links that are followed before giving up, as in Linux
_MOST_LINKS = 40


def write_atomically(path: Path, text: str, *, error: type[TpplanError] = PlanError) -> None:
    """Writes text to a temporary file beside `path` and renames it, so that `path` never holds half a file.

    Keeps the mode of an existing file. A symbolic link stays; the file it points to is replaced. A device, a pipe or an
    open file descriptor is written in place. Raises `error` where `path` is a folder or cannot be written.
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
    """True where the path exists and must not be replaced: a device, a pipe, or an open file such as /dev/stdout.

    Raises OSError for a cycle of links.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return _is_open_file(path) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _is_open_file(path: Path) -> bool:
    """True where the path, or a link on the way to its target, names an open file descriptor."""
    name = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        if _OPEN_FILE.fullmatch(name):
            return True
        if not os.path.islink(name):
            return False
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return False


def _write_in_place(path: Path, text: str) -> None:
    """Appends to an existing device or pipe. Raises OSError for a disk and for a pipe without a reader."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "w", encoding="utf-8") as file:
        if stat.S_ISBLK(os.fstat(descriptor).st_mode):
            raise OSError(errno.EPERM, "it is a disk")
        os.set_blocking(descriptor, True)
        file.write(text)


def _reason(cause: OSError | ValueError) -> str:
    if isinstance(cause, OSError) and cause.errno == errno.ENXIO:
        return "no process reads from the pipe"
    return getattr(cause, "strerror", None) or str(cause)


def read_text(path: Path, *, error: type[TpplanError], origin: str) -> str:
    """The text of a UTF-8 file. Raises `error` where it is unreadable or longer than MAX_TEXT_BYTES (an endless
    device)."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise error(f"{origin}: cannot be read: it has more than {MAX_TEXT_BYTES >> 20} MiB")
        return content.decode("utf-8")
    except (OSError, ValueError) as cause:  # a name with a zero byte is a ValueError
        raise error(f"{origin}: cannot be read: {_reason(cause)}") from cause


def read_regular(path: Path, *, error: type[TpplanError], origin: str | None = None) -> bytes:
    """The bytes of a regular file; links are followed.

    Raises `error` for a folder, a pipe or a device (which may never end), and for a file that cannot be read.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise error(f"{origin or path}: cannot be read: it is not a regular file")
            return file.read()
    except (OSError, ValueError) as cause:  # a name with a zero byte is a ValueError
        raise error(f"{origin or path}: cannot be read: {_reason(cause)}") from cause


def _without_waiting(name: str, flags: int) -> int:
    """Opens a file without blocking, even a pipe that has no writer yet."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def unwritable(path: Path) -> str | None:
    """The reason why no file can be written at `path`; None where one can."""
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
    """JSON with sorted keys; an object or a list that holds only scalars stands on one line."""
    deeper = indent + "  "
    match value:
        case dict() if value and any(isinstance(member, dict | list) and member for member in value.values()):
            members = (f"{deeper}{json.dumps(key)}: {format_json(value[key], deeper)}" for key in sorted(value))
            return "{\n" + ",\n".join(members) + f"\n{indent}}}"
        case list() if any(isinstance(member, dict | list) for member in value):
            return "[\n" + ",\n".join(deeper + format_json(member, deeper) for member in value) + f"\n{indent}]"
        case _:
            return json.dumps(value, sort_keys=True, allow_nan=False)


def version_of(package: str, otherwise: str) -> str:
    """The version of an installed package; `otherwise` where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


def tpplan_version() -> str:
    """The version of the installed tpplan, "0+checkout" where it is not installed."""
    return version_of("tpplan", "0+checkout")
