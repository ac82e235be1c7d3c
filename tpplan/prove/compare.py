"""Compares the graph of an applied model with the original's: the same ops in the same order on the same values.

Copies that a rank does not need may be missing. Each value must have the local shape that its layout implies, and each
literal must be unchanged; sizes given to view and expand may change, for the shapes cover them. Ops of tpplan's own
scope must be the conversions that the plan names, with their collectives.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch

from tpplan.core.graph import (
    OWN_SCOPE,
    Argument,
    Boundary,
    Direction,
    ModelGraph,
    Op,
    Ref,
    within,
)
from tpplan.core.layout import COLLECTIVE_STEPS, Step, local_shape
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import CROSS_ENTROPY, Reading, reading_conversion
from tpplan.layouts.rules import Call, takes_sizes, written_operands
from tpplan.prove.local_nodes import LocalNodes, expected_literals, literals_of
from tpplan.prove.module_scope import given_nodes, parent
from tpplan.torch_internals import pytree
from tpplan.torch_internals.operators import is_op
from tpplan.trace.fx_to_graph import IGNORED, argument_of
from tpplan.trace.record_fx import SCOPE

CONTIGUOUS = "aten.contiguous.default"
#: op that marks the reading of a parameter that is passed to a module, or out of one
ALIAS = "aten.alias.default"
#: ops that a rank may not need
_NEEDLESS = frozenset({ALIAS, CONTIGUOUS})
#: ops that return their operand itself where there is nothing to do, and else a new tensor
_GIVE_BACK = frozenset({CONTIGUOUS, "aten.to.dtype", "aten.to.device", "aten.to.dtype_layout"})
BOUNDARY, FRAME, SIBLING = "tpplan.boundary.default", "tpplan.frame.default", "tpplan.sibling.default"
#: nodes of a stopped trace that a ModelGraph does not have
_PASSED = frozenset({FRAME, *IGNORED})
#: ops of conversions besides collectives: they move elements
_MOVES = frozenset({"view", "view_as", "clone", "contiguous", "chunk", "cat", "detach", "narrow", "movedim", "permute",
                    "new_zeros", "copy_", "wait_tensor"})  # fmt: skip
#: further ops of a step
_ALSO = {
    Step.DIVIDE: frozenset({"div"}),
    # _assert_async checks ids against the whole table's rows: it gives no value that another op could read
    Step.LOCAL_ROWS: frozenset({"sub", "lt", "ge", "__or__", "masked_fill_", "aminmax", "__and__", "_assert_async"}),
    Step.MASK: frozenset({"masked_fill"}),
}
#: the step of each collective op
_COLLECTIVES = {
    "_c10d_functional.all_reduce.default": Step.ALL_REDUCE,
    "_c10d_functional.all_gather_into_tensor.default": Step.ALL_GATHER,
    "_c10d_functional.reduce_scatter_tensor.default": Step.REDUCE_SCATTER,
    "_c10d_functional.all_to_all_single.default": Step.ALL_TO_ALL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """A difference of the applied model: the op, what was expected and seen, and the decisions to blame."""

    message: str
    blamed: tuple[str, ...]
    node: Op | Boundary | None = None
    #: a module whose own code differs under every sharding
    culprit: str | None = None
    #: sizes among the op's literals or results that it has neither in the plan nor in the original
    strange: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """Name, literals and result shapes of a node of an applied model's graph."""

    title: str
    literals: object
    shapes: tuple[tuple[int, ...], ...]


def difference(local: LocalNodes, applied: ModelGraph) -> Counterexample | None:
    """The first difference of two whole graphs; None where nodes and values are the same up to conversions."""
    assignment, graph = local.assignment, local.assignment.graph
    for source, other in zip_longest(graph.sources, applied.sources):
        if source is None or other is None or (source.kind, source.label) != (other.kind, other.label):
            label = (source or other).label
            readers = graph.consumers.get(source.result, ()) if source is not None else ()
            return _blame(assignment, next(iter(readers), None), f"{label}: the applied model has another, or none")
    if graph.questions != applied.questions:
        return _blame(
            assignment, None, "the applied model asks other questions of its inputs, or is told other answers"
        )
    entries = {b.name for b, _ in assignment.conversions() if b.direction is Direction.INPUT}
    unconverted: set[str] = set()
    converted = _Converted(applied)
    losses = _sharded_losses(assignment)
    rest = deque(node for node in applied.nodes if node.name not in converted.own)
    copies = {op.name for op in graph.ops if op.target in _NEEDLESS}
    images = {s.result: t.result for s, t in zip(graph.sources, applied.sources, strict=True)}
    for original in graph.nodes:
        if original.name in losses:
            images[original.results[0]] = converted.latest(images[value] for value in original.operands)
            continue
        if original.name in copies and _is_needless(assignment, original, _title(rest[0]) if rest else ""):
            images[original.results[0]] = images[original.operands[0]]
            continue
        while rest and _is_copy_of_a_rank(applied, rest[0], original) and unconverted.isdisjoint(rest[0].operands):
            converted.join(rest.popleft())
        if not rest:
            return _blame(assignment, original, f"the applied model ends before {_title(original)}")
        node = rest.popleft()
        image = _image(applied, node)
        problem = _difference(local, original, image)
        reads = [converted.core(value, node.module) for value in node.operands]
        if problem is None and reads != [converted.core(images[value], node.module) for value in original.operands]:
            problem = f"{_title(original)} reads other values"
        if problem is None and not unconverted.isdisjoint(node.operands):
            problem = f"{_title(original)} reads what entered a module, and not what it was converted to"
        if problem is not None:
            return _blame(assignment, original, problem, _strange(assignment, original, image))
        images.update(zip(original.results, node.results, strict=True))
        if original.name in entries:
            unconverted.add(node.results[0])
    if rest:
        return _blame(assignment, None, f"the applied model goes on with {_title(rest[0])}")
    return _other_conversions(assignment, converted, images, losses)


def _is_needless(assignment: Assignment, original: Op | Boundary, found: str) -> bool:
    """True for an op that a rank does not run: the mark of a parameter that is passed on (a rank passes no parameter),
    and a copy of a tensor that is contiguous on a rank, unless an op writes to either side of it.

    `found` is the title of the op that runs instead.
    """
    if not isinstance(original, Op) or found.startswith(original.target):
        return False
    graph = assignment.graph
    if original.target == ALIAS:
        return any(source.result == original.operands[0] for source in graph.parameters)
    written = graph.once(_written_storages, lambda: _written_storages(graph))
    return original.target == CONTIGUOUS and written.isdisjoint(
        graph.values[name].storage for name in (*original.operands, *original.results)
    )


def _is_copy_of_a_rank(applied: ModelGraph, node: Op | Boundary, original: Op | Boundary) -> bool:
    """True for a copy that a rank alone makes, of a tensor that in one process is contiguous already, as where a slice
    has a dim of size 1; unless an op of the applied model writes to either side of it."""
    if not isinstance(node, Op) or node.target != CONTIGUOUS or _title(original).startswith(CONTIGUOUS):
        return False
    written = applied.once(_written_storages, lambda: _written_storages(applied))
    return written.isdisjoint(applied.values[name].storage for name in (*node.operands, *node.results))


def _written_storages(graph: ModelGraph) -> frozenset[str]:
    return frozenset(graph.values[name].storage for op in graph.ops for name in written_operands(op))


def _gives_back(graph: ModelGraph, op: Op) -> bool:
    """True where an op returns its operand itself, as a conversion to the dtype that it has."""
    given, result = graph.values[op.operands[0]], graph.values[op.results[0]]
    return (given.shape, given.dtype, given.storage) == (result.shape, result.dtype, result.storage)


class _Converted:
    """The conversions that tpplan's own code in an applied model makes of the model's values."""

    def __init__(self, applied: ModelGraph) -> None:
        self.own = frozenset(op.name for op in applied.ops if op.module == OWN_SCOPE)
        #: number of ops by name, by the value that they convert
        self.ops: dict[str, Counter[str]] = defaultdict(Counter)
        self._order = {name: place for place, name in enumerate(applied.values)}
        self._given_back = {
            op.results[0]: op for op in applied.ops if op.target in _GIVE_BACK and _gives_back(applied, op)
        }
        self._origin: dict[str, str] = {}
        #: the operands of copies that a rank alone makes, by their results
        self._copied: dict[str, str] = {}
        for op in applied.ops:
            if op.name in self.own and op.operands:
                origin = self.latest(map(self.origin, op.operands))
                self._origin.update(dict.fromkeys(op.results, origin))
                self.ops[origin][op.target] += 1

    def origin(self, value: str) -> str:
        """The model's value that a value is converted or copied from; the value itself where it is neither."""
        value = self._origin.get(value, value)
        while value in self._copied:
            value = self._copied[value]
            value = self._origin.get(value, value)
        return value

    def join(self, copy: Op | Boundary) -> None:
        """Takes the result of a copy, and its conversions, for its operand."""
        self._copied[copy.results[0]] = copy.operands[0]
        self.ops[self.origin(copy.operands[0])] += self.ops.pop(copy.results[0], Counter())

    def core(self, value: str, module: str) -> str:
        """The origin of a value before any ops of the module's own code that returned their operand itself.

        A trace takes later reads of that operand for reads of the op's result, except reads of a parameter.
        """
        value = self.origin(value)
        while (op := self._given_back.get(value)) is not None and op.module == module:
            value = self.origin(op.operands[0])
        return value

    def latest(self, values: Iterable[str]) -> str:
        """The value that was made last: the looked-up rows, for example, and not the mask of the ids."""
        return max(values, key=lambda value: self._order[value])


def _sharded_losses(assignment: Assignment) -> frozenset[str]:
    """Names of cross entropies over sharded classes, which tpplan's own code computes."""
    return frozenset(
        op.name
        for op in assignment.graph.ops
        if op.target == CROSS_ENTROPY and assignment.strategy(op.name).operands[0].dim is not None
    )


def _other_conversions(
    assignment: Assignment, converted: _Converted, images: Mapping[str, str], losses: frozenset[str]
) -> Counterexample | None:
    """The first value that is converted by other steps than its conversions take, as far as ops tell steps apart.

    Each read of a parameter by a module's code converts it, so that its steps may occur several times.
    """
    graph = assignment.graph
    steps: dict[str, list[Step]] = defaultdict(list)
    for boundary, conversion in assignment.conversions():
        value = boundary.result if boundary.direction is Direction.INPUT else boundary.operand
        steps[images[value]] += conversion.forward or (Step.NONE,)
    reads: dict[str, set[Step]] = {}
    for source in graph.parameters:
        readings = assignment.readings[source.label]
        found = (reading_conversion(assignment.strategy(reading.name)).forward for reading in readings)
        reads[images[source.result]] = {step for taken in found for step in taken}
    for loss in graph.ops:
        if loss.name in losses:  # all-reduces of the maximum logit, and of sums that need the targets
            operands = [images[value] for value in loss.operands]
            steps[operands[0]].append(Step.ALL_REDUCE)
            steps[converted.latest(operands)].append(Step.ALL_REDUCE)
    of_losses = {images[value] for loss in graph.ops if loss.name in losses for value in loss.operands}
    for value in dict.fromkeys((*steps, *reads, *converted.ops)):
        wanted, found_ops = steps[value], converted.ops.get(value, Counter())
        collectives = Counter({step: found_ops[op] for op, step in _COLLECTIVES.items() if found_ops[op]})
        also = frozenset().union(*(_ALSO.get(step, ()) for step in (*wanted, *reads.get(value, ()))))
        names = {op.split(".")[1] for op in found_ops if op not in _COLLECTIVES}
        is_same = (
            set(collectives) == reads[value] & COLLECTIVE_STEPS
            if value in reads
            else collectives == Counter(step for step in wanted if step in COLLECTIVE_STEPS)
        )
        is_left_out = bool(wanted) and not found_ops
        if not is_same or is_left_out or (value not in of_losses and not names <= _MOVES | also):
            origin = next(name for name, image in images.items() if image == value)
            shown = ", ".join(f"{op.split('.')[1]} x{count}" for op, count in found_ops.items()) or "nothing"
            return _blame(assignment, graph.producers.get(origin), f"{origin} is converted by {shown}")
    return None


def difference_so_far(local: LocalNodes, ran: torch.fx.Graph, reason: str) -> Counterexample:
    """The first difference of a graph that stopped; else, with `reason`, the op that would have run next."""
    assignment = local.assignment
    losses = _sharded_losses(assignment)
    originals = deque(node for node in assignment.graph.nodes if node.name not in losses)
    for node in ran.nodes:
        is_own = node.meta.get(SCOPE) == OWN_SCOPE
        if is_own or not is_op(node.target) or str(node.target) in _PASSED:
            continue
        if str(node.target) == SIBLING:
            while originals and within(originals[0].module, node.args[1]) and not _leaves(originals[0], node.args[1]):
                originals.popleft()
            continue
        image = _fx_image(node)
        while originals and _is_needless(assignment, originals[0], image.title):
            originals.popleft()
        if image.title == CONTIGUOUS and originals and not _title(originals[0]).startswith(CONTIGUOUS):
            continue  # a copy that a rank alone makes, or else the comparison of whole graphs finds it
        original = originals.popleft() if originals else None
        problem = "more ran than before" if original is None else _difference(local, original, image)
        if problem is not None:
            return _blame(assignment, original, problem, _strange(assignment, original, image))
    return _blame(assignment, originals[0] if originals else None, reason)


def _leaves(node: Op | Boundary, module: str) -> bool:
    return isinstance(node, Boundary) and node.module == module and node.direction is Direction.OUTPUT


def _image(graph: ModelGraph, node: Op | Boundary) -> _Image:
    shapes = tuple(graph.values[name].shape for name in node.results)
    literals = literals_of((node.args, node.kwargs)) if isinstance(node, Op) else None
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
    return _Image(title=str(node.target), literals=literals_of((args, kwargs)), shapes=shapes)


class _AnyTensor(dict[str, Argument]):
    """A mapping in which every name of a stopped graph is a tensor."""

    def __missing__(self, name: str) -> Argument:
        return Ref(name)


def _difference(local: LocalNodes, original: Op | Boundary, image: _Image) -> str | None:
    """The difference between a node and its image in words; None where there is none."""
    title = _title(original)
    if title.partition(" in ")[0] != image.title.partition(" in ")[0]:
        return f"{title} became {image.title}"
    wanted, shapes = local.of(original)
    if wanted is not None and wanted != image.literals:
        before, after = _first_change(wanted, image.literals)
        return f"{title}: the number {before} became {after}"
    if shapes and not image.shapes:
        return f"{title}: does not run where the result would be {shapes} on a rank"
    if shapes != image.shapes:
        return f"{title}: expected the local shapes {shapes}, got {image.shapes}"
    return None


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


def _strange(assignment: Assignment, node: Op | Boundary | None, image: _Image) -> frozenset[int]:
    """Sizes among an op's literals and results in the image that it should not have on a rank."""
    if not isinstance(node, Op):
        return frozenset()
    if not takes_sizes(node.target):
        wanted = expected_literals(assignment, node)
        after = _first_change(wanted, image.literals)[1] if wanted != image.literals else None
        return frozenset({after} if type(after) is int else ())
    tp, strategy = assignment.tp, assignment.strategy(node.name)
    call = Call.of(assignment.graph, node)
    pairs = zip(call.results, strategy.results, strict=True)
    shapes = [local_shape(value.shape, layout, tp) for value, layout in pairs]
    expected = {size for shape in shapes for size in shape}
    found = {leaf for leaf in pytree.tree_leaves((image.literals, image.shapes)) if isinstance(leaf, int)}
    strange = found - expected - {-1} - set(pytree.tree_leaves(call.args))
    return frozenset(strange | _misplaced(image.literals, (call.args, call.kwargs), shapes[0]))


def _misplaced(literals: object, written: object, shape: tuple[int, ...]) -> set[int]:
    """Sizes in lists of one size per dim that are neither the dim's size nor the one written in the original."""
    if not isinstance(literals, tuple) or not isinstance(written, tuple) or len(literals) != len(written):
        return set()
    if len(literals) == len(shape) and all(isinstance(size, int) for size in (*literals, *written)):
        triples = zip(literals, written, shape, strict=True)
        return {found for found, own, size in triples if found not in (own, size, -1)}
    return {size for one, other in zip(literals, written, strict=True) for size in _misplaced(one, other, shape)}


def _blame(
    assignment: Assignment, node: Op | Boundary | None, message: str, strange: frozenset[int] = frozenset()
) -> Counterexample:
    """The counterexample with the decisions to blame: those that show the module's code strange sizes; else the op
    where it is sharded; else all sharded values that the code of its module, or of the next one around it, sees."""
    module = node.module if node is not None else ""
    visible = tuple(_visible(assignment, module))
    blamed = tuple(name for name in visible if _local_sizes(assignment, name) & strange)
    if not blamed and strange:  # computed from other sizes: `dim // heads` of an input's dim
        entries = (b for b in assignment.graph.boundaries if (b.module, b.direction) == (module, Direction.INPUT))
        blamed = tuple(_sharded(assignment, entries))
    if not blamed:
        is_sharded = isinstance(node, Op) and node.name in _sharded(assignment, (node,))
        blamed = (node.name,) if node is not None and is_sharded else visible
    while not blamed and module:
        module = parent(assignment.graph, module)
        blamed = tuple(_visible(assignment, module))
    blamed = blamed or tuple(_sharded(assignment, assignment.graph.nodes))
    line = assignment.graph.lines.get(node.name, "") if node is not None else ""
    at = f", at {line}" if line and " at " not in message else ""
    return Counterexample(message=message + at, blamed=blamed, node=node, strange=strange)


def _local_sizes(assignment: Assignment, name: str) -> set[int]:
    """Sizes on a rank of the sharded dims of a decision's results."""
    node = assignment.deciders[name]
    assert not isinstance(node, Reading)
    values = [assignment.graph.values[result] for result in node.results]
    tp = assignment.tp
    return {
        local_shape(value.shape, layout, tp)[layout.dim]
        for value, layout in zip(values, assignment.strategy(name).results, strict=True)
        if layout.dim is not None
    }


def _visible(assignment: Assignment, module: str) -> Iterator[str]:
    """Decisions that give sharded values to a module's own code."""
    yield from _sharded(assignment, given_nodes(assignment.graph, module))


def _sharded(assignment: Assignment, nodes: Iterable[Op | Boundary]) -> Iterator[str]:
    for node in nodes:
        strategy = assignment.strategy(node.name)
        if any(layout.dim is not None for layout in (*strategy.operands, *strategy.results)):
            yield node.name
