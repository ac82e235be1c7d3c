"""A model, its inputs and what a plan says of it, to hold the applied model against."""

import contextlib
import logging
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from torch import nn

from tpplan.core.errors import ModelError, first_line
from tpplan.core.graph import LOSS_SCOPE, Boundary, Op, enclosing, within
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.layouts.assignment import Assignment
from tpplan.plan.plan import Plan
from tpplan.prove.apply_as_rank import applied_as, copied
from tpplan.prove.compare import difference, difference_so_far, is_run_of
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.fewer_layers import FewerLayers
from tpplan.prove.local_nodes import LocalNodes
from tpplan.prove.module_alone import ModuleAlone, PassedError, WatchedCall, is_called_once, reads_its_own
from tpplan.stages.stage_model import received_on_a_rank
from tpplan.trace.answers.concrete_values import AtRestError
from tpplan.trace.answers.own_failure import own_failure
from tpplan.trace.boundary_marks import BoundaryHook
from tpplan.trace.dedup_layers import PlanDigest
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.stopped_trace import TraceError
from tpplan.trace.trace import Loss, trace
from tpplan.trace.whole.opaque import Opaques

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Original:
    """A model on the meta device, its inputs, and what a plan says of its graph, to hold applied models against.
    `opaques` are the modules of its trace that run whole; `fewer` are layers that are left out of both; `growing`
    has the dims, as (value, dim), that grow with batch or length; None where they are not known: code is told no shapes
    then."""

    model: nn.Module
    inputs: Inputs
    assignment: Assignment
    loss: Loss | None
    cast: BoundaryHook
    opaques: Opaques = field(default_factory=Opaques)
    fewer: FewerLayers = field(default_factory=FewerLayers)
    growing: Container[tuple[str, int]] | None = None

    @cached_property
    def nodes(self) -> LocalNodes:
        """The nodes as they must be on a rank."""
        return LocalNodes(self.assignment)

    @cached_property
    def nodes_by_name(self) -> Mapping[str, Op | Boundary]:
        """The nodes of the model's graph by name."""
        return {node.name: node for node in self.assignment.graph.nodes}

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.nodes_by_name)}

    def place_of(self, problem: Counterexample) -> int:
        """How far the applied model ran as it must: the place of the node that differs, among all; -1 if none does."""
        return -1 if problem.node is None else self._places[problem.node.name]

    def ran_before(self, problem: Counterexample) -> frozenset[str]:
        """Modules whose own code ran as it must: it has ended before the node that differs."""
        if problem.node is None:
            return frozenset()
        place, nodes = self._places[problem.node.name], self.assignment.graph.nodes
        later = {"", *(node.module for node in nodes[place:])}
        return frozenset({node.module for node in nodes} - later)

    def without(self, fewer: FewerLayers) -> "Original":
        """The model without some layers."""
        graph = fewer.graph(self.assignment.graph)
        assignment, opaques = replace(self.assignment, graph=graph), fewer.opaques(self.opaques)
        return replace(self, assignment=assignment, opaques=opaques, fewer=fewer)

    @cached_property
    def is_faithful(self) -> bool:
        """True where the model without its layers runs the nodes that are said to be left."""
        with self.fewer.left_out(self.model):
            own = copied(self.model)
        try:
            graph = trace(own, self.inputs, loss=self.loss, cast=self.cast, opaques=self.opaques)
        except TraceError:
            return False
        return graph_fingerprint(graph) == graph_fingerprint(self.assignment.graph)

    def alone(self, module: str) -> ModuleAlone | None:
        """The module as it is run alone; None where it is not called once, is given something else than tensors and
        plain values, reads others, or does something else alone than in the model, on whole tensors."""
        graph = self.assignment.graph
        if module in ("", LOSS_SCOPE) or not is_called_once(graph, module) or self._runs_whole(module):
            return None
        if not reads_its_own(graph, module):
            return None
        call = WatchedCall(module)
        with self.fewer.left_out(self.model):

            def fresh() -> nn.Module:
                return call.watched(copied(self.model))

            with contextlib.suppress(ModelError):
                trace(fresh(), self.inputs, loss=self.loss, cast=self.cast, opaques=self.opaques, fresh=fresh)
            if call.seen is None:
                return None
            calling, is_like = call.seen.calling(_stopping_after(copied(self.model), module)), False
            try:
                trace(calling, call.seen.on_whole(), cast=self.cast, opaques=self.opaques, is_compared=True)
            except TraceError as error:
                is_like = isinstance(error.__cause__, PassedError) and is_run_of(graph, module, error.ran)
            except ModelError as error:
                logger.info("module %s is not run alone: %s", module, first_line(error))
        return call.seen if is_like else None

    def _runs_whole(self, module: str) -> bool:
        """True where a module, or one around or inside it, runs whole."""
        return any(within(name, module) or within(module, name) for name in self.opaques.reasons)

    def difference(
        self, rank: int, plan: Plan, until: str | None = None, alone: ModuleAlone | None = None
    ) -> Counterexample | None:
        """The first difference of the model that a rank makes by applying the plan; None where it runs the same ops,
        with `until` as far as the end of that module's first call; with `alone` that module is all that is run."""
        plan = self.fewer.plan(plan)

        def fresh() -> nn.Module:
            with self.fewer.left_out(self.model):
                model = _stopping_after(applied_as(self.model, plan, rank), until)
            return model if alone is None else alone.calling(model)

        inputs = received_on_a_rank(self.inputs, plan.stage, plan.mesh.tp)
        try:
            applied = trace(
                fresh(),
                inputs if alone is None else alone.on_a_rank(self.assignment),
                loss=self.loss if alone is None else None,
                cast=self.cast,
                plan_digest=digest_of(plan),
                opaques=self.opaques,
                fresh=fresh,
                is_compared=True,
            )
        except TraceError as error:
            return self._difference_so_far(error, None if alone is None else alone.module)
        return difference(self.nodes, applied)

    def _difference_so_far(self, error: TraceError, module: str | None) -> Counterexample | None:
        """The first difference of a trace that stopped, of the whole model or of a module alone; None where it came as
        far as it should. Raises tpplan's own failure where that stopped it."""
        if isinstance(error.__cause__, PassedError):
            found = difference_so_far(self.nodes, error.ran, _PASSED, module)
            return None if found.message.startswith(_PASSED) else found  # a line of code may follow
        at = f", at {error.line}" if error.line else ""
        reason = f"the applied model cannot run: {error.reason}{at}"
        found = difference_so_far(self.nodes, error.ran, reason, module)
        if found.message == reason and (failure := own_failure(error.__cause__, has_run=True)) is not None:
            raise failure from error.__cause__
        return replace(found, culprit=error.module) if isinstance(error.__cause__, AtRestError) else found


#: why a trial's trace ends
_PASSED = "the trial ends here"


def _stopping_after(model: nn.Module, module: str | None) -> nn.Module:
    """The model; where it has the module, one that raises PassedError once that has run."""

    def stop(*_: object) -> None:
        raise PassedError

    own = dict(model.named_modules()).get(module) if module else None
    if own is not None:
        own.register_forward_hook(stop)
    return model


def _called_by_name(plan: Plan) -> dict[str, str]:
    """The modules that a stage reads by their names: the one that is given what is received, and the one whose output
    is sent."""
    stage = plan.stage
    found = {"receives": stage.received, "sends": stage.last} if stage is not None else {}
    return {name: what for what, name in found.items() if name is not None}


def digest_of(plan: Plan) -> PlanDigest:
    """A function that returns all that a plan does inside a module, by names relative to the module."""
    inside: dict[str, list[tuple[int, str, str, tuple[tuple[str, str], ...]]]] = defaultdict(list)
    tables: tuple[Mapping[str, object], ...] = (
        plan.boundary_plans(),
        plan.size_plans(),
        plan.sharded_losses(),
        plan.row_bags(),
        dict.fromkeys(plan.drawing_modules(), True),
        dict.fromkeys(plan.opaque_modules(), True),
        _called_by_name(plan),
    )
    for kind, table in enumerate(tables):
        for name, entry in table.items():
            for module in enclosing(name):
                inside[module].append((kind, name, repr(entry), ()))
    read = [(len(tables), name, repr(own.placement), own.reads) for name, own in plan.parameter_plans().items()]
    read += [(len(tables) + 1, name, "", own.reads) for name, own in plan.buffer_plans().items()]
    for kind, name, placement, layouts in read:
        reads = tuple((reader, str(layout)) for reader, layout in layouts.items())
        for module in enclosing(name):
            inside[module].append((kind, name, placement, reads))

    @cache
    def plan_digest(module: str) -> object:
        return tuple(
            sorted(
                (kind, name.removeprefix(module), entry, tuple(sorted((r.removeprefix(module), x) for r, x in reads)))
                for kind, name, entry, reads in inside.get(module, ())
            )
        )

    return plan_digest
