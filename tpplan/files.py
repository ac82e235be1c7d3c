"""Files that appear whole or not at all, and JSON that people read in them."""

import json
import os
import tempfile
from pathlib import Path

from tpplan.errors import PlanError


def write_atomically(path: Path, text: str) -> None:
    """Writes a file beside its final place and renames it. Raises PlanError where the folder cannot be written."""
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def unwritable(path: Path) -> str | None:
    """Why no file can be written there; None where nothing is in the way."""
    folder = path.parent
    if path.is_dir():
        return "it is a folder"
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
