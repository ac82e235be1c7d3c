"""Parameters that a model's forward writes to (max_norm, clamping, a teacher that follows), and what that forbids.

What is written must be the parameter itself, and be written as often as one process writes it. FSDP's is a copy, which
goes when it has been used; a data-parallel rank writes what its own rows make it write; and a layer that is recomputed
writes twice. Neither shows in a step's loss. So such a model has tensor-parallel ranks alone, on which all read the
same rows, and what runs again in backward writes to no parameter.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tpplan.core.graph import ModelGraph, within
from tpplan.core.mesh import Mesh
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.rules import OPAQUE, written_operands
from tpplan.plan.plan import Precision

#: ops whose results selective recomputation keeps, as code calls them
_KEPT = (
    "aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.addmm", "aten.baddbmm", "aten.addbmm",
    "aten.einsum", "aten.tensordot", "aten.bilinear", "aten.conv", "aten._convolution", "aten._grouped_mm",
    "aten._scaled_mm", "aten.scaled_dot_product_attention",
)  # fmt: skip
_RECURRENT = ("aten.gru", "aten.lstm", "aten.rnn_", "aten.quantized_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A parameter, and the first op that writes to it."""

    label: str
    module: str
    target: str

    def __str__(self) -> str:
        op = "" if self.target == OPAQUE else f", {self.target}"
        return f"the forward writes to parameter {self.label} (in {self.module or ROOT}{op})"


def writes_of(graph: ModelGraph) -> tuple[Write, ...]:
    """One for each parameter and module that are met, in order."""
    return graph.once(writes_of, lambda: tuple(_writes_of(graph)))


def _writes_of(graph: ModelGraph) -> Iterator[Write]:
    labels = {graph.values[source.result].storage: source.label for source in graph.parameters}
    seen: set[tuple[str, str]] = set()
    for op in graph.ops:
        for name in written_operands(op):
            label = labels.get(graph.values[name].storage)
            if label is not None and (label, op.module) not in seen:
                seen.add((label, op.module))
                yield Write(label=label, module=op.module, target=op.target)


def why_copies(mesh: Mesh, precision: Precision) -> str:
    """Why what is written may be a copy of a parameter; "" where it is not."""
    if mesh.data_parallel > 1:
        return f"on {mesh.data_parallel} data-parallel ranks each would write to its own copy"
    return "bf16-mixed computes with a copy" if precision is Precision.BF16_MIXED else ""


def why_not_selective(graph: ModelGraph, region: str) -> str:
    """Why a module cannot keep the results of products and run the rest again; "" where it can. Code that writes to
    such a result writes to what is kept: torch raises, or does not notice (recurrent layers)."""
    makers: dict[str, str] = {}
    for op in graph.ops:
        if not within(op.module, region):
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
    """The first write of what stands inside one of some modules."""
    names = tuple(regions)
    return next((write for write in writes_of(graph) if any(within(write.module, name) for name in names)), None)
