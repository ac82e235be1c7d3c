"""`--pin` and `--pins FILE`. The options in a file act as if they came first on the command line.

    # pins.toml                      {"tp": 8, "memory-limit": "70GiB",        <- pins.json
    tp = 8                            "pins": {"model.layers.*.mlp": "megatron"}}
    memory-limit = "70GiB"
    [pins]
    "model.layers.*.mlp" = "megatron"

Keys are names of options without dashes. The command line overrides the file.
"""

import argparse
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.core.errors import UsageError
from tpplan.core.files import read_text
from tpplan.core.strict_json import MAX_INTEGER, read_json
from tpplan.layouts.pins import parse_pins, split_pin
from tpplan.plan.styles import KNOWN_STYLES

if TYPE_CHECKING:
    from argparse import _ActionsContainer

_FILE = "--pins"


def add_pins(group: "_ActionsContainer") -> None:
    """Adds the options --pin and --pins."""
    group.add_argument(
        "--pin",
        action="append",
        default=[],
        type=_pin,
        metavar="PATTERN=STYLE",
        help=f"restrict modules to a style, as in 'model.layers.*.mlp=megatron'; repeatable. Styles: {KNOWN_STYLES}",
    )
    group.add_argument(_FILE, metavar="FILE", help="pins, and other options by name, from a TOML or JSON file")


def pins_of(args: argparse.Namespace) -> dict[str, str]:
    """{pattern: style} of all pins; a later pin overrides an earlier one. Raises UsageError for an unknown style."""
    pins = dict(args.pin)
    parse_pins(pins)
    return pins


def with_files(arguments: Sequence[str]) -> list[str]:
    """The command line with the options of all --pins files inserted behind the verb.

    Raises UsageError for an unreadable or malformed file.
    """
    files = [
        argument.removeprefix(f"{_FILE}=") if argument != _FILE else following
        for argument, following in zip(arguments, (*arguments[1:], ""), strict=False)
        if argument == _FILE or argument.startswith(f"{_FILE}=")
    ]
    said = [word for file in files if file for word in _words(Path(file))]
    return [*arguments[:1], *said, *arguments[1:]] if said else list(arguments)


def _words(path: Path) -> Iterator[str]:
    """Yields the options in a file as words of a command line."""
    data = _read(path)
    if not isinstance(data, dict):
        raise UsageError(f"{path}: expected an object, got {type(data).__name__}")
    for key, value in data.items():
        match value:
            case dict() if key == "pins":
                for pattern, style in value.items():
                    if not isinstance(style, str):
                        raise UsageError(f"{path}: pins.{pattern}: expected the name of a style, got {style!r:.80}")
                    yield f"--pin={pattern}={style}"
            case bool():
                if value:
                    yield f"--{key}"
            case int() if abs(value) > MAX_INTEGER:
                raise UsageError(f"{path}: {key}: expected a number below 2^63")
            case str() | int() | float() if key != "pins":
                yield f"--{key}={value}"
            case _:
                raise UsageError(f"{path}: {key}: expected {'a table of' if key == 'pins' else 'the value of'} {key}")


def _read(path: Path) -> object:
    if path.suffix == ".json":
        return read_json(path, origin=str(path), error=UsageError)
    text = read_text(path, error=UsageError, origin=str(path))
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{path}: not valid TOML: tables and arrays are nested too deep") from None
    except ValueError as error:  # a TOMLDecodeError, or a number with too many digits for Python
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def _pin(text: str) -> tuple[str, str]:
    try:
        return split_pin(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
