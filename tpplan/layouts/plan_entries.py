"""Checks the entries of a plan against a graph: whether the graph has what they name, and can read parameters and
buffers as they say. These are (1) for parameters and buffers, (5) and (6) of tpplan.layouts.typecheck."""

from collections.abc import Collection, Iterator, Mapping

from tpplan.core.graph import LEFT_AT, LOSS_SCOPE, Direction, ModelGraph, Op, Source, SourceKind, Value, within
from tpplan.core.layout import R_STAR, ROWS, Conversion, Layout, P, R, can_convert, fits
from tpplan.core.name_patterns import ROOT, module_name
from tpplan.layouts.buffer_writes import buffers_written, why_apart
from tpplan.layouts.parameter_writes import why_copies, why_not_recomputed, write_within, writes_of
from tpplan.layouts.readings import sliced_buffers
from tpplan.layouts.rules import OPAQUE, written_operands
from tpplan.layouts.rules.embedding import BAGS
from tpplan.layouts.rules.loss import CROSS_ENTROPY
from tpplan.plan.plan import BoundaryPlan, BufferPlan, ParameterPlan, Plan
from tpplan.plan.sections.ranks import RECEIVED, StagePlan

#: a boundary of a module: (module, direction, path)
CrossingKey = tuple[str, Direction, str]
#: a place in the plan: a section, a full name in it, and the path below
Place = tuple[str, ...]


class PlanEntries:
    """A plan's sections with patterns expanded, by names of a graph ("" for the root)."""

    def __init__(self, graph: ModelGraph, plan: Plan) -> None:
        self.graph = graph
        self.tp = plan.mesh.tp
        self.outputs = plan.outputs
        self.parameters = plan.parameter_plans()
        self.buffers = plan.buffer_plans()
        self.losses = plan.sharded_losses()
        self.bags = plan.row_bags()
        self.draws = frozenset(plan.drawing_modules())
        self.opaque = frozenset(plan.opaque_modules())
        self.recomputed = plan.recomputed_modules()
        self.sized = plan.size_plans().keys()
        boundaries = {module_name(name): boundary for name, boundary in plan.boundary_plans().items()}
        self.modules = boundaries.keys() | self.sized | self.losses.keys() | self.bags.keys() | self.draws
        self.crossings = _crossings(boundaries)
        self.copies = why_copies(plan.mesh, plan.precision)
        self.apart = why_apart(buffers_written(graph), plan.mesh)
        self.written = {graph.values[name].storage for op in graph.ops for name in written_operands(op)}

    @property
    def layouts(self) -> set[Layout]:
        """The layouts that the plan names: those in which parameters and buffers are read, and those into which it
        converts."""
        reads = (own.reads for section in (self.parameters, self.buffers) for own in section.values())
        named = {layout for reading in reads for layout in reading.values()}
        return named | {conversion.target for conversion in self.crossings.values()}

    def problems(self) -> Iterator[tuple[str, Place]]:
        """Yields each entry that does not fit the graph, as a message and its place in the plan."""
        yield from self._unknown_names()
        for source in self.graph.parameters:
            for problem in self._parameter(source, self.parameters[source.label]):
                yield f"parameter {source.label}: {problem}", ("parameters", source.label)
        yield from self._buffers()
        yield from self._written()

    def _unknown_names(self) -> Iterator[tuple[str, Place]]:
        """Yields violations of (5) by names."""
        graph = self.graph
        labels = {source.label for source in graph.parameters}
        for label in sorted(labels ^ self.parameters.keys()):
            there, here = ("model", "plan") if label in labels else ("plan", "model")
            yield f"parameter {label}: in the {there}, not in the {here}", ("parameters", label)
        for module in sorted(self.modules - {boundary.module for boundary in graph.boundaries}):
            yield f"module {module}: in the plan, not in the model", (self._section_naming(module), module)
        places = {place for boundary in graph.boundaries for place in boundary.places}
        for module, direction, path in sorted(self.crossings.keys() - places):
            message = f"{direction} {path} of {module or ROOT}: the plan converts it, but no tensor crosses there"
            yield message, ("boundaries", module, f"{direction}s", path)
        whole = {op.module for op in graph.ops if op.target == OPAQUE}
        for module in sorted(whole - self.opaque):
            yield f"module {module or ROOT}: runs whole, but the plan does not say so", ("opaque", module)
        for module in sorted(self.opaque - whole):
            yield f"module {module or ROOT}: the plan says that it runs whole, but it does not", ("opaque", module)
        outputs = {boundary.path for boundary in graph.boundaries if boundary.leaves_model}
        outputs |= {path for path, _ in graph.outputs if path.startswith(LEFT_AT)}
        for path in sorted(self.outputs.keys() - outputs):
            yield f"output {path}: in the plan, not in the model", ("outputs", path)
        losses = {op.module for op in graph.ops if op.target == CROSS_ENTROPY}
        for module in sorted(self.losses.keys() - losses):
            yield f"loss of {module or ROOT}: in the plan, not in the model", ("losses", module)
        bags = {op.module for op in graph.ops if op.target == BAGS}
        for module in sorted(self.bags.keys() - bags):
            yield f"bags of {module or ROOT}: in the plan, not in the model", ("bags", module)

    def _section_naming(self, module: str) -> str:
        tables: dict[str, Collection[str]] = {
            "losses": self.losses,
            "bags": self.bags,
            "draws": self.draws,
            "sizes": self.sized,
        }
        return next((section for section, names in tables.items() if module in names), "boundaries")

    def _parameter(self, source: Source, plan: ParameterPlan) -> Iterator[str]:
        """Yields violations of (1) and (5) by a parameter."""
        shape = self.graph.whole_shape(source)
        if (plan.shape, plan.trainable) != (shape, source.trainable):
            yield (
                f"shape {plan.shape}, trainable {plan.trainable} in the plan; {shape}, trainable {source.trainable} in "
                "the model"
            )
        if set(plan.aliases) != set(source.aliases):
            planned, own = (", ".join(names) or "nothing" for names in (plan.aliases, source.aliases))
            yield f"tied to {planned} in the plan, to {own} in the model"
        if not plan.placement.is_plain or not fits(shape, plan.placement, self.tp):
            yield f"{shape} cannot rest as {plan.placement} on {self.tp} ranks"
        readers = self._readers(source)
        if unplanned := sorted(readers - plan.reads.keys()):
            yield f"{unplanned[0] or ROOT} reads it, but the plan gives no layout for that"
        for reader, layout in sorted(plan.reads.items()):
            if reader not in readers:
                yield f"{reader or ROOT} does not read it"
            if not self._can_be_read(source, plan.placement, layout) or (reader == LOSS_SCOPE and self.tp > 1):
                yield f"{reader or ROOT} cannot read {shape} as {layout} where it rests as {plan.placement}"

    def _can_be_read(self, source: Source, placement: Layout, layout: Layout) -> bool:
        value = self.graph.values[source.result]
        if layout == ROWS or not value.can_be(layout, self.tp):
            return False
        if layout == R_STAR and not (placement == R and source.trainable):
            return False
        start = R_STAR if placement == R and layout.dim is not None else placement
        if not can_convert(start, layout):
            return False
        return value.storage not in self.written or not Conversion(start, layout).forward

    def _buffers(self) -> Iterator[tuple[str, Place]]:
        """Yields violations of (1) and (5) by buffers that the plan names."""
        sources = {source.label: source for source in self.graph.sources if source.kind is SourceKind.BUFFER}
        for label, plan in self.buffers.items():
            found = self._buffer(sources[label], plan) if label in sources else "in the plan, not in the model"
            if found is not None:
                yield f"buffer {label}: {found}", ("buffers", label)

    def _buffer(self, source: Source, plan: BufferPlan) -> str | None:
        value = self.graph.values[source.result]
        if plan.shape != value.shape:
            return f"shape {plan.shape} in the plan, {value.shape} in the model"
        if source.result not in sliced_buffers(self.graph):
            return "an op may write to it, or no op joins it with what carries a gradient: it is read whole"
        if different := sorted(self._readers(source) ^ plan.reads.keys()):
            return f"{different[0] or ROOT} reads it in the plan or in the model, and not in both"
        wrong = next((own for own in plan.reads.values() if not self._can_be_sliced(value, own)), None)
        return f"{value.shape} cannot be read as {wrong} on {self.tp} ranks" if wrong is not None else None

    def _can_be_sliced(self, value: Value, layout: Layout) -> bool:
        is_slice = layout != ROWS and layout.dim is not None and can_convert(R_STAR, layout)
        return layout == R or (is_slice and value.can_be(layout, self.tp))

    def _readers(self, source: Source) -> set[str]:
        """The modules whose ops read a parameter or buffer."""
        return {node.module for node in self.graph.consumers.get(source.result, ()) if isinstance(node, Op)}

    def _written(self) -> Iterator[tuple[str, Place]]:
        """Yields violations of (6)."""
        write = next(iter(writes_of(self.graph)), None)
        if write is not None and self.copies:
            yield f"{write}, and {self.copies}", ("mesh_degrees",)
        if self.apart:
            yield self.apart, ("mesh_degrees",)
        write = write_within(self.graph, self.recomputed)
        if write is not None:
            region = next(name for name in self.recomputed if within(write.module, name))
            yield f"{write}, and would write twice where {region or ROOT} is recomputed", ("recompute",)
        for region, mode in self.recomputed.items():
            if obstacle := why_not_recomputed(self.graph, region, mode):
                yield f"{region or ROOT} is recomputed selectively: {obstacle}", ("recompute",)


def _crossings(boundaries: Mapping[str, BoundaryPlan]) -> dict[CrossingKey, Conversion]:
    return {
        (module, direction, path): crossing.conversion
        for module, boundary in boundaries.items()
        for direction, side in ((Direction.INPUT, boundary.inputs), (Direction.OUTPUT, boundary.outputs))
        for path, crossing in side.items()
    }


def crossing_layouts(graph: ModelGraph, stage: StagePlan | None) -> dict[str, Layout]:
    """Layouts other than R of the tensors that a stage receives and sends, by value; none for a whole model.

    The loss of a stage that sends slices is P: a stand-in for the loss adds up what is sent, and each rank its slices.
    """
    if stage is None:
        return {}
    received = {f"{RECEIVED}.{i}": one.layout for i, one in enumerate(stage.receives)}
    sent = {f"output.{i}": one.layout for i, one in enumerate(stage.sends)}
    found = {
        source.result: received[source.label]
        for source in graph.sources
        if source.kind is SourceKind.INPUT and source.label in received
    }
    found |= {own.result: sent[own.path] for own in graph.boundaries if own.leaves_model and own.path in sent}
    if graph.loss is not None and any(layout != R for layout in sent.values()):
        found[graph.loss] = P
    return {value: layout for value, layout in found.items() if layout != R}
