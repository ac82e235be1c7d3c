"""`tpplan size model.py --profile h100-sxm --target-tokens-per-day 50e9 ...`: how many GPUs, and the best plan on each.

Tries 1, 2, 4, ... GPUs of a node, then 1, 2, 4, ... nodes, until the target is met, or up to --max-gpus; then counts
between the last two, by bisection.
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.solve import STAGE_COLUMNS, add_training, check_output, training_options
from tpplan.commands.terminal.comparison import batch_cell, mesh_cell
from tpplan.commands.terminal.output import aligned, folded, print_lines, write_json, wrote
from tpplan.commands.terminal.pins import add_pins, pins_of
from tpplan.commands.terminal.progress import bars
from tpplan.commands.terminal.values import count, gpu_count, num_bytes
from tpplan.commands.terminal.verbs import add_verb
from tpplan.core.errors import InfeasibleError, UsageError
from tpplan.core.files import write_atomically
from tpplan.core.strict_json import MOST
from tpplan.core.units import format_seconds
from tpplan.machine.profile import load_profile
from tpplan.plan.plan import Recompute
from tpplan.plan.report import gib
from tpplan.search.models.user_model import load_model_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.search.comparisons.cluster_sizing import Sized

#: most GPUs that are tried without --max-gpus
_MOST = 1024
_DAY_S, _HOUR_S = 86_400.0, 3_600.0
_SPANS = {"h": _HOUR_S, "d": _DAY_S, "w": 7 * _DAY_S}

_EPILOG = """\
Plans are priced, not proven: run `tpplan solve` for the count that you choose. MFU is relative to the fastest matmul of
the profile; GPU-hours count every GPU of the cluster. model.py is as for `tpplan solve`.
"""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "size", "find how many GPUs a training needs", __doc__, _EPILOG, run=run)
    parser.add_argument("model", metavar="model.py", help="model.py, model.py:BUILDER or hf:path/config.json")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--profile", action="append", required=True, metavar="NAME", help="a profile or its path; several are compared"
    )
    machine.add_argument("--gpus", type=_counts, metavar="N,N,...", help="the counts to try, instead of doubling")
    machine.add_argument("--max-gpus", type=gpu_count, metavar="N", help=f"the most to try (with a target: {_MOST})")
    machine.add_argument("--gpus-per-node", type=gpu_count, metavar="N", help="default: the profile's")
    machine.add_argument("--memory-limit", type=num_bytes, metavar="SIZE", help="per GPU, such as 70GiB")
    target = parser.add_argument_group("target")
    target.add_argument("--target-tokens-per-day", type=_amount, metavar="N", help="such as 50e9")
    target.add_argument("--deadline", type=_duration, metavar="TIME", help="such as 30d, 2w or 12h, for --tokens")
    target.add_argument("--tokens", type=_amount, metavar="N", help="tokens to train on, such as 1e12")
    add_training(parser.add_argument_group("training"))
    search = parser.add_argument_group("search")
    search.add_argument("--tp", type=count, metavar="N", help="pin the tensor-parallel degree")
    search.add_argument("--fsdp", type=count, metavar="N", help="pin the degree that FSDP shards over")
    search.add_argument("--ep", type=count, metavar="N", help="pin the number of ranks that divide experts")
    add_pins(search)
    parser.add_argument("--json", action="store_true", help="print the table and the plans as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one page with charts here")


def run(args: argparse.Namespace) -> int:
    """Solves for each count and prints the table; returns 3 where no count meets the target."""
    target = _target(args)
    if target is None and args.gpus is None and args.max_gpus is None:
        raise UsageError(
            "size: expected --target-tokens-per-day, or --deadline with --tokens, or --max-gpus, or --gpus"
        )
    profiles = [load_profile(name) for name in args.profile]
    check_output(args.html)
    pins = pins_of(args)
    model = load_model_file(args.model)
    from tpplan.search.comparisons.cluster_sizing import counts_up_to, size
    from tpplan.search.points.options import Cluster

    clusters = []
    for profile in profiles:
        per_node = args.gpus_per_node or profile.gpus_per_node
        counts = args.gpus or counts_up_to(args.max_gpus or _MOST, per_node)
        clusters += [Cluster(gpus=n, gpus_per_node=min(n, per_node), profile=profile) for n in counts]
    options = training_options(args, model) | {
        "loss": model.loss,
        "unused_outputs": model.unused_outputs,
        "tp": args.tp,
        "fsdp": args.fsdp,
        "ep": args.ep,
        "memory_limit_bytes": args.memory_limit,
        "pins": pins,
    }
    with model.locating(), bars(STAGE_COLUMNS) as progress:
        found = size(
            model.build_model,
            model.example_inputs,
            clusters=clusters,
            tokens_per_s=target,
            options=options | {"progress": progress},
            refine=args.gpus is None,
        )
        rows = list(found)
    if args.json:
        write_json(_as_data(rows, target, args.tokens))
    else:
        print_lines(lambda width: _lines(rows, target, args.tokens, width))
    if args.html is not None:
        write_atomically(args.html, _page(rows, target, args.tokens))
        wrote(args.html)
    return 0 if _answers(rows, target) else InfeasibleError.exit_code


def _target(args: argparse.Namespace) -> float | None:
    """The requested tokens per second, the larger where two targets are given; None without a target."""
    if (args.deadline is None) != (args.tokens is None) and args.deadline is not None:
        raise UsageError("--deadline needs --tokens, the number of tokens to train on until then")
    asked = []
    if args.target_tokens_per_day is not None:
        asked.append(args.target_tokens_per_day / _DAY_S)
    if args.deadline is not None:
        asked.append(args.tokens / args.deadline)
    return max(asked, default=None)


def _groups(rows: Sequence["Sized"]) -> "dict[str, list[Sized]]":
    """Profile name -> its rows, by GPUs."""
    found: dict[str, list[Sized]] = {}
    for row in rows:
        found.setdefault(row.profile.name, []).append(row)
    return {name: sorted(group, key=lambda row: row.cluster.gpus) for name, group in found.items()}


def _answers(rows: Sequence["Sized"], target: float | None) -> "list[Sized]":
    """The row with the fewest GPUs that meets the target, for each profile that has one."""
    from tpplan.search.comparisons.cluster_sizing import smallest

    return [best for group in _groups(rows).values() if (best := smallest(group, target)) is not None]


# Text

_TITLES = ("", "GPUs", "mesh", "micro", "recompute", "step", "tokens/s", "MFU", "peak", "GPU-h/1e9")
#: titles of the left-aligned columns
_LEFT = ("", "mesh", "recompute")


def _lines(rows: Sequence["Sized"], target: float | None, tokens: float | None, width: int) -> list[str]:
    """The table of each profile with its conclusion, then the failures and the legend."""
    answers = _answers(rows, target)
    lines = []
    shows_recompute = any(row.plan is not None and row.plan.recompute for row in rows)
    for name, group in _groups(rows).items():
        lines.append(name)
        cells = [_TITLES, *(_cells(row, is_answer=row in answers) for row in group if row.divides)]
        if not shows_recompute or max(map(len, aligned(cells, ()))) > width:
            cells = [(*row[:4], *row[5:]) for row in cells]
        left = [i for i, title in enumerate(cells[0]) if title in _LEFT]
        lines += aligned(cells, left) if len(cells) > 1 else []
        best = next((row for row in answers if row.profile.name == name), None)
        lines += folded(_answer(best, group, target, tokens), width)
        lines += [*(folded(text, width) if (text := _left_out(group)) else []), ""]
    for row in rows:
        if row.plan is None and row.divides:
            lines += folded(f"{row.cluster.gpus} x {row.profile.name}: {row.problem.split(' (')[0]}.", width)
    lines += folded(
        "mesh: replicas x FSDP shards x tensor-parallel ranks. micro: sequences at once x accumulation steps. MFU: the "
        "model's own FLOP per second over those of the profile's fastest matmul. GPU-h/1e9: GPU-hours for 1e9 tokens. "
        "Plans are priced, not proven: `tpplan solve` proves the one you choose.",
        width,
    )
    return lines


def _left_out(group: Sequence["Sized"]) -> str:
    """A line on the counts of a table that the batch or a pinned degree does not divide; "" without such."""
    counts = [str(row.cluster.gpus) for row in group if not row.divides]
    if not counts:
        return ""
    first = next(row.problem for row in group if not row.divides)
    return f"Left out: {', '.join(counts)} GPUs, which the batch or a pinned degree does not divide ({first})."


def _cells(row: "Sized", *, is_answer: bool) -> tuple[str, ...]:
    gpus = str(row.cluster.gpus)
    if row.plan is None:
        return ("", gpus, "does not fit" if "fits" in row.problem else "none", *[""] * (len(_TITLES) - 3))
    plan = row.plan
    modes = dict.fromkeys(str(mode) for mode in plan.recompute.values() if mode is not Recompute.NONE)
    return (
        ">" if is_answer else "",
        gpus,
        mesh_cell(plan),
        batch_cell(plan),
        ", ".join(modes) or "none",
        f"{format_seconds(plan.predicted.step_time_s)} +/-{row.relative_error:.0%}",
        _short(row.tokens_per_s),
        f"{row.mfu:.0%}",
        gib(plan.predicted.peak_memory_bytes),
        f"{row.gpu_hours_per_1e9_tokens:.3g}",
    )


def _answer(best: "Sized | None", group: Sequence["Sized"], target: float | None, tokens: float | None) -> str:
    """The conclusion of a profile's table, in a sentence."""
    asked = "fits" if target is None else f"does {_short(target * _DAY_S)} tokens a day"
    if best is None:
        most = max(row.cluster.gpus for row in group)
        fastest = max(row.tokens_per_s for row in group)
        reached = f"; the most that was reached is {_short(fastest * _DAY_S)}" if target is not None and fastest else ""
        return f"None of the counts tried, up to {most} GPUs, {asked}{reached}.{_near_miss(None, group, target)}"
    day = best.tokens_per_s * _DAY_S
    text = f"Of the counts tried, {best.cluster.gpus} GPUs are the fewest on which the training {asked}"
    text += f": {_short(day)}" + (" tokens a day" if target is None else "")
    if tokens is not None:
        text += f", {tokens / day:.3g} days and {_short(tokens / 1e9 * best.gpu_hours_per_1e9_tokens)} GPU-hours for "
        text += f"{_short(tokens)} tokens"
    return f"{text}.{_near_miss(best, group, target)}"


def _near_miss(best: "Sized | None", group: Sequence["Sized"], target: float | None) -> str:
    """A sentence on the fewest GPUs that miss the target by less than their error bar; "" where there are none."""
    fewer = [row for row in group if row.plan is not None and (best is None or row.cluster.gpus < best.cluster.gpus)]
    for row in fewer:
        missing = 1 - row.tokens_per_s / (target or row.tokens_per_s)
        if 0 < missing <= row.relative_error:
            gpus, error = row.cluster.gpus, row.relative_error
            return f" {gpus} GPUs miss it by {missing:.1%}, less than their error bar of {error:.0%}."
    return ""


def _short(number: float) -> str:
    """A number with three digits: 812, 12.7k, 50.0B."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.{0 if number / scale >= 100 else 1}f}{suffix}"
    return f"{number:.3g}"


# HTML


def _page(rows: Sequence["Sized"], target: float | None, tokens: float | None) -> str:
    """The page of the plans, with the conclusion of each profile."""
    from tpplan.page.plans_page import Row, plans_page

    answers, sentences, shown = _answers(rows, target), [], []
    for name, group in _groups(rows).items():
        best = next((row for row in answers if row.profile.name == name), None)
        sentences.append(f"{name}: {_answer(best, group, target, tokens)}")
        for row in group:
            label, problem = f"{row.cluster.gpus} x {name}", row.problem.split(" (")[0]
            shown.append(Row(name=label, plan=row.plan, problem=problem, is_answer=row is best))
    return plans_page(shown, title="How many GPUs", sentences=sentences)


# JSON


def _as_data(rows: Sequence["Sized"], target: float | None, tokens: float | None) -> dict[str, object]:
    answers = _answers(rows, target)
    return {
        "target_tokens_per_s": target,
        "tokens": tokens,
        "smallest_gpus": {row.profile.name: row.cluster.gpus for row in answers},
        "rows": [
            {
                "profile": row.profile.name,
                "gpus": row.cluster.gpus,
                "gpus_per_node": row.cluster.gpus_per_node,
                "problem": row.problem or None,
                "meets_target": row.plan is not None and row.tokens_per_s >= (target or 0.0),
                "step_time_s": row.plan.predicted.step_time_s if row.plan is not None else None,
                "step_time_error_s": row.plan.predicted.step_time_error_s if row.plan is not None else None,
                "tokens_per_s": row.tokens_per_s if row.plan is not None else None,
                "mfu": row.mfu if row.plan is not None else None,
                "peak_memory_bytes": row.plan.predicted.peak_memory_bytes if row.plan is not None else None,
                "gpu_hours_per_1e9_tokens": row.gpu_hours_per_1e9_tokens if row.plan is not None else None,
                "plan": row.plan.to_dict() if row.plan is not None else None,
            }
            for row in rows
        ],
    }


# Values of options


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({gpu_count(part) for part in text.split(",")}))


def _amount(text: str) -> float:
    """A number above 0, such as 50e9."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= MOST:
        raise argparse.ArgumentTypeError(f"expected a number above 0 such as 50e9, got {text!r:.80}")
    return number


def _duration(text: str) -> float:
    """Seconds of text such as 12h, 30d or 2w."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text)
    if match is None or not 0 < float(match[1]) <= MOST:
        raise argparse.ArgumentTypeError(f"expected a time such as 12h, 30d or 2w, got {text!r}")
    return float(match[1]) * _SPANS[match[2]]
