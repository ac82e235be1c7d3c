"""The structure half of the proof: retrace what apply will run, on local shapes, and walk both graphs together.

The model is traced again with its parameters cut to one rank's shapes and every planned conversion resizing the tensor
that crosses. Then the same ops must run in the same order (save copies that are needless on a rank), each value must
have the one local shape that its layout implies, and each literal must be unchanged, except sizes that view and expand
are given, which the shapes cover. That finds sizes baked into code (`view(B, T, self.n_heads, hd)`) and positions or
masks built from a sharded length. Baked sizes have a remedy: the same retrace with each replaced by what a rank needs
(tpplan.sizes), compared in the same way.
The rules themselves are validated by brute force; the other half of the proof is tpplan.typecheck.
"""

import copy
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tpplan import operators
from tpplan.assemble import Expanded
from tpplan.blocks import like_nodes
from tpplan.exported import IGNORED, argument_of
from tpplan.graph import LOSS_SCOPE, Argument, Boundary, Direction, ModelGraph, Op, Ref, within
from tpplan.layout import local_shape
from tpplan.plan import SizePlan
from tpplan.rewrite import rewrite_calls
from tpplan.rules import Call, localized_arguments, takes_sizes, written_operands, written_sizes
from tpplan.sizes import LocalSizes
from tpplan.space import Reading
from tpplan.trace import BoundaryHook, Inputs, Loss, TraceError, trace

BOUNDARY, FRAME = "tpplan.boundary.default", "tpplan.frame.default"
CONTIGUOUS = "aten.contiguous.default"
RESIZE, SIBLING = "tpplan.resize.default", "tpplan.sibling.default"
#: what a trace that stopped holds and a ModelGraph does not
_PASSED = frozenset({FRAME, RESIZE, *IGNORED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """Where the retrace differs: the op, what was expected and seen, and the decisions whose sharding is to blame."""

    message: str
    blamed: tuple[str, ...]
    node: Op | Boundary | None = None


#: sizes to replace, by module
Sizes = Mapping[str, tuple[SizePlan, ...]]


def check_structure(
    model: nn.Module, inputs: Inputs, expanded: Expanded, *, loss: Loss | None, cast: BoundaryHook
) -> Sizes | Counterexample:
    """The sizes with which the applied model runs the original's ops on the planned local shapes, none where it does so
    as it is; else the first difference that no size accounts for."""
    written: dict[str, tuple[SizePlan, ...]] = {}
    while True:
        found = _retrace(model, inputs, expanded, written, loss=loss, cast=cast)
        if found is None:
            return written
        more = _with_sizes_of(expanded, found.node, written)
        if more == written:
            return found
        written = more


def _with_sizes_of(expanded: Expanded, node: Op | Boundary | None, written: Sizes) -> dict[str, tuple[SizePlan, ...]]:
    """The sizes so far and those of an op, and of its like in other blocks, whose code holds the whole's."""
    found = dict(written)
    graph, tp = expanded.graph, expanded.formulation.mesh.tp
    for op in like_nodes(graph, node) if isinstance(node, Op) and node.module != LOSS_SCOPE else ():
        assert isinstance(op, Op)
        own = found.get(op.module, ())
        new = (size for size in written_sizes(Call.of(graph, op), expanded.strategy(op.name), tp) if size not in own)
        found[op.module] = (*own, *new)
    return {module: sizes for module, sizes in found.items() if sizes}


def _retrace(
    model: nn.Module, inputs: Inputs, expanded: Expanded, written: Sizes, *, loss: Loss | None, cast: BoundaryHook
) -> Counterexample | None:
    """Traces the model on one rank's shapes, with these sizes replaced, and compares."""
    local = localized(model, expanded)
    rewrite_calls({local.get_submodule(module): (LocalSizes(own),) for module, own in written.items()})
    sizes = _boundary_sizes(expanded)

    def resize(tensor: torch.Tensor, module: str, direction: Direction, path: str) -> torch.Tensor:
        wanted = sizes.get((module, direction, path))
        return tensor if wanted is None else operators.resize(tensor, wanted)

    try:
        key = functools.partial(_doings, sizes)
        retraced = trace(local, inputs, loss=loss, cast=cast, resize=resize, resize_key=key)
    except TraceError as error:
        reason = f"the applied model cannot run: {str(error).splitlines()[0].partition(': ')[2]}"
        return _compare_so_far(expanded, error.ran or torch.fx.Graph(), reason)
    return _compare(expanded, retraced)


def localized(model: nn.Module, expanded: Expanded) -> nn.Module:
    """A copy of a meta model whose parameters have one rank's shapes; tied ones stay tied."""
    local = copy.deepcopy(model)
    tp = expanded.formulation.mesh.tp
    for source in expanded.graph.parameters:
        shape = local_shape(expanded.graph.values[source.result].shape, expanded.read_layout(source), tp)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """What a node of a retrace shows of itself."""

    title: str
    literals: object
    shapes: tuple[tuple[int, ...], ...]


def _compare(expanded: Expanded, retraced: ModelGraph) -> Counterexample | None:
    """Walks two whole graphs: the same nodes reading the same values, and nothing left over."""
    graph = expanded.graph
    if [(s.kind, s.label) for s in graph.sources] != [(s.kind, s.label) for s in retraced.sources]:
        return Counterexample(message="the retrace has other inputs, parameters or constants", blamed=())
    resized = {op.results[0]: op.operands[0] for op in retraced.ops if op.target == RESIZE}
    nodes = [node for node in retraced.nodes if not (isinstance(node, Op) and node.target == RESIZE)]
    images = {s.result: t.result for s, t in zip(graph.sources, retraced.sources, strict=True)}
    remaining = deque(nodes)
    for original in graph.nodes:
        if _is_needless(expanded, original, _title(remaining[0]) if remaining else ""):
            images[original.results[0]] = images[original.operands[0]]
            continue
        if not remaining:
            return _blame(expanded, original, f"one trace ends before {_title(original)}")
        node = remaining.popleft()
        image = _image(retraced, node)
        problem = _difference(expanded, original, image)
        if problem is None and [resized.get(v, v) for v in node.operands] != [images.get(v) for v in original.operands]:
            problem = f"{_title(original)} reads other values"
        if problem is not None:
            return _blame(expanded, original, problem, _strange(expanded, original, image))
        images.update(zip(original.results, node.results, strict=True))
    return _blame(expanded, None, f"one trace ends before {_title(remaining[0])}") if remaining else None


def _is_needless(expanded: Expanded, original: Op | Boundary, found: str) -> bool:
    """True for a copy that a rank does not make, as what it holds is contiguous: one head, moved before the sequence.

    `found` is what runs there instead. Where either side of the copy is written to, it matters.
    """
    if not isinstance(original, Op) or original.target != CONTIGUOUS or found.startswith(CONTIGUOUS):
        return False
    graph = expanded.graph
    written = {graph.values[name].storage for op in graph.ops for name in written_operands(op)}
    return written.isdisjoint(graph.values[name].storage for name in (*original.operands, *original.results))


def _compare_so_far(expanded: Expanded, ran: torch.fx.Graph, reason: str) -> Counterexample:
    """Walks a graph that stopped: the first difference, else what would have run next is what cannot run."""
    originals = deque(expanded.graph.nodes)
    for node in ran.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or str(node.target) in _PASSED:
            continue
        if str(node.target) == SIBLING:
            while originals and within(originals[0].module, node.args[1]) and not _leaves(originals[0], node.args[1]):
                originals.popleft()
            continue
        image = _fx_image(node)
        while originals and _is_needless(expanded, originals[0], image.title):
            originals.popleft()
        original = originals.popleft() if originals else None
        problem = "more ran than before" if original is None else _difference(expanded, original, image)
        if problem is not None:
            return _blame(expanded, original, problem, _strange(expanded, original, image))
    return _blame(expanded, originals[0] if originals else None, reason)


def _leaves(node: Op | Boundary, module: str) -> bool:
    return isinstance(node, Boundary) and node.module == module and node.direction is Direction.OUTPUT


def _image(graph: ModelGraph, node: Op | Boundary) -> _Image:
    shapes = tuple(graph.values[name].shape for name in node.results)
    literals = _literals((node.args, node.kwargs)) if isinstance(node, Op) else None
    return _Image(title=_title(node), literals=literals, shapes=shapes)


def _fx_image(node: torch.fx.Node) -> _Image:
    value = node.meta.get("val")
    tensors = [t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, torch.Tensor)]
    shapes = tuple(tuple(map(int, tensor.shape)) for tensor in tensors)
    if str(node.target) == BOUNDARY:
        _, module, direction, path = node.args
        return _Image(title=f"{direction} {path} of {module or 'the root'}", literals=None, shapes=shapes)
    args = argument_of(node.args, _AnyTensor())
    kwargs = tuple((key, argument_of(value, _AnyTensor())) for key, value in node.kwargs.items())
    return _Image(title=str(node.target), literals=_literals((args, kwargs)), shapes=shapes)


class _AnyTensor(dict[str, Argument]):
    """Names of a graph that stopped: whatever they are, they are tensors."""

    def __missing__(self, name: str) -> Argument:
        return Ref(name)


def _difference(expanded: Expanded, original: Op | Boundary, image: _Image) -> str | None:
    """What differs between a node and its image; None where nothing does."""
    title = _title(original)
    if title.partition(" in ")[0] != image.title.partition(" in ")[0]:
        return f"{title} became {image.title}"
    wanted = _expected_literals(expanded, original) if isinstance(original, Op) else None
    if wanted is not None and wanted != image.literals:
        before, after = _first_change(wanted, image.literals)
        return f"{title}: the number {before} became {after}"
    strategy, tp = expanded.strategy(original.name), expanded.formulation.mesh.tp
    # A boundary's own value is still in the layout in front of it.
    layouts = strategy.operands if isinstance(original, Boundary) else strategy.results
    values = [expanded.graph.values[name] for name in original.results]
    shapes = tuple(local_shape(value.shape, layout, tp) for value, layout in zip(values, layouts, strict=True))
    if shapes and not image.shapes:
        return f"{title}: does not run where the result would be {shapes} on a rank"
    if shapes != image.shapes:
        return f"{title}: expected the local shapes {shapes}, got {image.shapes}"
    return None


def _expected_literals(expanded: Expanded, op: Op) -> object:
    """An op's literals as they must come back; None where they are sizes, which the result's shape covers."""
    if takes_sizes(op.target):
        return None
    tp = expanded.formulation.mesh.tp
    localized = localized_arguments(Call.of(expanded.graph, op), expanded.strategy(op.name), tp)
    return _literals((localized, op.kwargs))


def _literals(argument: Argument | object) -> object:
    if isinstance(argument, Ref):
        return "tensor"
    return tuple(map(_literals, argument)) if isinstance(argument, tuple) else argument


def _first_change(before: object, after: object) -> tuple[object, object]:
    """The innermost place where two literals differ."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        return next(_first_change(a, b) for a, b in zip(before, after, strict=True) if a != b)
    return before, after


def _title(node: Op | Boundary | None) -> str:
    match node:
        case Op():
            return f"{node.target} in {node.module or 'the root'}"
        case Boundary():
            return f"{node.direction} {node.path} of {node.module or 'the root'}"
        case None:
            return "nothing"


def _strange(expanded: Expanded, node: Op | Boundary | None, image: _Image) -> frozenset[int]:
    """Sizes that an op was given, or gave, and that neither its results nor its literals have on a rank."""
    if not isinstance(node, Op) or not takes_sizes(node.target):
        return frozenset()
    tp, strategy = expanded.formulation.mesh.tp, expanded.strategy(node.name)
    call = Call.of(expanded.graph, node)
    pairs = zip(call.results, strategy.results, strict=True)
    expected = {size for value, layout in pairs for size in local_shape(value.shape, layout, tp)}
    found = {leaf for leaf in pytree.tree_leaves((image.literals, image.shapes)) if isinstance(leaf, int)}
    return frozenset(found - expected - {-1} - set(pytree.tree_leaves(call.args)))


def _blame(
    expanded: Expanded, node: Op | Boundary | None, message: str, strange: frozenset[int] = frozenset()
) -> Counterexample:
    """Whatever the module's code can read strange sizes from; else the op itself where it runs sharded; else whatever
    sharded value its module's code can see, or that of a module around it."""
    module = node.module if node is not None else ""
    visible = tuple(_visible(expanded, module))
    blamed = tuple(name for name in visible if _local_sizes(expanded, name) & strange)
    if not blamed:
        is_sharded = isinstance(node, Op) and node.name in _sharded(expanded, (node,))
        blamed = (node.name,) if node is not None and is_sharded else visible
    while not blamed and module:
        module = _parent(expanded, module)
        blamed = tuple(_visible(expanded, module))
    return Counterexample(message=message, blamed=blamed or tuple(_sharded(expanded, expanded.graph.nodes)), node=node)


def _local_sizes(expanded: Expanded, name: str) -> set[int]:
    """Sizes of the sharded dims of what a decision gives, on a rank."""
    node = expanded.formulation.space.deciders[name]
    assert not isinstance(node, Reading)
    values = [expanded.graph.values[result] for result in node.results]
    tp = expanded.formulation.mesh.tp
    return {
        local_shape(value.shape, layout, tp)[layout.dim]
        for value, layout in zip(values, expanded.strategy(name).results, strict=True)
        if layout.dim is not None
    }


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
        if any(layout.dim is not None for layout in (*strategy.operands, *strategy.results)):
            yield node.name
