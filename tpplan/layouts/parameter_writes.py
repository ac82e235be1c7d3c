"""Parameters that forward writes to (max_norm, clamping, a moving average), and the plans that this forbids.

A write must reach the parameter itself, and exactly as often as on one process. FSDP gathers a temporary copy, so the
write is lost; data-parallel ranks write values that depend on their own rows; a recomputed layer writes twice. None of
this shows in a step's loss. Such a model is planned with tensor-parallel ranks alone, which all read the same rows, and
a recomputed region never writes to a parameter.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tpplan.core.graph import ModelGraph, Op, within
from tpplan.core.mesh import Mesh
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.rules import OPAQUE, base_target, written_operands
from tpplan.plan.plan import Precision, Recompute

#: prefixes of ops whose results selective recomputation may keep
_KEPT = (
    "aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.addmm", "aten.baddbmm", "aten.addbmm",
    "aten.einsum", "aten.tensordot", "aten.bilinear", "aten.conv", "aten._convolution", "aten._grouped_mm",
    "aten._scaled_mm", "aten.scaled_dot_product_attention",
)  # fmt: skip
_RECURRENT = ("aten.gru", "aten.lstm", "aten.rnn_", "aten.quantized_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A parameter, and the module and op of the first write to it."""

    label: str
    module: str
    target: str

    def __str__(self) -> str:
        op = "" if self.target == OPAQUE else f", {self.target}"
        return f"the forward writes to parameter {self.label} (in {self.module or ROOT}{op})"


def writes_of(graph: ModelGraph) -> tuple[Write, ...]:
    """The first write to each parameter by each module, in order of execution."""
    return graph.once(writes_of, lambda: tuple(_writes_of(graph)))


def _writes_of(graph: ModelGraph) -> Iterator[Write]:
    labels = {graph.values[source.result].storage: source.label for source in graph.parameters}
    seen: set[tuple[str, str]] = set()
    for op in graph.ops:
        for name in written_operands(op) if op.results or base_target(op.target) != op.target else ():
            label = labels.get(graph.values[name].storage)
            if label is not None and (label, op.module) not in seen:
                seen.add((label, op.module))
                yield Write(label=label, module=op.module, target=op.target)


def why_copies(mesh: Mesh, precision: Precision) -> str:
    """The reason why forward would write to a copy of a parameter; "" where it writes to the parameter itself."""
    if mesh.data_parallel > 1:
        return f"on {mesh.data_parallel} data-parallel ranks each would write to its own copy"
    return "bf16-mixed computes with a copy" if precision is Precision.BF16_MIXED else ""


def why_not_recomputed(graph: ModelGraph, region: str, mode: Recompute) -> str:
    """The reason why a module cannot be recomputed in a mode that keeps some results; "" where it can.

    An op that writes to a kept result changes what backward reads: torch raises, or for recurrent layers does not
    notice.
    """
    if not mode.is_selective:
        return ""
    return graph.once_for_all_sizes((why_not_recomputed, region), lambda: _why_not_kept(graph, region))


def _why_not_kept(graph: ModelGraph, region: str) -> str:
    """The reason why results of a module's ops cannot be kept while others are computed again; "" where they can."""
    makers: dict[str, str] = {}
    for op in graph.nodes_by_module.get(region, ()):
        if not isinstance(op, Op):
            continue
        written = {graph.values[name].storage for name in written_operands(op)}
        kept = next((makers[storage] for storage in written if makers.get(storage, "").startswith(_KEPT)), None)
        if kept is not None:
            return f"{op.target} in {op.module or ROOT} writes to what {kept} gave, which would be kept"
        if op.target.startswith(_RECURRENT):
            return f"{op.target} in {op.module or ROOT} writes to products of its own, which would be kept"
        if op.target == OPAQUE:
            return f"{op.module or ROOT} runs whole, and may write to products of its own, which would be kept"
        for name in op.results:
            makers.setdefault(graph.values[name].storage, op.target)
    return ""


def write_within(graph: ModelGraph, regions: Iterable[str]) -> Write | None:
    """The first write in one of the modules `regions` or their submodules; None without one."""
    names = tuple(regions)
    return next((write for write in writes_of(graph) if any(within(write.module, name) for name in names)), None)
