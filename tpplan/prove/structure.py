"""The structure half of the proof: the applied model runs the model's own ops, and nothing else but conversions.

The plan is applied as on the first and on the last rank of the tp axis, and the applied model is traced on meta tensors
as the model was; tpplan.prove.compare says how the two graphs must agree. Where a plan is made, layers that are like
earlier ones, under equal parts of the plan, are left out at first (tpplan.prove.fewer_layers), so that a counterexample
is found soon; a plan that holds is then compared whole as on the first rank, from which the last differs in the slices
that it has.

That finds sizes baked into code (`view(B, T, self.n_heads, hd)`) and positions or masks built from a sharded length.
Such sizes, and those that code takes from a tensor in another layout, are replaced by what the layouts imply
(tpplan.apply.modules.local_sizes), else attributes of the module that hold them (tpplan.prove.local_attributes); else
code that asks for shapes is told those of one process (tpplan.prove.whole_shapes). Then the result is compared again.
The rules themselves are validated by brute force; the other half of the proof is tpplan.layouts.typecheck.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from torch import nn

from tpplan.core.graph import LOSS_SCOPE, Boundary, Op, enclosing
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import Call, Strategy, quotients, written_sizes
from tpplan.layouts.size_dims import sizes_by_dims
from tpplan.plan.compress_names import by_pattern
from tpplan.plan.plan import ATTRIBUTE, Plan, SizePlan
from tpplan.prove.apply_as_rank import applied_as, copied
from tpplan.prove.compare import difference, difference_so_far
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.fewer_layers import FewerLayers
from tpplan.prove.local_attributes import with_attributes_of
from tpplan.prove.local_nodes import LocalNodes
from tpplan.stages.stage_model import received_on_a_rank
from tpplan.trace.answers.concrete_values import AtRestError
from tpplan.trace.answers.own_failure import own_failure
from tpplan.trace.boundary_marks import BoundaryHook
from tpplan.trace.dedup_layers import PlanDigest
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.stopped_trace import TraceError
from tpplan.trace.trace import Loss, trace
from tpplan.trace.whole.opaque import Opaques


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

    def difference(self, rank: int, plan: Plan, until: str | None = None) -> Counterexample | None:
        """The first difference of the model that a rank makes by applying the plan; None where it runs the same ops,
        with `until` as far as the end of that module's first call."""
        plan = self.fewer.plan(plan)

        def fresh() -> nn.Module:
            with self.fewer.left_out(self.model):
                return applied_as(self.model, plan, rank)

        def stopping() -> nn.Module:
            return _stopping_after(fresh(), until)

        try:
            applied = trace(
                stopping(),
                received_on_a_rank(self.inputs, plan.stage, plan.mesh.tp),
                loss=self.loss,
                cast=self.cast,
                plan_digest=digest_of(plan),
                opaques=self.opaques,
                fresh=stopping,
                is_compared=True,
            )
        except TraceError as error:
            if isinstance(error.__cause__, _PassedError):
                found = difference_so_far(self.nodes, error.ran, _PASSED)
                return None if found.message.startswith(_PASSED) else found  # a line of code may follow
            at = f", at {error.line}" if error.line else ""
            reason = f"the applied model cannot run: {error.reason}{at}"
            found = difference_so_far(self.nodes, error.ran, reason)
            if found.message == reason and (failure := own_failure(error.__cause__, has_run=True)) is not None:
                raise failure from error.__cause__
            return replace(found, culprit=error.module) if isinstance(error.__cause__, AtRestError) else found
        return difference(self.nodes, applied)


class _PassedError(Exception):
    """A trial has run the module that it is about."""


#: why a trial's trace ends
_PASSED = "the trial ends here"


def _stopping_after(model: nn.Module, module: str | None) -> nn.Module:
    """The model; where it has the module, one that raises _PassedError once that has run."""

    def stop(*_: object) -> None:
        raise _PassedError

    own = dict(model.named_modules()).get(module) if module else None
    if own is not None:
        own.register_forward_hook(stop)
    return model


def check_structure(
    original: Original, plan: Plan, *, trial_on: int | None = None, until: str | None = None
) -> Plan | Counterexample:
    """The plan with the sizes that it must replace so that its applied model runs the original's ops; else the first
    difference that no size accounts for. A trial is on one rank alone, and layers that may be left out are; with
    `until` it ends with that module's first call, and sees fewer differences: of ops, their literals and shapes."""
    ranks, fewer = _ranks(plan), FewerLayers.of(original.assignment.graph, digest_of(plan))
    if trial_on is not None:
        ranks = tuple(rank for rank in ranks if rank == trial_on)
    if not (ranks and fewer.standing):
        return _checked(original, original, plan, ranks, until)
    short = original.without(fewer)
    checked = _checked(original, short, plan, ranks, until)
    if isinstance(checked, Plan):
        return checked if trial_on is not None else _checked(original, original, checked, ranks[:1])
    # Whatever the plan: found once for these layers.
    key = Original.is_faithful, frozenset(fewer.standing.items())
    is_faithful = original.assignment.graph.once(key, lambda: short.is_faithful)
    return checked if is_faithful else _checked(original, original, plan, ranks, until)


def _checked(
    original: Original, compared: Original, plan: Plan, ranks: Sequence[int], until: str | None = None
) -> Plan | Counterexample:
    """The plan with the sizes that some ranks must replace, of a model of which all layers are compared, or fewer.

    Where no sizes will do, the difference of those with which a rank came furthest: what is before it can be mended.
    """
    assignment, model, written = original.assignment, original.model, plan.size_plans()
    for rank in ranks:
        differences: list[Counterexample] = []
        while found := compared.difference(rank, plan, until):
            own = original.nodes_by_name[found.node.name] if found.node is not None else None
            found = replace(found, node=own, rank=rank)
            if found.culprit is not None:
                return found
            differences.append(found)
            differing = _Differing(assignment, model, found, done=compared.ran_before(found))
            more = differing.with_sizes(written)
            if more == written and not found.strange:
                more = differing.with_sizes(written, is_given=lambda size: True)
            if more == written:
                more = differing.with_quotients(written)
            if more == written:
                more = with_attributes_of(assignment, model, found, written, original.growing, done=differing.done)
            if more == written:
                return max(differences, key=original.place_of)
            written = more
            named = {module or ROOT: sizes for module, sizes in written.items()}
            plan = replace(plan, sizes=by_pattern(assignment.graph, named, lambda sizes, rename: sizes, ()))
    return plan


def find_difference(original: Original, plan: Plan) -> Counterexample | None:
    """The first difference of the applied model, without adding sizes; None where it runs the original's ops."""
    found = (original.difference(rank, plan) for rank in _ranks(plan))
    return next((difference for difference in found if difference is not None), None)


def _ranks(plan: Plan) -> tuple[int, ...]:
    """The tp ranks that are compared: the first and the last."""
    return (0, plan.mesh.tp - 1) if plan.mesh.tp > 1 else ()


@dataclass(frozen=True, slots=True)
class _Differing:
    """The code that differs on a rank: that of the differing op, and of the same ops in modules of its class, but for
    modules that are `done`, which ran as they must: one retrace for all keeps proofs of many convolutions short."""

    assignment: Assignment
    model: nn.Module
    problem: Counterexample
    done: frozenset[str]

    def with_sizes(
        self, written: Mapping[str, tuple[SizePlan, ...]], *, is_given: Callable[[int], bool] | None = None
    ) -> dict[str, tuple[SizePlan, ...]]:
        """The sizes `written` so far plus those of the ops, where their code gives a size of another layout.

        `is_given` says which sizes of a slice the code may give for the whole's; by default those that were seen.
        """
        assignment, found, seen = self.assignment, dict(written), self.problem.strange.__contains__
        calls: dict[str, list[tuple[Call, Strategy]]] = defaultdict(list)
        for op in assignment.graph.ops:
            calls[op.module].append((Call.of(assignment.graph, op), assignment.strategy(op.name)))
        for op in self._ops():
            own = found.get(op.module, ())
            placed = Call.of(assignment.graph, op), assignment.strategy(op.name)
            sizes = _sizes_of(placed, calls[op.module], assignment.tp, is_given or seen)
            found[op.module] = (*own, *(size for size in sizes if size not in own))
        return {module: sizes for module, sizes in found.items() if sizes}

    def with_quotients(self, written: Mapping[str, tuple[SizePlan, ...]]) -> dict[str, tuple[SizePlan, ...]]:
        """The sizes `written` so far plus the quotients of the ops where an attribute that they may be computed with is
        a rank's."""
        assignment, found = self.assignment, dict(written)
        for op in self._ops():
            own = found.get(op.module, ())
            if any(size.call.startswith(ATTRIBUTE) for size in own):
                more = quotients(Call.of(assignment.graph, op), assignment.strategy(op.name), assignment.tp)
                found[op.module] = (*own, *(size for size in more if size not in own))
        return found

    def _ops(self) -> Iterator[Op]:
        """Ops with the differing op's target in the own code of modules of its class; none in the loss."""
        node = self.problem.node
        if not isinstance(node, Op) or node.module == LOSS_SCOPE:
            return iter(())
        cls, graph = type(self.model.get_submodule(node.module)), self.assignment.graph
        alike = (op for op in graph.ops if op.target == node.target and op.module not in self.done)
        others = (op for op in alike if op.module != LOSS_SCOPE)
        return (op for op in others if type(self.model.get_submodule(op.module)) is cls)


def _sizes_of(
    placed: tuple[Call, Strategy], calls: list[tuple[Call, Strategy]], tp: int, is_given: Callable[[int], bool]
) -> Iterator[SizePlan]:
    """Yields the sizes of a call that its code may take from another layout: as dims of its tensor where they are dims,
    which leaves batch and length free, else as numbers."""
    by_dims = {size.position: size for size in sizes_by_dims(calls, placed, tp, is_given)}
    yield from by_dims.values()
    yield from (size for size in written_sizes(*placed, tp) if size.position not in by_dims)


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
