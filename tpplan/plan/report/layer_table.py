"""The layer table of a plan: a row for each module or repeated block that owns parameters or converts tensors.

A row names the module's style (tpplan.plan.styles) only where placement, shape and conversions leave one reading;
otherwise it says which dim is split. Pins accept the same words (tpplan.layouts.pins).
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from rich.text import Text

from tpplan.core.layout import R_STAR, ROWS, Layout, LayoutKind, P, Step
from tpplan.core.name_patterns import ROOT
from tpplan.plan.compress_names import block_and_pattern, pattern_in
from tpplan.plan.plan import BoundaryPlan, CrossingPlan, ParameterPlan, Plan
from tpplan.plan.styles import Style

#: dtypes of ids, which a row does not name
_IDS = ("int64", "int32")
_TITLES = ("module", "style", "weight", "conversion", "forward / backward")
#: collectives in a table of few columns
_SHORT_STEPS = {
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-reduce": "AR",
    "all-to-all": "A2A",
    "local-rows": "own rows",
}
#: explanations of the layouts in a table
_LEGEND = {
    LayoutKind.REPLICATE: "R whole",
    LayoutKind.REPLICATE_PARTIAL_GRADIENT: "R* whole, its gradient a summand",
    LayoutKind.SHARD: "S(d) slice of dim d",
    LayoutKind.COPIED: "S(d)/m one of m slices of dim d, shared by neighbours, its gradient a summand",
    LayoutKind.JOINT: "S(d, d+1) slice of two dims as one",
    LayoutKind.PARTIAL: "P summand",
    LayoutKind.ROWS: "rows lookup in this rank's rows",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module, or equal modules of a repeated block: their parameters, and the conversions at their boundary."""

    key: str
    count: int
    is_exception: bool
    parameters: Mapping[str, ParameterPlan]
    boundary: BoundaryPlan
    tied_to: str | None

    @property
    def main(self) -> ParameterPlan | None:
        """The parameter with the most elements; None without parameters."""
        return max(self.parameters.values(), key=lambda p: prod(p.shape), default=None)

    @property
    def style(self) -> str:
        """The style, as far as placements and conversions determine it; "" for a module without parameters."""
        if self.main is None:
            return f"tied to {self.tied_to}" if self.tied_to else ""
        if self.main.placement.kind is not LayoutKind.SHARD:
            is_on_slices = {*self.main.reads.values()} == {R_STAR}
            return Style.SLICES if is_on_slices else Style.REPLICATED
        if any(crossing.conversion.target == ROWS for crossing in self.boundary.inputs.values()):
            return Style.VOCABULARY
        matrices = [name for name, parameter in self.parameters.items() if len(parameter.shape) > 1]
        if len(matrices) == 1 and len(self.main.shape) == 2:
            summands = any(c.conversion.source.kind is LayoutKind.PARTIAL for c in self.boundary.outputs.values())
            if self._splits_outputs:  # summands are of a module inside then
                return Style.COLUMN
            if summands or any(P in parameter.reads.values() for parameter in self.parameters.values()):
                return Style.ROW  # only a matrix split along the dim it sums over gives summands
            if self.main.placement.dim == 0:
                return Style.COLUMN
        return f"{Style.SPLIT} {self.main.placement.dim}"

    @property
    def _splits_outputs(self) -> bool:
        """True for a matrix split along dim 0 together with a bias, or part by part as several matrices in one are."""
        if self.main is None or self.main.placement.dim != 0:
            return False
        vectors = (own for own in self.parameters.values() if len(own.shape) == 1)
        has_parts = any(own.parts or own.each for own in (self.main.placement, *self.main.reads.values()))
        return has_parts or any(own.placement.kind is LayoutKind.SHARD for own in vectors)

    @property
    def weights(self) -> Iterator[str]:
        """Yields the placement of the largest parameter, then those of parameters with another placement."""
        if self.main is None:
            return
        main = _placement(self.main)
        texts = {name: _placement(parameter) for name, parameter in sorted(self.parameters.items())}
        yield from (main, *(f"{name} {text}" for name, text in texts.items() if text != main))

    @property
    def crossings(self) -> Iterator[tuple[str, CrossingPlan]]:
        """Yields ("in x" or "out y", conversion), inputs first."""
        for direction, table in (("in", self.boundary.inputs), ("out", self.boundary.outputs)):
            for path, crossing in sorted(table.items()):
                name = path.removeprefix("output").removeprefix(".") if direction == "out" else path
                yield f"{direction} {name}".rstrip(), crossing


def layer_lines(plan: Plan, width: int) -> Iterator[Text]:
    """The table and a legend as lines, at most `width` columns wide where the names allow."""
    if plan.mesh.tp == 1:
        yield from _without_tp(plan)
        return
    rows = module_rows(plan)
    dtypes = _dtypes(rows)
    entries = list(_entries(plan, rows, dtypes))
    table, is_short = _side_by_side(entries, width)
    yield from table or _nested(_folded(entries), width)
    if is_short:
        yield Text(
            "; ".join(f"{short} {long}" for long, short in _SHORT_STEPS.items() if short.isupper()) + ".", style="dim"
        )
    shown = {layout.kind for row in rows for layout in _layouts(row)}
    yield Text("; ".join(_LEGEND[kind] for kind in LayoutKind if kind in shown) + ".", style="dim")
    if any(entry.conversions for entry in entries):
        yield Text("The backward half of a conversion is taken where the value carries a gradient.", style="dim")
    if dtypes:
        others = " where no other dtype is named" if len(dtypes) > 1 else ""
        yield Text(f"Tensors cross as {dtypes[0]}{others}.", style="dim")


def layer_rows(plan: Plan, shows: Callable[[str], bool], width: int) -> list[str]:
    """The table of the modules whose names or patterns `shows` accepts, with a header; empty where there are none."""
    rows = [row for row in module_rows(plan) if shows(row.key)]
    entries = list(_entries(plan, rows, _dtypes(rows)))
    return [line.plain for line in _side_by_side(entries, width)[0] or _nested(entries, width)] if rows else []


def layer_entries(plan: Plan) -> tuple["LayerEntry", ...]:
    """The table's rows as data, siblings that say the same under one label; a member of a block is indented by two
    spaces under the block's heading."""
    rows = module_rows(plan)
    return tuple(_folded(list(_entries(plan, rows, _dtypes(rows)))))


def _dtypes(rows: list[ModuleRow]) -> list[str]:
    """The dtypes in which tensors cross, without those of ids, the commonest first."""
    counts = Counter(crossing.dtype for row in rows for _, crossing in row.crossings if crossing.dtype not in _IDS)
    return sorted(counts, key=lambda dtype: (counts[dtype], dtype), reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """A row as text: label, style, placements, and (conversion, steps) of each tensor at the boundary."""

    label: str
    style: str = ""
    weights: tuple[str, ...] = ()
    conversions: tuple[tuple[str, str], ...] = ()


def _entries(plan: Plan, rows: list[ModuleRow], dtypes: list[str]) -> Iterator[LayerEntry]:
    """Yields the rows as text, with a heading above the members of a block. Dtypes are named unless usual
    (dtypes[0])."""
    heading = None
    for row in rows:
        pattern = block_and_pattern(plan, row.key)[0]
        if pattern is not None and pattern != heading and row.key != pattern:
            yield LayerEntry(label=f"{pattern} x{_num_members(plan, pattern)}")
        heading = pattern
        conversions = tuple(
            (
                f"{name}: {crossing.conversion if crossing.dtype in (*_IDS, *dtypes[:1]) else crossing}",
                f"{_steps(crossing.conversion.forward)} / {_steps(crossing.conversion.backward)}",
            )
            for name, crossing in row.crossings
        )
        if row.is_exception and not conversions:
            conversions = (("none", ""),)
        yield LayerEntry(
            label=_label(plan, row, pattern), style=row.style, weights=tuple(row.weights), conversions=conversions
        )


def _folded(entries: list[LayerEntry]) -> list[LayerEntry]:
    """The entries with siblings that say the same under one label, `attention.{k,q,v}_proj`, where the first stands."""
    groups: dict[tuple[object, ...], list[LayerEntry]] = {}
    block = 0
    for number, entry in enumerate(entries):
        is_heading = re.search(r" x\d+$", entry.label) is not None
        block += is_heading and not entry.label.startswith(" ")
        parent = entry.label.startswith(" "), entry.label.rpartition(".")[0]
        says = entry.style, entry.weights, entry.conversions
        key = (block, parent, says) if entry.style and not is_heading else (number,)
        groups.setdefault(key, []).append(entry)
    return [replace(own[0], label=braced([entry.label for entry in own])) for own in groups.values()]


def braced(labels: list[str]) -> str:
    """`attention.{k,q,v}_proj` for labels that differ between what they begin and end with; one label unchanged."""
    if len(labels) == 1:
        return labels[0]
    indent, names = labels[0].partition(labels[0].lstrip())[0], [label.lstrip() for label in labels]
    parts = [re.split(r"(?<=[._])", name) for name in names]
    start = "".join(_shared(parts))
    ends = [re.split(r"(?=[._])", name.removeprefix(start))[::-1] for name in names]
    end = "".join(_shared(ends)[::-1])
    varied = [name.removeprefix(start).removesuffix(end) for name in names]
    return indent + (f"{start}{{{','.join(varied)}}}{end}" if start or end else ", ".join(names))


def _shared(parts: Sequence[Sequence[str]]) -> list[str]:
    """The leading parts that all names share; the last part of each name is left out."""
    columns = zip(*(own[:-1] for own in parts), strict=False)
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]


def _without_tp(plan: Plan) -> Iterator[Text]:
    """The lines of a plan with tp 1, in which FSDP alone shards the weights."""
    yield Text("tp 1: every module computes whole, nothing is converted.")
    if plan.mesh.shard > 1:
        units = ", ".join(f"{unit} x{_num_members(plan, unit)}" if "*" in unit else unit for unit in plan.fsdp.units)
        yield Text(
            f"FSDP over {plan.mesh.shard} ranks holds 1/{plan.mesh.shard} of each weight on a rank, and gathers them "
            f"for one unit at a time: {units}."
        )


def _side_by_side(entries: list[LayerEntry], width: int) -> tuple[list[Text], bool]:
    """One line for each conversion, the module on its first line, and whether steps are written short; no lines where
    they exceed `width` columns."""
    folded = _folded(entries)
    brief_titles = (*_TITLES[:-1], "fwd / bwd")
    full, short, long = (
        [titles, *(line for entry in own for line in _lines(entry))]
        for titles, own in (
            (_TITLES, folded),
            (brief_titles, [_shortened(entry) for entry in folded]),
            (brief_titles, [_shortened(entry) for entry in entries]),
        )
    )
    brief = [(label, style.removesuffix(" parallel"), *rest) for label, style, *rest in full]
    for lines, gap in itertools.product((full, brief, short, long), (2, 1)):
        table = _aligned(lines, gap)
        if max(map(len, table)) <= width:
            return [Text(line, style="" if i else "dim") for i, line in enumerate(table)], lines in (short, long)
    return [], False


def _brief(style: str) -> str:
    """A style in a word, for a table of few columns: column, row, slices, tied, vocab."""
    return re.sub(r"^on | parallel$| to .*| dim\b|(?<=vocab)ulary", "", style)


def _shortened(entry: LayerEntry) -> LayerEntry:
    """An entry for a table of few columns: collectives by initials, an argument without a name where it is the only."""
    is_only = sum(name.startswith("in ") for name, _ in entry.conversions) == 1
    conversions = []
    for name, steps in entry.conversions:
        for step, initials in _SHORT_STEPS.items():
            steps = steps.replace(step, initials)
        conversions.append((re.sub(r"^in [^:]+:", "in:", name) if is_only else name, steps))
    return replace(entry, style=_brief(entry.style), conversions=tuple(conversions))


def _lines(entry: LayerEntry) -> Iterator[tuple[str, ...]]:
    modules = [(entry.label, entry.style)]
    for module, weight, conversion in itertools.zip_longest(modules, entry.weights, entry.conversions):
        yield (*(module or ("", "")), weight or "", *(conversion or ("", "")))


def _nested(entries: list[LayerEntry], width: int) -> Iterator[Text]:
    """One line for each module, its conversions on lines below; so are its style and weights where lines would exceed
    `width` columns."""
    modules = [_TITLES[:3], *((entry.label, entry.style, ", ".join(entry.weights)) for entry in entries)]
    every = [conversion for entry in entries for conversion in entry.conversions]
    crossings = iter(_aligned([_TITLES[3:], *every], 2))
    table = _aligned(modules, 2)
    is_wide = max(map(len, table)) > width
    below = iter(_aligned([own[1:] for own in modules], 2))
    lines = iter([own[0] for own in modules] if is_wide else table)
    for entry, line in zip([None, *entries], lines, strict=True):
        style, label = "" if entry else "dim", entry.label if entry else ""
        indent, kind = " " * (len(label) - len(label.lstrip()) + 4), next(below)
        yield Text(line, style=style)
        if is_wide and kind:
            yield Text(indent + kind, style=style)
        yield from (Text(indent + next(crossings), style=style) for _ in (entry.conversions if entry else every[:1]))


def _aligned(lines: Sequence[tuple[str, ...]], gap: int) -> list[str]:
    """Lines with cells padded to the width of their column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (zip(line, widths, strict=True) for line in lines)
    return [(" " * gap).join(cell.ljust(width) for cell, width in cells).rstrip() for cells in padded]


def _label(plan: Plan, row: ModuleRow, pattern: str | None) -> str:
    """The label of a row: members of a block are indented, exceptions show their index, a count shows equal modules."""
    if pattern is None:
        return row.key or ROOT
    if row.key == pattern:
        return f"{pattern} x{_num_members(plan, pattern)}"
    if row.is_exception:
        member = row.key.removeprefix(pattern.removesuffix("*"))
        return f"  {member if '.' in member else row.key}"
    count = f" x{row.count}" if row.count != _num_members(plan, pattern) else ""
    return f"  {row.key.removeprefix(pattern + '.')}{count}"


def module_rows(plan: Plan) -> list[ModuleRow]:
    """The plan's modules in reading order: a row for each key that owns parameters, converts tensors, or reads a tied
    weight under another name."""
    owned = _by_module(plan.parameters)
    owned_by_members = _by_module(plan.parameter_plans())
    boundaries_of_members = plan.boundary_plans()
    tied = {_module(alias): name for name, parameter in plan.parameters.items() for alias in parameter.aliases}
    keys = {*owned, *plan.boundaries, *tied}
    exceptions = {key for key in keys if pattern_in(plan, key) != key}
    replaced: dict[str, int] = defaultdict(int)
    for key in exceptions:
        replaced[pattern_in(plan, key)] += 1
    none = BoundaryPlan(inputs={}, outputs={})
    rows = [
        ModuleRow(
            key=key,
            count=_num_members(plan, key) - replaced[key],
            is_exception=key in exceptions,
            parameters=(owned if "*" in key else owned_by_members).get(key, {}),
            boundary=(plan.boundaries if "*" in key else boundaries_of_members).get(key, none),
            tied_to=tied.get(key),
        )
        for key in keys
    ]
    return sorted((row for row in rows if row.count), key=lambda row: _reading_order(plan, row))


def _by_module(parameters: Mapping[str, ParameterPlan]) -> dict[str, dict[str, ParameterPlan]]:
    found: dict[str, dict[str, ParameterPlan]] = defaultdict(dict)
    for name, parameter in parameters.items():
        found[_module(name)][name.rpartition(".")[2]] = parameter
    return found


def _reading_order(plan: Plan, row: ModuleRow) -> tuple[object, ...]:
    """Sort key: by name with numbers by value; an exception follows its pattern."""
    return _natural(pattern_in(plan, row.key)), row.is_exception, _natural(row.key)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)|\.", name) if part)


def _num_members(plan: Plan, key: str) -> int:
    return sum(1 for _ in plan.expand(key))


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _placement(parameter: ParameterPlan) -> str:
    reads = sorted({str(read) for read in parameter.reads.values() if read != parameter.placement})
    return f"{parameter.placement} as {' and '.join(reads)}" if reads else str(parameter.placement)


def _layouts(row: ModuleRow) -> Iterator[Layout]:
    for parameter in row.parameters.values():
        yield parameter.placement
        yield from parameter.reads.values()
    for _, crossing in row.crossings:
        yield from (crossing.conversion.source, crossing.conversion.target)


def _steps(steps: tuple[Step, ...]) -> str:
    return " + ".join(step.replace("_", "-") for step in steps) or "none"
