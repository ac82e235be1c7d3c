"""`tpplan profile -o FILE` measures this machine; `list` names shipped profiles, `check FILE` and `show FILE` tell what
one contains.

Alone it measures one device. Under torchrun it also measures collectives, on every group that a mesh on these nodes can
have, with all ranks working at the same time:

    tpplan profile -o profiles/mine.json --budget 5m
    torchrun --nproc-per-node 8 -m tpplan profile -o profiles/mine.json

Finished sections are kept in FILE.partial until all are done: after an interruption, the same command continues.
"""

import argparse
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.terminal.output import aligned, print_lines, write, write_json, wrote
from tpplan.commands.terminal.progress import Report, bars
from tpplan.commands.terminal.ranks import is_first_rank, own_device
from tpplan.commands.terminal.verbs import add_verb
from tpplan.core.errors import ProfileError, UsageError
from tpplan.core.files import is_written_in_place, unwritable, write_atomically
from tpplan.core.strict_json import MOST
from tpplan.machine.lint import warnings, why_invalid
from tpplan.machine.profile import HardwareProfile, load_profile, shipped_profiles
from tpplan.machine.report import DEFAULT_WIDTH, as_data, render, to_html
from tpplan.plan.report import gib

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    import torch

_SECONDS_PER_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
#: narrowest and widest report, in columns
_MIN_WIDTH, _MAX_WIDTH = 60, 160
#: columns of the longest name of a section of a profile
_SECTION_COLUMNS = 18


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb and its sub-verbs check and show."""
    parser = add_verb(subparsers, "profile", "measure this machine, check or show a profile", __doc__)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="measure, and write the profile here")
    parser.add_argument("--name", help="the profile's name (default: the file's, without its ending)")
    parser.add_argument("--budget", type=duration, default=300.0, metavar="TIME", help="such as 90s, 5m (default), 1h")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=[],
        metavar="DTYPE",
        help="default: float32 on a CPU; bfloat16 float16 float32 on a GPU",
    )
    parser.add_argument("--note", action="append", default=[], metavar="TEXT", help="a line for the profile's notes")
    parser.set_defaults(run=run_measure)
    actions = parser.add_subparsers(metavar="list|check|show", required=False)
    listed = actions.add_parser("list", help="list the profiles that ship with tpplan", allow_abbrev=False)
    listed.set_defaults(run=run_list)
    listed.add_argument("--json", action="store_true", help="print as JSON")
    check = actions.add_parser("check", help="say whether a profile is valid, and what it lacks", allow_abbrev=False)
    check.set_defaults(run=run_check)
    show = actions.add_parser("show", help="print a profile's tables", allow_abbrev=False)
    show.add_argument("--html", type=Path, metavar="FILE", help="write one page with charts here")
    show.set_defaults(run=run_show)
    for action in (check, show):
        action.add_argument("profile", metavar="FILE", help="a profile's path, or the name of a shipped one")
        action.add_argument("--json", action="store_true", help="print as JSON")


# --- list, check and show ---------------------------------------------------------------------------------------------


def run_list(args: argparse.Namespace) -> int:
    """Prints the shipped profiles, a line each."""
    found = [load_profile(name) for name in shipped_profiles()]
    if args.json:
        write_json([{"name": own.name, "device": own.device, "gpus_per_node": own.gpus_per_node} for own in found])
        return 0
    rows = [("name", "device", "per node", "memory")]
    rows += [(own.name, own.device, str(own.gpus_per_node), gib(own.memory_bytes)) for own in found]
    print_lines(lambda width: aligned(rows, left=(0, 1)))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Loads the profile and prints its warnings. Raises ProfileError where it is not valid, or mostly noise."""
    profile = load_profile(args.profile)
    found, problem = warnings(profile), why_invalid(profile)
    if args.json:
        content = {"name": profile.name, "fingerprint": profile.fingerprint, "warnings": found, "invalid": problem}
        write_json(content, sort_keys=False)
    else:
        for warning in found:
            write(f"warning: {warning}\n")
    if problem:
        raise ProfileError(f"{args.profile}: {problem}")
    if args.json:
        return 0
    count = "no warnings" if not found else f"{len(found)} warning{'s' if len(found) > 1 else ''}"
    write(f"{args.profile}: valid, {count} ({profile.name}, {profile.fingerprint[:12]})\n")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Prints the tables; with --html also writes the page."""
    profile = load_profile(args.profile)
    if args.html is not None:
        _check_writable(args.html)
        write_atomically(args.html, to_html(profile), error=ProfileError)
    _print_profile(profile, as_json=args.json)
    if args.html is not None:
        wrote(args.html)
    return 0


def _print_profile(profile: HardwareProfile, *, as_json: bool = False) -> None:
    if as_json:
        write_json(as_data(profile), sort_keys=False)
    else:
        columns = shutil.get_terminal_size(fallback=(DEFAULT_WIDTH, 0)).columns
        text = render(profile, width=max(_MIN_WIDTH, min(columns, _MAX_WIDTH)), color=sys.stdout.isatty())
        write(text, is_styled=True)


# --- measure -------------------------------------------------------------------------------------------------------


def run_measure(args: argparse.Namespace) -> int:
    """Measures, writes and prints the profile, removes the partial file; ranks but the first only measure."""
    if args.output is None:
        raise UsageError("profile: expected -o FILE to measure this machine, or check FILE, or show FILE")
    _check_writable(args.output)
    partial = _partial_of(args.output)
    start = time.perf_counter()
    with own_device(args.device) as device, bars(_SECTION_COLUMNS, is_shown=is_first_rank(), stays=True) as progress:
        profile = _measure(args, device, partial, progress)
    if not is_first_rank():
        return 0
    write_atomically(args.output, profile.dumps(), error=ProfileError)
    if partial is not None:
        partial.unlink(missing_ok=True)
    _print_profile(profile)
    if problem := why_invalid(profile):
        write(f"tpplan: {args.output} is not valid: {problem}\n", to_stderr=True)
    wrote(args.output, f" after {time.perf_counter() - start:.0f} s")
    return 0


def _partial_of(output: Path) -> Path | None:
    """The file that keeps finished sections; None where the output is a device or a pipe.

    Raises ProfileError where that name exists and is no regular file.
    """
    if is_written_in_place(output):
        return None
    partial = output.with_name(output.name + ".partial")
    if partial.exists() and not partial.is_file():
        raise ProfileError(f"{partial}: finished sections would be kept there, but it is no regular file: remove it")
    return partial


def _measure(
    args: argparse.Namespace, device: "torch.device", partial: Path | None, progress: Report
) -> HardwareProfile:
    from tpplan.measure.session import measure_machine, survey_of

    return measure_machine(
        survey_of(device, dtypes=args.dtypes, progress=progress),
        name=args.name or args.output.name.removesuffix(".json"),
        budget_s=args.budget,
        notes=args.note,
        partial=partial,
        say=lambda text: write(f"tpplan: {text}\n", to_stderr=True),
    )


def _check_writable(path: Path) -> None:
    """Raises ProfileError where the file cannot be written, before minutes are spent on measuring."""
    if problem := unwritable(path):
        raise ProfileError(f"{path}: cannot be written: {problem}")


def duration(text: str) -> float:
    """Seconds of text such as 90, 90s, 5m or 1h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or not 0 < float(match[1]) <= MOST:
        raise argparse.ArgumentTypeError(f"expected a time above 0 such as 90s, 5m or 1h, got {text!r}")
    return float(match[1]) * _SECONDS_PER_UNIT[match[2]]
