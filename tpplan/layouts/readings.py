"""Readings: the decisions in which layout an op reads a parameter, or a buffer of which it may read a slice.

Every rank has a buffer whole, at rest and in state_dict. Code inside one module that joins it with weights
(`cat((q_bias, k_bias, v_bias))`, where k_bias is a buffer of zeros) or multiplies it into activations (slopes, one for
each head) needs the part of it that belongs to the rank's slice of the rest. Reading a slice of a buffer sends nothing,
as a buffer carries no gradient.
"""

from dataclasses import dataclass

from tpplan.core.graph import LEFT_AT, LOSS_SCOPE, ModelGraph, Op, Source, SourceKind
from tpplan.core.layout import R_STAR, Conversion, P, R
from tpplan.layouts.rules import OPAQUE, Strategy, written_operands
from tpplan.layouts.rules.call import base_target, registered_rules
from tpplan.layouts.rules.reduction import STATISTICS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An op reads a parameter, or a buffer of which it may read a slice. Its strategies are (layout at rest,) =>
    (layout in which the op reads,)."""

    name: str
    source: Source
    op: Op
    position: int

    @property
    def module(self) -> str:
        """The module whose code reads."""
        return self.op.module


def has_partial_gradient(reading: Strategy) -> bool:
    """True where a parameter rests whole and its gradient is a summand on each rank, reduced once per step."""
    return reading.operands[0] == R and reading.results[0] not in (R, P)


def reading_conversion(reading: Strategy) -> Conversion:
    """The conversion from the parameter at rest to the layout in which the op reads it."""
    return Conversion(R_STAR if has_partial_gradient(reading) else reading.operands[0], reading.results[0])


def reading_name(op: Op, position: int) -> str:
    """The name of the decision that reads a parameter or a buffer as the op's operand at `position`."""
    return f"{op.name}<-{position}"


def sources_read(graph: ModelGraph) -> dict[str, Source]:
    """The parameters, and the buffers that ops may read as slices, by the names of their values."""
    sliced = sliced_buffers(graph)
    return {
        source.result: source
        for source in graph.sources
        if source.kind is SourceKind.PARAMETER or source.result in sliced
    }


def sliced_buffers(graph: ModelGraph) -> frozenset[str]:
    """Names of the buffers whose readings are decisions.

    A write to a slice would be lost, so no op writes to such a buffer or to a view of it, and forward puts no other
    tensor in its place. One module holds it, under one name, and no stub is given it. Its first use together with a
    value that carries a gradient lies in the module that reads it: behind a module's boundary the boundary can convert.
    """
    return graph.once_for_all_sizes(sliced_buffers, lambda: _sliced_buffers(graph))


def _sliced_buffers(graph: ModelGraph) -> frozenset[str]:
    buffers = [source for source in graph.sources if source.kind is SourceKind.BUFFER]
    if not buffers:
        return frozenset()
    changed, meeting = _changed_storages(graph), _meeting_gradients(graph)
    replaced = {path.removeprefix(LEFT_AT) for path, _ in graph.outputs if path.startswith(LEFT_AT)}
    return frozenset(
        source.result
        for source in buffers
        if source.result in meeting
        and not source.aliases
        and graph.values[source.result].shape
        and graph.values[source.result].storage not in changed
        and source.result not in graph.read_by_stubs
        and not any(path == source.label or path.startswith(f"{source.label}.") for path in replaced)
    )


def _changed_storages(graph: ModelGraph) -> frozenset[str]:
    """Storages that an op writes to, may write to, or reads by code of which no rule is known."""
    found: set[str] = set()
    for op in graph.ops:
        known = op.is_pointwise or op.target in registered_rules() or base_target(op.target) in registered_rules()
        is_plain = known and op.target not in STATISTICS and op.target != OPAQUE and op.module != LOSS_SCOPE
        names = written_operands(op) if is_plain else op.operands
        found.update(graph.values[name].storage for name in names)
    return frozenset(found)


def _meeting_gradients(graph: ModelGraph) -> frozenset[str]:
    """Values without a gradient that ops alone lead to an op with an operand that carries one."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if not isinstance(node, Op):
            continue
        meets = any(graph.values[name].carries_gradient for name in node.operands)
        if meets or not found.isdisjoint(node.results):
            found.update(name for name in node.operands if not graph.values[name].carries_gradient)
    return frozenset(found)
