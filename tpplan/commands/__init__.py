"""The command line: one file for each verb, with `add_parser(subparsers)` and `run(args) -> int`.

Results go to stdout, progress and logs to stderr. Exit codes: 0, that of the error's class (tpplan.core.errors), 2 for
a wrong command line, 130 when interrupted, 141 when the reader of stdout has gone. Importing a verb is cheap: torch is
imported by the `run` that needs it.

In: a command line. Out: text for people, or JSON, and an exit code.

Imports: anatomy, core, exporters, layouts, machine, measure, page, plan, search, solvers, trace, trial, verify.
"""

import argparse
import importlib
import logging
import os
import pkgutil
import shlex
import sys
import traceback
from collections.abc import Sequence

from tpplan.commands.terminal.output import write
from tpplan.commands.terminal.pins import with_files
from tpplan.core.errors import InternalError, TpplanError, UsageError
from tpplan.core.escapes import escaped_lines
from tpplan.core.files import version_of
from tpplan.core.gc_pause import rarely_collected, uncollected_at_exit
from tpplan.search.models.hf_model import trusted
from tpplan.search.models.model_spec import HF_PREFIX, TRUST_FLAG, UserCodeError

_INTERRUPTED = 130  # 128 + SIGINT, as shells count
_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb and returns its exit code. argparse itself exits with 2 on a wrong command line."""
    try:
        args = _parse(with_files(sys.argv[1:] if argv is None else argv))
    except TpplanError as error:
        return _print_error(error)
    handler = logging.StreamHandler()
    handler.setFormatter(_Escaping("tpplan: %(message)s"))
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, handlers=[handler])
    uncollected_at_exit()
    try:
        with rarely_collected():
            code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise the interpreter would flush its buffer to the broken pipe when it ends, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        write("tpplan: interrupted\n", to_stderr=True)
        return _INTERRUPTED
    except TpplanError as error:
        return _print_error(error)
    except Exception:
        bug = "tpplan: this is a bug in tpplan: please report it with the lines above and what `tpplan doctor` prints"
        write(f"{traceback.format_exc()}{bug}\n", to_stderr=True)
        return 1
    return code


class _Escaping(logging.Formatter):
    """Formats log lines, which may quote a plan, with terminal control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The formatted line with terminal control characters escaped."""
        return escaped_lines(super().format(record))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments. Positional `words` may also follow options, which argparse does not support."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    takes_words = "words" in vars(args) and not any(word.startswith("-") for word in rest)
    if rest and not takes_words:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words += rest
    args.command = shlex.join(["tpplan", *arguments])
    if vars(args).get("trust_remote_code"):
        _trust(args)
    return args


def _print_error(error: TpplanError) -> int:
    """Prints the error to stderr, after the user's own traceback where their code raised it; returns the exit code."""
    if isinstance(error, UserCodeError):
        write(f"{error.user_traceback}\n", to_stderr=True)
    if isinstance(error, InternalError):
        write("".join(traceback.format_exception(error)), to_stderr=True)
    write(f"tpplan: error: {error}\n", to_stderr=True)
    return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpplan", description="Plans how a PyTorch model is sharded over many GPUs.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is being done to stderr")
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        if not module.ispkg:
            importlib.import_module(f"{__name__}.{module.name}").add_parser(subparsers)
    for verb in subparsers.choices.values():
        if {"model", "words"} & {action.dest for action in verb._actions}:
            verb.add_argument(TRUST_FLAG, action="store_true", help="run the code that hf:path/config.json names")
    return parser


def _versions() -> str:
    """tpplan's version and torch's, without importing torch."""
    return ", ".join(f"{name} {version_of(name, 'not installed')}" for name in ("tpplan", "torch"))


def _trust(args: argparse.Namespace) -> None:
    """Marks the model's configuration as allowed to run code. Raises UsageError for a model without one."""
    if "model" in vars(args):
        args.model = trusted(args.model)
        return
    marked = [trusted(word) if word.startswith(HF_PREFIX) else word for word in args.words]
    if marked == args.words:
        raise UsageError(f"{TRUST_FLAG}: it is for {HF_PREFIX}path/config.json, and no such model was given")
    args.words = marked
