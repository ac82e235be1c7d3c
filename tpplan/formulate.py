"""From a priced decision space and a mesh to the optimization problem, and from its solution back to numbers.

Objective: seconds of one optimizer step on one rank,

    A * (compute + tp collectives) + waiting for the CPU + exposed FSDP communication + FSDP's copies
        + gradient reductions + adding up gradients + optimizer

with A accumulation steps; tpplan.costs.issue says when a GPU waits for the CPU. FSDP prefetches: a unit's gather hides
behind the compute of its neighbour, so of a unit only max(0, communication - compute) is exposed; the root's is all
exposed, for nothing runs before or after it. A device without streams hides nothing: on a CPU each of FSDP's
collectives is waited for where it is issued.
Resource: peak bytes of one rank = parameters + gradients + optimizer states (each over its FSDP shard) + saved
activations + unsharded units + the largest op's gradients.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tpplan.costs.additions import MOVED
from tpplan.costs.compute import Executor
from tpplan.costs.issue import Lag, scaled, waiting
from tpplan.costs.memory import activation_terms
from tpplan.costs.regions import NO_REGIONS, Regions
from tpplan.costs.table import StrategyTime, time_table
from tpplan.graph import Boundary, Source, within
from tpplan.layout import Layout, LayoutKind
from tpplan.ledger import BUFFERS, TRANSIENTS
from tpplan.mesh import Axis, Mesh
from tpplan.optimizers import optimizer_named
from tpplan.plan import Precision, Recompute, uses_fsdp
from tpplan.problem import Edge, Expression, Node, Problem, Resource, Term
from tpplan.profile import Collective, Estimate, HardwareProfile
from tpplan.rules import Strategy
from tpplan.space import Reading, Space, is_summand
from tpplan.units import DTYPE_BYTES

#: from a parameter to the bytes of its whole
BytesOf = Callable[[Source], float]

#: parts of the step's time
COMPUTE, TENSOR_PARALLEL, DATA_PARALLEL = "compute", "tensor-parallel collectives", "exposed data-parallel collectives"
TP_REDUCTION, OPTIMIZER = "tensor-parallel gradient reduction", "optimizer"
FSDP_COPIES = "copies of FSDP"
ACCUMULATION, ISSUE = "gradient accumulation", "waiting for the CPU"

#: prices that differ by less are the same
TIE_TOLERANCE = 1e-9
#: what a conversion counts among equals: less than anything that takes time
CONVERSION_S = 1e-9

#: bytes reduced at once; gradients of many small parameters travel together (torch DDP's default bucket)
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What surrounds the model: how it is trained, on what."""

    profile: HardwareProfile
    gpus_per_node: int
    precision: Precision
    optimizer: str
    memory_limit_bytes: float
    accumulation_steps: int
    units: tuple[str, ...]
    #: what of every unit but the root runs again in backward
    recompute: Recompute = Recompute.NONE
    #: ZeRO-3; False keeps units gathered until their backward (ZeRO-2)
    reshard_after_forward: bool = True

    def master_bytes(self, dtype: str) -> int:
        """Bytes per element of a parameter at rest and of its gradient; the trace has the compute dtype."""
        if self.precision is Precision.BF16_MIXED and dtype == "bfloat16":
            return DTYPE_BYTES["float32"]
        return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An FSDP unit: parameters gathered together. `hides` are the decisions of its module."""

    name: str
    parameters: tuple[Source, ...]
    hides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A collective and the compute it runs beside, if any, in seconds; it happens `weight` times a step."""

    transfer: Expression
    compute: Expression | None
    weight: float

    def terms(self, slowdown: float) -> Iterator[Term]:
        """What a step takes longer for it: T where nothing runs beside it, else what does not hide behind the compute,
        and what hides by as much as it slows that: max(0, T - C) + s min(T, C) = (1 - s) max(0, T - C) + s T."""
        if self.compute is None:
            yield Term(name=DATA_PARALLEL, expressions=(self.transfer,), weight=self.weight)
            return
        exposed = (Expression(), _minus(self.transfer, self.compute))
        yield Term(name=DATA_PARALLEL, expressions=exposed, weight=self.weight * (1 - slowdown))
        if slowdown:
            yield Term(name=DATA_PARALLEL, expressions=(self.transfer,), weight=self.weight * slowdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSpace:
    """A decision space with what its strategies cost per micro-batch: the same for every mesh of its tp degree."""

    space: Space
    times: Mapping[str, tuple[StrategyTime, ...]]
    activations: tuple[Term, ...]
    executor: Executor
    regions: Regions
    is_compiled: bool


def price_space(
    space: Space,
    profile: HardwareProfile,
    gpus_per_node: int,
    executor: Executor,
    regions: Regions = NO_REGIONS,
    *,
    is_compiled: bool = False,
) -> PricedSpace:
    """Times and activations of every decision."""
    group = Mesh(tp=space.tp).group(Axis.TP, gpus_per_node)
    return PricedSpace(
        space=space,
        times=time_table(space, profile, group, executor, regions, is_compiled=is_compiled),
        activations=activation_terms(space, executor, regions),
        executor=executor,
        regions=regions,
        is_compiled=is_compiled,
    )


@dataclass(frozen=True, kw_only=True)
class Formulation:
    """One mesh's problem and what is needed to read its solution."""

    priced: PricedSpace
    mesh: Mesh
    setting: Setting

    @property
    def space(self) -> Space:
        """The decisions."""
        return self.priced.space

    @property
    def table(self) -> Mapping[str, tuple[StrategyTime, ...]]:
        """Times by deciding decision."""
        return self.priced.times

    @property
    def uses_fsdp(self) -> bool:
        """FSDP2 shards, replicates, or casts."""
        return uses_fsdp(self.mesh, self.setting.precision)

    @cached_property
    def problem(self) -> Problem:
        """The problem; nodes are the deciding decisions."""
        names = list(self.space.members)
        return Problem(
            nodes=tuple(
                Node(name=name, strategies=tuple(str(s) for s in self.space.strategies[name])) for name in names
            ),
            edges=tuple(dict.fromkeys(self._edges())),
            objective=tuple(self._objective()),
            resources=(
                Resource(name="memory", terms=tuple(self._memory()), limit=self.setting.memory_limit_bytes),
                Resource(
                    name="memory of the optimizer's step",
                    terms=tuple(self._step_memory()),
                    limit=self.setting.memory_limit_bytes,
                ),
            ),
        )

    def strategy(self, choice: Mapping[str, int], decision: str) -> Strategy:
        """The chosen strategy of any decision."""
        representative = self.space.classes[decision]
        return self.space.strategies[representative][choice[representative]]

    def tie_break(self, objective_s: float) -> Problem:
        """Among choices of this price, that of least work: where communication is exposed, compute behind it is free.

        Minimizes compute, tp collectives and reductions, hidden or not, and then the number of conversions.
        """
        work = tuple(t for t in self.problem.objective if t.name in (COMPUTE, TENSOR_PARALLEL, TP_REDUCTION))
        conversions = (
            _linear("conversions", name, [CONVERSION_S * (s.operands != s.results) for s in strategies], 1.0)
            for name in self.space.members
            if isinstance(self.space.deciders[name], Boundary) and len(strategies := self.space.strategies[name]) > 1
        )
        price = Resource(name="step time", terms=self.problem.objective, limit=objective_s * (1 + TIE_TOLERANCE))
        return Problem(
            nodes=self.problem.nodes,
            edges=self.problem.edges,
            objective=(*work, *conversions),
            resources=(*self.problem.resources, price),
        )

    # Edges

    def _edges(self) -> Iterator[Edge]:
        space = self.space
        for flow in space.flows:
            source, target = space.classes[flow.source], space.classes[flow.target]
            yield Edge(
                source=source,
                target=target,
                source_layouts=tuple(str(s.results[flow.result]) for s in space.strategies[source]),
                target_layouts=tuple(str(s.operands[flow.operand]) for s in space.strategies[target]),
            )
        for readings in space.readings.values():
            yield from self._agreements([r.name for r in readings], lambda strategy: str(strategy.operands[0]))
        for shared in space.shared:
            yield from self._agreements(shared, str)

    def _agreements(self, names: Sequence[str], label: Callable[[Strategy], str]) -> Iterator[Edge]:
        """All of these decisions choose strategies with the same label."""
        classes = list(dict.fromkeys(self.space.classes[name] for name in names))
        for source, target in pairwise(classes):
            yield Edge(
                source=source,
                target=target,
                source_layouts=tuple(map(label, self.space.strategies[source])),
                target_layouts=tuple(map(label, self.space.strategies[target])),
            )

    # Objective

    def _objective(self) -> Iterator[Term]:
        steps = self.setting.accumulation_steps
        for name, members in self.space.members.items():
            times = self.table[name]
            weight = float(steps * len(members))
            for part, seconds in (
                (COMPUTE, [(t.forward + t.backward + t.again).seconds for t in times]),
                (
                    TENSOR_PARALLEL,
                    [(t.forward_collectives + t.backward_collectives + t.again_collectives).seconds for t in times],
                ),
            ):
                if any(seconds):
                    yield _linear(part, name, seconds, weight)
        yield from self._issue()
        yield from self._tp_gradient_reductions()
        yield from self._accumulation()
        yield from self._optimizer()
        if self.mesh.data_parallel > 1:
            for overlap in self.overlaps():
                yield from overlap.terms(self.setting.profile.overlap_slowdown)
        if self.uses_fsdp:
            yield from self._fsdp_copies()

    def lags(self) -> dict[str, Lag]:
        """How far issuing a micro-batch's kernels falls behind running them; nothing where a profile does not say."""
        issue_s = self.setting.profile.issue_s
        if issue_s is None:
            return {}
        found = {}
        for name, members in self.space.members.items():
            times = self.table[name]
            forward = [issue_s * t.forward_kernels - (t.forward + t.forward_collectives).seconds for t in times]
            rest = [issue_s * (t.backward_kernels + t.again_kernels) - _rest(t).seconds for t in times]
            both = [first + other for first, other in zip(forward, rest, strict=True)]
            if any(forward) or any(both):
                found[name] = Lag(forward=scaled(forward, len(members)), both=scaled(both, len(members)))
        return found

    def _issue(self) -> Iterator[Term]:
        if lags := self.lags():
            yield Term(name=ISSUE, expressions=waiting(lags, self.setting.accumulation_steps))

    def _tp_gradient_reductions(self) -> Iterator[Term]:
        """R* readings: gradients summed over tp once per step, in buckets, each rank its FSDP shard."""
        rate = self.seconds_per_byte(Collective.ALL_REDUCE, Axis.TP).seconds
        if not rate:
            return
        for readings in self.space.readings.values():
            gradient = self._gradient_bytes(readings[0].parameter) / self.mesh.shard if readings else 0.0
            # Once for a parameter, if any of its readings is R*.
            names = dict.fromkeys(self.space.classes[reading.name] for reading in readings)
            vectors = {
                name: tuple(gradient * rate if is_summand(s) else 0.0 for s in self.space.strategies[name])
                for name in names
            }
            if any(any(vector) for vector in vectors.values()):
                expressions = tuple(Expression(terms=(item,)) for item in vectors.items())
                yield Term(name=TP_REDUCTION, expressions=expressions)

    def _accumulation(self) -> Iterator[Term]:
        """Each micro-batch's gradients but the first's are added to those there are, on every rank its shard."""
        rate = self.setting.profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES
        if added := self.setting.accumulation_steps - 1:
            for expression in self._parameter_bytes(self._gradient_bytes):
                yield Term(name=ACCUMULATION, expressions=(expression,), weight=MOVED * added * rate / self.shards)

    def _optimizer(self) -> Iterator[Term]:
        """Reads parameter, gradient and states, writes parameter and states."""
        rate = self.setting.profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES

        def moved(source: Source) -> float:
            return 3 * self._gradient_bytes(source) + 2 * self._state_bytes(source)

        for expression in self._parameter_bytes(moved):
            yield Term(name=OPTIMIZER, expressions=(expression,), weight=rate / self.shards)

    def overlaps(self) -> Iterator[Beside]:
        """FSDP's collectives, each with the compute that it runs beside; nothing runs beside the root's."""
        steps = self.setting.accumulation_steps
        for unit, count in self.distinct_units:
            gather = self._transfer(unit, Collective.ALL_GATHER, Axis.SHARD, self._compute_bytes)
            scatter = self._transfer(unit, Collective.REDUCE_SCATTER, Axis.SHARD, self._gradient_bytes)
            reduce = self._transfer(unit, Collective.ALL_REDUCE, Axis.REPLICATE, self._sharded_gradient_bytes)
            if unit.name == "":
                yield Beside(transfer=_sum(gather, scatter), compute=None, weight=float(steps * count))
                yield Beside(transfer=reduce, compute=None, weight=float(count))
                continue
            forward, backward = self._hidden_time(unit)
            repeated = _sum(gather, scatter) if self.setting.reshard_after_forward else scatter
            yield Beside(transfer=gather, compute=forward, weight=float(steps * count))
            if steps > 1:
                yield Beside(transfer=repeated, compute=backward, weight=float((steps - 1) * count))
            yield Beside(transfer=_sum(repeated, reduce), compute=backward, weight=float(count))

    def _fsdp_copies(self) -> Iterator[Term]:
        """FSDP2 gathers and reduces in flat buffers, into which and out of which it copies, one rank's shard too.

        A gather: in from a rank's own shard, which it casts, and out. A reduction: in from a unit's gradients; a single
        rank's are copied where several's are scattered. [torch 2.13, fsdp/_fully_shard/_fsdp_collectives.py]
        """
        rate = self.setting.profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES
        steps = self.setting.accumulation_steps
        is_alone = self.shards == 1
        copies_in = 0.0 if is_alone and self.setting.precision is not Precision.BF16_MIXED else 1 / self.shards

        def gathered(source: Source) -> float:
            return 2 * self._compute_bytes(source) + copies_in * (self._master(source) + self._compute_bytes(source))

        def reduced(source: Source) -> float:
            copied_in = self._compute_bytes(source) * _trainable(source) + self._gradient_bytes(source)
            return copied_in + (2 * self._gradient_bytes(source) if is_alone else 0.0)

        for unit, count in self.distinct_units:
            gathers = 2 if unit.name and self.setting.reshard_after_forward else 1

            def moved(source: Source, gathers: int = gathers) -> float:
                return gathers * gathered(source) + reduced(source)

            weight = rate * steps * count
            yield Term(name=FSDP_COPIES, expressions=(self._bytes_expression(unit.parameters, moved),), weight=weight)

    def _hidden_time(self, unit: Unit) -> tuple[Expression, Expression]:
        """A unit's own forward and backward compute. Collectives of the tp axis hide nothing: links are shared."""
        if self.setting.profile.device_type == "cpu":
            return Expression(), Expression()
        counts = Counter(unit.hides)
        forward = tuple((name, tuple(n * t.forward.seconds for t in self.table[name])) for name, n in counts.items())
        backward = tuple(
            (name, tuple(n * (t.backward + t.again).seconds for t in self.table[name])) for name, n in counts.items()
        )
        return Expression(terms=forward), Expression(terms=backward)

    def _transfer(self, unit: Unit, kind: Collective, axis: Axis, bytes_of: BytesOf) -> Expression:
        """Seconds of a collective over a unit's parameters, linear in their bytes between all and none sharded by tp.

        T(x) = T(n/t) + (T(n) - T(n/t)) (x - n/t) / (n - n/t): exact at both ends.
        """
        group = self.mesh.group(axis, self.setting.gpus_per_node)
        whole = sum(bytes_of(source) for source in unit.parameters)
        least = whole / self.mesh.tp
        profile = self.setting.profile
        low = profile.collective(kind, group, least).seconds
        if self.mesh.tp == 1 or not whole:
            return Expression(constant=low)
        slope = (profile.collective(kind, group, whole).seconds - low) / (whole - least)
        local = self._bytes_expression(unit.parameters, bytes_of)
        terms = tuple((name, tuple(slope * entry for entry in vector)) for name, vector in local.terms)
        return Expression(constant=low + slope * (local.constant - least), terms=terms)

    def seconds_per_byte(self, kind: Collective, axis: Axis) -> Estimate:
        """What a byte costs in a full bucket."""
        group = self.mesh.group(axis, self.setting.gpus_per_node)
        return self.setting.profile.collective(kind, group, BUCKET_BYTES) * (1 / BUCKET_BYTES)

    # Memory

    def _memory(self) -> Iterator[Term]:
        """At least the peak of what is chosen (tpplan.replay): as if all that lasts were there at once, and beside it
        the most that anything makes for a while."""
        yield from self._resting_memory()
        yield from self.priced.activations
        if self.mesh.tp > 1:
            everything = sum(map(self._gradient_bytes, self.space.graph.parameters)) / self.shards
            bucket = Expression(constant=min(everything, float(BUCKET_BYTES)))
            yield Term(name=BUFFERS, expressions=(bucket,))
        if self.uses_fsdp:
            yield from self._unsharded()

    def _resting_memory(self) -> Iterator[Term]:
        """What is there between steps, and gradients."""
        for expression in self._parameter_bytes(self._master):
            yield Term(name="parameters", expressions=(expression,), weight=1 / self.shards)
        for expression in self._parameter_bytes(self._gradient_bytes):
            yield Term(name="gradients", expressions=(expression,), weight=1 / self.shards)
        for expression in self._parameter_bytes(self._state_bytes):
            yield Term(name="optimizer states", expressions=(expression,), weight=1 / self.shards)

    def _step_memory(self) -> Iterator[Term]:
        """The optimizer's temporaries, when activations are gone."""
        optimizer = optimizer_named(self.setting.optimizer)
        yield from self._resting_memory()
        if optimizer.of_all:
            for expression in self._parameter_bytes(self._gradient_bytes):
                yield Term(name=TRANSIENTS, expressions=(expression,), weight=optimizer.of_all / self.shards)
        if optimizer.of_largest:
            each = (self._bytes_expression([source], self._gradient_bytes) for source in self.space.graph.parameters)
            expressions = tuple(dict.fromkeys(each))
            yield Term(name=TRANSIENTS, expressions=expressions, weight=optimizer.of_largest / self.shards)

    def _unsharded(self) -> Iterator[Term]:
        """The root stays gathered; of the other units the current and the prefetched; one unit's gradients."""
        gathered = [
            self._bytes_expression(unit.parameters, self._compute_bytes) for unit, _ in self.distinct_units if unit.name
        ]
        root = [unit for unit, _ in self.distinct_units if not unit.name]
        for unit in root:
            yield Term(
                name="unsharded parameters",
                expressions=(self._bytes_expression(unit.parameters, self._compute_bytes),),
            )
        if gathered and self.setting.reshard_after_forward:
            yield Term(name="unsharded parameters", expressions=tuple(gathered), weight=2.0)
        elif gathered:
            for unit, count in self.distinct_units:
                if unit.name:
                    every = self._bytes_expression(unit.parameters, self._compute_bytes)
                    yield Term(name="unsharded parameters", expressions=(every,), weight=float(count))
        gradients = tuple(
            _sum(
                self._bytes_expression(unit.parameters, self._compute_bytes),
                self._bytes_expression(unit.parameters, self._gradient_bytes),
            )
            for unit, _ in self.distinct_units
        )
        yield Term(name="unsharded gradients", expressions=gradients)

    # Parameters

    @property
    def shards(self) -> int:
        """Ranks that share a parameter beyond tp."""
        return self.mesh.shard

    def _state_bytes(self, source: Source) -> float:
        """Of the optimizer."""
        value = self.space.graph.values[source.result]
        width = self.setting.master_bytes(value.dtype)
        return (
            value.num_elements * optimizer_named(self.setting.optimizer).bytes_per_element(width) * _trainable(source)
        )

    def _master(self, source: Source) -> float:
        value = self.space.graph.values[source.result]
        return float(value.num_elements * self.setting.master_bytes(value.dtype))

    def _compute_bytes(self, source: Source) -> float:
        return float(self.space.graph.values[source.result].num_bytes)

    def _gradient_bytes(self, source: Source) -> float:
        """Gradients are reduced in the master dtype."""
        return self._master(source) * _trainable(source)

    def _sharded_gradient_bytes(self, source: Source) -> float:
        return self._gradient_bytes(source) / self.mesh.shard

    def _parameter_bytes(self, bytes_of: BytesOf) -> Iterator[Expression]:
        """One expression for each placement that decides, and one for the parameters that nothing reads."""
        whole = self._bytes_expression(self.space.graph.parameters, bytes_of)
        yield Expression(constant=whole.constant)
        for term in whole.terms:
            yield Expression(terms=(term,))

    def _bytes_expression(self, parameters: Sequence[Source], bytes_of: BytesOf) -> Expression:
        """Bytes of parameters on a rank of tp, by the placements that their first readings choose."""
        constant = 0.0
        vectors: dict[str, list[float]] = {}
        for source in parameters:
            readings = self.space.readings[source.label]
            if not readings:
                constant += bytes_of(source)
                continue
            name = self.space.classes[readings[0].name]
            vector = vectors.setdefault(name, [0.0] * len(self.space.strategies[name]))
            for i, strategy in enumerate(self.space.strategies[name]):
                vector[i] += bytes_of(source) / self.parts(strategy.operands[0])
        return Expression(constant=constant, terms=tuple((name, tuple(v)) for name, v in vectors.items()))

    def parts(self, layout: Layout) -> int:
        """Over how many ranks of tp a placement divides."""
        return self.mesh.tp if layout.kind is LayoutKind.SHARD else 1

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Every FSDP unit, the root last under the name "": each parameter in the deepest unit with all its names."""
        inside: dict[str, list[Source]] = {name: [] for name in (*self.setting.units, "")}
        for source in self.space.graph.parameters:
            names = (source.label, *source.aliases)
            owners = [unit for unit in self.setting.units if all(within(name, unit) for name in names)]
            inside[max(owners, key=len, default="")].append(source)
        hides: dict[str, list[str]] = {name: [] for name in inside}
        for decision, decider in self.space.deciders.items():
            module = decider.op.module if isinstance(decider, Reading) else decider.module
            owners = [unit for unit in self.setting.units if within(module, unit)]
            hides[max(owners, key=len, default="")].append(self.space.classes[decision])
        return tuple(
            Unit(name=name, parameters=tuple(parameters), hides=tuple(hides[name]))
            for name, parameters in inside.items()
            if parameters
        )

    @cached_property
    def distinct_units(self) -> tuple[tuple[Unit, int], ...]:
        """Units that decide alike, once, with their count."""
        found: dict[object, list[Unit]] = {}
        for unit in self.units:
            reads = tuple(
                self.space.classes[readings[0].name]
                if (readings := self.space.readings[source.label])
                else source.label
                for source in unit.parameters
            )
            found.setdefault((unit.name == "", reads, tuple(sorted(unit.hides))), []).append(unit)
        return tuple((units[0], len(units)) for units in found.values())


def _trainable(source: Source) -> int:
    """1 for a parameter that trains, 0 for a frozen one: what it has of gradients and states."""
    return int(source.trainable)


def _rest(time: StrategyTime) -> Estimate:
    """What of a micro-batch comes after its forward."""
    return time.backward + time.backward_collectives + time.again + time.again_collectives


def _linear(part: str, name: str, vector: Sequence[float], weight: float) -> Term:
    return Term(name=part, expressions=(Expression(terms=((name, tuple(vector)),)),), weight=weight)


def _sum(*expressions: Expression) -> Expression:
    return Expression(
        constant=sum(e.constant for e in expressions), terms=tuple(term for e in expressions for term in e.terms)
    )


def _minus(left: Expression, right: Expression) -> Expression:
    negative = tuple((name, tuple(-entry for entry in vector)) for name, vector in right.terms)
    return Expression(constant=left.constant - right.constant, terms=(*left.terms, *negative))
