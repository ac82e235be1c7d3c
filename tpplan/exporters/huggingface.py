"""a tp_plan dict as JSON, style by module name, which transformers, DeepSpeed's AutoTP and vLLM read

The dict says how tensor parallelism cuts each layer. Degrees of data parallelism, precision and recomputation are the
training script's. A style converts at its own layer alone, so what is written is first made a plan of its own, which
converts nowhere else, and that plan is proven to be the same model: a sequence that lies in slices between layers, a
size in the model's code that would have to be a rank's own, or dropout on slices is refused by name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum

from torch import nn

from tpplan.core.errors import ExportError, VerificationError
from tpplan.core.graph import Boundary, Direction, Op
from tpplan.core.layout import R_STAR, ROWS, Conversion, Layout, P, R, S
from tpplan.core.name_patterns import ROOT
from tpplan.exporters import Crossing, LaidOut
from tpplan.layouts.typecheck import Mistyped, implied_strategies
from tpplan.plan.plan import BoundaryPlan, CrossingPlan, ParameterPlan, Plan


class Style(StrEnum):
    """Styles of transformers: how a layer's weights are cut, and what its input and output are on a rank."""

    COLUMNS = "colwise"
    COLUMNS_GATHERED = "colwise_gather_output"
    ROWS = "rowwise"
    ROWS_OF_WHOLE = "rowwise_split_input"
    VOCABULARY = "embedding_rowwise"
    EMBEDDING_COLUMNS = "embedding_colwise"
    #: whole weights that meet slices: their gradients are summed over ranks
    SUMMED = "replicated_with_grad_allreduce"
    WHOLE = "replicate"


def export(laid: LaidOut) -> str:
    """Returns the dict as JSON. Raises ExportError for a plan that it cannot say."""
    if laid.plan.mesh.tp == 1:
        raise ExportError("the plan has one tensor-parallel rank, and a tp_plan would say nothing: solve with --tp N")
    styles = _styles(laid)
    try:
        laid.prove(_as_run(laid, styles))
    except VerificationError as error:
        raise ExportError(f"this form converts at the cut layers alone, and then {error}; use apply_plan") from error
    return json.dumps(by_pattern(styles), indent=2) + "\n"


def _styles(laid: LaidOut) -> dict[str, Style]:
    """Returns the style of every linear layer and embedding, and of norms that meet slices, by module name.

    Where layouts fit only if an output is gathered before the model's own loss, or a replicated weight's gradient is
    summed, the layer's style says so.
    """
    owned = _owned(laid.plan)
    modules = dict(laid.model.named_modules(remove_duplicate=False))
    styles = {name: _style(laid, name, modules[name], owned[name]) for name in modules if name in owned}
    for _ in styles:
        found = implied_strategies(laid.graph, _as_run(laid, styles))
        if not isinstance(found, Mistyped):
            break
        change = _mended(laid, styles, found)
        if not change:
            raise _unsaid(laid.plan, found)
        styles |= change
    return styles


def _unsaid(plan: Plan, problem: Mistyped) -> ExportError:
    drawing = {ROOT if name == "" else name for name in plan.drawing_modules()}.intersection(problem.place)
    if drawing:
        return ExportError(
            f"module {min(drawing)}: dropout runs on slices, and every rank would draw the same mask: set its "
            "probability to 0 and solve again, or use apply_plan"
        )
    return ExportError(f"this form converts at the cut layers alone, and then {problem.message}: use apply_plan")


def _owned(plan: Plan) -> dict[str, dict[str, ParameterPlan]]:
    """Returns the plans of parameters by owning module and attribute."""
    found: dict[str, dict[str, ParameterPlan]] = {}
    for label, parameter in plan.parameter_plans().items():
        for name in (label, *parameter.aliases):
            owner, _, attribute = name.rpartition(".")
            found.setdefault(owner, {})[attribute] = parameter
    return found


def _style(laid: LaidOut, name: str, module: nn.Module, parameters: Mapping[str, ParameterPlan]) -> Style:
    placements = {attribute: parameter.placement for attribute, parameter in parameters.items()}
    if all(placement == R for placement in placements.values()):
        return Style.WHOLE
    weight, bias = placements.get("weight"), placements.get("bias")
    if weight is not None and parameters["weight"].reads.get(name) != weight:
        weight = None  # a fused weight, which a rank reads part by part
    if isinstance(module, nn.Linear) and weight == S(0) and bias in (None, S(0)):
        gathers = any(crossing.target == R for crossing in _changed(laid, name, Direction.OUTPUT))
        return Style.COLUMNS_GATHERED if gathers else Style.COLUMNS
    if isinstance(module, nn.Linear) and weight == S(1) and bias in (None, R):
        cuts = any(crossing.source == R for crossing in _changed(laid, name, Direction.INPUT))
        return Style.ROWS_OF_WHOLE if cuts else Style.ROWS
    if isinstance(module, nn.Embedding) and weight in (S(0), S(1)):
        return Style.VOCABULARY if weight == S(0) else Style.EMBEDDING_COLUMNS
    cut = ", ".join(f"{attribute} as {parameter.reads.get(name)}" for attribute, parameter in parameters.items())
    raise ExportError(
        f"module {name or ROOT}: {type(module).__name__} with {cut}: a tp_plan cuts nn.Linear by columns or rows, and "
        "nn.Embedding: use apply_plan"
    )


def _changed(laid: LaidOut, name: str, direction: Direction) -> Iterator[Crossing]:
    return (crossing for crossing in laid.crossings.get((name, direction), ()) if crossing.is_conversion)


def _mended(laid: LaidOut, styles: Mapping[str, Style], problem: Mistyped) -> dict[str, Style]:
    """Returns styles to change for the layouts to fit; none where the form has no style for that."""
    match problem.place:
        case ("parameters", _, "reads", module) if styles.get(module) is Style.WHOLE:
            return {module: Style.SUMMED}
    node = next((node for node in laid.graph.nodes if node.name in problem.blamed), None)
    if node is None or not (node.module in laid.plan.sharded_losses() or _leaves(node)):
        return {}
    return dict.fromkeys(_columns_behind(laid, styles, node), Style.COLUMNS_GATHERED)


def _leaves(node: Op | Boundary) -> bool:
    return isinstance(node, Boundary) and node.leaves_model


def _columns_behind(laid: LaidOut, styles: Mapping[str, Style], node: Op | Boundary) -> Iterator[str]:
    """Yields the column-parallel layers whose slices reach the node through no other layer."""
    open_values, seen = list(node.operands), set[str]()
    while open_values:
        value = open_values.pop()
        producer = laid.graph.producers.get(value)
        if value in seen or producer is None:
            continue
        seen.add(value)
        if isinstance(producer, Boundary) and producer.module in styles:
            if styles[producer.module] is Style.COLUMNS:
                yield producer.module
            continue
        open_values += producer.operands


def _as_run(laid: LaidOut, styles: Mapping[str, Style]) -> Plan:
    """Returns the plan that the styles carry out: they convert at their own layers, and nothing else is changed."""
    boundaries: dict[str, BoundaryPlan] = {}
    for boundary in laid.graph.boundaries:
        conversion = _conversion(laid, styles.get(boundary.module, Style.WHOLE), boundary)
        if conversion is None or conversion.is_identity:
            continue
        own = boundaries.setdefault(boundary.module, BoundaryPlan(inputs={}, outputs={}))
        crossing = CrossingPlan(conversion, laid.graph.values[boundary.operand].dtype)
        side = "inputs" if boundary.direction is Direction.INPUT else "outputs"
        boundaries[boundary.module] = replace(own, **{side: {**getattr(own, side), boundary.path: crossing}})
    parameters = {
        label: replace(parameter, reads={name: _read(parameter, styles.get(name), name) for name in parameter.reads})
        for label, parameter in laid.plan.parameter_plans().items()
    }
    return replace(laid.plan, parameters=parameters, boundaries=boundaries, sizes={}, losses={}, draws=(), outputs={})


def _read(parameter: ParameterPlan, style: Style | None, module: str) -> Layout:
    if style in (Style.ROWS, Style.ROWS_OF_WHOLE) or parameter.placement != R:
        return parameter.reads[module]
    return R_STAR if style is Style.SUMMED and parameter.trainable else R


def _conversion(laid: LaidOut, style: Style, boundary: Boundary) -> Conversion | None:
    """Returns what a style does to a tensor that enters or leaves its layer; None where it leaves it alone."""
    value = laid.graph.values[boundary.operand]
    last, is_input = S(max(0, len(value.shape) - 1)), boundary.direction is Direction.INPUT
    match style:
        case Style.COLUMNS | Style.COLUMNS_GATHERED if is_input:
            return Conversion(R, R_STAR) if value.carries_gradient else None
        case Style.COLUMNS_GATHERED | Style.EMBEDDING_COLUMNS:
            return None if is_input else Conversion(last, R)
        case Style.ROWS_OF_WHOLE if is_input:
            return Conversion(R, last)
        case Style.ROWS | Style.ROWS_OF_WHOLE:
            return None if is_input else Conversion(P, R)
        case Style.VOCABULARY:
            return Conversion(R, ROWS) if is_input else Conversion(ROWS, R)
        case Style.COLUMNS | Style.SUMMED | Style.WHOLE:
            return None


def by_pattern(styles: Mapping[str, Style]) -> dict[str, str]:
    """Returns the style by name with `*` for every layer number. Raises ExportError where like layers differ."""
    found: dict[str, tuple[str, Style]] = {}
    for name, style in styles.items():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        first, same = found.setdefault(pattern, (name, style))
        if same is not style:
            raise ExportError(
                f"{first} is {same} and {name} is {style}: a tp_plan has one style for all of {pattern}; pin them "
                "alike and solve again, or use apply_plan"
            )
    return {pattern: str(style) for pattern, (_, style) in found.items()}
