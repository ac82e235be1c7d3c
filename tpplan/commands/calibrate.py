"""`tpplan calibrate plan.json trace.json model.py`: a plan held against a torch.profiler trace of a training run.

The trace is one rank's, of whole steps of a model that the plan was applied to, as export_chrome_trace wrote it
(record_shapes=True names the shapes of ops). Printed are seconds by part, collectives, and the ops that are predicted
worst. With -o, a profile is written whose fitted numbers come from this run.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.solve import check_output
from tpplan.commands.terminal.output import aligned, print_answer, wrote
from tpplan.commands.terminal.values import count
from tpplan.commands.terminal.verbs import add_verb
from tpplan.commands.try_plans import calibration_lines, chosen_lines, profile_of, write_calibrated
from tpplan.core.units import format_seconds
from tpplan.plan.plan import Plan
from tpplan.search.models.user_model import load_model_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.trial.worst_predicted import Row

#: longest name of an op in a table
_NAME_COLUMNS = 46


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "calibrate", "hold a plan against a profiler's trace", __doc__, run=run)
    parser.add_argument("plan", metavar="plan.json", help="the plan that was applied")
    parser.add_argument("trace", metavar="trace.json", help="a trace of some steps on one rank; may be gzipped")
    parser.add_argument("model", metavar="model.py", help="model.py, model.py:BUILDER or hf:path/config.json")
    parser.add_argument("--worst", type=count, default=10, metavar="N", help="ops to list (default 10)")
    parser.add_argument("--profile", metavar="NAME", help="default: the plan's, by its name")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a profile fitted to this run")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the comparison, and writes the profile."""
    from tpplan.trial.against_trace import against_trace
    from tpplan.trial.calibrate import Run
    from tpplan.trial.worst_predicted import worst

    check_output(args.output)
    plan, spec = Plan.load(args.plan), load_model_file(args.model)
    profile = profile_of([plan], args.profile)
    with spec.locating():
        found = against_trace(plan, Path(args.trace), spec, profile)
    ops, collectives = worst(found.ops, args.worst), worst(found.collectives, args.worst)
    lines = [
        f"{found.steps} step{'s' * (found.steps > 1)} in the trace, {format_seconds(found.step_time_s)} each; "
        f"{format_seconds(found.predicted_s)} predicted",
        "",
        *_table("part", [(part, *times) for part, times in found.parts.items()]),
        "",
        "Collectives, with waiting for other ranks",
        *_table("collective", [(row.what, row.measured_s, row.predicted_s) for row in collectives]),
        "",
        f"Ops that are predicted worst, forward and backward, of {len(found.ops)} kinds",
        *_table("op", [(shortened(row.what), row.measured_s, row.predicted_s) for row in ops]),
    ]
    data: dict[str, object] = {
        "steps": found.steps,
        "step_time_s": found.step_time_s,
        "predicted_s": found.predicted_s,
        "parts_s": {part: list(times) for part, times in found.parts.items()},
        "collectives": _rows(collectives),
        "ops": _rows(ops),
    }
    if args.output is not None:
        runs = [Run(plan=plan, measured_s=found.step_time_s)]
        fitted = write_calibrated(runs, spec, profile, args.output)
        lines += ["", *calibration_lines([args.plan], runs, fitted)]
        lines += chosen_lines(runs, [args.plan], spec, fitted.profile)
        data["fitted"] = {number.name: number.value for number in fitted.profile.fitted or ()}
    print_answer(lines, data, as_json=args.json)
    if args.output is not None:
        wrote(args.output)
    return 0


def _table(what: str, rows: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    """Rows of (name, measured, predicted) seconds."""
    cells = [(what, "measured", "predicted", "off by")]
    for name, measured_s, predicted_s in rows:
        off = f"{predicted_s / measured_s - 1:+.0%}" if measured_s else "-"
        if measured_s or predicted_s:
            cells.append((name, format_seconds(measured_s), format_seconds(predicted_s), off))
    yield from (f"  {line}" for line in aligned(cells, {0}))


def shortened(name: str) -> str:
    """A name that leaves room for numbers in a row of 80 columns."""
    return name if len(name) <= _NAME_COLUMNS else f"{name[: _NAME_COLUMNS - 3]}..."


def _rows(rows: "Sequence[Row]") -> list[dict[str, object]]:
    return [
        {"what": row.what, "calls": row.calls, "measured_s": row.measured_s, "predicted_s": row.predicted_s}
        for row in rows
    ]
