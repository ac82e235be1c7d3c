"""`torchrun --nproc-per-node 8 -m tpplan try a.json b.json model.py`: plans tried for some steps on the real ranks.

Weights and data are made up. Plans take turns, so that what changes on the machine changes for all of them; the model
is built anew in each turn. Printed are the measured and predicted time of a step, by part, and the peak memory.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.solve import check_output
from tpplan.commands.terminal.output import aligned, print_answer, write, wrote
from tpplan.commands.terminal.ranks import is_first_rank, own_device
from tpplan.commands.terminal.values import count
from tpplan.commands.terminal.verbs import add_verb
from tpplan.core.errors import TpplanError, UsageError
from tpplan.core.units import format_seconds
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.plan.plan import Plan
from tpplan.plan.report import gib
from tpplan.search.models.model_spec import ModelSpec, is_model
from tpplan.search.models.user_model import load_model_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.trial.calibrate import Calibration, Run
    from tpplan.trial.turns import Tried

_EPILOG = """\
With --calibrate, the numbers of a profile that no benchmark gives (by how much matmuls are slower in training, and
kernels beside a collective) are fitted to these runs, and the problem of the fastest plan is solved again with them.
The profile is the plans', by name, unless --profile names another.
"""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "try", "time plans on the real ranks", __doc__, _EPILOG, run=run)
    parser.add_argument("words", nargs="+", metavar="plan.json|model.py", help="plans, and the model that they are for")
    parser.add_argument("--steps", type=count, default=5, metavar="N", help="steps of a plan in a turn (default 5)")
    parser.add_argument("--turns", type=count, default=3, metavar="N", help="turns of each plan (default 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    parser.add_argument("--calibrate", action="store_true", help="fit a profile to the runs, and write it to -o")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="for --calibrate: the profile's file")
    parser.add_argument("--profile", metavar="NAME", help="for --calibrate: default the plans', by its name")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints what was measured, on the first rank."""
    if args.calibrate != (args.output is not None):
        raise UsageError("try: --calibrate and -o FILE go together: the profile is written there")
    paths, source = sorted_words(args.words)
    plans = [Plan.load(path) for path in paths]
    profile = profile_of(plans, args.profile) if args.calibrate else None
    check_output(args.output)
    spec = load_model_file(source)
    with own_device(args.device, alone_too=True) as device:
        from tpplan.trial.turns import in_turns

        def say(text: str) -> None:
            if is_first_rank():
                write(f"tpplan: {text}\n", to_stderr=True)

        with spec.locating():
            tried = in_turns(plans, spec, device, turns=args.turns, steps=args.steps, say=say)
    if not is_first_rank():
        return 0
    from tpplan.trial.calibrate import Run

    runs = [Run(plan=one.plan, measured_s=one.step_time_s, spread=one.spread) for one in tried]
    lines = list(_lines(paths, tried))
    data: dict[str, object] = {"plans": [_as_data(path, one) for path, one in zip(paths, tried, strict=True)]}
    if profile is not None:
        found = write_calibrated(runs, spec, profile, args.output)
        lines += ["", *calibration_lines(paths, runs, found), *chosen_lines(runs, paths, spec, found.profile)]
        data["fitted"] = {number.name: number.value for number in found.profile.fitted or ()}
        data["calibrated_s"] = list(found.after_s)
    print_answer(lines, data, as_json=args.json)
    if args.output is not None:
        wrote(args.output)
    return 0


def sorted_words(words: Sequence[str]) -> tuple[list[str], str]:
    """The plans and the model among the words. Raises UsageError unless there is one model and a plan."""
    models = [word for word in words if is_model(word)]
    paths = [word for word in words if word not in models]
    if len(models) != 1 or not paths:
        raise UsageError(f"try: expected plans and one model (model.py or hf:config.json), got {' '.join(words)}")
    return paths, models[0]


def profile_of(plans: Sequence[Plan], name: str | None) -> HardwareProfile:
    """The profile to calibrate. Raises UsageError where plans were made with several and none is named."""
    names = {name} if name else {plan.cluster.profile for plan in plans}
    if len(names) > 1:
        raise UsageError(f"the plans are for several machines ({', '.join(sorted(names))}): say which with --profile")
    return load_profile(names.pop())


# ---- what was measured


def _lines(paths: Sequence[str], tried: "Sequence[Tried]") -> Iterator[str]:
    fastest = min(range(len(tried)), key=lambda i: tried[i].step_time_s)
    rows = [("plan", "step", "predicted", "off by", "turns apart", "peak memory", "predicted")]
    for path, one in zip(paths, tried, strict=True):
        predicted = one.plan.predicted
        rows.append((
            os.path.basename(path),
            format_seconds(one.step_time_s),
            format_seconds(predicted.step_time_s),
            f"{predicted.step_time_s / one.step_time_s - 1:+.0%}",
            f"{one.spread:.0%}",
            "not counted" if one.peak_bytes is None else gib(one.peak_bytes),
            gib(predicted.peak_memory_bytes),
        ))  # fmt: skip
    yield from (f"  {line}" for line in aligned(rows, {0}))
    if len(tried) > 1:
        yield f"fastest: {paths[fastest]}"
    for path, one in zip(paths, tried, strict=True):
        yield ""
        yield f"{os.path.basename(path)}: a step by part, on the first rank"
        measured, predicted_parts = one.measured_parts, one.predicted_parts
        parts = [("part", "measured", "predicted")]
        parts += [
            (part, format_seconds(measured[part]), format_seconds(predicted_parts[part]))
            for part in measured
            if measured[part] or predicted_parts[part]
        ]
        yield from (f"  {line}" for line in aligned(parts, {0}))


def _as_data(path: str, one: "Tried") -> dict[str, object]:
    predicted = one.plan.predicted
    return {
        "plan": path,
        "step_time_s": one.step_time_s,
        "predicted_step_time_s": predicted.step_time_s,
        "steps_s": [list(turn) for turn in one.turns],
        "peak_bytes": one.peak_bytes,
        "predicted_peak_bytes": predicted.peak_memory_bytes,
        "parts_s": one.measured_parts,
        "predicted_parts_s": one.predicted_parts,
    }


# ---- calibration


def write_calibrated(runs: "Sequence[Run]", spec: ModelSpec, profile: HardwareProfile, output: Path) -> "Calibration":
    """Fits the profile to the runs, and writes it."""
    from tpplan.core.files import write_atomically
    from tpplan.trial.calibrate import calibrated

    found = calibrated(runs, spec, profile, name=output.name.removesuffix(".json"))
    write_atomically(output, found.profile.dumps(), error=UsageError)
    return found


def calibration_lines(names: Sequence[str], runs: "Sequence[Run]", found: "Calibration") -> Iterator[str]:
    """Yields the fitted numbers, and each run's prediction before and after."""
    for number in found.profile.fitted or ():
        yield f"{number.name} {number.value:.3g}, residual {number.residual:.1%}: {number.what}"
    if found.is_at_the_end:
        yield (
            "matmul_slowdown is at the end of its range, so something else than matmuls differs from the profile: "
            "measure this machine with `tpplan profile`, and plan with that"
        )
    rows: list[tuple[str, ...]] = [("plan", "measured", "predicted", "calibrated")]
    times = zip(names, runs, found.before_s, found.after_s, strict=True)
    rows += [
        (os.path.basename(name), *map(format_seconds, (run.measured_s, before, after)))
        for name, run, before, after in times
    ]
    yield from (f"  {line}" for line in aligned(rows, {0}))


def chosen_lines(
    runs: "Sequence[Run]", names: Sequence[str], spec: ModelSpec, profile: HardwareProfile
) -> Iterator[str]:
    """Whether the calibrated profile would choose another plan than the fastest one."""
    from tpplan.trial.calibrate import chooses_alike, solved_again

    fastest = min(range(len(runs)), key=lambda i: runs[i].measured_s)
    plan = runs[fastest].plan
    try:
        again = solved_again(plan, spec, profile)
    except TpplanError as error:
        yield f"no plan could be solved with this profile: {error}"
        return
    if chooses_alike(plan, again):
        yield f"solved again with this profile, {names[fastest]} is the plan that is chosen"
        return
    yield (
        f"solved again with this profile, another plan than {names[fastest]} is chosen: {again.mesh}, micro-batch "
        f"{again.batch.micro_batch}, {format_seconds(again.predicted.step_time_s)} predicted (unproven; `tpplan solve "
        "--profile` writes it)"
    )
