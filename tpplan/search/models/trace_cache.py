"""Results that several calls of solve for one model share: traces, executed ops, and prices of layouts.

    reuse = Reuse()
    plans = [tpplan.solve(build_model, ..., cluster=cluster, reuse=reuse) for cluster in clusters]

A trace depends on the model and its inputs alone, an executed op on its shapes, a price on the machine and the degree.
Sharing does not change the plans.
"""

import logging
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from tpplan.core.errors import PlanMismatchError
from tpplan.core.graph import ModelGraph, joined_name
from tpplan.core.name_patterns import ROOT
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.known_times import KnownTimes
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.strategy_times import Rates
from tpplan.experts.degree_graph import of_degree
from tpplan.experts.expert_share import whole_shape, with_shares
from tpplan.layouts.assignment import Assignment, assignment_of
from tpplan.layouts.buffer_writes import BufferWrite, buffers_written
from tpplan.layouts.rules import OPAQUE
from tpplan.layouts.typecheck import Mistyped
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.model_fingerprint import check_parameters
from tpplan.plan.plan import Plan
from tpplan.prove.apply_as_rank import copied
from tpplan.prove.original import Original
from tpplan.search.models.grown_graph import grown, share_outline
from tpplan.search.models.meta_model import Built, built_on_meta
from tpplan.search.models.subject import Subject
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.retrace_opaque import trace_marking
from tpplan.trace.trace import assumptions, gathered_layers, hooked_weight, repeated_children, why_untouched
from tpplan.trace.whole.opaque import Opaques

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model on the meta device, the inputs that it was traced on (`micro_batch` sequences), and the trace. `notes`
    say how it was built."""

    micro_batch: int
    model: nn.Module
    inputs: Inputs
    units: tuple[str, ...]
    graph: ModelGraph
    assumptions: tuple[str, ...]
    opaques: Opaques
    notes: tuple[str, ...]

    def buffers_written(self) -> tuple[BufferWrite, ...]:
        """The buffers that the forward writes to from rows of the batch, those in modules that run whole included."""
        found = {own.label: own for own in buffers_written(self.graph)}
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        observed = self.opaques.by_key()
        for op in self.graph.ops if observed else ():
            for name, is_read in observed[str(op.args[2])].buffers if op.target == OPAQUE else ():
                label = joined_name(op.module, name)
                if label not in found or not found[label].is_read:
                    found[label] = BufferWrite(
                        label=label,
                        module=op.module,
                        target=OPAQUE,
                        line="",
                        is_read=is_read,
                        is_plain=label not in buffers,
                    )
        return tuple(found.values())

    def running_again(self) -> str:
        """The first module that runs whole and whose own code runs modules in backward; "" where none does."""
        observed = self.opaques.by_key()
        opaque = (op for op in self.graph.ops if observed and op.target == OPAQUE)
        return next((op.module or ROOT for op in opaque if observed[str(op.args[2])].runs_again), "")

    def original(
        self, assignment: Assignment, subject: Subject, growing: Container[tuple[str, int]] | None = None
    ) -> Original:
        """The model, to hold against it what a plan with this assignment makes of it. `growing` has its dims that grow
        with batch or length, if these are known."""
        return Original(
            model=self.model,
            inputs=self.inputs,
            assignment=assignment,
            loss=subject.loss,
            cast=subject.cast(self.units),
            opaques=self.opaques,
            growing=growing,
        )

    def parameters(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """By each name of a parameter its shape with the experts of all ranks, and whether it trains."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: (whole_shape(self.model, name, weight), weight.requires_grad) for name, weight in named}

    def fitting(self, plan: Plan) -> Assignment:
        """The assignment that a plan implies for this model. Raises PlanMismatchError where the model has other
        parameters, and where a value has no layout."""
        check_parameters(plan, self.parameters())
        found = self.assignment_of(plan)
        if isinstance(found, Mistyped):
            raise PlanMismatchError(f"the plan does not fit the model: {found.message}")
        return found

    def assignment_of(self, plan: Plan) -> Assignment | Mistyped:
        """The assignment that a plan implies for this model, or the first thing that does not type."""
        num_averages = self.opaques.num_averages(plan.batch.accumulation_steps)
        return assignment_of(self.graph, plan, layers=self.units, num_averages=num_averages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A model's graph at a batch and length that are not planned, the inputs that it was traced on, and the modules
    that are one op in it."""

    inputs: Inputs
    graph: ModelGraph
    opaques: Opaques


@dataclass(slots=True)
class Reuse:
    """Results by everything that they depend on; every call that is given a Reuse adds to it."""

    models: dict[Hashable, Built] = field(default_factory=dict)
    traces: dict[Hashable, Traced] = field(default_factory=dict)
    #: models whose graph at a micro-batch was not traced but grown (tpplan.search.models.grown_graph)
    grown: dict[Hashable, Traced] = field(default_factory=dict)
    #: models with divided experts whose graph was derived from graphs of other numbers of ranks
    #: (tpplan.experts.degree_graph), or was traced with the dims from there whose size data decides
    likened: dict[Hashable, Traced] = field(default_factory=dict)
    #: keys of subjects of which a grown graph differed from the trace
    ungrowing: set[Hashable] = field(default_factory=set)
    #: whether graphs may be grown, or taken from relatives, at all
    grows: bool = True
    spaces: dict[Hashable, PricedSpace] = field(default_factory=dict)
    #: least GPU seconds of a sequence (tpplan.search.points.best_rates)
    paces: dict[Hashable, float] = field(default_factory=dict)
    #: modules that must run whole, and why, by key of a subject
    whole: dict[Hashable, list[tuple[str, str]]] = field(default_factory=dict)
    #: by key of a trace, and a length
    elsewhere: dict[Hashable, Elsewhere] = field(default_factory=dict)
    #: dims of values that grow with batch or length (tpplan.search.models.growing_dims), by key of a trace
    growing: dict[Hashable, frozenset[tuple[str, int]]] = field(default_factory=dict)
    executor: Executor = field(default_factory=Executor)
    #: by fingerprint of the profile
    rates: dict[str, Rates] = field(default_factory=dict)

    def forget_grown(self) -> None:
        """Drops all graphs that were not traced, and what was priced of them."""
        self.grown.clear()
        self.likened.clear()
        self.spaces.clear()

    def rates_of(self, profile: HardwareProfile) -> Rates:
        """The times of kernels and ops on a machine that were computed so far."""
        if (key := profile.fingerprint) not in self.rates:
            self.rates[key] = Rates(KnownTimes(profile))
        return self.rates[key]

    def space(self, key: Hashable, make: Callable[[], PricedSpace]) -> PricedSpace:
        """The priced space that `make` returned for this key at the first call."""
        if key not in self.spaces:
            self.spaces[key] = make()
        return self.spaces[key]

    def pace(self, key: Hashable, make: Callable[[], float]) -> float:
        """The least GPU seconds of a sequence that `make` returned for this key at the first call."""
        if key not in self.paces:
            self.paces[key] = make()
        return self.paces[key]


@dataclass(frozen=True, slots=True)
class TraceCache:
    """One trace of a subject per micro-batch, kept in `reuse`. `relatives` are caches of the same model with experts
    divided among other numbers of ranks, from whose graphs this one's may be derived."""

    subject: Subject
    reuse: Reuse
    relatives: tuple["TraceCache", ...] = ()

    def key(self, micro_batch: int) -> Hashable:
        """Everything that a trace depends on."""
        return *self.subject.key, micro_batch, self.subject.device, tuple(self.whole)

    @property
    def whole(self) -> list[tuple[str, str]]:
        """Modules that must run whole, and why, as proofs have found."""
        return self.reuse.whole.setdefault(self.subject.key, [])

    def run_whole(self, module: str, reason: str) -> None:
        """Makes a module run whole from now on, or the one around it where it does already; all is traced again."""
        logger.info("module %s is to run whole: %s", module or ROOT, reason)
        self.whole.append((module, reason))

    def traced(self, micro_batch: int) -> Traced:
        """The model traced at a micro-batch; after traces at two smaller ones, or of relatives, its graph may be taken
        from theirs, and its inputs are those of another one."""
        key = self.key(micro_batch)
        if (known := self.known(micro_batch)) is not None:
            return known
        if (found := self._grown(micro_batch)) is not None:
            self.reuse.grown[key] = found
        elif (found := self._likened(micro_batch)) is not None:
            self.reuse.likened[key] = found
        else:
            found = self.really_traced(micro_batch)
        return found

    def known(self, micro_batch: int) -> Traced | None:
        """The model as it was traced at a micro-batch before, or its graph was taken from others; else None."""
        key = self.key(micro_batch)
        return self.reuse.traces.get(key) or self.reuse.likened.get(key) or self.reuse.grown.get(key)

    def foreseen(self, micro_batch: int) -> ModelGraph | None:
        """The graph at a micro-batch as far as it is known without another trace: traced before, or grown from smaller
        ones."""
        known = self.reuse.traces.get(self.key(micro_batch)) or self._grown(micro_batch)
        return known.graph if known is not None else None

    def really_traced(self, micro_batch: int) -> Traced:
        """The model traced at a micro-batch, never grown."""
        key = self.key(micro_batch)
        if key not in self.reuse.traces:
            smaller = self._smaller(micro_batch)
            like = smaller[max(smaller)].graph if smaller else None
            with self.subject.planning():
                found = self.reuse.traces[key] = self._trace(micro_batch, like=like)
            any(share_outline(smaller[size].graph, found.graph) for size in sorted(smaller))
            self._observe(found)
        return self.reuse.traces[key]

    def _smaller(self, micro_batch: int) -> dict[int, Traced]:
        """The traces of this model at smaller micro-batches, by these."""
        smaller = [own for own in self.reuse.traces.values() if own.micro_batch < micro_batch]
        return {own.micro_batch: own for own in smaller if self.reuse.traces.get(self.key(own.micro_batch)) is own}

    def elsewhere(self, model: nn.Module, batch: int, length: int) -> Elsewhere:
        """The built model traced at another batch and length, once for each; its calls are not in the graph."""
        key = self.key(batch), length
        if key not in self.reuse.elsewhere:
            inputs = self.subject.inputs(batch, length)
            with self.subject.planning():
                graph, opaques, _ = self.trace_of(model, inputs, notes_calls=False)
            self.reuse.elsewhere[key] = Elsewhere(inputs=inputs, graph=graph, opaques=opaques)
        return self.reuse.elsewhere[key]

    def alike(self, traced: Traced) -> ModelGraph | None:
        """A graph of the same ops at another micro-batch, as it was traced before; None without one."""
        for own in self.reuse.traces.values():
            is_other = own.micro_batch != traced.micro_batch and self.reuse.traces.get(self.key(own.micro_batch)) is own
            if is_other and share_outline(own.graph, traced.graph):
                return own.graph
        return None

    def first(self, micro_batches: Sequence[int]) -> list[Traced]:
        """The traces at the first two of some micro-batches; none unless both exist."""
        found = [self._anchor(size) for size in micro_batches[:2]]
        return [own for own in found if own is not None] if len(found) == 2 and None not in found else []

    def _anchor(self, micro_batch: int) -> Traced | None:
        """The model at a micro-batch as others are grown from it: traced, or taken from relatives; None where it is not
        known yet."""
        key = self.key(micro_batch)
        return self.reuse.traces.get(key) or self.reuse.likened.get(key)

    def grown_sizes(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """The micro-batches among `sizes` with a grown graph and no trace, ascending."""
        keys = {size: self.key(size) for size in sizes}
        return tuple(sorted(n for n, key in keys.items() if key in self.reuse.grown and key not in self.reuse.traces))

    def is_likened(self, sizes: Iterable[int]) -> bool:
        """True where the graph at some micro-batch among `sizes` was taken from relatives, and not traced since."""
        keys = set(map(self.key, sizes))
        return bool(keys & self.reuse.likened.keys() - self.reuse.traces.keys())

    def distrust_grown(self) -> None:
        """Traces every micro-batch of this model from now on, after a grown graph has differed from its trace."""
        logger.info("a graph grown from smaller micro-batches differs from its trace: each micro-batch is traced")
        self.reuse.ungrowing.add(self.subject.key)
        self.reuse.forget_grown()

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtypes in which the model's parameters were built, by name."""
        return self._built().dtypes

    def trace_of(
        self, model: nn.Module, inputs: Inputs, *, notes_calls: bool = True, like: ModelGraph | None = None
    ) -> tuple[ModelGraph, Opaques, tuple[str, ...]]:
        """The graph of a built model on some inputs, with its calls where `notes_calls`; its opaque modules, which are
        one op in it; and its layers. `like` is as `trace` takes it."""
        layers = repeated_children(model)
        graph, opaques = self._marked(model, inputs, layers, notes_calls=notes_calls, like=like)
        divided = dict(self.subject.experts.calls) if self.subject.experts is not None else {}
        gathered = tuple(name for name in gathered_layers(model, graph) if name not in divided)  # FSDP has these apart
        if gathered != layers and self.subject.casts:  # what enters others than it was thought
            graph, opaques = self._marked(model, inputs, gathered, notes_calls=notes_calls, like=like)
        return graph, opaques, gathered

    def _marked(
        self, model: nn.Module, inputs: Inputs, layers: tuple[str, ...], *, notes_calls: bool, like: ModelGraph | None
    ) -> tuple[ModelGraph, Opaques]:
        untouched, cast = why_untouched(model), self.subject.cast(layers)
        # A forward may leave tensors of the trace on its module; the proof copies a model that has none.
        graph, opaques = trace_marking(
            model,
            lambda: copied(model),
            inputs,
            loss=self.subject.loss,
            cast=cast,
            untouched=untouched,
            whole=self.whole,
            notes_calls=notes_calls,
            like=like,
        )
        opaques.is_hooked = bool(untouched)
        opaques.hooked_weight = hooked_weight(model)
        return graph, opaques

    def _built(self) -> Built:
        if (stage := self.subject.stage) is not None and self.subject.key not in self.reuse.models:
            # All stages are made of one model, whatever loss stands for what they send.
            whole = replace(self, subject=replace(self.subject, stage=None, loss=None))
            self.reuse.models[self.subject.key] = whole._built().stage(stage, self.subject.precision)
        elif self.subject.key not in self.reuse.models:
            is_half = self.subject.precision.makes_half
            build = self.subject.build_model
            if (experts := self.subject.experts) is not None:
                build = partial(with_shares, build, experts)
            self.reuse.models[self.subject.key] = built_on_meta(build, is_half=is_half)
        return self.reuse.models[self.subject.key]

    def _trace(self, micro_batch: int, like: ModelGraph | None = None) -> Traced:
        built = self._built()
        model = built.model  # the trace runs a copy
        inputs = self.subject.inputs(micro_batch, self.subject.seq_len)
        graph, opaques, units = self.trace_of(model, inputs, like=like)
        cast = self.subject.cast(units)
        units = tuple(unit for unit in units if not opaques.hides(unit))
        assumed: tuple[str, ...] = ()
        if graph.questions:
            assumed = assumptions(
                graph, model, inputs, loss=self.subject.loss, cast=cast, opaques=opaques, fresh=lambda: copied(model)
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

    def _may_grow(self) -> bool:
        return self.reuse.grows and self.subject.key not in self.reuse.ungrowing

    def _grown(self, micro_batch: int) -> Traced | None:
        """The model with the graph grown from traces at the two next smaller micro-batches; None where none can be."""
        if not self._may_grow():
            return None
        both = [*self.reuse.traces.values(), *self.reuse.likened.values()]
        smaller = {own.micro_batch for own in both if own.micro_batch < micro_batch}
        known = {size: own for size in smaller if (own := self._anchor(size)) is not None}
        if len(known) < 2 or any(own.opaques.by_key() or own.opaques.untouched for own in known.values()):
            return None
        low, high = sorted(known)[-2:]
        graph = grown(known[low].graph, known[high].graph, (low, high), micro_batch)
        return None if graph is None else replace(known[high], micro_batch=micro_batch, graph=graph)

    def _likened(self, micro_batch: int) -> Traced | None:
        """The model with the graph that graphs of its relatives imply, or traced, but with the dims whose size data
        decides as in theirs; None without relatives that are alike."""
        if not self.relatives or not self._may_grow():
            return None
        base = self.relatives[0].traced(micro_batch)
        if base.opaques.by_key() or base.opaques.untouched:
            return None
        for start, first, second in self._pairs(micro_batch):
            graph = of_degree(start.graph, first.graph, second.graph, self.degree)
            if graph is not None:
                model = self._built().model
                share_outline(start.graph, graph)
                return replace(base, model=model, inputs=second.inputs, graph=graph, notes=self._built().notes)
        with self.subject.planning():
            found = self._trace(micro_batch, like=base.graph)
        any(share_outline(relative.traced(micro_batch).graph, found.graph) for relative in self.relatives)
        self._observe(found)
        return found

    def _observe(self, traced: Traced) -> None:
        """Keeps what the modules that run whole were seen to run."""
        modules = {str(op.args[2]): op.module for op in reversed(traced.graph.ops) if op.target == OPAQUE}
        self.reuse.executor.observe(traced.opaques.by_key(), modules)

    @property
    def degree(self) -> int:
        """The number of ranks that divide experts."""
        return self.subject.experts.ep if self.subject.experts is not None else 1

    def _pairs(self, micro_batch: int) -> Iterator[tuple[Traced, Traced, Traced]]:
        """Yields the model as a relative has it at a micro-batch; and, of micro-batches, as that relative has it and as
        another number of ranks does: the second relative, or this one. At one expert a rank, code may give its ops
        other arguments, so that each relative is tried."""
        others = [(self.relatives[0], other) for other in self.relatives[1:]]
        for base, other in (*others, *((relative, self) for relative in self.relatives)):
            if other is not self:
                other.traced(micro_batch)
            sizes = {own.micro_batch for own in self.reuse.likened.values()}
            for size in sorted(sizes, key=lambda size: (size != micro_batch, size)):
                second = other.reuse.likened.get(other.key(size))
                if second is not None and (first := base._anchor(size)) is not None:
                    yield base.traced(micro_batch), first, second
