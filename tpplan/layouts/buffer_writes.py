"""Buffers that forward writes to from rows of the batch, and which of them training reads.

A tensor that a module holds in a plain attribute, a list or an object is a buffer like any other here. Data-parallel
ranks have different rows, so that each would write other values (a moving average, a codebook). Where a later step
reads them, its loss is no longer that of one process, and such a model is planned with tensor-parallel ranks alone,
as one that writes to parameters is (tpplan.layouts.parameter_writes). Running statistics of norms are read in
evaluation alone: every data-parallel rank has those of its own rows, of which a plan tells.

One walk over the graph notes, for each storage, its *origins*: the buffers that its values follow from, as they were
before the step, BATCH and WEIGHTS. What buffers have at the end of one step is what they start the next one with.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tpplan.core.graph import LEFT_AT, Boundary, ModelGraph, Op, SourceKind, references
from tpplan.core.mesh import Mesh
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.rules import OPAQUE, written_operands
from tpplan.layouts.rules.reduction import STATISTICS

#: the origin of values that follow from rows of the batch; no buffer has this name
BATCH = ""
#: the origin of values that follow from parameters
WEIGHTS = " "
#: ops that overwrite all they write to, with another value or a number
_OVERWRITING = ("aten.copy_.", "aten.fill_.", "aten.zero_.")
#: ops that read a second tensor for its shape or dtype alone
_OF_SHAPE = ("aten.view_as.", "aten.reshape_as.", "aten.expand_as.", "aten.type_as.")

Origins = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferWrite:
    """A buffer that is written to from rows. `is_read`: whether training reads what was written, at a later step.
    `module`, `target` and `line`: of the last op that writes to it; `line` is "" where it is not known. `is_plain`:
    whether it is no registered buffer, but a tensor in an attribute."""

    label: str
    module: str
    target: str
    line: str
    is_read: bool
    is_plain: bool = False

    def __str__(self) -> str:
        op = "" if self.target == OPAQUE else f", {self.target}"
        at = f", {self.line}" if self.line else ""
        kind = "attribute" if self.is_plain else "buffer"
        return f"the forward writes to {kind} {self.label} from rows of the batch (in {self.module or ROOT}{op}{at})"


def buffers_written(graph: ModelGraph) -> tuple[BufferWrite, ...]:
    """The buffers that the forward writes to from rows, in the order of the model."""
    return graph.once_for_all_sizes(buffers_written, lambda: tuple(_buffers_written(graph)))


def why_apart(writes: Iterable[BufferWrite], mesh: Mesh) -> str:
    """The reason why data-parallel ranks would train with different buffers; "" where they would not."""
    write = next((write for write in writes if write.is_read), None)
    if write is None or mesh.data_parallel == 1:
        return ""
    return (
        f"{write}, and training reads it: on {mesh.data_parallel} data-parallel ranks each would write what its own "
        "rows give"
    )


def read_in_later_steps(graph: ModelGraph, kept: Mapping[str, str]) -> frozenset[str]:
    """The buffers from which a step, or a later one, computes what it returns. `kept`: by a buffer's label, the value
    that forward puts in its place."""
    return _read_later(graph, _Steps.of(graph, kept))


def origins_of(graph: ModelGraph, values: Iterable[str]) -> dict[str, Origins]:
    """The origins of values at the end of a step."""
    origins = _origins(graph)
    return {value: origins.get(graph.values[value].storage, frozenset()) for value in values}


@dataclass(frozen=True, slots=True)
class _Steps:
    """`origins` of each storage at the end of a step, and those of each buffer, `after` it."""

    origins: Mapping[str, Origins]
    after: Mapping[str, Origins]

    @classmethod
    def of(cls, graph: ModelGraph, replaced: Mapping[str, str]) -> "_Steps":
        """The steps of a graph in which forward puts other values in place of some buffers."""
        origins = _origins(graph)
        after = {label: origins.get(storage, frozenset()) for storage, label in _labels(graph).items()}
        after |= {label: origins.get(graph.values[value].storage, frozenset()) for label, value in replaced.items()}
        return cls(origins, after)


def _labels(graph: ModelGraph) -> dict[str, str]:
    """The label of each buffer, by its storage: of registered ones, and of the constants that the model holds."""
    found = {graph.values[own.result].storage: own.label for own in graph.sources if own.kind is SourceKind.BUFFER}
    return {graph.values[name].storage: path for name, path in graph.held.items()} | found


def _read_later(graph: ModelGraph, steps: _Steps) -> Origins:
    ends = [graph.loss] if graph.loss is not None else []
    ends += [value for path, value in graph.outputs if not path.startswith(LEFT_AT)]
    storages = [graph.values[value].storage for value in ends]
    return reached({origin for storage in storages for origin in steps.origins.get(storage, ())}, steps.after)


def _buffers_written(graph: ModelGraph) -> Iterator[BufferWrite]:
    buffers = _labels(graph)
    last = {buffers[storage]: op for op in graph.ops for storage in _written(graph, op) if storage in buffers}
    left = {path.removeprefix(LEFT_AT): value for path, value in graph.outputs if path.startswith(LEFT_AT)}
    replaced = {
        source.label: left[name]
        for source in graph.sources
        if source.kind is SourceKind.BUFFER
        for name in (source.label, *source.aliases)
        if name in left
    }
    replaced |= {path: left[path] for path in graph.held.values() if path in left}
    if not last and not replaced:
        return
    steps = _Steps.of(graph, replaced)
    after, read = steps.after, _read_later(graph, steps)
    makers = {label: graph.producers.get(value) for label, value in replaced.items()}
    last |= {label: maker for label, maker in makers.items() if isinstance(maker, Op)}
    for label, op in last.items():
        if BATCH in reached(after[label], after):
            yield BufferWrite(
                label=label,
                module=op.module,
                target=op.target,
                line=graph.lines.get(op.name, ""),
                is_read=label in read,
                is_plain=label in graph.held.values(),
            )


def reached(origins: Iterable[str], after: Mapping[str, Origins]) -> Origins:
    """The origins over any number of steps, where `after` are those that buffers have at the end of one."""
    found: set[str] = set()
    following = list(origins)
    while following:
        origin = following.pop()
        if origin not in found:
            found.add(origin)
            following += after.get(origin, ())
    return frozenset(found)


def _origins(graph: ModelGraph) -> dict[str, Origins]:
    """The origins of each storage at the end of a step."""
    found: dict[str, Origins] = {}
    for source in graph.sources:
        named = {SourceKind.INPUT: BATCH, SourceKind.PARAMETER: WEIGHTS, SourceKind.BUFFER: source.label}
        own = named.get(source.kind, graph.held.get(source.result))
        found[graph.values[source.result].storage] = frozenset(() if own is None else (own,))
    for node in graph.nodes:
        if isinstance(node, Boundary):
            found.setdefault(graph.values[node.result].storage, _of(graph, found, (node.operand,)))
            continue
        read = _of(graph, found, _read(node))
        for storage in (graph.values[result].storage for result in node.results):
            found.setdefault(storage, read)
        for storage in _written(graph, node):
            is_over = _overwrites(graph, node)
            given = _of(graph, found, node.operands[1:]) if is_over else _of(graph, found, node.operands)
            found[storage] = given if is_over else found.get(storage, frozenset()) | given
    return found


def _of(graph: ModelGraph, found: dict[str, Origins], values: Iterable[str]) -> Origins:
    return frozenset().union(*(found.get(graph.values[value].storage, frozenset()) for value in values))


def _read(op: Op) -> tuple[str, ...]:
    """The operands whose elements an op's results follow from."""
    name = op.target.split(".")[1] if "." in op.target else ""
    if name.startswith("new_") or name.endswith("_like"):
        return ()
    if op.target.startswith(_OF_SHAPE):
        return op.operands[:1]
    statistics = _statistics(op)
    return tuple(operand for operand in op.operands if operand not in statistics)


def _statistics(op: Op) -> tuple[str, ...]:
    """The running statistics that an op writes to and does not read, as in training."""
    places = STATISTICS.get(op.target)
    is_training = places is not None and len(op.args) > 5 and bool(op.args[5])
    return tuple(references(op.args[slice(*places)])) if places is not None and is_training else ()


def _written(graph: ModelGraph, op: Op) -> tuple[str, ...]:
    """The storages that an op writes to."""
    return tuple(graph.values[name].storage for name in (*written_operands(op), *_statistics(op)))


def _overwrites(graph: ModelGraph, op: Op) -> bool:
    """True where nothing is left of what the op writes to."""
    if not op.target.startswith(_OVERWRITING):
        return False
    value = graph.values[op.operands[0]]
    return value.num_elements == graph.values[value.storage].num_elements
