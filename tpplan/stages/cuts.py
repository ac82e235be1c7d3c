"""Where a model may be cut into stages, and what of it each stage has, found on its graph.

A cut stands after a layer, or after a module before all layers, as an embedding. What is computed from weights before
it, and read after it, must be what that layer or module gives: it is sent. All else that is read after a cut is made
again there from the inputs: masks, positions, rotary tables. A parameter may be read on both sides: each has it then.
A module that several layers share has one name in the graph, in one of them; what it runs is part of that layer which
runs at the time.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from tpplan.core.graph import Boundary, Direction, ModelGraph, Op, Source, SourceKind, enclosing, within
from tpplan.plan.sections.ranks import StagePlan, TensorPlan, TiedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place between stages: after the layer `unit`, which gives the values that are `sent`, before the node at
    `position`. Without `why_not` stages may meet here."""

    unit: str
    position: int
    sent: tuple[str, ...] = ()
    why_not: str = ""


def cuts_of(graph: ModelGraph, units: Sequence[str]) -> list[Cut]:
    """The cuts after each unit but the last, in the order in which units run."""
    weighed = _computed_from_weights(graph)
    last = {unit: position for position, unit in _ends(graph, units)}
    ordered = sorted(last, key=last.__getitem__)
    return [_cut(graph, unit, last[unit] + 1, weighed) for unit in ordered[:-1]]


def cut_after(graph: ModelGraph, unit: str) -> Cut:
    """The cut after a module that the graph runs."""
    ends = [position for position, _ in _ends(graph, (unit,))]
    return _cut(graph, unit, ends[-1] + 1, _computed_from_weights(graph))


def end_cuts_of(graph: ModelGraph, units: Sequence[str]) -> tuple[list[Cut], list[Cut]]:
    """The cut between what runs before the first unit and the units, and the cut after the last unit; none where
    stages cannot meet, or where no parameter is read beyond it. The first is as late as may be."""
    weighed = _computed_from_weights(graph)
    own = [position for position, _ in _ends(graph, units)]
    if not own:
        return [], []
    ends = {module: position for position, module in _ends(graph, _called(graph)) if position < own[0]}
    before = [module for module in ends if not any(within(unit, module) for unit in units)]
    latest = sorted(before, key=lambda module: (-ends[module], len(module)))
    first = (cut for cut in (_cut(graph, module, ends[module] + 1, weighed) for module in latest) if not cut.why_not)
    (last,) = {unit for position, unit in _ends(graph, units) if position == own[-1]}
    found = list(islice(first, 1)), [_cut(graph, last, own[-1] + 1, weighed)]
    early = (cut for cut in found[0] if _reads_weights(graph, range(cut.position)))
    late = (cut for cut in found[1] if not cut.why_not and _reads_weights(graph, range(cut.position, len(graph.nodes))))
    return list(early), list(late)


def _called(graph: ModelGraph) -> list[str]:
    return list(dict.fromkeys(boundary.module for boundary in graph.boundaries if boundary.module))


def _reads_weights(graph: ModelGraph, positions: range) -> bool:
    read = _read_in(graph, positions)
    return any(source.result in read for source in graph.parameters)


def stages_of(graph: ModelGraph, cuts: Sequence[Cut], in_flight: Sequence[int], micro_batch: int) -> list[StagePlan]:
    """The stages between cuts, in order, of a graph traced at a micro-batch. `in_flight` are the micro-batches that
    each stage keeps at once."""
    ends = [0, *(cut.position for cut in cuts), len(graph.nodes)]
    ranges = list(itertools.starmap(range, pairwise(ends)))
    reads = [_read_in(graph, own) for own in ranges]
    holding = {s: tuple(i for i, read in enumerate(reads) if s.result in read) for s in graph.parameters}
    tied = {source: stages for source, stages in holding.items() if len(stages) > 1}
    return [
        replace(
            _stage(graph, cuts, index, own, {source: stages for source, stages in tied.items() if index in stages}),
            in_flight=in_flight[index],
            micro_batch=micro_batch,
        )
        for index, own in enumerate(ranges)
    ]


def end_of(graph: ModelGraph, stage: StagePlan) -> int:
    """The position after the last node of a stage's last layer."""
    assert stage.last is not None
    return max(position for position, _ in _ends(graph, (stage.last,))) + 1


def tensors_of(graph: ModelGraph, unit: str) -> tuple[TensorPlan, ...]:
    """The tensors that a unit gives, in the order of its outputs."""
    leaving = (graph.values[name] for name in given_by(graph, unit))
    return tuple(TensorPlan(shape=value.shape, dtype=value.dtype) for value in leaving)


def given_by(graph: ModelGraph, unit: str) -> tuple[str, ...]:
    """The values that a unit gives, each once."""
    own = graph.nodes_by_module[unit]
    crossings = (node for node in own if isinstance(node, Boundary) and node.module == unit)
    return tuple(dict.fromkeys(node.result for node in crossings if node.direction is Direction.OUTPUT))


def _ends(graph: ModelGraph, units: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields (position of a unit's last node, unit)."""
    known = set(units)
    for position, running in enumerate(_running(graph)):
        for unit in known.intersection(running):
            yield position, unit


def _running(graph: ModelGraph) -> Sequence[tuple[str, ...]]:
    """By position the modules that run there, by their first names: that of the node, and those around its call."""
    first = graph.first_names
    return graph.once(
        _running, lambda: [tuple(first.get(m, m) for m in enclosing(name)) for name in called_names(graph)]
    )


def called_names(graph: ModelGraph) -> Sequence[str]:
    """By position the name of the node's module, of a shared one that by which it was called."""
    return graph.once(called_names, lambda: [_called_as(graph, position) for position in range(len(graph.nodes))])


def _called_as(graph: ModelGraph, position: int) -> str:
    """The name of a node's module around which most modules run there, and none that is called elsewhere alone; the
    first of several, and where none is such."""
    module = graph.nodes[position].module
    if module not in graph.other_names:
        return module
    calls = graph.once(_calls, lambda: _calls(graph))

    def running(name: str) -> int:
        around = (graph.first_names.get(own, own) for own in enclosing(name)[1:])
        called = [calls[own] for own in around if own in calls]
        return len(called) if all(any(position in call for call in own) for own in called) else -1

    return max((module, *graph.other_names[module]), key=running)


def _calls(graph: ModelGraph) -> dict[str, list[range]]:
    """By name of a module the positions of its calls, from where a tensor enters until the last one leaves; nothing of
    a module to which none enters, or from which none leaves."""
    found: dict[str, list[range]] = {}
    entered: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        if not isinstance(node, Boundary):
            continue
        if node.direction is Direction.INPUT:
            entered.setdefault(node.module, position)
        elif node.module in entered:
            found.setdefault(node.module, []).append(range(entered.pop(node.module), position + 1))
        elif node.module in found:  # another tensor of what the last call gives
            found[node.module][-1] = range(found[node.module][-1].start, position + 1)
    return found


def _computed_from_weights(graph: ModelGraph) -> frozenset[str]:
    """Values that depend on a parameter, through what is written to a storage too."""
    return graph.once(_computed_from_weights, lambda: _dependent_on_weights(graph))


def _dependent_on_weights(graph: ModelGraph) -> frozenset[str]:
    found = {source.result for source in graph.sources if source.kind is SourceKind.PARAMETER}
    storages = {graph.values[name].storage for name in found}
    for node in graph.nodes:
        if any(name in found or graph.values[name].storage in storages for name in node.operands):
            found.update(node.results)
            storages.update(graph.values[name].storage for name in node.results)
            if isinstance(node, Op) and node.target.rpartition(".")[0].endswith("_"):
                storages.add(graph.values[node.operands[0]].storage)
    return frozenset(found)


def _cut(graph: ModelGraph, unit: str, position: int, weighed: frozenset[str]) -> Cut:
    sent = given_by(graph, unit)
    why_not = _why_not(graph, unit, position, sent, weighed)
    return Cut(unit=unit, position=position, sent=() if why_not else sent, why_not=why_not)


def _why_not(graph: ModelGraph, unit: str, position: int, sent: tuple[str, ...], weighed: frozenset[str]) -> str:
    """Why stages cannot meet after a unit, which ends before the node at `position`; "" where they can. `weighed` are
    the values that are computed from weights."""
    before = {name for node in graph.nodes[:position] for name in node.results}
    for node in graph.nodes[position:]:
        for name in node.operands:
            if name in before and name in weighed and name not in sent:
                made = graph.producers[name]
                line = f" ({graph.lines[made.name]})" if made.name in graph.lines else ""
                where = f"{made.module or 'the root'} made before it{line}"
                return f"{node.module or 'the root'} reads what {where}"
    if not sent:
        return f"{unit} gives no tensor"
    if any(not graph.values[name].carries_gradient for name in sent):
        return f"{unit} gives a tensor without a gradient"
    if any(graph.values[name].varying for name in sent):
        return f"data decides the shape of what {unit} gives"
    if any(unit in running for running in _running(graph)[position:]):
        return f"{unit} runs again after it"
    return ""


def _read_in(graph: ModelGraph, positions: range) -> set[str]:
    """Values that nodes at some positions read."""
    return {name for position in positions for name in graph.nodes[position].operands}


def _stage(
    graph: ModelGraph, cuts: Sequence[Cut], index: int, own: range, tied: Mapping[Source, tuple[int, ...]]
) -> StagePlan:
    received = cuts[index - 1].unit if index else None
    last = cuts[index].unit if index < len(cuts) else None
    absent = _absent(graph, own)
    return StagePlan(
        index=index,
        count=len(cuts) + 1,
        absent=absent,
        blank=_blank(graph, own, absent),
        received=received,
        last=last,
        receives=tensors_of(graph, received) if received is not None else (),
        sends=tensors_of(graph, last) if last is not None else (),
        in_flight=1,
        micro_batch=1,
        tied=tuple(TiedPlan(name=source.label, stages=stages) for source, stages in tied.items()) or None,
    )


def _absent(graph: ModelGraph, own: range) -> tuple[str, ...]:
    """The outermost modules that are called, run nowhere in a stage, and have parameters or compute from weights all
    that they give: their buffers and draws are of the stage that runs them."""
    running = _running(graph)
    present = {module for position in own for module in running[position]}
    found: dict[str, None] = {}
    for module in graph.once(_modules_of_weights, lambda: _modules_of_weights(graph)):
        if module not in present and found.keys().isdisjoint(enclosing(module)):
            found[module] = None
    return tuple(found)


def _modules_of_weights(graph: ModelGraph) -> tuple[str, ...]:
    """The modules that are called, and have parameters or compute from weights all that they give."""
    called = dict.fromkeys(boundary.module for boundary in graph.boundaries if boundary.module)
    weighted = {module for s in graph.parameters for label in (s.label, *s.aliases) for module in enclosing(label)}
    weighed = _computed_from_weights(graph)

    def is_of_weights(module: str) -> bool:
        gives = given_by(graph, module)
        return module in weighted or (bool(gives) and all(name in weighed for name in gives))

    return tuple(filter(is_of_weights, called))


def _blank(graph: ModelGraph, own: range, absent: Sequence[str]) -> tuple[str, ...]:
    """Parameters of modules that a stage has, which only other stages read."""
    inside, outer = _read_in(graph, own), frozenset(absent)
    everywhere = graph.once(_read_in, lambda: _read_in(graph, range(len(graph.nodes))))
    return tuple(
        name
        for source in graph.parameters
        if source.result in everywhere and source.result not in inside
        for name in (source.label, *source.aliases)
        if outer.isdisjoint(enclosing(name))
    )
