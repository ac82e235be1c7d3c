"""Compares the graph of an applied model with the original's: the same ops in the same order on the same values.

Copies that a rank does not need may be missing. Each value must have the local shape that its layout implies, and each
literal must be unchanged; sizes given to view and expand may change, for the shapes cover them. Ops of tpplan's own
scope must be the conversions that the plan names, with their collectives.
"""

from collections import deque
from collections.abc import Iterator
from itertools import zip_longest

import torch

from tpplan.core.graph import ALIAS, OWN_SCOPE, Boundary, Direction, ModelGraph, Op, SourceKind, within
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import written_operands
from tpplan.prove.conversions_made import CONTIGUOUS, Converted, computed_by_own_code, other_conversions
from tpplan.prove.counterexample import Counterexample, blame
from tpplan.prove.local_nodes import LocalNodes
from tpplan.prove.module_alone import nodes_of_call
from tpplan.prove.rank_nodes import BOUNDARY, difference_of, is_like, node_of, ran_node, strange_sizes, title_of
from tpplan.torch_internals.operators import is_op
from tpplan.trace.fx_to_graph import IGNORED
from tpplan.trace.record_fx import SCOPE

#: sources that each rank has whole
_WHOLE = frozenset({SourceKind.BUFFER, SourceKind.CONSTANT})
#: ops that a rank may not need
_NEEDLESS = frozenset({ALIAS, CONTIGUOUS})
FRAME, SIBLING = "tpplan.frame.default", "tpplan.sibling.default"
#: nodes of a stopped trace that a ModelGraph does not have
_PASSED = frozenset({FRAME, *IGNORED})


def difference(local: LocalNodes, applied: ModelGraph) -> Counterexample | None:
    """The first difference of two whole graphs; None where nodes and values are the same up to conversions."""
    return _difference_of_inputs(local.assignment, applied) or _difference_of_nodes(local, applied)


def _difference_of_inputs(assignment: Assignment, applied: ModelGraph) -> Counterexample | None:
    """The first difference of two graphs in their inputs, parameters and buffers, or in the values read of inputs."""
    graph = assignment.graph
    for source, other in zip_longest(graph.sources, applied.sources):
        if source is None or other is None or (source.kind, source.label) != (other.kind, other.label):
            readers = graph.consumers.get(source.result, ()) if source is not None else ()
            ours, theirs = (f"{own.kind} {own.label}" if own is not None else "nothing" for own in (source, other))
            message = f"the applied model takes {theirs} where the model takes {ours}"
            return blame(assignment, next(iter(readers), None), message)
        shapes = graph.values[source.result].shape, applied.values[other.result].shape
        if source.kind in _WHOLE and shapes[0] != shapes[1]:
            message = f"{source.kind} {source.label} of shape {shapes[0]} has shape {shapes[1]} in the applied model"
            return blame(assignment, next(iter(graph.consumers.get(source.result, ())), None), message)
    for question, other_question in zip_longest(graph.questions, applied.questions):
        if question != other_question:
            asked, told = (_asked(own) for own in (question, other_question))
            return blame(assignment, None, f"the applied model {told} where the model {asked}")
    return None


def _difference_of_nodes(local: LocalNodes, applied: ModelGraph) -> Counterexample | None:
    """The first difference of two graphs with the same sources: of an op, a value that an op reads, or a conversion."""
    assignment, graph = local.assignment, local.assignment.graph
    entries = {b.name for b, _ in assignment.conversions() if b.direction is Direction.INPUT}
    unconverted: set[str] = set()
    converted = Converted(applied)
    computed = computed_by_own_code(assignment)
    rest = deque(node for node in applied.nodes if node.name not in converted.own)
    copies = {op.name for op in graph.ops if op.target in _NEEDLESS}
    images = {s.result: t.result for s, t in zip(graph.sources, applied.sources, strict=True)}
    for original in graph.nodes:
        if original.name in computed:
            images[original.results[0]] = converted.latest(images[value] for value in original.operands)
            continue
        if original.name in copies and _is_needless(assignment, original, title_of(rest[0]) if rest else ""):
            images[original.results[0]] = images[original.operands[0]]
            continue
        while rest and _is_copy_of_a_rank(applied, rest[0], original) and unconverted.isdisjoint(rest[0].operands):
            converted.join(rest.popleft())
        if not rest:
            return blame(assignment, original, f"the applied model ends before {title_of(original)}")
        node = rest.popleft()
        image = node_of(applied, node)
        problem = difference_of(local, original, image)
        reads = [converted.core(value, node.module) for value in node.operands]
        if problem is None and reads != [converted.core(images[value], node.module) for value in original.operands]:
            problem = f"{title_of(original)} reads other values than in the model"
        if problem is None and not unconverted.isdisjoint(node.operands):
            problem = f"{title_of(original)} reads what entered a module, and not what it was converted to"
        if problem is not None:
            return blame(assignment, original, problem, strange_sizes(assignment, original, image))
        images.update(zip(original.results, node.results, strict=True))
        if original.name in entries:
            unconverted.add(node.results[0])
    if rest:
        return blame(assignment, None, f"the applied model goes on with {title_of(rest[0])}")
    return other_conversions(assignment, converted, images, computed)


def _asked(question: tuple[str, str, bool] | None) -> str:
    """A read of an input's value in words: the line of code and the answer."""
    return (
        f"reads a value at {question[0]} and gets {question[1]}" if question is not None else "reads no further value"
    )


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
    if not isinstance(node, Op) or node.target != CONTIGUOUS or title_of(original).startswith(CONTIGUOUS):
        return False
    written = applied.once(_written_storages, lambda: _written_storages(applied))
    return written.isdisjoint(applied.values[name].storage for name in (*node.operands, *node.results))


def _written_storages(graph: ModelGraph) -> frozenset[str]:
    return frozenset(graph.values[name].storage for op in graph.ops for name in written_operands(op))


def difference_so_far(local: LocalNodes, ran: torch.fx.Graph, reason: str, module: str | None = None) -> Counterexample:
    """The first difference of a graph that stopped; else, with `reason`, the op that would have run next. With `module`
    the graph is that of a module which ran alone."""
    assignment = local.assignment
    computed = computed_by_own_code(assignment)
    expected = assignment.graph.nodes if module is None else nodes_of_call(assignment.graph, module)
    originals = deque(node for node in expected if node.name not in computed)
    known = assignment.graph.nodes_by_module
    for node in _ops_of(ran, module):
        if str(node.target) == SIBLING:
            _pass_call(originals, str(node.args[1]))
            continue
        scope = node.args[1] if str(node.target) == BOUNDARY else node.meta.get(SCOPE)
        if assignment.graph.read_by_stubs and scope not in known:
            continue  # in a stub, of which the graph has no node
        image = ran_node(node)
        while originals and _is_needless(assignment, originals[0], image.title):
            originals.popleft()
        if image.title == CONTIGUOUS and originals and not title_of(originals[0]).startswith(CONTIGUOUS):
            continue  # a copy that a rank alone makes, or else the comparison of whole graphs finds it
        original = originals.popleft() if originals else None
        if original is None:
            return blame(assignment, None, f"the applied model goes on with {image.title}")
        problem = difference_of(local, original, image)
        if problem is not None:
            return blame(assignment, original, problem, strange_sizes(assignment, original, image))
    return blame(assignment, originals[0] if originals else None, reason)


def is_run_of(graph: ModelGraph, module: str, ran: torch.fx.Graph) -> bool:
    """True where a graph that stopped is that of a module which ran alone, on whole tensors, as it does in the model's
    graph."""
    originals = deque(nodes_of_call(graph, module))
    constants = {source.result for source in graph.sources if source.kind is SourceKind.CONSTANT}
    for node in _ops_of(ran, module):
        if str(node.target) == SIBLING:
            _pass_call(originals, str(node.args[1]))
            continue
        original = originals.popleft() if originals else None
        if original is None or not is_like(node_of(graph, original), ran_node(node)):
            return False
        if constants.isdisjoint(original.operands) == any(own.op == "get_attr" for own in node.all_input_nodes):
            return False
    return not originals


def _ops_of(ran: torch.fx.Graph, module: str | None) -> Iterator[torch.fx.Node]:
    """Yields the ops of a graph that stopped, but tpplan's own; with `module` from the call of that module on."""
    has_begun = module is None
    for node in ran.nodes:
        is_own = node.meta.get(SCOPE) == OWN_SCOPE
        if is_own or not is_op(node.target) or str(node.target) in _PASSED:
            continue
        has_begun = has_begun or (str(node.target) == BOUNDARY and node.args[1] == module)
        if has_begun:
            yield node


def _pass_call(originals: deque[Op | Boundary], module: str) -> None:
    """Drops the nodes of one call of a module from the first ones: what enters it, what is inside, what leaves it."""
    while originals and _is_before_end(originals[0], module):
        originals.popleft()
    while originals and _leaves(originals[0], module):
        originals.popleft()


def _is_before_end(node: Op | Boundary, module: str) -> bool:
    is_alias = isinstance(node, Op) and node.target == ALIAS
    return not _leaves(node, module) and (is_alias or within(node.module, module))


def _leaves(node: Op | Boundary, module: str) -> bool:
    return isinstance(node, Boundary) and node.module == module and node.direction is Direction.OUTPUT
