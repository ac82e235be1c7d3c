"""Says in sentences what a plan does in some modules, with its numbers, to readers new to tensor parallelism."""

from collections.abc import Callable, Iterator, Sequence

from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT
from tpplan.core.units import format_bytes, format_seconds
from tpplan.plan.compress_names import pattern_in
from tpplan.plan.plan import CollectivePlan, Pass, Plan, Recompute
from tpplan.plan.report.layer_table import ModuleRow, module_rows
from tpplan.plan.report.words import plural, ranges
from tpplan.plan.styles import Style

#: seconds of a collective, alone; None where the machine is not known
SecondsOf = Callable[[CollectivePlan], float | None]


def sentences(plan: Plan, shows: Callable[[str], bool], seconds_of: SecondsOf) -> Iterator[str]:
    """Yields a paragraph for each group of modules that `shows` accepts and that say the same, with the collectives at
    their boundaries, then one on FSDP and one on recomputation where these concern them."""
    rows = [row for row in module_rows(plan) if shows(row.key)]
    if plan.mesh.tp == 1:
        gpus = plural(plan.mesh.num_gpus, "GPU")
        yield f"No layer is split (tp 1): each of {gpus} runs these modules whole, on its own part of the batch."
    said: set[str] = set()
    converting = {pattern_in(plan, row.key) for row in rows if _converts(row)}
    groups: dict[tuple[object, ...], list[ModuleRow]] = {}
    for row in rows:
        groups.setdefault(_alike(row), []).append(row)
    for own in groups.values():
        found = {
            pattern_in(plan, row.key): None
            for row in own
            if _converts(row) or pattern_in(plan, row.key) not in converting
        }
        places = [place for place in found if place not in said]
        said.update(places)
        exchanges = [line for place in places for line in _exchanges(plan, place, seconds_of)]
        text = [_weights(own, plan, sends=bool(exchanges))] if own[0].main is not None and plan.mesh.tp > 1 else []
        text += exchanges
        if text:
            yield f"{_names(own)}: {'; '.join(text)}."
    yield from _whole(plan, shows)
    yield from _experts(plan, shows, seconds_of)
    yield from _fsdp(plan, shows, seconds_of)
    yield from _recomputed(plan, shows)


def _converts(row: ModuleRow) -> bool:
    return any(True for _ in row.crossings)


def _alike(row: ModuleRow) -> tuple[object, ...]:
    """A key that is equal for modules of which one sentence speaks: siblings of a style that convert nothing."""
    alone = () if row.main is not None and not _converts(row) else (row.key,)
    return row.key.rpartition(".")[0], row.style, *alone


def _names(rows: Sequence[ModuleRow]) -> str:
    """`layers.*.attention.k_proj, q_proj and v_proj`."""
    first, *others = [row.key for row in rows]
    names = [first, *(name.rpartition(".")[2] for name in others)]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _weights(rows: Sequence[ModuleRow], plan: Plan, *, sends: bool) -> str:
    """How the weights of modules of one style lie, what a GPU computes with them, and that it sends nothing where
    that is not said otherwise."""
    main, tp = rows[0].main, plan.mesh.tp
    assert main is not None
    if main.placement.dim is None:
        if rows[0].style == Style.SLICES:
            return (
                f"the weight is whole on each of {tp} GPUs and meets a slice of the input there; the sum of their "
                "gradients is the gradient"
            )
        return f"each of {tp} GPUs runs it whole, on the same input"
    share = _share(rows, plan, "")
    match rows[0].style:
        case Style.COLUMN:
            return (
                f"split by columns: from the whole input each of {tp} GPUs computes "
                f"{_share(rows, plan, ' outputs')}{'' if sends else ', and sends nothing'}"
            )
        case Style.ROW:
            return (
                f"split by rows: each of {tp} GPUs has {_share(rows, plan, ' inputs')}, and what it computes from them "
                "is a summand of the whole output"
            )
        case Style.VOCABULARY:
            return f"each of {tp} GPUs has {share} rows of the table, and looks up the ids that are among them"
        case _:
            return f"split along dim {main.placement.dim}: each of {tp} GPUs has {share}"


def _share(rows: Sequence[ModuleRow], plan: Plan, unit: str) -> str:
    """The slices of the split dim that a GPU has: `1024 of 4096 outputs`, `8 of 32 heads (1024 of 4096 outputs)`."""
    parts: dict[tuple[str, str], None] = {}
    for row in rows:
        main = row.main
        assert main is not None
        assert main.placement.dim is not None
        size, slices = main.shape[main.placement.dim], main.placement.num_slices(plan.mesh.tp)
        parts[_heads(row, plan, slices), f"{size // slices} of {size}"] = None
    if not all(heads for heads, _ in parts):
        return " and ".join(dict.fromkeys(numbers for _, numbers in parts)) + unit
    return " and ".join(f"{heads} ({numbers}{unit})" for heads, numbers in parts)


def _heads(row: ModuleRow, plan: Plan, slices: int) -> str:
    """The heads that a GPU has of those along the split dim: `8 of 32 heads`; "" where none are known there."""
    known = plan.tp_shares.heads if plan.tp_shares is not None else None
    labels = [f"{row.key}.{name}" for name, parameter in row.parameters.items() if parameter is row.main]
    places = [*labels, *(pattern_in(plan, label) for label in labels)]
    counts = next((own for place in places if (own := (known or {}).get(place))), ())
    if not counts or any(count % slices for count in counts):
        return ""
    shares = [f"{count // slices} of {count}" for count in counts]
    if len({*shares}) == 1:
        return f"{shares[0]} heads" + (f" of each of {len(shares)} parts" if len(shares) > 1 else "")
    return f"{', '.join(shares[:-1])} and {shares[-1]} heads"


def _exchanges(plan: Plan, place: str, seconds_of: SecondsOf) -> Iterator[str]:
    """Yields what tp ranks send at a module's boundary, forward and backward."""
    found = [entry for entry in plan.collectives if entry.where == place and entry.axis is Axis.TP]
    for during in Pass:
        own = [entry for entry in found if entry.during is during]
        if own:
            when = "once a step" if during is Pass.STEP else during
            yield f"{when}, {' and '.join(_collective(entry, seconds_of) for entry in own)}"


def _collective(entry: CollectivePlan, seconds_of: SecondsOf) -> str:
    """`one reduce-scatter of 64.0 MiB, 210 us (32 in a step)`."""
    many = f" ({entry.count} in a step)" if entry.count > 1 else ""
    seconds = seconds_of(entry)
    time = f", {format_seconds(seconds)}" if seconds is not None else ""
    return f"one {entry.kind.replace('_', '-')} of {format_bytes(entry.num_bytes)}{time}{many}"


def _whole(plan: Plan, shows: Callable[[str], bool]) -> Iterator[str]:
    """Yields why modules are not divided, where a plan says so."""
    for module, own in (plan.tp_shares.modules if plan.tp_shares is not None else {}).items():
        if own.reason and shows(module):
            seconds = format_seconds(own.whole_seconds)
            yield f"{module} runs an op whole on every GPU, {seconds} of the step: {own.reason}."


def _experts(plan: Plan, shows: Callable[[str], bool], seconds_of: SecondsOf) -> Iterator[str]:
    """Yields how the experts of modules are divided, and what their rows cost."""
    for module, call in plan.experts.modules.items() if plan.experts is not None else ():
        if not shows(module):
            continue
        ep, own = plan.mesh.ep, [e for e in plan.collectives if e.where == module and e.axis is Axis.EP]
        sent = "; ".join(f"{entry.during}, {_collective(entry, seconds_of)}" for entry in own)
        yield (
            f"{module} has {call.experts} experts, {call.experts // ep} on each of {ep} ranks: a row goes to the rank "
            f"that has its expert, and comes back ({sent})."
        )


def _fsdp(plan: Plan, shows: Callable[[str], bool], seconds_of: SecondsOf) -> Iterator[str]:
    """Yields how FSDP shards the units that the modules are, or are in."""
    mesh = plan.mesh
    if mesh.shard == 1:
        return
    keys = [row.key for row in module_rows(plan) if shows(row.key)]
    for unit in plan.fsdp.units:
        if not any(_is_in(plan, key, unit) for key in keys):
            continue
        own = [e for e in plan.collectives if e.where == unit and e.axis in (Axis.SHARD, Axis.SHARD_TP)]
        text = f"FSDP: each of {mesh.shard} ranks keeps 1/{mesh.shard} of the weights of {unit}"
        names = [name for name, _ in plan.expand(unit)]
        if wide := [name for name in names if name in plan.units_over_tp()]:
            both, which = mesh.size(Axis.SHARD_TP), unit if len(wide) == len(names) else ranges(wide)
            whole = f"each of {both} ranks, of shard and tp together, keeps 1/{both} of the weights of {which}"
            text = f"FSDP: {whole}" if len(wide) == len(names) else f"{text}, but {whole}"
        sent = [f"{entry.during}, {_collective(entry, seconds_of)}" for entry in own]
        yield "; ".join([text, *sent]) + "."


def _is_in(plan: Plan, key: str, unit: str) -> bool:
    """True for a module in an FSDP unit; the root's own are those in no other."""
    place = pattern_in(plan, key)
    if unit != ROOT:
        return place == unit or place.startswith(f"{unit}.")
    return not any(other != ROOT and _is_in(plan, key, other) for other in plan.fsdp.units)


def _recomputed(plan: Plan, shows: Callable[[str], bool]) -> Iterator[str]:
    """Yields what is recomputed of the layers that the modules are in."""
    keys = [pattern_in(plan, row.key) for row in module_rows(plan) if shows(row.key)]
    named: dict[Recompute, list[str]] = {}
    for name, mode in plan.recomputed_modules().items():
        place = pattern_in(plan, name)
        if not name or any(key == place or key.startswith(f"{place}.") for key in keys):
            named.setdefault(mode, []).append(name or ROOT)
    for mode, names in named.items():
        yield f"To save memory, in {ranges(names)} {mode.says}."
