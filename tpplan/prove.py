"""The structure half of the proof: retrace what apply will run, on local shapes, and walk both graphs together.

The model is traced again with its parameters cut to one rank's shapes and every planned conversion resizing the tensor
that crosses. Then the same ops must run in the same order, each value must have the one local shape that its layout
implies, and each literal must be unchanged, except sizes that view and expand are given, which the shapes cover. That
finds sizes baked into code (`view(B, T, self.n_heads, hd)`) and positions or masks built from a sharded length.
The rules themselves are validated by brute force; a plan so checked says `structure`.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import nn

from tpplan import operators
from tpplan.assemble import Expanded
from tpplan.errors import ModelError
from tpplan.graph import Argument, Boundary, Direction, ModelGraph, Op, Ref, within
from tpplan.layout import LayoutKind, local_shape
from tpplan.rules import Call, localized_sizes
from tpplan.trace import BoundaryHook, Inputs, Loss, trace

RESIZE = "tpplan.resize.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """Where the retrace differs: the op, what was expected and seen, and the decisions whose sharding is to blame."""

    message: str
    blamed: tuple[str, ...]


def check_structure(
    model: nn.Module, inputs: Inputs, expanded: Expanded, *, loss: Loss | None, hook: BoundaryHook | None
) -> Counterexample | None:
    """None when the applied model runs the original's ops on the planned local shapes, else the first difference."""
    local = localized(model, expanded)
    sizes = _boundary_sizes(expanded)

    def resize(tensor: torch.Tensor, module: str, direction: Direction, path: str) -> torch.Tensor:
        if hook is not None:
            tensor = hook(tensor, module, direction, path)
        wanted = sizes.get((module, direction, path))
        return tensor if wanted is None else operators.resize(tensor, wanted)

    try:
        retraced = trace(local, inputs, loss=loss, hook=resize, hook_key=lambda module: _doings(sizes, module))
    except ModelError as error:
        return _failed(expanded, error)
    return _compare(expanded, retraced)


def localized(model: nn.Module, expanded: Expanded) -> nn.Module:
    """A copy of a meta model whose parameters have one rank's shapes; tied ones stay tied."""
    local = copy.deepcopy(model)
    tp = expanded.formulation.mesh.tp
    for source in expanded.graph.parameters:
        shape = local_shape(expanded.graph.values[source.result].shape, expanded.placement(source), tp)
        original = local.get_parameter(source.label)
        cut = nn.Parameter(torch.empty(shape, dtype=original.dtype, device="meta"), requires_grad=source.trainable)
        for name in (source.label, *source.aliases):
            owner, _, attribute = name.rpartition(".")
            local.get_submodule(owner)._parameters[attribute] = cut
    return local


def _boundary_sizes(expanded: Expanded) -> dict[tuple[str, Direction, str], tuple[int, ...]]:
    """Local shapes behind the conversions that change them."""
    tp = expanded.formulation.mesh.tp
    found = {}
    for boundary, conversion in expanded.conversions():
        shape = expanded.graph.values[boundary.operand].shape
        before, after = (local_shape(shape, layout, tp) for layout in (conversion.source, conversion.target))
        if before != after:
            found[boundary.module, boundary.direction, boundary.path] = after
    return found


def _doings(sizes: Mapping[tuple[str, Direction, str], tuple[int, ...]], module: str) -> object:
    """What resizes inside a module, by names relative to it."""
    return frozenset(
        (name.removeprefix(module), direction, path, shape)
        for (name, direction, path), shape in sizes.items()
        if within(name, module)
    )


def _compare(expanded: Expanded, retraced: ModelGraph) -> Counterexample | None:
    graph = expanded.graph
    resized = {op.results[0]: op.operands[0] for op in retraced.ops if op.target == RESIZE}
    nodes = [node for node in retraced.nodes if not (isinstance(node, Op) and node.target == RESIZE)]
    images = {s.result: t.result for s, t in zip(graph.sources, retraced.sources, strict=False)}
    if [(s.kind, s.label) for s in graph.sources] != [(s.kind, s.label) for s in retraced.sources]:
        return Counterexample(message="the retrace has other inputs, parameters or constants", blamed=())
    for original, image in zip_longest(graph.nodes, nodes):
        if original is None or image is None:
            node = original or image
            return _blame(expanded, original, f"one trace ends before {_title(node)}")
        problem = _difference(expanded, retraced, original, image, images, resized)
        if problem:
            return _blame(expanded, original, problem)
        images.update(zip(original.results, image.results, strict=True))
    return None


def _difference(
    expanded: Expanded,
    retraced: ModelGraph,
    original: Op | Boundary,
    image: Op | Boundary,
    images: Mapping[str, str],
    resized: Mapping[str, str],
) -> str | None:
    """What differs between an op and its image; None where nothing does."""
    if _title(original) != _title(image) or len(original.results) != len(image.results):
        return f"{_title(original)} became {_title(image)}"
    seen = [resized.get(name, name) for name in image.operands]
    if seen != [images.get(name) for name in original.operands]:
        return f"{_title(original)} reads other values"
    if isinstance(original, Op) and isinstance(image, Op):
        wanted = _expected_arguments(expanded, original)
        got = _literals((image.args, image.kwargs))
        if wanted is not None and wanted != got:
            return f"{_title(original)}: literals {wanted} became {got}"
    for name, local in zip(original.results, image.results, strict=True):
        layout = expanded.layout(name)
        before = layout
        if isinstance(original, Boundary):
            before = expanded.strategy(original.name).operands[0]
        shape = local_shape(expanded.graph.values[name].shape, before, expanded.formulation.mesh.tp)
        if retraced.values[local].shape != shape:
            return (
                f"{_title(original)}: expected the local shape {list(shape)}, got {list(retraced.values[local].shape)}"
            )
    return None


def _expected_arguments(expanded: Expanded, op: Op) -> object:
    """An op's literals as they must come back; None where they are sizes, which the result's shape covers."""
    call = Call.of(expanded.graph, op)
    if call.results and localized_sizes(call, call.results[0].shape) is not None:
        return None
    return _literals((op.args, op.kwargs))


def _literals(argument: Argument | object) -> object:
    if isinstance(argument, Ref):
        return "tensor"
    return tuple(map(_literals, argument)) if isinstance(argument, tuple) else argument


def _title(node: Op | Boundary | None) -> str:
    match node:
        case Op():
            return f"{node.target} in {node.module or 'the root'}"
        case Boundary():
            return f"{node.direction} {node.path} of {node.module or 'the root'}"
        case None:
            return "nothing"


def _blame(expanded: Expanded, node: Op | Boundary | None, message: str) -> Counterexample:
    """The op itself where it runs sharded, else whatever sharded value its module's code can see."""
    if isinstance(node, Op):
        if node.name in _sharded(expanded, (node,)):
            return Counterexample(message=message, blamed=(node.name,))
        return Counterexample(message=message, blamed=tuple(_visible(expanded, node.module)))
    module = node.module if node is not None else ""
    parent = module.rpartition(".")[0]
    blamed = tuple(_visible(expanded, module)) or tuple(_visible(expanded, parent))
    return Counterexample(message=message, blamed=blamed)


def _failed(expanded: Expanded, error: ModelError) -> Counterexample:
    """The retrace did not finish: blame what is given sizes in the failing module, else all that is sharded there."""
    text = str(error).splitlines()[0]
    module = text.partition("in module '")[2].partition("'")[0]
    sized = [
        op
        for op in expanded.graph.ops
        if op.module == module and localized_sizes(call := Call.of(expanded.graph, op), call.results[0].shape)
    ]
    blamed = tuple(_sharded(expanded, sized)) or tuple(_visible(expanded, module))
    return Counterexample(message=f"the applied model cannot run: {text}", blamed=blamed)


def _visible(expanded: Expanded, module: str) -> Iterator[str]:
    """Decisions that give sharded values to a module's own code: its ops, its inputs, its children's outputs."""

    def is_visible(node: Op | Boundary) -> bool:
        leaves_child = isinstance(node, Boundary) and node.direction is Direction.OUTPUT
        return node.module == module or (leaves_child and _parent(expanded, node.module) == module)

    yield from _sharded(expanded, filter(is_visible, expanded.graph.nodes))


def _parent(expanded: Expanded, module: str) -> str:
    """The nearest enclosing module that runs code of its own (containers do not)."""
    running = {boundary.module for boundary in expanded.graph.boundaries}
    parent = module
    while parent:
        parent = parent.rpartition(".")[0]
        if parent in running:
            break
    return parent


def _sharded(expanded: Expanded, nodes: Iterable[Op | Boundary]) -> Iterator[str]:
    for node in nodes:
        strategy = expanded.strategy(node.name)
        if any(layout.kind is LayoutKind.SHARD for layout in (*strategy.operands, *strategy.results)):
            yield node.name
