"""What scripts/dev/torch_versions.py found for each torch: outcomes, a plan's hash, the table, whether all is right."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

#: keys of a plan that name versions, which its hash leaves out
LEFT_OUT = ("torch_version", "tpplan_version", "proof.plan_hash")  # the last is a hash of them among others
#: hexadecimal digits of a hash that are shown
SHOWN_DIGITS = 12
HEADINGS = (
    "torch",
    "build",
    "Python",
    "suite: passed/failed/skipped",
    "min",
    "demo",
    "plan of the 8B",
    "tp 2 x fsdp 2",
)
#: a part that has not run
NOTHING = "-"


class Part(StrEnum):
    """What is run with each torch. suite: scripts/test. demo: scripts/demo. solve: the plan of Llama 3 8B for 16 GPUs.
    run: a plan with tp 2 and fsdp 2 on four ranks beside one process."""

    SUITE = "suite"
    DEMO = "demo"
    SOLVE = "solve"
    RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a part ended, what stands in its cell, and how long it took. hashes: of a plan, by its keys."""

    is_right: bool
    text: str
    seconds: float
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A torch as it was asked for (2.14.1, or 2.13.0+cpu), what its environment holds, and how each part ended.
    problem: why there is no such environment. is_missing: pip finds no such build here, which is nobody's mistake."""

    torch: str
    build: str = NOTHING
    python: str = NOTHING
    problem: str = ""
    is_missing: bool = False
    outcomes: Mapping[Part, Outcome] = field(default_factory=dict)


def row_from_json(data: Mapping[str, object]) -> Row:
    """The row that dataclasses.asdict and JSON made that of."""
    outcomes = data["outcomes"]
    assert isinstance(outcomes, dict)
    return Row(**{**data, "outcomes": {Part(part): Outcome(**outcome) for part, outcome in outcomes.items()}})


def suite_outcome(code: int, output: str, seconds: float) -> Outcome:
    """Reads pytest's closing line, such as `2 failed, 90 passed, 3 skipped, 1 error in 61.20s (0:01:01)`; an error
    counts as a failed test."""
    closing = re.findall(r"^=* ?(\d+ [a-z]+(?:, \d+ [a-z]+)* in [\d.]+s)", output, flags=re.MULTILINE)
    if not closing:
        return Outcome(is_right=False, text=f"no closing line, exit code {code}", seconds=seconds)
    counts = Counter(
        {name.removesuffix("s"): int(number) for number, name in re.findall(r"(\d+) ([a-z]+)", closing[-1])}
    )
    failed = counts["failed"] + counts["error"]
    text = f"{counts['passed']}/{failed}/{counts['skipped']}"
    is_right = code == 0 and failed == 0 and counts["passed"] > 0
    if failed == 0 and not is_right:
        text += f", exit code {code}"
    return Outcome(is_right=is_right, text=text, seconds=seconds)


def plan_hashes(plan: Mapping[str, object]) -> dict[str, str]:
    """sha256 of the JSON under each key of a plan, without what names versions."""
    return {
        key: hashlib.sha256(json.dumps(_without(key, value), sort_keys=True).encode()).hexdigest()
        for key, value in sorted(plan.items())
        if key not in LEFT_OUT
    }


def _without(key: str, value: object) -> object:
    """A section of a plan without its members that are left out."""
    if not isinstance(value, dict):
        return value
    return {name: member for name, member in value.items() if f"{key}.{name}" not in LEFT_OUT}


def plan_hash(hashes: Mapping[str, str]) -> str:
    """One hash of what plan_hashes gave."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def solve_outcome(plan: Mapping[str, object], seconds: float) -> Outcome:
    """A plan that was solved is right where it was proven; whether it is that of other versions, verdict says."""
    hashes = plan_hashes(plan)
    proof = plan["proof"]
    is_proven = isinstance(proof, dict) and proof["status"] == "proven"
    text = plan_hash(hashes)[:SHOWN_DIGITS] + ("" if is_proven else ", unproven")
    return Outcome(is_right=is_proven, text=text, seconds=seconds, hashes=hashes)


def table_lines(rows: Sequence[Row]) -> list[str]:
    """The rows as a table in Markdown, its columns aligned."""
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _cells(row: Row) -> tuple[str, ...]:
    suite = row.outcomes.get(Part.SUITE)
    minutes = f"{suite.seconds / 60:.0f}" if suite else NOTHING
    suite_text, demo, solve, run = (row.outcomes[part].text if part in row.outcomes else NOTHING for part in Part)
    build = "not to be had" if row.is_missing else "no environment" if row.problem else row.build
    return row.torch, build, row.python, suite_text, minutes, demo, solve, run


def verdict(rows: Sequence[Row], parts: Sequence[Part]) -> tuple[bool, list[str]]:
    """Whether each of those parts is right with each torch that can be had and all plans are the same, and the lines
    that say so, or what is wrong."""
    run = [row for row in rows if not row.is_missing]
    wrong = list(_wrong(run, parts))
    is_one_plan, plans = _plans(run) if Part.SOLVE in parts else (True, [])
    missing = [row.torch for row in rows if row.is_missing]
    is_right = bool(run) and not wrong and is_one_plan
    lines = [*wrong, *plans]
    if missing:
        lines.append(f"pip finds no such build here: {', '.join(missing)}")
    lines.append(f"all right: {', '.join(parts)}" if is_right else "not all is right")
    return is_right, lines


def _wrong(rows: Sequence[Row], parts: Sequence[Part]) -> Iterator[str]:
    for row in rows:
        if row.problem:
            yield f"{row.torch}: {row.problem}"
            continue
        for part in parts:
            outcome = row.outcomes.get(part)
            if outcome is None:
                yield f"{row.torch}: {part} has not run"
            elif not outcome.is_right:
                yield f"{row.torch}: {part}: {outcome.text}"


def _plans(rows: Sequence[Row]) -> tuple[bool, list[str]]:
    """Whether the plans of all rows are the same, and lines on that: which keys differ from the first row's plan."""
    solved = [(row.torch, row.outcomes[Part.SOLVE].hashes) for row in rows if Part.SOLVE in row.outcomes]
    solved = [(torch, hashes) for torch, hashes in solved if hashes]
    if not solved:
        return False, ["there is no plan to compare"]
    first_torch, first = solved[0]
    lines = []
    for torch, hashes in solved[1:]:
        keys = [key for key in sorted({*first, *hashes}) if first.get(key) != hashes.get(key)]
        if keys:
            lines.append(f"{torch}: its plan is not that of {first_torch}: {', '.join(keys)} differ")
    left_out = f"without {', '.join(LEFT_OUT)}"
    if not lines:
        return True, [
            f"the plan of the 8B is the same with {len(solved)} of {len(rows)}, {left_out}: {plan_hash(first)}"
        ]
    return False, [*lines, f"plans are compared {left_out}"]
