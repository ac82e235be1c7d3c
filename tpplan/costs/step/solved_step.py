"""From a solved formulation to the sections of a Plan: every block expanded, and priced again from scratch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.core.errors import ModelError
from tpplan.core.graph import LEFT_AT, LOSS_SCOPE, Boundary, Direction, ModelGraph, Op, Source
from tpplan.core.layout import Conversion, Layout, R, local_shape
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.error_bars import NONE, Residuals
from tpplan.costs.step.cost_table import price_space
from tpplan.costs.step.formulate import BUCKET_BYTES, Formulation
from tpplan.costs.step.memory_replay import peak_of
from tpplan.costs.step.parameter_sizes import Weights
from tpplan.costs.strategy_times import Transfer
from tpplan.layouts.decision_space import CROSS_ENTROPY, is_summand
from tpplan.layouts.layer_treatments import Treatment
from tpplan.layouts.rules import OPAQUE, Call, Strategy, draws, has_rule
from tpplan.machine.profile import Collective, Estimate
from tpplan.plan.compress_names import pattern_of
from tpplan.plan.gradient_buckets import bucketed
from tpplan.plan.parts import ACCUMULATION, DATA_PARALLEL, FSDP_COPIES, ISSUE, OPTIMIZER, TENSOR_PARALLEL, TP_REDUCTION
from tpplan.plan.plan import (
    BoundaryPlan,
    CollectivePlan,
    CrossingPlan,
    FsdpPlan,
    ParameterPlan,
    Pass,
    Prediction,
    Recompute,
)
from tpplan.solvers.problem import total

#: as what FSDP gathers parameters of several dtypes
BYTES = "uint8"
#: numbers that ranks exchange of each parameter that FSDP does not hold: whether its gradient is there, and came now
FLAGS = 2
#: relative difference between tied and expanded prices that rounding explains
PRICE_TOLERANCE = 1e-6


def expand(formulation: Formulation, choice: Mapping[str, int]) -> Formulation:
    """The solution with every decision its own class and one strategy: what will be applied, nothing shared.

    Raises AssertionError where its price, priced from scratch, is not the tied problem's, or where it may need more
    memory than that says: it may need less, for what was chosen need not name the least recomputed layers.
    """
    space = formulation.space
    untied = replace(
        space,
        strategies={name: (formulation.strategy(choice, name),) for name in space.deciders},
        classes={name: name for name in space.deciders},
    )
    setting, tied = formulation.setting, formulation.priced
    priced = price_space(
        untied,
        setting.profile,
        setting.gpus_per_node,
        tied.executor,
        is_compiled=tied.is_compiled,
        num_gpus=formulation.mesh.num_gpus,
    )
    kin = {unit.name: kind.unit.name for kind in formulation.kinds for unit in kind.units}
    decided = replace(setting, treatments=formulation.treatments(choice), kin=kin)
    expanded = replace(formulation, priced=priced, setting=decided, conflicts=())
    problem = formulation.problem
    everything = dict.fromkeys(untied.deciders, 0)
    before, after = problem.price(choice), expanded.problem.price(everything)
    assert abs(before - after) <= PRICE_TOLERANCE * max(before, after), (
        f"the tied problem prices its solution at {before}, the expanded plan costs {after}"
    )
    for tied_row, row in zip(problem.resources, expanded.problem.resources, strict=True):
        before, after = total(tied_row.terms, choice), total(row.terms, everything)
        assert after <= before * (1 + PRICE_TOLERANCE), (
            f"{row.name}: the tied problem says {before} bytes, the expanded plan needs {after}"
        )
    assert expanded.problem.is_consistent(everything), "the expanded plan's layouts disagree along an edge"
    return expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """An expanded formulation read decision by decision."""

    formulation: Formulation
    #: where parameters stay as they are, backwards of a step that average all gradients; None where that is FSDP's work
    num_averages: int | None = None

    @property
    def graph(self) -> ModelGraph:
        """The traced graph."""
        return self.formulation.space.graph

    def strategy(self, decision: str) -> Strategy:
        """The strategy of a decision."""
        return self.formulation.space.strategies[decision][0]

    def layout(self, value: str) -> Layout:
        """The layout of a computed value; R for inputs, buffers and constants. Parameters have one per reading."""
        place = self.formulation.space.layouts.get(value)
        return self.strategy(place[0]).results[place[1]] if place is not None else R

    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """One rank's shapes of computed values under the layouts chosen; a proof has seen these."""
        tp, values = self.formulation.mesh.tp, self.graph.values
        names = (result for node in self.graph.nodes for result in node.results)
        return {name: local_shape(values[name].shape, self.layout(name), tp) for name in names}

    def placement(self, source: Source) -> Layout:
        """A parameter's placement; replicated where nothing reads it."""
        readings = self.formulation.space.readings[source.label]
        return self.strategy(readings[0].name).operands[0] if readings else R

    def conversions(self) -> Iterator[tuple[Boundary, Conversion]]:
        """Every boundary where the layout changes."""
        for boundary in self.graph.boundaries:
            strategy = self.strategy(boundary.name)
            conversion = Conversion(strategy.operands[0], strategy.results[0])
            if not conversion.is_identity:
                yield boundary, conversion

    # Sections of the plan, by full names

    def parameter_plans(self) -> dict[str, ParameterPlan]:
        """Placement and readings of each parameter."""
        space = self.formulation.space
        found = {}
        for source in self.graph.parameters:
            value = self.graph.values[source.result]
            master = "float32" if self.formulation.setting.master_bytes(value.dtype) == 4 else value.dtype
            reads = {r.op.module: self.strategy(r.name).results[0] for r in space.readings[source.label]}
            found[source.label] = ParameterPlan(
                placement=self.placement(source),
                reads=reads,
                shape=value.shape,
                dtype=master,
                trainable=source.trainable,
                aliases=source.aliases,
            )
        return found

    def boundary_plans(self) -> dict[str, BoundaryPlan]:
        """Conversions of each module."""
        chosen: dict[tuple[str, Direction, str], CrossingPlan] = {}
        for boundary in self.graph.boundaries:
            strategy = self.strategy(boundary.name)
            conversion = Conversion(strategy.operands[0], strategy.results[0])
            place = (boundary.module, boundary.direction, boundary.path)
            crossing = chosen.setdefault(place, CrossingPlan(conversion, self.graph.values[boundary.operand].dtype))
            assert crossing.conversion == conversion, f"calls of a module differ at {place}"
        found: dict[str, dict[Direction, dict[str, CrossingPlan]]] = {}
        for (module, direction, path), crossing in chosen.items():
            if not crossing.conversion.is_identity:
                sides = found.setdefault(module, {Direction.INPUT: {}, Direction.OUTPUT: {}})
                sides[direction][path] = crossing
        return {
            module: BoundaryPlan(inputs=sides[Direction.INPUT], outputs=sides[Direction.OUTPUT])
            for module, sides in found.items()
        }

    def outputs(self) -> dict[str, Layout]:
        """Layouts of the model's outputs that are not R, those among them that its forward leaves behind."""
        returned = (
            (boundary.path, boundary.result)
            for boundary in self.graph.boundaries
            if boundary.module == "" and boundary.direction is Direction.OUTPUT
        )
        left = ((path, value) for path, value in self.graph.outputs if path.startswith(LEFT_AT))
        return {path: layout for path, value in (*returned, *left) if (layout := self.layout(value)) != R}

    def sharded_losses(self) -> dict[str, int]:
        """Modules in whose forward a cross entropy runs on slices, and the number of classes."""
        found: dict[str, int] = {}
        for op in self.graph.ops:
            if (
                op.target == CROSS_ENTROPY
                and op.module != LOSS_SCOPE
                and self.strategy(op.name).operands[0].dim is not None
            ):
                count = self.graph.values[op.operands[0]].shape[-1]
                if found.setdefault(op.module, count) != count:
                    raise ModelError(
                        f"module {op.module or ROOT}: its forward has cross entropies over {found[op.module]} and over "
                        f"{count} classes, which slices would confuse; put them into modules of their own"
                    )
        return {module or ROOT: count for module, count in found.items()}

    def drawing_modules(self) -> tuple[str, ...]:
        """Modules in whose forward dropout falls on slices."""
        found = {
            op.module: None
            for op in self.graph.ops
            if draws(Call.of(self.graph, op))
            and any(layout.dim is not None for layout in self.strategy(op.name).operands)
        }
        return tuple(module or ROOT for module in found)

    def fsdp_plan(self) -> FsdpPlan:
        """Units by pattern, the root last."""
        names = [unit.name or ROOT for unit in self.formulation.units] if self.formulation.uses_fsdp else []
        patterns = dict.fromkeys(self._pattern_of(name) for name in names)
        treatments = self.treatments
        resharded = [treatment.reshard for treatment in treatments.values()]
        rule = 2 * sum(resharded) >= len(resharded)
        exceptions = tuple(name for name in names if name in treatments and treatments[name].reshard != rule)
        return FsdpPlan(units=tuple(patterns), reshard_after_forward=rule, exceptions=exceptions)

    @property
    def treatments(self) -> Mapping[str, Treatment]:
        """What is done to each layer."""
        return self.formulation.treatments(dict.fromkeys(self.formulation.space.deciders, 0))

    def recomputed(self) -> dict[str, Recompute]:
        """What of each layer runs again in backward, layers of which nothing does left out."""
        modes = {name: treatment.recompute for name, treatment in self.treatments.items()}
        return {name: mode for name, mode in modes.items() if mode is not Recompute.NONE}

    def unruled_ops(self) -> dict[str, float]:
        """Ops that no rule covers and that therefore run whole, though they read gradient-carrying tensors: seconds."""
        found: Counter[str] = Counter()
        for op in self.graph.ops:
            is_unruled = not has_rule(op.target) and op.target != OPAQUE
            if is_unruled and any(self.graph.values[name].carries_gradient for name in op.operands):
                found[op.target] += self._seconds(op)  # type: ignore[assignment]
        return {target: float(seconds) for target, seconds in sorted(found.items())}

    def guesses(self) -> tuple[str, ...]:
        """What is not known of ops, but taken to be, by the modules that they stand in."""
        space, executor = self.formulation.space, self.formulation.priced.executor
        found = (
            f"{self._pattern_of(op.module) or ROOT}: {guess}"
            for op in self.graph.ops
            for guess in executor.execute(Call.of(self.graph, op), self.strategy(op.name), space.tp).guesses
        )
        return tuple(dict.fromkeys(found))

    def opaque_seconds(self) -> dict[str, float]:
        """Modules that run whole, and the seconds they take in a step."""
        found: Counter[str] = Counter()
        for op in self.graph.ops:
            if op.target == OPAQUE:
                found[op.module] += self._seconds(op)  # type: ignore[assignment]
        return {module: float(seconds) for module, seconds in found.items()}

    def _seconds(self, op: Op) -> float:
        """What an op takes in a step, compute alone."""
        times = self.formulation.table[op.name][0]
        return (times.forward + times.backward).seconds * self.formulation.setting.accumulation_steps

    # Collectives

    def collectives(self) -> tuple[CollectivePlan, ...]:
        """Every collective of an optimizer step on one rank."""
        counts: Counter[tuple[str, str, Axis, Pass, str, int]] = Counter()
        steps = self.formulation.setting.accumulation_steps
        for name, times in self.formulation.table.items():
            decider = self.formulation.space.deciders[name]
            where = decider.module if isinstance(decider, Op | Boundary) else decider.op.module
            for transfer in times[0].transfers:
                counts[self._key(where, transfer)] += steps
        counts.update(self._tp_reductions())
        if self.num_averages is None:
            counts.update(self._fsdp_collectives())
        counts.update(self._averages())
        return tuple(
            CollectivePlan(
                where=where, kind=kind, axis=axis, during=during, dtype=dtype, num_bytes=num_bytes, count=count
            )
            for (where, kind, axis, during, dtype, num_bytes), count in sorted(counts.items())
            if num_bytes
        )

    def _key(self, where: str, transfer: Transfer) -> tuple[str, str, Axis, Pass, str, int]:
        module = self._pattern_of(where) or ROOT
        return module, str(transfer.kind), Axis.TP, transfer.during, transfer.dtype, transfer.num_bytes

    def _tp_reductions(self) -> Counter[tuple[str, str, Axis, Pass, str, int]]:
        """Buckets of the gradients of R* readings."""
        weights = self._weights
        sizes: dict[str, list[int]] = {}
        for source in weights.trainable:
            if any(is_summand(self.strategy(r.name)) for r in self.formulation.space.readings[source.label]):
                num_bytes = weights.master_width(source) * weights.shard_elements(source)
                sizes.setdefault(self._master_dtype(source), []).append(num_bytes)
        found: Counter[tuple[str, str, Axis, Pass, str, int]] = Counter()
        for dtype, own in sizes.items():
            for bucket in bucketed(own, BUCKET_BYTES):
                num_bytes = sum(own[position] for position in bucket)
                found[ROOT, str(Collective.ALL_REDUCE), Axis.TP, Pass.STEP, dtype, num_bytes] += 1
        return found

    def _fsdp_collectives(self) -> Counter[tuple[str, str, Axis, Pass, str, int]]:
        """Gathers and reductions of each unit; the root is gathered once a micro-batch, the others again backward."""
        found: Counter[tuple[str, str, Axis, Pass, str, int]] = Counter()
        mesh, steps, treatments = self.formulation.mesh, self.formulation.setting.accumulation_steps, self.treatments
        kinds = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
        gather, scatter, reduce = map(str, kinds)
        for unit in self.formulation.units if mesh.data_parallel > 1 else ():
            where = self._pattern_of(unit.name) or ROOT
            held = [source for source in unit.parameters if not self._is_beside_fsdp(source)]
            trained = [source for source in held if self._has_gradient(source)]
            gathered, reduced = self._unit_bytes(held, trained)
            if mesh.shard > 1 and held:
                dtype = self._gathered_dtype(held)
                found[where, gather, Axis.SHARD, Pass.FORWARD, dtype, gathered] += steps
                if unit.name and treatments[unit.name].reshard:
                    found[where, gather, Axis.SHARD, Pass.BACKWARD, dtype, gathered] += steps
            if not trained:
                continue
            dtype = self._master_dtype(trained[0])
            if mesh.shard > 1:
                found[where, scatter, Axis.SHARD, Pass.BACKWARD, dtype, reduced] += steps
            if mesh.replicate > 1:
                found[where, reduce, Axis.REPLICATE, Pass.BACKWARD, dtype, reduced // mesh.shard] += 1
        return found

    def _averages(self) -> Counter[tuple[str, str, Axis, Pass, str, int]]:
        """Of the gradients that FSDP does not hold, over each of its axes: first which ranks have one, then in buckets
        (tpplan.apply.collectives.dp_gradients)."""
        found: Counter[tuple[str, str, Axis, Pass, str, int]] = Counter()
        weights, times = self._weights, 1 if self.num_averages is None else self.num_averages
        beside = [source for source in weights.trainable if self._is_beside_fsdp(source)]
        sizes: dict[str, list[int]] = {}
        for source in filter(self._has_gradient, beside):
            num_bytes = weights.master_width(source) * weights.elements(source)
            sizes.setdefault(self._master_dtype(source), []).append(num_bytes)
        for axis in (Axis.REPLICATE, Axis.SHARD):
            if beside and self.formulation.mesh.size(axis) > 1:
                kind = str(Collective.ALL_REDUCE)
                found[ROOT, kind, axis, Pass.STEP, "int32", FLAGS * DTYPE_BYTES["int32"] * len(beside)] += times
                for dtype, own in sizes.items():
                    for bucket in bucketed(own, BUCKET_BYTES):
                        found[ROOT, kind, axis, Pass.STEP, dtype, sum(own[position] for position in bucket)] += times
        return found

    def _is_beside_fsdp(self, source: Source) -> bool:
        """True where FSDP is not used for it: all parameters stay as they are, or it has no dims."""
        if self.num_averages is not None:
            return True
        return self.formulation.uses_fsdp and not self.graph.values[source.result].shape

    @property
    def _weights(self) -> Weights:
        return Weights(formulation=self.formulation)

    def _unit_bytes(self, parameters: Sequence[Source], trained: Sequence[Source]) -> tuple[int, int]:
        """Bytes of a unit on one tp rank, as gathered and as reduced: whole, and filled up as in FSDP's buffers."""
        weights = self._weights
        gathered = sum(weights.compute_width(source) * weights.padded_elements(source) for source in parameters)
        reduced = sum(weights.master_width(source) * weights.padded_elements(source) for source in trained)
        return gathered, reduced

    def _has_gradient(self, source: Source) -> bool:
        """True for a parameter that trains and that something reads: FSDP reduces no other."""
        return source.trainable and bool(self.formulation.space.readings[source.label])

    def _master_dtype(self, source: Source) -> str:
        """Of a parameter at rest and of its gradient."""
        dtype = self.graph.values[source.result].dtype
        return "float32" if self.formulation.setting.master_bytes(dtype) == DTYPE_BYTES["float32"] else dtype

    def _gathered_dtype(self, parameters: Sequence[Source]) -> str:
        """What FSDP gathers a unit in: parameters of several dtypes travel as bytes."""
        dtypes = {self.graph.values[source.result].dtype for source in parameters}
        return dtypes.pop() if len(dtypes) == 1 else BYTES

    def prediction(self, modes: Mapping[str, Recompute] | None = None) -> Prediction:
        """Seconds by part, from the expanded problem's own terms, and bytes, from its step gone through. `modes` are
        the modules that are recomputed, if they are others than the setting's."""
        problem = self.formulation.problem
        everything = dict.fromkeys(self.formulation.space.deciders, 0)
        time: Counter[str] = Counter()
        for term in problem.objective:
            time[term.name] += term.value(everything)  # type: ignore[assignment]
        peak = peak_of(
            self.formulation,
            self.recomputed() if modes is None else modes,
            is_averaged=self.num_averages is not None,
        )
        error, is_extrapolated = self._error(dict(time))
        return Prediction(
            step_time_s=float(sum(time.values())),
            step_time_error_s=error,
            is_extrapolated=is_extrapolated,
            time_s={name: float(seconds) for name, seconds in time.items()},
            peak_memory_bytes=peak.num_bytes,
            slack_bytes=float(self.formulation.setting.slack_bytes),
            memory_limit_bytes=self.formulation.setting.memory_limit_bytes,
            memory_bytes=peak.memory_bytes,
            peak_during=peak.during,
            peak_module=peak.module or ROOT,
        )

    def _error(self, time: Mapping[str, float]) -> tuple[float, bool]:
        """tpplan.costs.error_bars has the model. Parts that are bytes times a rate have the rate's relative error."""
        formulation, profile = self.formulation, self.formulation.setting.profile
        times = [t for entry in formulation.table.values() for t in entry]
        repeats = formulation.repeats()
        found = [t.residuals for t in times] + [again.residuals for again in repeats]
        residuals = sum(found, NONE) * formulation.setting.accumulation_steps
        estimates = [e for t in times for e in (t.forward, t.backward, t.forward_collectives, t.backward_collectives)]
        estimates += [estimate for again in repeats for estimate in (again.compute, again.collectives)]
        extrapolated = any(e.extrapolated for e in estimates)
        moved, step = profile.memory_bound(num_bytes=BUCKET_BYTES), formulation.optimizer_issue()
        if profile.device_type == "cuda" and step.seconds < time.get(OPTIMIZER, 0.0):
            step = Estimate.zero()  # the GPU takes longer
        moving_s = sum(time.get(part, 0.0) for part in (FSDP_COPIES, ACCUMULATION, OPTIMIZER))
        residuals += Residuals(
            memory=max(0.0, moving_s - step.seconds) * moved.relative_error,
            launches=time.get(ISSUE, 0.0) * profile.launch.relative_error + step.error_s,
        )
        data_axis = Axis.SHARD if formulation.mesh.shard > 1 else Axis.REPLICATE
        axes = {DATA_PARALLEL: data_axis, TP_REDUCTION: Axis.TP}
        for part, axis in axes.items():
            if time.get(part, 0.0) > 0 and formulation.mesh.size(axis) > 1:
                bucket = formulation.seconds_per_byte(Collective.ALL_REDUCE, axis)
                error = time[part] * bucket.relative_error
                is_tp = axis is Axis.TP
                residuals += Residuals(tp_collectives=error) if is_tp else Residuals(data_collectives=error)
                extrapolated |= bucket.extrapolated
        tp_s = time.get(TENSOR_PARALLEL, 0.0) + time.get(TP_REDUCTION, 0.0)
        return residuals.combined(profile, sum(time.values()) - tp_s), extrapolated

    def _pattern_of(self, name: str) -> str:
        return pattern_of(self.graph, name)
