"""The structure half of the proof: what apply makes of a model runs the model's ops, and conversions alone beside them.

The plan is applied, as on the first and on the last rank of the tp axis, and what it made is run on meta tensors and
written down as the model was. Then the same ops must run in the same order on the same values (save copies that are
needless on a rank), each value must have the one local shape that its layout implies, and each literal must be
unchanged, except sizes that view and expand are given, which the shapes cover. Between them stands code of tpplan's
own, which is known by its scope: it converts what the plan says is converted there, by the collectives that the
conversion takes.

That finds sizes baked into code (`view(B, T, self.n_heads, hd)`) and positions or masks built from a sharded length.
Such sizes, and those that code takes from a tensor in another layout, have a remedy: each is replaced by what the
layouts imply (tpplan.apply.modules.local_sizes), and what that makes is compared in the same way.
The rules themselves are validated by brute force; the other half of the proof is tpplan.layouts.typecheck.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import nn

from tpplan.core.graph import (
    LOSS_SCOPE,
    OWN_SCOPE,
    Argument,
    Boundary,
    Direction,
    ModelGraph,
    Op,
    Ref,
    enclosing,
    within,
)
from tpplan.core.layout import COLLECTIVE_STEPS, Step, local_shape
from tpplan.core.name_patterns import ROOT
from tpplan.costs.step.solved_step import Expanded
from tpplan.layouts.decision_space import CROSS_ENTROPY, Reading, reading_conversion
from tpplan.layouts.rules import Call, Strategy, localized_arguments, takes_sizes, written_operands, written_sizes
from tpplan.layouts.size_dims import sizes_by_dims
from tpplan.plan.compress_names import by_pattern
from tpplan.plan.plan import Plan, SizePlan
from tpplan.prove.apply_as_rank import applied_as
from tpplan.prove.module_scope import given_nodes, parent
from tpplan.torch_internals import pytree
from tpplan.torch_internals.operators import is_op
from tpplan.trace.answers.concrete_values import AtRestError
from tpplan.trace.answers.own_failure import own_failure
from tpplan.trace.dedup_layers import Doings
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.fx_to_graph import IGNORED, argument_of
from tpplan.trace.opaque import Opaques
from tpplan.trace.record_fx import SCOPE
from tpplan.trace.stopped_trace import TraceError
from tpplan.trace.trace import BoundaryHook, Loss, trace

CONTIGUOUS = "aten.contiguous.default"
#: what stands for the reading of a parameter that is passed to a module, or out of one
ALIAS = "aten.alias.default"
#: ops that give back the tensor itself where there is nothing to do; to anything else they make a new one
_GIVE_BACK = frozenset({CONTIGUOUS, "aten.to.dtype", "aten.to.device", "aten.to.dtype_layout"})
BOUNDARY, FRAME, SIBLING = "tpplan.boundary.default", "tpplan.frame.default", "tpplan.sibling.default"
#: what a trace that stopped holds and a ModelGraph does not
_PASSED = frozenset({FRAME, *IGNORED})
#: what conversions are made of besides collectives: they move elements
_MOVES = frozenset({"view", "view_as", "clone", "contiguous", "chunk", "cat", "detach", "narrow", "movedim",
                    "new_zeros", "copy_", "wait_tensor"})  # fmt: skip
#: and what else a step takes
_ALSO = {
    Step.DIVIDE: frozenset({"div"}),
    # ids are checked against the whole table's rows first: an assertion gives no value that another op could read
    Step.LOCAL_ROWS: frozenset({"sub", "lt", "ge", "__or__", "masked_fill_", "aminmax", "__and__", "_assert_async"}),
    Step.MASK: frozenset({"masked_fill"}),
}
#: the collective of a step, by the op that runs
_COLLECTIVES = {
    "_c10d_functional.all_reduce.default": Step.ALL_REDUCE,
    "_c10d_functional.all_gather_into_tensor.default": Step.ALL_GATHER,
    "_c10d_functional.reduce_scatter_tensor.default": Step.REDUCE_SCATTER,
    "_c10d_functional.all_to_all_single.default": Step.ALL_TO_ALL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """Where what runs differs: the op, what was expected and seen, and the decisions whose sharding is to blame."""

    message: str
    blamed: tuple[str, ...]
    node: Op | Boundary | None = None
    #: a module whose own code does what no sharding of it would mend
    culprit: str | None = None
    #: sizes that the op was given, or gave, and that it has neither in the plan nor in the original
    strange: frozenset[int] = frozenset()


def check_structure(
    model: nn.Module,
    inputs: Inputs,
    expanded: Expanded,
    plan: Plan,
    *,
    loss: Loss | None,
    cast: BoundaryHook,
    opaques: Opaques | None = None,
) -> Plan | Counterexample:
    """The plan, with the sizes to replace, which applied runs the original's ops on the planned local shapes; else the
    first difference that no size accounts for. `model` is on the meta device; `opaques` are the original's."""
    written: dict[str, tuple[SizePlan, ...]] = {}
    for rank in (0, plan.mesh.tp - 1) if plan.mesh.tp > 1 else ():
        while found := _difference_on(rank, model, inputs, expanded, plan, loss=loss, cast=cast, opaques=opaques):
            if found.culprit is not None:
                return found
            more = _with_sizes_of(expanded, model, found, written)
            if more == written and not found.strange:
                more = _with_sizes_of(expanded, model, found, written, is_given=lambda size: True)
            if more == written:
                return found
            written = more
            named = {module or ROOT: sizes for module, sizes in written.items()}
            plan = replace(plan, sizes=by_pattern(expanded.graph, named, lambda sizes, rename: sizes, ()))
    return plan


def find_difference(
    model: nn.Module,
    inputs: Inputs,
    expanded: Expanded,
    plan: Plan,
    *,
    loss: Loss | None,
    cast: BoundaryHook,
    opaques: Opaques | None = None,
) -> Counterexample | None:
    """The first difference of a plan as it is, no size added; None where it runs the original's ops."""
    ranks = (0, plan.mesh.tp - 1) if plan.mesh.tp > 1 else ()
    found = (_difference_on(r, model, inputs, expanded, plan, loss=loss, cast=cast, opaques=opaques) for r in ranks)
    return next((difference for difference in found if difference is not None), None)


def _with_sizes_of(
    expanded: Expanded,
    model: nn.Module,
    problem: Counterexample,
    written: Mapping[str, tuple[SizePlan, ...]],
    *,
    is_given: Callable[[int], bool] | None = None,
) -> dict[str, tuple[SizePlan, ...]]:
    """The sizes so far and those of an op whose code gives another layout's, and of all that the same code runs
    elsewhere. `is_given` says which slice's sizes may be given for the whole's; by default those that were seen.

    Modules of one class run the same code: what it has written is written in each of them, and one retrace for all is
    what keeps proofs of many convolutions short.
    """
    found, node, graph, seen = dict(written), problem.node, expanded.graph, problem.strange.__contains__
    calls: dict[str, list[tuple[Call, Strategy]]] = defaultdict(list)
    for op in graph.ops:
        calls[op.module].append((Call.of(graph, op), expanded.strategy(op.name)))
    for op in _of_the_same_code(graph, model, node) if isinstance(node, Op) else ():
        own = found.get(op.module, ())
        placed = Call.of(graph, op), expanded.strategy(op.name)
        sizes = _sizes_of(placed, calls[op.module], expanded.formulation.mesh.tp, is_given or seen)
        found[op.module] = (*own, *(size for size in sizes if size not in own))
    return {module: sizes for module, sizes in found.items() if sizes}


def _sizes_of(
    placed: tuple[Call, Strategy], calls: list[tuple[Call, Strategy]], tp: int, is_given: Callable[[int], bool]
) -> Iterator[SizePlan]:
    """The sizes of a call that its code may give by another layout's: as dims of its tensor where they are, for then
    the batch and the length are free, else as numbers."""
    by_dims = {size.position: size for size in sizes_by_dims(calls, placed, tp, is_given)}
    yield from by_dims.values()
    yield from (size for size in written_sizes(*placed, tp) if size.position not in by_dims)


def _of_the_same_code(graph: ModelGraph, model: nn.Module, node: Op) -> Iterator[Op]:
    """Ops of one kind in the own code of modules of one class, this one among them."""
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
    expanded: Expanded,
    plan: Plan,
    *,
    loss: Loss | None,
    cast: BoundaryHook,
    opaques: Opaques | None,
) -> Counterexample | None:
    """Applies the plan as a rank does, traces what it made, and compares."""

    def fresh() -> nn.Module:
        return applied_as(model, plan, rank)

    local = fresh()
    try:
        applied = trace(local, inputs, loss=loss, cast=cast, doings=_doings(plan), opaques=opaques, fresh=fresh)
    except TraceError as error:
        reason = f"the applied model cannot run: {str(error).splitlines()[0].partition(': ')[2]}"
        found = _compare_so_far(expanded, error.ran, reason)
        if found.message == reason and (failure := own_failure(error.__cause__, has_run=True)) is not None:
            raise failure from error.__cause__
        return replace(found, culprit=error.module) if isinstance(error.__cause__, AtRestError) else found
    return _compare(expanded, applied)


def _doings(plan: Plan) -> Doings:
    """What a plan does inside a module, by names relative to it."""
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

    def doings(module: str) -> object:
        return tuple(
            sorted(
                (kind, name.removeprefix(module), entry, tuple(sorted((r.removeprefix(module), x) for r, x in reads)))
                for kind, name, entry, reads in inside.get(module, ())
            )
        )

    return doings


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """What a node of an applied model's graph shows of itself."""

    title: str
    literals: object
    shapes: tuple[tuple[int, ...], ...]


def _compare(expanded: Expanded, applied: ModelGraph) -> Counterexample | None:
    """Walks two whole graphs: the same nodes reading the same values, and nothing left over but conversions."""
    graph = expanded.graph
    for source, other in zip_longest(graph.sources, applied.sources):
        if source is None or other is None or (source.kind, source.label) != (other.kind, other.label):
            label = (source or other).label
            readers = graph.consumers.get(source.result, ()) if source is not None else ()
            return _blame(expanded, next(iter(readers), None), f"{label}: the applied model has another, or none")
    if graph.questions != applied.questions:
        return _blame(expanded, None, "the applied model asks other questions of its inputs, or is told other answers")
    entries = {b.name for b, _ in expanded.conversions() if b.direction is Direction.INPUT}
    unconverted: set[str] = set()
    converted = _Converted(applied)
    losses = _sharded_losses(expanded)
    rest = deque(node for node in applied.nodes if node.name not in converted.own)
    images = {s.result: t.result for s, t in zip(graph.sources, applied.sources, strict=True)}
    for original in graph.nodes:
        if original.name in losses:
            images[original.results[0]] = converted.latest(images[value] for value in original.operands)
            continue
        if _is_needless(expanded, original, _title(rest[0]) if rest else ""):
            images[original.results[0]] = images[original.operands[0]]
            continue
        if not rest:
            return _blame(expanded, original, f"the applied model ends before {_title(original)}")
        node = rest.popleft()
        image = _image(applied, node)
        problem = _difference(expanded, original, image)
        reads = [converted.core(value, node.module) for value in node.operands]
        if problem is None and reads != [converted.core(images[value], node.module) for value in original.operands]:
            problem = f"{_title(original)} reads other values"
        if problem is None and not unconverted.isdisjoint(node.operands):
            problem = f"{_title(original)} reads what entered a module, and not what it was converted to"
        if problem is not None:
            return _blame(expanded, original, problem, _strange(expanded, original, image))
        images.update(zip(original.results, node.results, strict=True))
        if original.name in entries:
            unconverted.add(node.results[0])
    if rest:
        return _blame(expanded, None, f"the applied model goes on with {_title(rest[0])}")
    return _other_conversions(expanded, converted, images, losses)


def _is_needless(expanded: Expanded, original: Op | Boundary, found: str) -> bool:
    """True for what a rank does not run: the mark of a parameter that is read to be passed on, for what is passed is no
    parameter then; a copy of what a rank holds contiguous, such as one head moved before the sequence.

    `found` is what runs there instead. Where either side of a copy is written to, it matters.
    """
    if not isinstance(original, Op) or found.startswith(original.target):
        return False
    graph = expanded.graph
    if original.target == ALIAS:
        return any(source.result == original.operands[0] for source in graph.parameters)
    written = {graph.values[name].storage for op in graph.ops for name in written_operands(op)}
    return original.target == CONTIGUOUS and written.isdisjoint(
        graph.values[name].storage for name in (*original.operands, *original.results)
    )


def _gives_back(graph: ModelGraph, op: Op) -> bool:
    """True where an op's result is the tensor that it was given: a conversion to the dtype it had."""
    given, result = graph.values[op.operands[0]], graph.values[op.results[0]]
    return (given.shape, given.dtype, given.storage) == (result.shape, result.dtype, result.storage)


class _Converted:
    """What tpplan's own code in an applied model makes of the model's values."""

    def __init__(self, applied: ModelGraph) -> None:
        self.own = frozenset(op.name for op in applied.ops if op.module == OWN_SCOPE)
        #: ops by the value that they convert
        self.ops: dict[str, Counter[str]] = defaultdict(Counter)
        self._order = {name: place for place, name in enumerate(applied.values)}
        self._given_back = {
            op.results[0]: op for op in applied.ops if op.target in _GIVE_BACK and _gives_back(applied, op)
        }
        self._origin: dict[str, str] = {}
        for op in applied.ops:
            if op.name in self.own and op.operands:
                origin = self.latest(map(self.origin, op.operands))
                self._origin.update(dict.fromkeys(op.results, origin))
                self.ops[origin][op.target] += 1

    def origin(self, value: str) -> str:
        """The model's own value that this is a conversion of."""
        return self._origin.get(value, value)

    def core(self, value: str, module: str) -> str:
        """The origin, behind whatever ops of a module's own code gave back the tensor that they were given.

        To a trace, who reads that tensor again reads what was given back; but a parameter's next read is its own.
        """
        value = self.origin(value)
        while (op := self._given_back.get(value)) is not None and op.module == module:
            value = self.origin(op.operands[0])
        return value

    def latest(self, values: Iterable[str]) -> str:
        """Of several, the one made last: what is looked up, not the ids, whose mask it meets."""
        return max(values, key=lambda value: self._order[value])


def _sharded_losses(expanded: Expanded) -> frozenset[str]:
    """Cross entropies that run as code of ours."""
    return frozenset(
        op.name
        for op in expanded.graph.ops
        if op.target == CROSS_ENTROPY and expanded.strategy(op.name).operands[0].dim is not None
    )


def _other_conversions(
    expanded: Expanded, converted: _Converted, images: Mapping[str, str], losses: frozenset[str]
) -> Counterexample | None:
    """The first value that is converted by other steps than its conversions take, as far as their ops tell.

    Parameters are converted wherever their modules' code reads them, which may be more than once.
    """
    graph = expanded.graph
    steps: dict[str, list[Step]] = defaultdict(list)
    for boundary, conversion in expanded.conversions():
        value = boundary.result if boundary.direction is Direction.INPUT else boundary.operand
        steps[images[value]] += conversion.forward or (Step.NONE,)
    reads: dict[str, set[Step]] = {}
    for source in graph.parameters:
        readings = expanded.formulation.space.readings[source.label]
        found = (reading_conversion(expanded.strategy(reading.name)).forward for reading in readings)
        reads[images[source.result]] = {step for taken in found for step in taken}
    for loss in graph.ops:
        if loss.name in losses:  # the maximum of the logits, then the sums that the targets are needed for
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
            return _blame(expanded, graph.producers.get(origin), f"{origin} is converted by {shown}")
    return None


def _compare_so_far(expanded: Expanded, ran: torch.fx.Graph, reason: str) -> Counterexample:
    """Walks a graph that stopped: the first difference, else what would have run next is what cannot run."""
    losses = _sharded_losses(expanded)
    originals = deque(node for node in expanded.graph.nodes if node.name not in losses)
    for node in ran.nodes:
        is_own = node.meta.get(SCOPE) == OWN_SCOPE
        if is_own or not is_op(node.target) or str(node.target) in _PASSED:
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
    # What enters a module is marked in front of its conversion, what leaves it behind.
    is_entry = isinstance(original, Boundary) and original.direction is Direction.INPUT
    layouts = strategy.operands if is_entry else strategy.results
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
    if not isinstance(node, Op):
        return frozenset()
    if not takes_sizes(node.target):
        wanted = _expected_literals(expanded, node)
        after = _first_change(wanted, image.literals)[1] if wanted != image.literals else None
        return frozenset({after} if type(after) is int else ())
    tp, strategy = expanded.formulation.mesh.tp, expanded.strategy(node.name)
    call = Call.of(expanded.graph, node)
    pairs = zip(call.results, strategy.results, strict=True)
    shapes = [local_shape(value.shape, layout, tp) for value, layout in pairs]
    expected = {size for shape in shapes for size in shape}
    found = {leaf for leaf in pytree.tree_leaves((image.literals, image.shapes)) if isinstance(leaf, int)}
    strange = found - expected - {-1} - set(pytree.tree_leaves(call.args))
    return frozenset(strange | _misplaced(image.literals, (call.args, call.kwargs), shapes[0]))


def _misplaced(literals: object, written: object, shape: tuple[int, ...]) -> set[int]:
    """Sizes in a list of them, one for each dim of a shape, that are neither that dim's nor what stands there."""
    if not isinstance(literals, tuple) or not isinstance(written, tuple) or len(literals) != len(written):
        return set()
    if len(literals) == len(shape) and all(isinstance(size, int) for size in (*literals, *written)):
        triples = zip(literals, written, shape, strict=True)
        return {found for found, own, size in triples if found not in (own, size, -1)}
    return {size for one, other in zip(literals, written, strict=True) for size in _misplaced(one, other, shape)}


def _blame(
    expanded: Expanded, node: Op | Boundary | None, message: str, strange: frozenset[int] = frozenset()
) -> Counterexample:
    """Whatever the module's code can read strange sizes from; else the op itself where it runs sharded; else whatever
    sharded value its module's code can see, or that of a module around it."""
    module = node.module if node is not None else ""
    visible = tuple(_visible(expanded, module))
    blamed = tuple(name for name in visible if _local_sizes(expanded, name) & strange)
    if not blamed and strange:  # made of others: `dim // heads` of an input's dim
        entries = (b for b in expanded.graph.boundaries if (b.module, b.direction) == (module, Direction.INPUT))
        blamed = tuple(_sharded(expanded, entries))
    if not blamed:
        is_sharded = isinstance(node, Op) and node.name in _sharded(expanded, (node,))
        blamed = (node.name,) if node is not None and is_sharded else visible
    while not blamed and module:
        module = parent(expanded.graph, module)
        blamed = tuple(_visible(expanded, module))
    blamed = blamed or tuple(_sharded(expanded, expanded.graph.nodes))
    return Counterexample(message=message, blamed=blamed, node=node, strange=strange)


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
    """Decisions that give sharded values to a module's own code."""
    yield from _sharded(expanded, given_nodes(expanded.graph, module))


def _sharded(expanded: Expanded, nodes: Iterable[Op | Boundary]) -> Iterator[str]:
    for node in nodes:
        strategy = expanded.strategy(node.name)
        if any(layout.dim is not None for layout in (*strategy.operands, *strategy.results)):
            yield node.name
