"""One call of solve: the model as traced, and what has been computed of each tp degree."""

import copy
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from tpplan import solvers
from tpplan.core.errors import IndivisibleError, ModelError, SolverError, UsageError
from tpplan.core.graph import Direction, ModelGraph, within
from tpplan.core.mesh import Mesh, divisors, meshes, sub_clusters, tp_degrees
from tpplan.core.name_patterns import ROOT
from tpplan.costs.best_rates import BestRates, seconds_of_a_sequence
from tpplan.costs.step.cost_table import PricedSpace, price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.train_config import Setting
from tpplan.layouts.decision_space import Space, build_space
from tpplan.layouts.layer_treatments import Treatment
from tpplan.layouts.parameter_writes import why_copies, why_not_selective, write_within, writes_of
from tpplan.layouts.pins import Pin, Pinned
from tpplan.layouts.rules import Strategy
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Compile, Plan, Precision, Recompute, uses_fsdp
from tpplan.prove.apply_as_rank import copied
from tpplan.search.grown_graph import grown
from tpplan.search.options import Allows, Batch, BuildModel, Cluster, ExampleInputs, Progress
from tpplan.search.trace_cache import Built, Reuse, Traced
from tpplan.search.unsearched import unsearched_counts, unsearched_degrees
from tpplan.solvers.presolve import LIMIT_TOLERANCE
from tpplan.solvers.problem import Conflict, Problem, Solution, Status
from tpplan.torch_internals import pytree
from tpplan.torch_internals.modules import own_buffers, own_parameters
from tpplan.trace.answers.planned_device import PlannedDevice, planning_for
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.hooks.parameter_names import register_names
from tpplan.trace.opaque import Opaques
from tpplan.trace.record_fx import on_meta_like
from tpplan.trace.retrace_opaque import trace_marking
from tpplan.trace.trace import BoundaryHook, Loss, accumulated_hooks, assumptions, repeated_children

logger = logging.getLogger(__name__)

#: of some decisions the strategies among which one is chosen
Choices = Mapping[str, frozenset[Strategy]]
#: strategies that are forbidden, by tp and decision
Cuts = dict[tuple[int, str], set[Strategy]]


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A mesh and a micro-batch: what the ILP does not decide. The order says which of equals is taken."""

    num_gpus: int
    tp: int
    shard: int
    micro_batch: int

    @classmethod
    def of(cls, mesh: Mesh, micro_batch: int) -> "Point":
        """The point of a mesh."""
        return cls(mesh.num_gpus, mesh.tp, mesh.shard, micro_batch)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return Mesh(replicate=self.num_gpus // (self.tp * self.shard), shard=self.shard, tp=self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point with its formulation and its solution."""

    point: Point
    formulation: Formulation
    solution: Solution


@dataclass
class Job:
    """One call of solve: inputs, what has been computed of each micro-batch and tp degree, and the cuts found."""

    build_model: BuildModel
    example_inputs: ExampleInputs
    loss: Loss | None
    unused_outputs: frozenset[str]
    cluster: Cluster
    profile: HardwareProfile
    batch: Batch
    precision: Precision
    optimizer: str
    recompute: Recompute | None
    reshard_after_forward: bool | None
    is_compiled: bool
    wishes: Callable[[ModelGraph], Allows] | None
    limit: float
    solver: str | None
    time_limit_s: float | None
    report: Progress
    all_gpus: bool = True
    #: what the model's code is told that it runs on; None: the profile's device
    told: PlannedDevice | None = None
    pins: tuple[Pin, ...] = ()
    reuse: Reuse = field(default_factory=Reuse)
    spaces: dict[tuple[int, int], PricedSpace] = field(default_factory=dict)
    floors: dict[tuple[int, int], float] = field(default_factory=dict)
    #: what of meshes is left out without a bound that says why
    unsearched: tuple[str, ...] = ()
    #: what proofs have found to be wrong by itself, by tp and decision, and what they have together, by tp
    cuts: Cuts = field(default_factory=dict)
    conflicts: dict[int, list[Choices]] = field(default_factory=dict)
    #: what is cut to end sooner, though it may be right: the optimum without these cuts is the bound
    guesses: Cuts = field(default_factory=dict)
    cut_messages: list[str] = field(default_factory=list)
    #: by tp and the class of the module whose code differed, None where it is no module's
    counterexamples: Counter[tuple[int, type[nn.Module] | None]] = field(default_factory=Counter)

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        build_model: BuildModel,
        example_inputs: ExampleInputs,
        loss: Loss | None,
        machine: HardwareProfile,
        gpus_per_node: int,
    ) -> "Job":
        """The job whose model and batch are a given plan's: for its trace, and for what it costs on a machine."""
        return cls(
            build_model=build_model,
            example_inputs=example_inputs,
            loss=loss,
            unused_outputs=frozenset(),
            cluster=Cluster(gpus=plan.cluster.gpus, gpus_per_node=gpus_per_node, profile=machine),
            profile=machine,
            batch=Batch(plan.batch.global_batch, plan.batch.micro_batch, plan.batch.seq_len),
            precision=plan.precision,
            optimizer=plan.optimizer,
            recompute=Recompute.NONE,
            reshard_after_forward=True,
            is_compiled=plan.compile is Compile.BLOCKS,
            wishes=None,
            limit=machine.memory_bytes,
            solver=None,
            time_limit_s=None,
            report=lambda stage, done, total: None,
            told=PlannedDevice.parse(plan.proof.device) if plan.proof.device else None,
        )

    @property
    def device(self) -> PlannedDevice:
        """What the model's code sees while it is traced."""
        return self.told or PlannedDevice.of(self.profile)

    def changed(self, **options: object) -> "Job":
        """The same job with other options; what has been traced and priced is shared."""
        found = copy.copy(self)
        for name, value in options.items():
            setattr(found, name, value)
        found.floors = {}
        return found

    def points(self, *, tp: int | None, fsdp: int | None) -> list[Point]:
        """Every mesh with every micro-batch that divides its ranks' share of the global batch.

        Raises IndivisibleError where there is none.
        """
        gpus, per_node = self.cluster.gpus, self.cluster.gpus_per_node
        across = not self.profile.unmeasured_across_nodes
        self.unsearched = tuple(unsearched_degrees(self.cluster, self.profile)) if tp is None else ()
        own = (tp,) if tp else tuple(sorted({*tp_degrees(gpus, per_node, across_nodes=across), *divisors(per_node)}))
        every = list(meshes(gpus, per_node, tp=tp, fsdp=fsdp, across_nodes=across))
        for fewer in () if self.all_gpus else sub_clusters(gpus, per_node)[:-1]:
            degrees = [fewer // degree for degree in own if fewer % degree == 0]
            is_dividing = any(self.batch.global_batch % degree == 0 for degree in degrees)
            if is_dividing and fewer % ((tp or 1) * (fsdp or 1)) == 0:
                found_on = meshes(fewer, per_node, tp=tp, fsdp=fsdp, across_nodes=across)
                every += (mesh for mesh in found_on if mesh.tp in own)
        if not self.all_gpus:
            self.unsearched += tuple(unsearched_counts(self.cluster))
        found = [Point.of(mesh, m) for mesh in every for m in self.batch.micro_batches(mesh)]
        if not found:
            degrees = sorted({mesh.data_parallel for mesh in every})
            each = f" into micro-batches of {self.batch.micro_batch}" if self.batch.micro_batch else ""
            raise IndivisibleError(
                f"global batch {self.batch.global_batch} does not divide{each} on {' or '.join(map(str, degrees))} "
                f"data-parallel ranks of {gpus} GPUs; change --global-batch, --micro-batch or --tp"
            )
        return found

    def applicable(self, points: list[Point]) -> list[Point]:
        """Those on which the traced model can be laid out: all, unless its parameters must stay plain tensors, whole on
        each rank, or are written to. Raises UsageError where there is none then."""
        traced = self.traced(min(point.micro_batch for point in points))
        for unit in traced.units if self.recompute is Recompute.SELECTIVE else ():
            if obstacle := why_not_selective(traced.graph, unit):
                raise UsageError(f"{unit} cannot be recomputed selectively: {obstacle}; plan with --recompute full")
        points = self._untouched(self._written(points, traced), traced.opaques.untouched)
        return points if traced.opaques.untouched else self._within_fsdp(points, traced)

    def _written(self, points: list[Point], traced: Traced) -> list[Point]:
        """Those on which what code writes to parameters is written to them, and once."""
        write = next(iter(writes_of(traced.graph)), None)
        if write is None:
            return points
        kept = [point for point in points if not why_copies(point.mesh, self.precision)]
        if not kept:
            where = f"{write}: {traced.opaques.untouched}" if traced.opaques.untouched else str(write)
            raise UsageError(
                f"{where}, and {why_copies(points[0].mesh, self.precision)}: plan with --fsdp 1 and as many GPUs as "
                "--tp, in fp32 or bf16, or write to it after optimizer.step() instead"
            )
        again = write_within(traced.graph, traced.units)
        if again is not None and self.recompute not in (None, Recompute.NONE):
            raise UsageError(
                f"{again}, and would again where that layer is recomputed: leave out --recompute {self.recompute}, or "
                "write to it after optimizer.step() instead"
            )
        return kept

    def _within_fsdp(self, points: list[Point], traced: Traced) -> list[Point]:
        """Those on which FSDP2 holds nothing that it cannot."""
        held = [point for point in points if uses_fsdp(point.mesh, self.precision)]
        obstacle = (self._several_dtypes(traced) or _sparse_gradient(traced.graph)) if held else ""
        kept = [point for point in points if point not in held] if obstacle else points
        if not kept:
            raise UsageError(f"{obstacle}, or plan with as many GPUs as --tp, in fp32 or bf16")
        return kept

    def _several_dtypes(self, traced: Traced) -> str:
        """A unit with parameters of several dtypes, as built; "" where there is none."""
        dtypes = self.reuse.models[self._model_key].dtypes
        found: dict[str, dict[torch.dtype, str]] = {}
        for name, weight in traced.model.named_parameters():
            if weight.requires_grad and weight.dim():
                unit = next((unit for unit in traced.units if within(name, unit)), "")
                own = weight.dtype if self.precision is Precision.BF16 else dtypes[name]
                found.setdefault(unit, {}).setdefault(own, name)
        several = next(((unit, names) for unit, names in found.items() if len(names) > 1), None)
        if several is None:
            return ""
        shown = " and ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in several[1].items())
        where = several[0] or ROOT
        return f"FSDP2 takes one dtype of trained parameters a unit, and in {where} {shown}: give them one dtype"

    def _untouched(self, points: list[Point], reason: str) -> list[Point]:
        if not reason:
            return points
        if self.precision is Precision.BF16_MIXED:
            raise UsageError(
                f"bf16-mixed is FSDP2's work, which puts others in the place of parameters, and they must stay as they "
                f"are: {reason}; plan with precision bf16 or fp32, or change that"
            )
        plain = [point for point in points if point.shard == 1]
        if not plain:
            raise UsageError(f"parameters must stay as they are, and cannot be sharded: {reason}; plan with --fsdp 1")
        return plain

    # Trace

    def trace_key(self, micro_batch: int) -> Hashable:
        """What a trace depends on."""
        return *self._model_key, micro_batch, self.device, tuple(self.whole)

    @property
    def _model_key(self) -> tuple[Hashable, ...]:
        functions = map(_hashable, (self.build_model, self.example_inputs, self.loss))
        return *functions, self.batch.seq_len, self.precision

    @property
    def whole(self) -> list[tuple[str, str]]:
        """Modules that proofs have found to be run whole, and why."""
        return self.reuse.whole.setdefault(self._model_key, [])

    def run_whole(self, module: str, reason: str) -> None:
        """From now on a module runs whole, or the one around it where it does already. All is traced anew."""
        logger.info("module %s is to run whole: %s", module or ROOT, reason)
        self.whole.append((module, reason))
        self.cut_messages.append(reason)
        self.spaces, self.floors, self.cuts, self.conflicts, self.guesses = {}, {}, {}, {}, {}
        self.counterexamples.clear()

    def traced(self, micro_batch: int) -> Traced:
        """The model traced at a micro-batch's shapes, once for all that share it; where it was traced at two smaller
        ones, its graph may be grown from theirs, and its inputs are those of one."""
        key = self.trace_key(micro_batch)
        if key in self.reuse.traces:
            return self.reuse.traces[key]
        if key not in self.reuse.grown:
            found = self._grown(micro_batch)
            if found is None:
                return self.really_traced(micro_batch)
            self.reuse.grown[key] = found
        return self.reuse.grown[key]

    def really_traced(self, micro_batch: int) -> Traced:
        """The model traced at a micro-batch's shapes, whatever graph was grown."""
        key = self.trace_key(micro_batch)
        if key not in self.reuse.traces:
            self.reuse.traces[key] = self._trace(micro_batch)
            self.reuse.executor.observe(self.reuse.traces[key].opaques.by_key())
        return self.reuse.traces[key]

    def grown_sizes(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Of some micro-batches those of which there is a grown graph and no trace, ascending."""
        keys = {size: self.trace_key(size) for size in sizes}
        return tuple(sorted(n for n, key in keys.items() if key in self.reuse.grown and key not in self.reuse.traces))

    def distrust_grown(self) -> None:
        """From now on every micro-batch of this model is traced: code does at one what no growth foretold."""
        logger.info("graphs at other micro-batches are not what they were taken for: each is traced")
        self.reuse.ungrowing.add(self._model_key)
        self.reuse.grown.clear()
        self.reuse.spaces.clear()
        self.spaces, self.floors = {}, {}

    def _grown(self, micro_batch: int) -> Traced | None:
        """From the traces at the two largest smaller micro-batches; None where there are none, or no growth."""
        if self._model_key in self.reuse.ungrowing:
            return None
        smaller = [own for own in self.reuse.traces.values() if own.micro_batch < micro_batch]
        known = {
            own.micro_batch: own for own in smaller if self.reuse.traces.get(self.trace_key(own.micro_batch)) is own
        }
        if len(known) < 2 or any(own.opaques.by_key() or own.opaques.untouched for own in known.values()):
            return None
        low, high = sorted(known)[-2:]
        graph = grown(known[low].graph, known[high].graph, (low, high), micro_batch)
        return None if graph is None else replace(known[high], micro_batch=micro_batch, graph=graph)

    def pinned(self, micro_batch: int) -> Pinned:
        """What the pins hold. Raises UsageError for a pin that holds nothing of the model."""
        return Pinned(graph=self.traced(micro_batch).graph, pins=self.pins)

    def _trace(self, micro_batch: int) -> Traced:
        with planning_for(self.device):
            return self._trace_as_planned(micro_batch)

    def _trace_as_planned(self, micro_batch: int) -> Traced:
        if self._model_key not in self.reuse.models:
            self.reuse.models[self._model_key] = self._built()
        built = self.reuse.models[self._model_key]
        model = built.model  # what runs is a copy
        units = repeated_children(model)
        inputs = self.inputs(micro_batch, self.batch.seq_len)
        cast = self.cast(units)
        graph, opaques = self.trace_of(model, inputs)
        units = tuple(unit for unit in units if not opaques.hides(unit))
        assumed: tuple[str, ...] = ()
        if graph.questions:
            assumed = assumptions(
                graph, model, inputs, loss=self.loss, cast=cast, opaques=opaques, fresh=lambda: copied(model)
            )
        return Traced(
            micro_batch=micro_batch,
            model=model,
            inputs=inputs,
            units=units,
            graph=graph,
            assumptions=assumed,
            opaques=opaques,
            notes=built.notes,
        )

    def inputs(self, micro_batch: int, seq_len: int) -> Inputs:
        """The example inputs, in the dtype that the model computes in."""
        inputs = self.example_inputs(micro_batch, seq_len)
        return pytree.tree_map(_to_bfloat16, inputs) if self.precision is Precision.BF16 else inputs

    def trace_of(self, model: nn.Module, inputs: Inputs) -> tuple[ModelGraph, Opaques]:
        """The graph of a built model on some inputs, and the modules that are one operator in it."""
        untouched, cast = accumulated_hooks(model), self.cast(repeated_children(model))
        # A forward may leave tensors of the trace on its module; the proof copies a model that has none.
        graph, opaques = trace_marking(
            model, lambda: copied(model), inputs, loss=self.loss, cast=cast, untouched=untouched, whole=self.whole
        )
        opaques.is_hooked = bool(untouched)
        return graph, opaques

    def _built(self) -> Built:
        """The model on the meta device, in the dtype it computes in."""
        notes: tuple[str, ...] = ()
        try:
            with torch.device("meta"), _Unfilled():
                model = self.build_model()
        except (RuntimeError, NotImplementedError) as error:
            # Code that asks weights for values, as torch.nn.utils.parametrizations.orthogonal does, needs some.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            notes = (f"the builder fails on the meta device, and runs on the CPU: {reason}",)
            warnings.warn(notes[0], stacklevel=2)
            model = self.build_model()
        if not isinstance(model, nn.Module):
            raise ModelError(f"the builder returned {type(model).__name__}, expected a torch.nn.Module")
        if next(model.parameters(), None) is None:
            raise ModelError(f"{type(model).__name__} has no parameters: there is nothing to train or to shard")
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise ModelError(f"parameter {name} has no shape before the first call: call the model in the builder")
        _put_on_meta(model)
        register_names(model)
        dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
        if self.precision is not Precision.FP32:
            for parameter in model.parameters():
                if parameter.dtype == torch.float32:
                    parameter.data = parameter.data.to(torch.bfloat16)
        return Built(model, dtypes, notes)

    def cast(self, units: tuple[str, ...]) -> BoundaryHook:
        """FSDP's mixed precision casts what enters the root and each unit; so does the trace."""

        def cast(tensor: torch.Tensor, module: str, direction: Direction, path: str) -> torch.Tensor:
            enters_unit = direction is Direction.INPUT and (module == "" or module in units)
            casts = enters_unit and self.precision is Precision.BF16_MIXED
            return _to_bfloat16(tensor) if casts else tensor

        return cast

    # Solve

    def priced(self, micro_batch: int, tp: int) -> PricedSpace:
        """Decisions and their costs for a micro-batch on tp ranks, under the cuts so far."""
        key = micro_batch, tp
        if key not in self.spaces:
            shared = self._space_key(micro_batch, tp)
            if shared not in self.reuse.spaces:
                self.reuse.spaces[shared] = self._price(micro_batch, tp)
            self.spaces[key] = self.reuse.spaces[shared]
        return self.spaces[key]

    def _space_key(self, micro_batch: int, tp: int) -> Hashable:
        """What decisions and their costs depend on."""
        tables = (self.cuts, self.guesses)
        cuts = frozenset((n, s) for table in tables for (own, n), cut in table.items() if own == tp for s in cut)
        machine = self.profile, self.cluster.gpus_per_node, self.cluster.gpus
        ways = self.is_compiled, self.unused_outputs, _hashable(self.wishes), self.pins
        return self.trace_key(micro_batch), tp, machine, ways, cuts

    def _price(self, micro_batch: int, tp: int) -> PricedSpace:
        space = build_space(
            self.traced(micro_batch).graph,
            tp,
            unused_outputs=self.unused_outputs,
            cut=self.is_cut(micro_batch, tp),
            apart=self.pinned(micro_batch).pins_within,
        )
        return price_space(
            space,
            self.profile,
            self.cluster.gpus_per_node,
            self.reuse.executor,
            is_compiled=self.is_compiled,
            num_gpus=self.cluster.gpus,
            others=[other for (_, degree), other in reversed(self.spaces.items()) if degree == tp],
        )

    def is_cut(self, micro_batch: int, tp: int) -> Callable[[str, Strategy], bool]:
        """Says of decisions on tp ranks which strategies they may not choose."""
        graph, pinned = self.traced(micro_batch).graph, self.pinned(micro_batch)
        allows = self.wishes(graph) if self.wishes is not None else lambda name, strategy: True

        def is_cut(name: str, strategy: Strategy) -> bool:
            is_wrong = strategy in self.cuts.get((tp, name), ()) or strategy in self.guesses.get((tp, name), ())
            return is_wrong or not (allows(name, strategy) and pinned(name, strategy))

        return is_cut

    def conflicts_in(self, space: Space) -> tuple[Conflict, ...]:
        """What proofs have found not to go together, by deciding decisions, as far as it can still be chosen."""
        found: dict[Conflict, None] = {}
        for choices in self.conflicts.get(space.tp, ()):
            if not choices.keys() <= space.classes.keys():
                continue  # of another micro-batch's graph, which has other nodes
            own: dict[str, frozenset[int]] = {}
            for name, group in choices.items():
                representative = space.classes[name]
                options = space.strategies[representative]
                indices = frozenset(i for i, strategy in enumerate(options) if strategy in group)
                own[representative] = own.get(representative, indices) & indices
            kept = tuple((name, indices) for name, indices in own.items() if len(indices) < len(space.strategies[name]))
            if all(indices for _, indices in kept):
                found[Conflict(choices=kept)] = None
        return tuple(found)

    def pace(self, sizes: Sequence[int]) -> float:
        """GPU seconds of a step below which no plan comes, whatever its mesh and its micro-batch, from the traces of
        the two smallest micro-batches; 0 where there are none yet."""
        if len(sizes) < 2 or any(self.trace_key(size) not in self.reuse.traces for size in sizes[:2]):
            return 0.0
        first, second = (self.reuse.traces[self.trace_key(size)] for size in sizes[:2])
        if first.opaques.by_key() or second.opaques.by_key():
            return 0.0
        key = first.graph.fingerprint, second.graph.fingerprint, self.profile.fingerprint, self.is_compiled
        if key not in self.reuse.paces:
            rates = BestRates(self.profile, self.is_compiled)
            both = sizes[0], sizes[1]
            self.reuse.paces[key] = seconds_of_a_sequence(first.graph, second.graph, both, rates, self.reuse.executor)
        return self.reuse.paces[key] * self.batch.global_batch

    def formulate(self, point: Point, *, limit: float | None = None, treatment: Treatment | None = None) -> Formulation:
        """The problem of one point; with `treatment`, every layer gets that."""
        mesh, units = point.mesh, self.traced(point.micro_batch).units
        priced = self.priced(point.micro_batch, mesh.tp)
        return Formulation(
            priced=priced,
            conflicts=self.conflicts_in(priced.space),
            mesh=mesh,
            setting=Setting(
                profile=self.profile,
                gpus_per_node=self.cluster.gpus_per_node,
                precision=self.precision,
                optimizer=self.optimizer,
                memory_limit_bytes=self.limit if limit is None else limit,
                slack_bytes=self.profile.slack_bytes,
                accumulation_steps=self.batch.accumulation_steps(mesh, point.micro_batch),
                units=units,
                recompute=self.recompute,
                reshard_after_forward=self.reshard_after_forward,
                treatments=dict.fromkeys(units, treatment) if treatment is not None else None,
            ),
        )

    def floor(self, point: Point) -> float:
        """Seconds below which no plan of the point comes: its micro-batches' least compute and tp collectives, FSDP and
        the optimizer left out, no layer recomputed, and no limit kept."""
        key = point.micro_batch, point.tp
        if key not in self.floors:
            formulation = self.formulate(replace(point, num_gpus=point.tp, shard=1))
            try:
                self.floors[key] = self.solver_of(formulation.alone).bound or 0.0
            except SolverError:
                if self.time_limit_s is None:
                    raise
                self.floors[key] = 0.0  # out of time: no time is below it
        return self.floors[key] * self.batch.accumulation_steps(point.mesh, point.micro_batch)

    @property
    def lightest(self) -> Treatment:
        """Of the treatments that may be given, the one that takes no more time than any other, whatever the layouts:
        recomputing adds compute, and more than it can hide; gathering again adds a collective and copies."""
        reshard = self.reshard_after_forward
        return Treatment(recompute=self.recompute or Recompute.NONE, reshard=False if reshard is None else reshard)

    def solver_of(self, problem: Problem, *, cutoff: float = math.inf, is_relaxed: bool = False) -> Solution:
        """The optimum of a problem, by the solver and in the time asked for."""
        return solvers.solve(
            problem, solver=self.solver, time_limit_s=self.time_limit_s, cutoff=cutoff, is_relaxed=is_relaxed
        )

    def light(self, point: Point, *, cutoff: float = math.inf) -> Candidate | float:
        """The optimum of a point with the lightest treatment for every layer where that fits, which then nothing is
        faster than; else a bound: what it takes without a limit. Above the cutoff the bound is enough."""
        formulation = self.formulate(point, treatment=self.lightest)
        found = self.solver_of(formulation.unlimited, cutoff=cutoff)
        if found.bound is not None and found.bound > cutoff:
            return found.bound
        is_fitting = found.choice is not None and formulation.fits(found.choice, tolerance=LIMIT_TOLERANCE)
        if is_fitting or found.bound is None:
            return Candidate(point=point, formulation=formulation, solution=found)
        return found.bound

    def full(self, point: Point, *, cutoff: float = math.inf, is_relaxed: bool = False) -> Candidate | float:
        """The optimum of a point, or a bound on it: one that exceeds the cutoff, or that of a relaxation."""
        formulation = self.formulate(point)
        found = self.solver_of(formulation.problem, cutoff=cutoff, is_relaxed=is_relaxed)
        if found.status is Status.BOUNDED:
            assert found.bound is not None
            return found.bound
        return Candidate(point=point, formulation=formulation, solution=found)

    def solve_point(self, point: Point) -> Candidate:
        """The optimum of one point."""
        found = self.light(point)
        found = found if isinstance(found, Candidate) else self.full(point)
        assert isinstance(found, Candidate), "without a cutoff nothing is bounded away"
        return found


def _sparse_gradient(graph: ModelGraph) -> str:
    """A lookup that gives a sparse gradient; "" where there is none."""
    found = (op for op in graph.ops if op.args[_SPARSE.get(op.target, len(op.args)) :][:1] == (True,))
    op = next(found, None)
    if op is None:
        return ""
    return f"FSDP2 takes no sparse gradients, and {op.module or ROOT} looks up with sparse=True: leave that out"


#: where lookups are told to give sparse gradients
_SPARSE = {"aten.embedding.default": 4, "aten.embedding_bag.default": 5, "aten.embedding_bag.padding_idx": 5}


class _Unfilled(TorchFunctionMode):
    """Leaves tensors on the meta device as they are where code would fill them with random numbers: they hold none, and
    torch takes milliseconds for each to find that out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        if func in _FILLS and isinstance(filled, torch.Tensor) and filled.is_meta:
            return filled
        return func(*args, **kwargs)


_FILLS = frozenset({
    nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_, nn.init.kaiming_normal_, nn.init.kaiming_uniform_,
    nn.init.xavier_normal_, nn.init.xavier_uniform_, torch.Tensor.normal_, torch.Tensor.uniform_,
})  # fmt: skip


def _put_on_meta(model: nn.Module) -> None:
    """What code made on another device than it was told to (torch.normal heeds none), ties kept."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (own_parameters(module), own_buffers(module))
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and not tensor.is_meta:
                    _, table[name] = moved.setdefault(id(tensor), (tensor, on_meta_like(tensor)))


def _hashable(function: object) -> Hashable:
    """The function; a method of what has no hash is like no other."""
    try:
        hash(function)
    except TypeError:
        return object()
    return function


def _to_bfloat16(leaf: Any) -> Any:
    is_float32 = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
    return leaf.to(torch.bfloat16) if is_float32 else leaf
