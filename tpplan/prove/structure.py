"""The structure half of the proof: the applied model runs the model's own ops, and nothing else but conversions.

The plan is applied as on the first and on the last rank of the tp axis, and the applied model is traced on meta tensors
as the model was; tpplan.prove.compare says how the two graphs must agree.

That finds sizes baked into code (`view(B, T, self.n_heads, hd)`) and positions or masks built from a sharded length.
Such sizes, and those that code takes from a tensor in another layout, are replaced by what the layouts imply
(tpplan.apply.modules.local_sizes), else attributes of the module that hold them (tpplan.prove.local_attributes), and
the result is compared again. The rules themselves are validated by brute force;
the other half of the proof is tpplan.layouts.typecheck.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from torch import nn

from tpplan.core.graph import LOSS_SCOPE, ModelGraph, Op, enclosing
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import Call, Strategy, written_sizes
from tpplan.layouts.size_dims import sizes_by_dims
from tpplan.plan.compress_names import by_pattern
from tpplan.plan.plan import Plan, SizePlan
from tpplan.prove.apply_as_rank import applied_as
from tpplan.prove.compare import difference, difference_so_far
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.local_attributes import with_attributes_of
from tpplan.prove.local_nodes import LocalNodes
from tpplan.trace.answers.concrete_values import AtRestError
from tpplan.trace.answers.own_failure import own_failure
from tpplan.trace.boundary_marks import BoundaryHook
from tpplan.trace.dedup_layers import PlanDigest
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.stopped_trace import TraceError
from tpplan.trace.trace import Loss, trace
from tpplan.trace.whole.opaque import Opaques


def check_structure(
    model: nn.Module,
    inputs: Inputs,
    assignment: Assignment,
    plan: Plan,
    *,
    loss: Loss | None,
    cast: BoundaryHook,
    opaques: Opaques | None = None,
) -> Plan | Counterexample:
    """The plan with the sizes that it must replace so that its applied model runs the original's ops; else the first
    difference that no size accounts for. `model` is on the meta device; `opaques` are the original's."""
    written: dict[str, tuple[SizePlan, ...]] = {}
    nodes, digest = LocalNodes(assignment), _digest_of(plan)
    for rank in (0, plan.mesh.tp - 1) if plan.mesh.tp > 1 else ():
        while found := _difference_on(rank, model, inputs, nodes, plan, digest, loss=loss, cast=cast, opaques=opaques):
            if found.culprit is not None:
                return found
            more = _with_sizes_of(assignment, model, found, written)
            if more == written and not found.strange:
                more = _with_sizes_of(assignment, model, found, written, is_given=lambda size: True)
            if more == written:
                more = with_attributes_of(assignment, model, found, written)
            if more == written:
                return found
            written = more
            named = {module or ROOT: sizes for module, sizes in written.items()}
            plan = replace(plan, sizes=by_pattern(assignment.graph, named, lambda sizes, rename: sizes, ()))
            digest = _digest_of(plan)
    return plan


def find_difference(
    model: nn.Module,
    inputs: Inputs,
    assignment: Assignment,
    plan: Plan,
    *,
    loss: Loss | None,
    cast: BoundaryHook,
    opaques: Opaques | None = None,
) -> Counterexample | None:
    """The first difference of the applied model, without adding sizes; None where it runs the original's ops."""
    ranks = (0, plan.mesh.tp - 1) if plan.mesh.tp > 1 else ()
    nodes, digest = LocalNodes(assignment), _digest_of(plan)
    found = (
        _difference_on(rank, model, inputs, nodes, plan, digest, loss=loss, cast=cast, opaques=opaques)
        for rank in ranks
    )
    return next((difference for difference in found if difference is not None), None)


def _with_sizes_of(
    assignment: Assignment,
    model: nn.Module,
    problem: Counterexample,
    written: Mapping[str, tuple[SizePlan, ...]],
    *,
    is_given: Callable[[int], bool] | None = None,
) -> dict[str, tuple[SizePlan, ...]]:
    """The sizes `written` so far plus those of the differing op, where its code gives a size of another layout, and of
    the same ops in all modules of its class: one retrace for all keeps proofs of many convolutions short.

    `is_given` says which sizes of a slice the code may give for the whole's; by default those that were seen.
    """
    found, node, graph, seen = dict(written), problem.node, assignment.graph, problem.strange.__contains__
    calls: dict[str, list[tuple[Call, Strategy]]] = defaultdict(list)
    for op in graph.ops:
        calls[op.module].append((Call.of(graph, op), assignment.strategy(op.name)))
    for op in _of_the_same_code(graph, model, node) if isinstance(node, Op) else ():
        own = found.get(op.module, ())
        placed = Call.of(graph, op), assignment.strategy(op.name)
        sizes = _sizes_of(placed, calls[op.module], assignment.tp, is_given or seen)
        found[op.module] = (*own, *(size for size in sizes if size not in own))
    return {module: sizes for module, sizes in found.items() if sizes}


def _sizes_of(
    placed: tuple[Call, Strategy], calls: list[tuple[Call, Strategy]], tp: int, is_given: Callable[[int], bool]
) -> Iterator[SizePlan]:
    """Yields the sizes of a call that its code may take from another layout: as dims of its tensor where they are dims,
    which leaves batch and length free, else as numbers."""
    by_dims = {size.position: size for size in sizes_by_dims(calls, placed, tp, is_given)}
    yield from by_dims.values()
    yield from (size for size in written_sizes(*placed, tp) if size.position not in by_dims)


def _of_the_same_code(graph: ModelGraph, model: nn.Module, node: Op) -> Iterator[Op]:
    """Ops with the node's target in the own code of all modules of its class, the node included; none in the loss."""
    if node.module == LOSS_SCOPE:
        return iter(())
    cls = type(model.get_submodule(node.module))
    return (
        op
        for op in graph.ops
        if op.target == node.target and op.module != LOSS_SCOPE and type(model.get_submodule(op.module)) is cls
    )


def _difference_on(
    rank: int,
    model: nn.Module,
    inputs: Inputs,
    local_nodes: LocalNodes,
    plan: Plan,
    digest: PlanDigest,
    *,
    loss: Loss | None,
    cast: BoundaryHook,
    opaques: Opaques | None,
) -> Counterexample | None:
    """The first difference of the model that a rank makes by applying the plan, whose digest is given."""

    def fresh() -> nn.Module:
        return applied_as(model, plan, rank)

    local = fresh()
    try:
        applied = trace(
            local,
            inputs,
            loss=loss,
            cast=cast,
            plan_digest=digest,
            opaques=opaques,
            fresh=fresh,
            is_compared=True,
        )
    except TraceError as error:
        at = f", at {error.line}" if error.line else ""
        reason = f"the applied model cannot run: {error.reason}{at}"
        found = difference_so_far(local_nodes, error.ran, reason)
        if found.message == reason and (failure := own_failure(error.__cause__, has_run=True)) is not None:
            raise failure from error.__cause__
        return replace(found, culprit=error.module) if isinstance(error.__cause__, AtRestError) else found
    return difference(local_nodes, applied)


def _digest_of(plan: Plan) -> PlanDigest:
    """A function that returns all that a plan does inside a module, by names relative to the module."""
    inside: dict[str, list[tuple[int, str, str, tuple[tuple[str, str], ...]]]] = defaultdict(list)
    tables: tuple[Mapping[str, object], ...] = (
        plan.boundary_plans(),
        plan.size_plans(),
        plan.sharded_losses(),
        dict.fromkeys(plan.drawing_modules(), True),
        dict.fromkeys(plan.opaque_modules(), True),
    )
    for kind, table in enumerate(tables):
        for name, entry in table.items():
            for module in enclosing(name):
                inside[module].append((kind, name, repr(entry), ()))
    for name, parameter in plan.parameter_plans().items():
        reads = tuple((reader, str(layout)) for reader, layout in parameter.reads.items())
        for module in enclosing(name):
            inside[module].append((len(tables), name, repr(parameter.placement), reads))

    for name, buffer in plan.buffer_plans().items():
        reads = tuple((reader, str(layout)) for reader, layout in buffer.reads.items())
        for module in enclosing(name):
            inside[module].append((len(tables) + 1, name, "", reads))

    @cache
    def plan_digest(module: str) -> object:
        return tuple(
            sorted(
                (kind, name.removeprefix(module), entry, tuple(sorted((r.removeprefix(module), x) for r, x in reads)))
                for kind, name, entry, reads in inside.get(module, ())
            )
        )

    return plan_digest
