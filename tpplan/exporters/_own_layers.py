"""Layouts that change at the cut layers alone, as in Megatron's layers without sequence parallelism.

A linear layer or embedding that is cut takes its input, and gives its output, whole or as a slice of the last dim.
Forms with a style for each layer can carry out no other plan. So what they write is first made a plan of its own, with
the same cuts of weights, and that plan is proven to be the same model. It keeps no slices of the sequence between
layers, gathers what a loss on slices would read, and changes no sizes in the model's code, but for layers that a form
runs on DTensors, which have the sizes of one process.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType

from torch import nn

from tpplan.core.errors import ExportError, VerificationError
from tpplan.core.graph import Boundary, Direction, Op, within
from tpplan.core.layout import R_STAR, ROWS, Conversion, Layout, P, R, S
from tpplan.core.name_patterns import ROOT
from tpplan.exporters import Crossing, LaidOut
from tpplan.layouts.rules.size_literals import CREATIONS
from tpplan.layouts.typecheck import Mistyped, implied_strategies
from tpplan.plan.plan import BoundaryPlan, CrossingPlan, ParameterPlan, Plan

_ALONE = "with layouts that change at the cut layers alone,"


class Style(StrEnum):
    """How a layer's weights are cut, and what its input and output are on a rank, in the words of transformers."""

    COLUMNS = "colwise"
    COLUMNS_GATHERED = "colwise_gather_output"
    ROWS = "rowwise"
    ROWS_OF_WHOLE = "rowwise_split_input"
    VOCABULARY = "embedding_rowwise"
    EMBEDDING_COLUMNS = "embedding_colwise"
    #: whole weights that meet slices: their gradients are summed over ranks
    SUMMED = "replicated_with_grad_allreduce"
    WHOLE = "replicate"


def at_own_layers(
    laid: LaidOut, *, gathers: bool = False, products: Mapping[str, Style] = MappingProxyType({})
) -> tuple[dict[str, Style], LaidOut]:
    """Returns the style of every module with parameters, by name, and the model laid out by these styles alone.

    Weights are cut as planned. With `gathers`, layers whose slices code cannot read in these layouts give whole
    outputs, and what follows runs whole. `products` are layers besides nn.Linear that the form can cut (cut_products).
    Raises ExportError where the model is then not the same, or a layer has no style.
    """
    known: dict[str, Style] = {}
    for more in (_beside_created, _beside_sizes) if gathers else ():
        styles = _styles(laid, known, products, gathers=True)
        try:
            return _proven(laid, styles, products)
        except ExportError:
            known |= more(laid, styles, products)
    return _proven(laid, _styles(laid, known, products, gathers=gathers), products)


def cut_products(laid: LaidOut) -> dict[str, Style]:
    """Returns, by name, the layers without submodules, other than nn.Linear and nn.Embedding, that the plan cuts as a
    product with a weight is cut, whatever the order of the weight's dims: by columns, which give slices of the last
    dim, or by rows, which read them."""
    owned, found = owned_parameters(laid.plan), dict[str, Style]()
    for name, module in laid.model.named_modules(remove_duplicate=False):
        is_other = type(module) not in (nn.Linear, nn.Embedding) and next(module.children(), None) is None
        if is_other and any(one.placement != R for one in owned.get(name, {}).values()):
            ranks = {
                len(laid.graph.values[boundary.operand].shape)
                for boundary in laid.graph.boundaries
                if boundary.module == name
            }
            style = _style_of_product(laid, name, ranks.pop() - 1) if len(ranks) == 1 else None
            if style is not None:
                found[name] = style
    return found


def _style_of_product(laid: LaidOut, name: str, last: int) -> Style | None:
    """Returns how a layer is cut whose input and output have the dim `last` as their last; None where it is not cut as
    a product is."""
    entering = {crossing.target for crossing in laid.crossings.get((name, Direction.INPUT), ())}
    leaving = {crossing.source for crossing in laid.crossings.get((name, Direction.OUTPUT), ())}
    if entering <= {R, R_STAR} and {layout.dim for layout in leaving} == {last}:
        return Style.COLUMNS
    if leaving == {P} and entering == {S(last)}:
        return Style.ROWS
    return None


def _proven(laid: LaidOut, styles: dict[str, Style], products: Mapping[str, Style]) -> tuple[dict[str, Style], LaidOut]:
    """Returns the styles, and the model laid out by them. Raises ExportError where it is not the same model."""
    plan = _as_run(laid, styles, products)
    try:
        laid.prove(plan)
    except VerificationError as error:
        raise ExportError(f"{_ALONE} {error}: use apply_plan") from error
    strategies = implied_strategies(laid.graph, plan)
    assert not isinstance(strategies, Mistyped), "proven just now"
    return styles, replace(laid, plan=plan, strategies=strategies)


def _beside_created(laid: LaidOut, styles: Mapping[str, Style], products: Mapping[str, Style]) -> dict[str, Style]:
    """Returns the style of gathering for the layers whose slices meet tensors that code creates: it may give these
    their whole size, and this form changes no sizes in code."""
    graph, strategies = laid.graph, implied_strategies(laid.graph, _as_run(laid, styles, products))
    assert not isinstance(strategies, Mistyped), "the styles fit"
    created = [op for op in graph.ops if op.target in CREATIONS and strategies[op.name].results[0].dim is not None]
    reached = (reader for op in created for reader in _readers(laid, styles, op))
    found = (layer for reader in reached for layer in _columns_behind(laid, styles, reader))
    return dict.fromkeys(found, Style.COLUMNS_GATHERED)


def _beside_sizes(laid: LaidOut, styles: Mapping[str, Style], products: Mapping[str, Style]) -> dict[str, Style]:
    """Returns the style of gathering for the layers inside modules whose code has sizes that the plan replaces, which
    this form does not."""
    sized = laid.plan.size_plans().keys() - products.keys()
    return {
        name: Style.COLUMNS_GATHERED
        for name, style in styles.items()
        if style is Style.COLUMNS and any(within(name, module) for module in sized)
    }


def _styles(
    laid: LaidOut, known: Mapping[str, Style], products: Mapping[str, Style], *, gathers: bool
) -> dict[str, Style]:
    """Returns the style of every linear layer and embedding, and of norms that meet slices, by module name.

    Where layouts fit only if an output is gathered before the model's own loss, or a replicated weight's gradient is
    summed, the layer's style says so.
    """
    owned = owned_parameters(laid.plan)
    modules = dict(laid.model.named_modules(remove_duplicate=False))
    styles = {
        name: _style(laid, name, module, owned[name], products.get(name), gathers=gathers)
        for name, module in modules.items()
        if name in owned
    }
    styles |= known
    for _ in styles:
        found = implied_strategies(laid.graph, _as_run(laid, styles, products))
        if not isinstance(found, Mistyped):
            break
        change = _mended(laid, styles, found, gathers=gathers)
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
    return ExportError(f"{_ALONE} {problem.message}: use apply_plan")


def owned_parameters(plan: Plan) -> dict[str, dict[str, ParameterPlan]]:
    """Returns the plans of parameters by owning module, for each of their names, and by attribute."""
    found: dict[str, dict[str, ParameterPlan]] = {}
    for label, parameter in plan.parameter_plans().items():
        for name in (label, *parameter.aliases):
            owner, _, attribute = name.rpartition(".")
            found.setdefault(owner, {})[attribute] = parameter
    return found


def _style(
    laid: LaidOut,
    name: str,
    module: nn.Module,
    parameters: Mapping[str, ParameterPlan],
    product: Style | None,
    *,
    gathers: bool,
) -> Style:
    placements = {attribute: parameter.placement for attribute, parameter in parameters.items()}
    if all(placement == R for placement in placements.values()):
        return Style.WHOLE
    if all(name not in parameter.reads and parameter.aliases for parameter in parameters.values()):
        return Style.WHOLE  # it is not called: modules that have its parameters by other names read them
    weight, bias = placements.get("weight"), placements.get("bias")
    is_fused = weight is not None and parameters["weight"].reads.get(name) != weight  # a rank reads it part by part
    if isinstance(module, nn.Linear) and (weight, bias) in ((S(0), None), (S(0), S(0))):
        product = Style.COLUMNS
    elif isinstance(module, nn.Linear) and (weight, bias) in ((S(1), None), (S(1), R)):
        product = Style.ROWS
    if product is Style.COLUMNS and (gathers or not is_fused):
        is_whole = any(crossing.target == R for crossing in _changed(laid, name, Direction.OUTPUT))
        return Style.COLUMNS_GATHERED if is_fused or is_whole else Style.COLUMNS
    if product is Style.ROWS and not is_fused:
        cuts = any(crossing.source == R for crossing in _changed(laid, name, Direction.INPUT))
        return Style.ROWS_OF_WHOLE if cuts else Style.ROWS
    if isinstance(module, nn.Embedding) and weight in (S(0), S(1)) and not is_fused:
        return Style.VOCABULARY if weight == S(0) else Style.EMBEDDING_COLUMNS
    cut = ", ".join(f"{attribute} as {parameter.reads.get(name)}" for attribute, parameter in parameters.items())
    raise ExportError(
        f"module {name or ROOT}: {type(module).__name__} with {cut}: a tp_plan cuts nn.Linear by columns or rows, and "
        "nn.Embedding: use apply_plan"
    )


def _changed(laid: LaidOut, name: str, direction: Direction) -> Iterator[Crossing]:
    return (crossing for crossing in laid.crossings.get((name, direction), ()) if crossing.is_conversion)


def _mended(laid: LaidOut, styles: Mapping[str, Style], problem: Mistyped, *, gathers: bool) -> dict[str, Style]:
    """Returns styles to change for the layouts to fit; none where the form has no style for that."""
    match problem.place:
        case ("parameters", _, "reads", module) if styles.get(module) is Style.WHOLE:
            return {module: Style.SUMMED}
    node = next((node for node in laid.graph.nodes if node.name in problem.blamed), None)
    if node is None:
        return {}
    if gathers and styles.get(node.module) is Style.ROWS:
        return {node.module: Style.ROWS_OF_WHOLE}
    if not (gathers or node.module in laid.plan.sharded_losses() or _leaves(node)):
        return {}
    found = dict.fromkeys(_columns_behind(laid, styles, node), Style.COLUMNS_GATHERED)
    return found or (dict.fromkeys(_rows_ahead(laid, styles, node), Style.ROWS_OF_WHOLE) if gathers else {})


def _rows_ahead(laid: LaidOut, styles: Mapping[str, Style], node: Op | Boundary) -> Iterator[str]:
    """Yields the row-parallel layers that read slices of what the node makes, through no other layer."""
    for reader in _readers(laid, styles, node):
        if isinstance(reader, Boundary) and styles.get(reader.module) is Style.ROWS:
            yield reader.module


def _readers(laid: LaidOut, styles: Mapping[str, Style], node: Op | Boundary) -> Iterator[Op | Boundary]:
    """Yields what reads what the node makes, through ops and up to the boundaries of layers."""
    open_values, seen = list(node.results), set[str]()
    while open_values:
        value = open_values.pop()
        if value in seen:
            continue
        seen.add(value)
        for reader in laid.graph.consumers.get(value, ()):
            yield reader
            if not (isinstance(reader, Boundary) and reader.module in styles):
                open_values += reader.results


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


def _as_run(laid: LaidOut, styles: Mapping[str, Style], products: Mapping[str, Style]) -> Plan:
    """Returns the plan that the styles carry out: they convert at their own layers, and nothing else is changed but
    sizes in the code of `products`."""
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
    sizes = {name: sizes for name, sizes in laid.plan.size_plans().items() if name in products}
    changed = replace(laid.plan, parameters=parameters, boundaries=boundaries, sizes=sizes)
    return replace(changed, losses={}, draws=(), outputs={})


def _read(parameter: ParameterPlan, style: Style | None, module: str) -> Layout:
    read = parameter.reads[module]
    if style is Style.COLUMNS_GATHERED and read.dim is not None:
        return S(read.dim)
    if style in (Style.ROWS, Style.ROWS_OF_WHOLE) or parameter.placement != R:
        return read
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
