"""Whether the stages of a model together run the model: each its own part of the graph, on the same values."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace

from tpplan.core.graph import Argument, Boundary, ModelGraph, Op, Ref, SourceKind, may_write, references
from tpplan.plan.sections.ranks import RECEIVED, StagePlan
from tpplan.stages.cuts import called_names, given_by


def difference(whole: ModelGraph, stage: ModelGraph, plan: StagePlan, own: range) -> str:
    """The first way in which a stage's graph does not run the nodes `own` of the whole model's on the same values; ""
    where it does, and gives what the whole gives there.

    Values are matched from the sources, and from what is received, on: a node of the stage runs what one of the whole
    does where operator, module and literals are the same, and it reads the matching values. Constants match by what
    they hold: their numbers count those of other stages too. A shared parameter may have another first name in the
    stage, a shared module has that by which it is called. What the stage runs besides, on stubs, matches nothing, and
    neither it nor what the stage leaves out may write to memory that matching nodes read.
    """
    matched = _matching_sources(whole, stage)
    if plan.received is not None:
        received = given_by(stage, plan.received)
        inputs = {source.label: source.result for source in stage.sources if source.kind is SourceKind.INPUT}
        if [_origin(stage, name) for name in received] != [inputs.get(f"{RECEIVED}.{i}") for i in range(len(received))]:
            return f"the stub of {plan.received} does not give what stage {plan.index} receives"
        matched.update(zip(given_by(whole, plan.received), received, strict=True))
    left = _by_what_they_do(stage)
    others: set[str] = set()
    modules, handed = called_names(whole), _handed_on(whole)
    for position, node in enumerate(whole.nodes):
        operands = {name: matched.get(handed.get(name, name)) for name in node.operands}
        alike = None if None in operands.values() else left.get(_done(node, operands, modules[position]))
        if alike:
            other = alike.pop()
            others.add(other.name)
            matched.update((a, b) for a, b in zip(node.results, other.results, strict=True) if a not in matched)
        elif position in own:
            return f"{node.name} of {node.module or 'the root'} does not run on the same values in stage {plan.index}"
    # What earlier stages wrote to the tensors that they send has arrived with them.
    sent = given_by(whole, plan.received) if plan.received is not None else ()
    problem = _written_to(whole, lambda: _matching(whole, matched), range(own.stop), sent)
    if problem := problem or _written_to(stage, lambda: others, range(len(stage.nodes))):
        return f"{problem} in stage {plan.index}"
    if plan.last is None:
        ends = [value for _, value in whole.outputs], [value for _, value in stage.outputs]
    else:
        ends = list(given_by(whole, plan.last)), list(given_by(stage, plan.last))
    return "" if [matched.get(name) for name in ends[0]] == ends[1] else f"stage {plan.index} gives other values"


def _matching_sources(whole: ModelGraph, stage: ModelGraph) -> dict[str, Hashable]:
    """The values of a stage's sources by those of the whole's, and the constants of the whole."""
    firsts = {(source.kind, name): source.label for source in whole.sources for name in source.aliases}
    labelled = {(s.kind, firsts.get((s.kind, s.label), s.label)): s.result for s in stage.sources}
    found = {s.result: labelled[s.kind, s.label] for s in whole.sources if (s.kind, s.label) in labelled}
    return {**found, **_constants(whole)}


def _by_what_they_do(stage: ModelGraph) -> dict[Hashable, list[Op | Boundary]]:
    """The nodes of a stage by what they do, of like ones the first last."""
    found: dict[Hashable, list[Op | Boundary]] = {}
    known, handed, modules = _constants(stage), _handed_on(stage), called_names(stage)
    for position in reversed(range(len(stage.nodes))):
        node = stage.nodes[position]
        origins = {name: handed.get(name, name) for name in node.operands}
        operands = {name: known.get(origin, origin) for name, origin in origins.items()}
        found.setdefault(_done(node, operands, modules[position]), []).append(node)
    return found


def _writing(graph: ModelGraph) -> list[tuple[int, Op]]:
    """The ops that may write to an operand, with their positions."""
    return graph.once(
        _writing, lambda: [(i, node) for i, node in enumerate(graph.nodes) if isinstance(node, Op) and may_write(node)]
    )


def _constants(graph: ModelGraph) -> dict[str, Hashable]:
    """Maps the name of each constant to a key that is equal for equal constants: digest of its values, dtype, shape.
    Constants of unknown values, and those that ops may write to, have none."""
    writing = (node for _, node in _writing(graph) if node.target != "aten.detach_.default")
    written = {graph.values[name].storage for node in writing for name in node.operands}
    found: dict[str, Hashable] = {}
    for source in graph.sources:
        value, (_, _, digest) = graph.values[source.result], source.label.partition(" ")
        if source.kind is SourceKind.CONSTANT and digest and value.storage not in written:
            found[source.result] = digest, value.dtype, value.shape
    return found


def written_buffers(graph: ModelGraph) -> tuple[str, ...]:
    """Names of the buffers to whose memory a graph may write, by ops in place or as statistics of a batch."""
    writing = (node for node in graph.ops if may_write(node) or "batch_norm" in node.target)
    storages = {graph.values[name].storage for node in writing for name in node.operands}
    kept = (source for source in graph.sources if source.kind is SourceKind.BUFFER)
    return tuple(source.label for source in kept if graph.values[source.result].storage in storages)


def _handed_on(graph: ModelGraph) -> dict[str, str]:
    """Maps the result of each op that gives what it is given to that: a trace says of the same tensor, read again, that
    it is the result."""
    found: dict[str, str] = {}
    for node in graph.ops:
        if node.target.startswith("aten.to.") and node.operands:
            given, made = node.operands[0], node.results[0]
            other = graph.values[made]
            if graph.values[given] == replace(other, name=given, is_read=graph.values[given].is_read):
                found[made] = found.get(given, given)
    return found


def _origin(graph: ModelGraph, name: str) -> str:
    """The value that crossed boundaries under other names before it is `name`."""
    while isinstance(made := graph.producers.get(name), Boundary):
        name = made.operand
    return name


def _matching(graph: ModelGraph, matched: Mapping[str, Hashable]) -> set[str]:
    """Names of the nodes whose results are matched."""
    return {node.name for node in graph.nodes if node.results and all(name in matched for name in node.results)}


def _written_to(
    graph: ModelGraph, find_kept: Callable[[], Collection[str]], positions: range, apart: Collection[str] = ()
) -> str:
    """The first write of a node at some positions that is not kept to memory that a kept node reads, without the memory
    of the values `apart`; "" where there is none. `find_kept` gives the names of the kept nodes."""
    writing = [(position, node) for position, node in _writing(graph) if position in positions]
    if not writing:
        return ""
    kept = find_kept()
    read = {graph.values[name].storage for node in graph.nodes if node.name in kept for name in node.operands}
    read -= {graph.values[name].storage for name in apart}
    for _, node in writing:
        if node.name in kept:
            continue
        if not read.isdisjoint(graph.values[name].storage for name in _written_by(node)):
            return f"{node.name} of {node.module or 'the root'} writes to what is read"
    return ""


def _written_by(op: Op) -> tuple[str, ...]:
    """The operands to which an op that writes may write: one in place, as `aten.add_`, to its first argument alone."""
    name = op.target.partition(".")[2].rpartition(".")[0]
    is_in_place = op.target.startswith("aten.") and name.endswith("_") and not name.startswith("_")
    return tuple(references(op.args[0])) if is_in_place and op.args else op.operands


def _done(node: Op | Boundary, named: Mapping[str, Hashable], module: str) -> Hashable:
    """The operator or crossing, module, literals and operands of a node, its module and operands under other names:
    equal for nodes that do the same."""
    if isinstance(node, Boundary):
        return module, node.direction, node.path, named[node.operand]

    def renamed(argument: Argument) -> Hashable:
        if isinstance(argument, Ref):
            return Ref, named[argument.name]
        return tuple(map(renamed, argument)) if isinstance(argument, tuple) else (type(argument).__name__, argument)

    return node.target, module, renamed(node.args), tuple((key, renamed(value)) for key, value in node.kwargs)
