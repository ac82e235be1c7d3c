"""The parser of a verb, alike for all whose description is the docstring of their file."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_verb(
    subparsers: "_SubParsersAction[argparse.ArgumentParser]",
    name: str,
    help: str,
    description: str | None,
    epilog: str | None = None,
    *,
    run: Callable[[argparse.Namespace], int] | None = None,
) -> argparse.ArgumentParser:
    """Adds the parser of a verb, which prints its texts as they are written and takes no abbreviated options. `run` is
    None for a verb that has verbs of its own."""
    parser = subparsers.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if run is not None:
        parser.set_defaults(run=run)
    return parser
