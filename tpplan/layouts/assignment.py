"""Assignment: the strategy of every decision of a graph on a mesh, and the treatment of each layer.

The solution of an ILP makes an assignment (tpplan.costs.step.formulate), a plan implies one (`assignment_of`), and a
plan is written from one (tpplan.layouts.plan_sections). It needs no prices, no profile and no solver. From it follow:

    prove(assignment, model)            proof or counterexample             tpplan.prove.structure
    collectives(lifetimes)              what a rank sends in a step         tpplan.costs.prediction.collectives_of_step
    memory(lifetimes)                   the timeline of memory, its peak    tpplan.costs.prediction.memory_replay
    step_time(assignment, profile)      seconds of a step by part           tpplan.costs.prediction.step_time
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tpplan.core.graph import Boundary, ModelGraph, Source, SourceKind, enclosing
from tpplan.core.layout import Conversion, Layout, R, local_shape
from tpplan.core.mesh import Mesh
from tpplan.core.units import DTYPE_BYTES
from tpplan.layouts.decision_space import Decider, Space, deciders_of, flows_of, readings_of
from tpplan.layouts.layer_treatments import FsdpUnit, Treatment
from tpplan.layouts.plan_entries import crossing_layouts
from tpplan.layouts.readings import Reading
from tpplan.layouts.rules import Strategy
from tpplan.layouts.typecheck import Mistyped, implied_strategies
from tpplan.plan.plan import Compile, Plan, Precision, Recompute, uses_fsdp


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """How a model is divided on a mesh, and how a step of it is trained.

    `strategies` are by name of a decision: an op, a boundary or a reading. `layers` are the repeated
    modules, which become FSDP units. `resharded` says of each layer whether FSDP reshards it after forward,
    `recomputed` has the modes of recomputed modules. `num_averages` is the number of backwards of a step that average
    all gradients where parameters stay plain tensors; None where FSDP averages. `in_flight` is the number of
    micro-batches whose activations a rank keeps at once, `beside_bytes` are what it holds of other stages meanwhile.
    `whole_gradients` says that FSDP reduces gradients once a step, and a rank keeps them whole until then;
    `gathered_once` that it gathers units that it does not reshard once a step, and a rank keeps them until then.
    `over_tp` are the layers that FSDP shards over shard and tp together, whose parameters are all R. `crossing` are the
    layouts of values that cross between stages, where not R.
    """

    graph: ModelGraph
    mesh: Mesh
    strategies: Mapping[str, Strategy]
    layers: tuple[str, ...]
    resharded: Mapping[str, bool]
    recomputed: Mapping[str, Recompute]
    precision: Precision
    optimizer: str
    accumulation_steps: int
    is_compiled: bool
    num_averages: int | None = None
    in_flight: int = 1
    beside_bytes: float = 0.0
    whole_gradients: bool = False
    gathered_once: bool = False
    over_tp: frozenset[str] = frozenset()
    crossing: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        """The number of tensor-parallel ranks."""
        return self.mesh.tp

    @property
    def uses_fsdp(self) -> bool:
        """True where FSDP2 shards, replicates, or casts."""
        return uses_fsdp(self.mesh, self.precision)

    @property
    def has_uneven_reads(self) -> bool:
        """True where data decides what runs, so that the ranks of FSDP may read different parameters."""
        is_shared = self.mesh.replicate * self.mesh.shard > 1
        return self.uses_fsdp and is_shared and self.num_averages is None and self.graph.is_uneven

    @property
    def reductions(self) -> int:
        """How often a step FSDP reduces the gradients of a unit over its shards."""
        return 1 if self.whole_gradients else self.accumulation_steps

    @property
    def gathers(self) -> int:
        """How often a step FSDP gathers a unit that it does not reshard."""
        return 1 if self.gathered_once else self.accumulation_steps

    @property
    def deciders(self) -> Mapping[str, Decider]:
        """Ops, boundaries and readings by name of their decision."""
        return deciders_of(self.graph)

    @property
    def readings(self) -> Mapping[str, tuple[Reading, ...]]:
        """The readings of each parameter, and of each buffer that has any, in order, by its name."""
        return readings_of(self.graph)

    @cached_property
    def space(self) -> Space:
        """The decision space in which this assignment is the only choice."""
        return Space(
            graph=self.graph,
            tp=self.tp,
            deciders=deciders_of(self.graph),
            strategies={name: (strategy,) for name, strategy in self.strategies.items()},
            flows=flows_of(self.graph),
            classes={name: name for name in self.strategies},
            members={name: (name,) for name in self.strategies},
            crossing=self.crossing,
        )

    @property
    def treatments(self) -> dict[str, Treatment]:
        """The treatment of each layer that has parameters; without FSDP all of them reshard."""
        return {
            name: Treatment(
                recompute=self.recomputed.get(name, Recompute.NONE), reshard=reshard if self.uses_fsdp else True
            )
            for name, reshard in self.resharded.items()
        }

    @property
    def recomputed_within(self) -> dict[str, Recompute]:
        """Modes of recomputed modules that are no layers: parts of a layer, or modules around several."""
        return {name: mode for name, mode in self.recomputed.items() if name not in self.resharded}

    @cached_property
    def units(self) -> tuple[FsdpUnit, ...]:
        """The FSDP units, the root last."""
        return units_of(self.graph, self.layers, {name: name for name in self.strategies})

    @cached_property
    def sources_over_tp(self) -> frozenset[str]:
        """Names of the parameters that FSDP shards over shard and tp together."""
        return frozenset(source.label for unit in self.units if unit.name in self.over_tp for source in unit.parameters)

    def strategy(self, decision: str) -> Strategy:
        """The strategy of a decision."""
        return self.strategies[decision]

    def layout(self, value: str) -> Layout:
        """The layout of a computed value, or of one that is received; R for other inputs, buffers and constants. A
        parameter has one per reading, and so has a buffer that is read as a slice."""
        producer = self.graph.producers.get(value)
        if producer is None:
            return self.crossing.get(value, R)
        return self.strategies[producer.name].results[producer.results.index(value)]

    def placement(self, source: Source) -> Layout:
        """The layout of a parameter at rest on the tp axis: R where nothing reads it."""
        readings = self.readings[source.label]
        return self.strategies[readings[0].name].operands[0] if readings else R

    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each computed value on one rank."""
        values = self.graph.values
        names = (result for node in self.graph.nodes for result in node.results)
        return {name: local_shape(values[name].shape, self.layout(name), self.tp) for name in names}

    def conversion(self, boundary: Boundary) -> Conversion:
        """The conversion of the value that crosses a boundary."""
        strategy = self.strategies[boundary.name]
        return Conversion(strategy.operands[0], strategy.results[0])

    def conversions(self) -> Iterator[tuple[Boundary, Conversion]]:
        """Yields every boundary at which the layout changes, with its conversion."""
        for boundary in self.graph.boundaries:
            conversion = self.conversion(boundary)
            if not conversion.is_identity:
                yield boundary, conversion

    def has_gradient(self, source: Source) -> bool:
        """True for a parameter that trains and that something reads: FSDP reduces no other."""
        return source.trainable and bool(self.readings[source.label])

    def master_dtype(self, source: Source) -> str:
        """The dtype of a parameter at rest and of its gradient as it is reduced; the graph has the dtype of compute."""
        dtype = self.graph.values[source.result].dtype
        return "float32" if master_bytes(self.precision, dtype) == DTYPE_BYTES["float32"] else dtype


def master_bytes(precision: Precision, dtype: str) -> int:
    """Bytes per element of a parameter at rest, and of its gradient, where forward computes with `dtype`."""
    if precision is Precision.BF16_MIXED and dtype == "bfloat16":
        return DTYPE_BYTES["float32"]
    return DTYPE_BYTES[dtype]


def units_of(graph: ModelGraph, layers: tuple[str, ...], classes: Mapping[str, str]) -> tuple[FsdpUnit, ...]:
    """Every FSDP unit, the root last under the name "": each parameter belongs to the deepest unit with all its names.
    `classes` names the deciding decision of each decision."""
    inside: dict[str, list[Source]] = {name: [] for name in (*layers, "")}
    for source in graph.parameters:
        owners = frozenset.intersection(*graph.holders(source)) & inside.keys()
        inside[max(owners, key=len, default="")].append(source)
    hides: dict[str, list[str]] = {name: [] for name in inside}
    owner_of: dict[str, str] = {}
    for decision, decider in deciders_of(graph).items():
        module = decider.op.module if isinstance(decider, Reading) else decider.module
        if module not in owner_of:
            owner_of[module] = next(name for name in enclosing(module) if name in inside)
        hides[owner_of[module]].append(classes[decision])
    return tuple(
        FsdpUnit(
            name=name,
            parameters=tuple(parameters),
            hides=tuple(hides[name]),
            calls=graph.times_called.get(name, 1) if name else 1,
        )
        for name, parameters in inside.items()
        if parameters
    )


def assignment_of(
    graph: ModelGraph, plan: Plan, *, layers: tuple[str, ...] = (), num_averages: int | None = None
) -> Assignment | Mistyped:
    """The assignment that a plan implies for a graph, or the first value without a layout. `layers` are the model's
    repeated modules, for a plan that names no FSDP units; `num_averages` is as in Assignment."""
    implied = implied_strategies(graph, plan)
    if isinstance(implied, Mistyped):
        return implied
    parameters, buffers = plan.parameter_plans(), plan.buffer_plans()

    def strategy(name: str, decider: Decider) -> Strategy:
        if not isinstance(decider, Reading):
            return implied[name]
        if decider.source.kind is SourceKind.BUFFER:
            buffer = buffers.get(decider.source.label)
            return Strategy((R,), (buffer.reads[decider.op.module] if buffer is not None else R,))
        parameter = parameters[decider.source.label]
        return Strategy((parameter.placement,), (parameter.reads[decider.op.module],))

    units = tuple(unit for unit in plan.fsdp_units() if unit) or layers
    return Assignment(
        graph=graph,
        mesh=plan.mesh,
        strategies={name: strategy(name, decider) for name, decider in deciders_of(graph).items()},
        layers=units,
        resharded=dict.fromkeys(units, True) | plan.resharded_units(),
        recomputed=plan.recomputed_modules(),
        precision=plan.precision,
        optimizer=plan.optimizer,
        accumulation_steps=plan.batch.accumulation_steps,
        is_compiled=plan.compile is Compile.BLOCKS,
        num_averages=num_averages,
        in_flight=plan.stage.in_flight if plan.stage is not None else 1,
        beside_bytes=plan.stage.beside_bytes if plan.stage is not None else 0.0,
        whole_gradients=bool(plan.fsdp.whole_gradients),
        gathered_once=bool(plan.fsdp.gathered_once),
        over_tp=plan.units_over_tp(),
        crossing=crossing_layouts(graph, plan.stage),
    )
