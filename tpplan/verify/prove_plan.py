"""Proves a plan from a file, edited by hand or not, for the model that it is to be applied to.

    proven = prove_plan(plan, build_model, example_inputs, loss=loss)    # VerificationError with the path of a mistake
    proven.plan.dump("plan.json")                                        # with its proof in the file

Both halves of the proof that `solve` makes are made from the plan alone: the layout of every value and gradient is
derived from the plan (tpplan.layouts.typecheck), and the model with the plan applied must run the model's own ops on
local shapes (tpplan.prove.structure). Everything else that the plan states must then follow: collectives, dtypes,
fingerprints, FSDP's modules. Predicted times are not checked: they belong to a machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.apply.model_match import check_model
from tpplan.core.errors import ModelError, TpplanError, VerificationError
from tpplan.core.graph import Boundary, Direction, enclosing
from tpplan.core.graph_fingerprint import graph_fingerprint
from tpplan.core.name_patterns import ROOT, module_name
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.collectives_of_step import collectives
from tpplan.costs.prediction.memory_replay import memory
from tpplan.costs.prediction.step_time import with_peak
from tpplan.experts.row_wise import why_not_divided
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.plan_sections import boundary_plans, parameter_plans
from tpplan.layouts.typecheck import Mistyped
from tpplan.plan.model_fingerprint import parameters_fingerprint
from tpplan.plan.optimizers import optimizer_named
from tpplan.plan.plan import CollectivePlan, Fingerprints, OtherShapes, Plan
from tpplan.plan.proof_hash import as_proven
from tpplan.prove.structure import find_difference
from tpplan.search.build_plan import input_shapes
from tpplan.search.models.subject import BuildModel, ExampleInputs, Subject
from tpplan.search.models.trace_cache import Reuse, TraceCache, Traced
from tpplan.search.other_shapes import other_shapes
from tpplan.search.tp_shares import counted_again
from tpplan.trace.trace import Loss
from tpplan.verify.collective_log import Issued, listed

#: a note in a plan that was edited after it was proven, and proven again
EDITED = "edited after it was solved and proven again: the solver's report is that of the plan before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A proven plan, and what follows from it for the given model, whatever its file states."""

    #: the given plan with this proof in its file; a shrunk one also has its own collectives, memory and fingerprints
    plan: Plan
    traced: Traced
    assignment: Assignment


def prove_plan(
    plan: Plan,
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    loss: Loss | None = None,
    is_as_solved: bool = True,
    reuse: Reuse | None = None,
) -> Proven:
    """Proves a plan for a model. No profile is asked.

    is_as_solved: whether the plan's collectives and fingerprints are its own, and checked. Those of a shrunk plan are
        still the whole plan's: they are made anew, and so is its predicted memory. reuse: traces to use.

    Raises VerificationError with the JSON path of a mistake in the plan, ModelError where the model cannot be traced.
    """
    traces = TraceCache(Subject.of_plan(plan, build_model, example_inputs, loss), reuse or Reuse())
    traced = traces.traced(plan.batch.micro_batch)
    prints = _fingerprints(traced)
    _refuse(_experts_problems(plan, traced))
    _refuse(_static_problems(plan, traced, prints if is_as_solved else None))
    assignment = traced.assignment_of(plan)
    if isinstance(assignment, Mistyped):
        raise VerificationError(f"{json_path_of(plan, assignment.place)}: {assignment.message}")
    try:
        check_model(traced.model, plan)
    except TpplanError as error:
        raise VerificationError(_with_path(error)) from error
    _refuse(_dtype_problems(plan, assignment))
    _check_structure(plan, assignment, traced, traces)
    lifetimes = Lifetimes(assignment, traces.reuse.executor)
    issued = collectives(lifetimes)
    if is_as_solved:
        _refuse(_listing_problems(plan, issued))
        _refuse(_shape_problems(plan, traces, traced, assignment))
    else:
        peak = with_peak(plan.predicted, memory(lifetimes))
        plan = replace(plan, collectives=issued, predicted=peak, fingerprints=prints)
    plan = replace(plan, tp_shares=counted_again(plan.tp_shares, assignment, traces.reuse.executor))
    return Proven(plan=_mended(plan, traced.assumptions), traced=traced, assignment=assignment)


def _mended(plan: Plan, assumptions: tuple[str, ...]) -> Plan:
    """The plan with a proof under these assumptions, and with a note where it was edited after it was solved."""
    made, notes = as_proven(plan, assumptions=assumptions), plan.notes or ()
    if plan.proof.plan_hash in (None, made.proof.plan_hash) or EDITED in notes:
        return made
    return replace(made, notes=(*notes, EDITED))


def _refuse(problems: Iterator[str]) -> None:
    """Raises VerificationError for the first problem, if there is one."""
    for problem in problems:
        raise VerificationError(problem)


def _experts_problems(plan: Plan, traced: Traced) -> Iterator[str]:
    """Yields why modules whose experts the plan divides do not allow that."""
    if why := why_not_divided(traced.model, traced.graph, plan.expert_calls(), plan.mesh.ep):
        yield f"experts: {why}"


def _fingerprints(traced: Traced) -> Fingerprints:
    return Fingerprints(
        parameters=parameters_fingerprint(traced.parameters()),
        graph=graph_fingerprint(traced.graph),
        inputs=input_shapes(traced.inputs),
    )


def _check_structure(plan: Plan, assignment: Assignment, traced: Traced, traces: TraceCache) -> None:
    """The structure half of the proof. Raises VerificationError also where applying the plan fails."""
    try:
        with traces.subject.planning():
            found = find_difference(traced.original(assignment, traces.subject), plan)
    except ModelError:
        raise
    except TpplanError as error:
        raise VerificationError(_with_path(error)) from error
    if found is not None:
        node = found.node
        place: tuple[str, ...] = ("sizes",)
        if isinstance(node, Boundary):
            place = ("boundaries", node.module, f"{node.direction}s", node.places[0][-1])
        elif node is not None:
            place = ("sizes", node.module)
        raise VerificationError(f"{json_path_of(plan, place)}: {found.message}")


def _with_path(error: TpplanError) -> str:
    """The message of an error of applying a plan, after a JSON path: the error's own, else that of all boundaries."""
    return str(error) if error.plan_path else f"boundaries: {error}"


# ---- what can be checked without layouts


def _static_problems(plan: Plan, traced: Traced, prints: Fingerprints | None) -> Iterator[str]:
    """Yields mistakes in module names, FSDP units and fingerprints (unless prints is None), each with its JSON path."""
    try:
        optimizer_named(plan.optimizer)
    except TpplanError as error:
        yield f"optimizer: {error}"
    modules = {name for name, _ in traced.model.named_modules(remove_duplicate=False)}
    for section, keys in _named_modules(plan).items():
        for place, key in keys:
            missing = next((name for name, _ in plan.expand(key) if module_name(name) not in modules), None)
            if missing is not None:
                yield f"{section}{place}: the model has no module {missing!r}"
    yield from _unit_problems(plan)
    if prints is None:
        return
    for name in ("parameters", "graph", "inputs"):
        planned, found = getattr(plan.fingerprints, name), getattr(prints, name)
        if planned != found:
            yield (
                f"fingerprints.{name}: the plan was made for {planned}, this model has {found}: solve again, or find "
                "out whether the model, torch or the example inputs have changed"
            )


def _named_modules(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """(path within the section, key) of every entry that names modules, by section of the plan."""
    tables: dict[str, Sequence[str] | Mapping[str, object]] = {
        "boundaries": plan.boundaries,
        "sizes": plan.sizes,
        "losses": plan.losses,
        "recompute": plan.recompute,
        "opaque": plan.opaque or {},
    }
    lists = {
        "draws": plan.draws,
        "fsdp.units": plan.fsdp.units,
        "fsdp.exceptions": plan.fsdp.exceptions,
        "fsdp.over_tp": plan.fsdp.over_tp or (),
    }
    found = {section: [(f".{key}", key) for key in keys] for section, keys in tables.items()}
    return found | {section: [(f"[{i}]", key) for i, key in enumerate(keys)] for section, keys in lists.items()}


def _unit_problems(plan: Plan) -> Iterator[str]:
    """Yields FSDP units in a wrong order: a module is sharded once, and modules inside it before it."""
    seen: set[str] = set()
    for position, key in enumerate(plan.fsdp.units):
        for written, _ in plan.expand(key):
            name = module_name(written)
            around = next(filter(seen.__contains__, enclosing(name)), None)
            if around is not None:
                yield f"fsdp.units[{position}]: {written} comes after {around or ROOT}, which holds it: move it before"
            seen.add(name)


# ---- what follows from layouts


def _dtype_problems(plan: Plan, assignment: Assignment) -> Iterator[str]:
    """Yields dtypes that a plan names where parameters rest, or tensors cross, in other ones."""
    planned, boundaries = plan.parameter_plans(), plan.boundary_plans()
    for name, found in parameter_plans(assignment).items():
        if planned[name].dtype != found.dtype:
            path = json_path_of(plan, ("parameters", name, "dtype"))
            yield f"{path}: the plan says {planned[name].dtype}, it rests as {found.dtype}"
    for module, boundary in boundary_plans(assignment).items():
        own = boundaries.get(module or ROOT) or boundaries[module]
        for direction, here, there in (
            (Direction.INPUT, own.inputs, boundary.inputs),
            (Direction.OUTPUT, own.outputs, boundary.outputs),
        ):
            for path, crossing in there.items():
                if here[path].dtype != crossing.dtype:
                    place = json_path_of(plan, ("boundaries", module, f"{direction}s", path))
                    yield f"{place}: the plan says {here[path].dtype}, the tensor that crosses is {crossing.dtype}"


def _listing_problems(plan: Plan, implied: tuple[CollectivePlan, ...]) -> Iterator[str]:
    """Yields collectives whose number in the plan's list is not what the plan implies, and rows listed twice."""
    given, wanted = listed(plan), listed(replace(plan, collectives=implied))
    keys = list(_keys(plan))
    for key in (*wanted, *(key for key in given if key not in wanted)):
        if given[key] != wanted[key]:
            at = f"[{keys.index(key)}]" if key in keys else ""
            yield f"collectives{at}: {key}: listed {given[key]}, and the plan implies {wanted[key]}"
    first = {key: len(keys) - 1 - i for i, key in enumerate(reversed(keys))}
    yield from (
        f"collectives[{i}]: listed twice, at [{first[key]}] too: add the counts up in one row"
        for i, key in enumerate(keys)
        if first[key] < i
    )


def _shape_problems(plan: Plan, traces: TraceCache, traced: Traced, assignment: Assignment) -> Iterator[str]:
    """Yields other batches and lengths that the plan is said to hold for, where they are more than its proof shows."""
    claimed = plan.proof.other_shapes
    if claimed is None:
        return
    found = other_shapes(traces, plan, traced, assignment)
    if found is None or not _is_within(claimed, found):
        yield f"proof.other_shapes: the plan says {claimed}, it is proven for {found}"


def _is_within(claimed: OtherShapes, proven: OtherShapes) -> bool:
    """True where all shapes claimed are among those proven. A plan may claim fewer: solving gives up at sizes where it
    knows a graph without a trace, and may name another size in its reason."""
    return claimed.inputs == proven.inputs and all(
        own.multiple is None or (known.multiple is not None and own.multiple % known.multiple == 0)
        for own, known in ((claimed.batch, proven.batch), (claimed.length, proven.length))
    )


def _keys(plan: Plan) -> Iterator[Issued]:
    """The collective of each row of the plan's list, in order."""
    for row in plan.collectives:
        yield from listed(replace(plan, collectives=(row,)))


def json_path_of(plan: Plan, place: tuple[str, ...]) -> str:
    """The JSON path, in the plan's file, of a place (section, full name of a module or parameter, further keys)."""
    if not place:
        return "plan"
    section, *rest = place
    if not rest:
        return section
    name, *below = rest
    tables: dict[str, Mapping[str, object]] = {
        "parameters": plan.parameters,
        "buffers": plan.buffers or {},
        "boundaries": plan.boundaries,
        "sizes": plan.sizes,
        "losses": plan.losses,
        "opaque": plan.opaque or {},
    }
    keys = sorted(tables.get(section, {}), key=lambda key: "*" in key)
    written = name or ROOT
    key = next((key for key in keys if written in {full for full, _ in plan.expand(key)}), written)
    return ".".join((section, key, *(part or ROOT for part in below)))
