"""What scripts/evidence/adversary.py keeps of a case, and its tables."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from adversary_parts.steps import SHOWN_CHARACTERS

#: bad ends first: the first that holds of any shape is the case's
VERDICTS = ("WRONG", "hang", "crash", "slow", "refused", "invalid", "whole", "same", "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a case. `shapes` says it for each shape, the planned one first."""

    name: str
    verdict: str
    detail: str = ""
    group: str = ""
    shapes: tuple[str, ...] = ()
    seconds: float = 0.0


def table(title: str, rows: Iterable[Row], groups: Callable[[Row], Iterable[str]]) -> Iterator[str]:
    """How many of each group came to which end."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for group in (*groups(row), "all"):
            counts.setdefault(group, Counter())[row.verdict] += 1
    if not counts:
        return
    shown = [verdict for verdict in reversed(VERDICTS) if counts["all"][verdict] or verdict in ("right", "WRONG")]
    width = max(len(title), *map(len, counts))
    yield f"{title:{width}}  " + "  ".join(f"{verdict:>7}" for verdict in shown)
    for group in sorted(counts, key=lambda name: (name == "all", name)):
        yield f"{group:{width}}  " + "  ".join(f"{counts[group][verdict]:>7}" for verdict in shown)


def first_class(detail: str) -> str:
    """The exception's name in a row's detail."""
    return next((word for word in detail.replace(":", " ").split() if word.endswith("Error")), detail[:40])


def summary(rows: Mapping[str, Row]) -> Iterator[str]:
    """Tables of models, of mutants and of traps, and all that went wrong."""
    models = [row for name, row in rows.items() if name.startswith("model")]
    plans = [row for name, row in rows.items() if name.startswith("plan")]
    traps = [row for name, row in rows.items() if name.startswith("trap")]
    yield from table("models by how they are solved", models, lambda row: (row.group,) if row.group else ())
    others = Counter(shape.split(": ")[1] for row in models for shape in row.shapes[1:])
    if models:
        yield "other batches and lengths: " + ", ".join(f"{n} {verdict}" for verdict, n in others.most_common())
    refused = Counter(first_class(row.detail) for row in models if row.verdict == "refused")
    if refused:
        yield "models refused: " + ", ".join(f"{n} {name}" for name, n in refused.most_common())
    yield from ("", *table("mutated plans by kind", plans, lambda row: sorted(set(row.group.split("+")) - {""})))
    yield from ("", *table("traps", traps, lambda row: ()))
    for row in traps:
        yield f"    {row.name.removeprefix('trap ')}: {row.verdict}: {row.detail[:SHOWN_CHARACTERS]}"
    for row in rows.values():
        if row.verdict in ("WRONG", "hang", "crash", "slow"):
            yield f"{row.verdict}: {row.name}: {row.group}: {row.detail[:SHOWN_CHARACTERS]}"
            yield from (f"    {shape[:SHOWN_CHARACTERS]}" for shape in row.shapes)


def exit_code(rows: Iterable[Row]) -> int:
    verdicts = {row.verdict for row in rows}
    return 4 if verdicts & {"WRONG", "hang"} else 1 if "crash" in verdicts else 0
