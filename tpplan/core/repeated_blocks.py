"""Finds repeated blocks: sibling modules with equal structure, shapes and order of ops."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from tpplan.core.graph import (
    LEFT_AT,
    LOSS_SCOPE,
    Argument,
    Boundary,
    ModelGraph,
    Op,
    Ref,
    RepeatedBlock,
    joined_name,
    within,
)


def find_repeated_blocks(graph: ModelGraph, without: Collection[str] = ()) -> ModelGraph:
    """A copy of the graph with its outermost repeated blocks set.

    Siblings are the modules `prefix.0`, `prefix.1`, ...; siblings with equal labelled nodes form one
    RepeatedBlock. Modules named in `without` belong to none.
    """
    prefixes: dict[str, set[int]] = defaultdict(set)
    left_out = frozenset(without)
    for module in {node.module for node in graph.nodes}:
        parts = module.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal() and ".".join(parts[: depth + 1]) not in left_out:
                prefixes[".".join(parts[:depth])].add(int(part))
    found: list[RepeatedBlock] = []
    for prefix in sorted(prefixes, key=lambda name: (name.count("."), name)):
        if not any(within(prefix, name) for block in found for name in block.names):
            found += _alike(graph, prefix, sorted(prefixes[prefix]))
    return replace(graph, blocks=tuple(found))


def members(graph: ModelGraph, module: str) -> tuple[Op | Boundary, ...]:
    """The nodes of a module and its submodules, in order."""
    return graph.nodes_by_module.get(module, ())


def like_modules(graph: ModelGraph, module: str) -> tuple[str, ...]:
    """The other modules, wherever they are, whose nodes agree with a module's in all in which the siblings of a
    repeated block agree."""

    def found() -> tuple[str, ...]:
        parameters = _labels(graph)
        own, size = _labelled(graph, parameters, module), len(members(graph, module))
        scopes = graph.nodes_by_module.items()
        others = (name for name, nodes in scopes if len(nodes) == size and name not in (module, LOSS_SCOPE))
        return tuple(name for name in others if _labelled(graph, parameters, name) == own)

    made: tuple[str, ...] = graph.once((like_modules, module), found)
    return made


def like_ops(graph: ModelGraph) -> dict[str, str]:
    """Op name -> name of the first op at the same place in a sibling of its repeated block, with views among the same
    results; the op's own name outside of repeated blocks."""
    return graph.once_for_all_sizes(like_ops, lambda: _like_ops(graph))


def unlike_ops(graph: ModelGraph) -> tuple[Op, ...]:
    """The first of each set of ops that `like_ops` names alike, in order."""

    def places() -> tuple[int, ...]:
        first = frozenset(like_ops(graph).values())
        return tuple(i for i, node in enumerate(graph.nodes) if isinstance(node, Op) and node.name in first)

    found = (graph.nodes[place] for place in graph.once_for_all_sizes(unlike_ops, places))
    return tuple(node for node in found if isinstance(node, Op))


def _like_ops(graph: ModelGraph) -> dict[str, str]:
    values, found = graph.values, {op.name: op.name for op in graph.ops}
    for block in graph.blocks:
        first: dict[object, str] = {}
        for name in block.names:
            for place, node in enumerate(members(graph, name)):
                # A reshape of equal shapes makes a view of one tensor and a copy of another.
                views = [values[result].storage != result for result in node.results]
                found[node.name] = first.setdefault((place, *views), node.name)
    return found


def _alike(graph: ModelGraph, prefix: str, indices: list[int]) -> list[RepeatedBlock]:
    parameters = _labels(graph)
    alike: dict[object, list[int]] = defaultdict(list)
    for index in indices:
        alike[_labelled(graph, parameters, joined_name(prefix, str(index)))].append(index)
    return [RepeatedBlock(prefix=prefix, indices=tuple(siblings)) for siblings in alike.values() if len(siblings) > 1]


def _labels(graph: ModelGraph) -> dict[str, str]:
    """The labels of sources by their values: of a constant that forward replaces, the attribute where it is held, as
    its siblings have other numbers."""
    replaced = {path.removeprefix(LEFT_AT) for path, _ in graph.outputs if path.startswith(LEFT_AT)}
    held = {name: path.rpartition(".")[2] for name, path in graph.held.items() if path in replaced}
    return {source.result: source.label for source in graph.sources} | held


def _labelled(graph: ModelGraph, parameters: Mapping[str, str], module: str) -> tuple[object, ...]:
    """The module's nodes in order, labelled by all that must agree between siblings; values from outside the module are
    labelled by their shapes and the order of their first use.

    `parameters` maps the values of the graph's sources to their labels.
    """
    local: dict[str, tuple[int, int]] = {}
    outside: dict[str, tuple[object, ...]] = {}

    def rename(name: str) -> object:
        if name in local:
            return local[name]
        label = parameters.get(name, "")
        if label.startswith(module + "."):
            return "own", label.removeprefix(module), _kind(graph, name)
        return outside.setdefault(name, ("outside", len(outside), label, _kind(graph, name)))

    labels: list[object] = []
    for position, node in enumerate(members(graph, module)):
        labels.append((_label(node, module, rename), tuple(_kind(graph, result) for result in node.results)))
        local.update({result: (position, i) for i, result in enumerate(node.results)})
    return tuple(labels)


def _kind(graph: ModelGraph, name: str) -> tuple[object, ...]:
    value = graph.values[name]
    return value.shape, value.dtype, value.carries_gradient


def _label(node: Op | Boundary, module: str, rename: Callable[[str], object]) -> tuple[object, ...]:
    place = node.module.removeprefix(module)
    if isinstance(node, Boundary):
        return place, node.direction, node.path, rename(node.operand)

    def relative(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return rename(argument.name)
        return tuple(map(relative, argument)) if isinstance(argument, tuple) else (type(argument), argument)

    return place, node.target, relative(node.args), tuple((key, relative(value)) for key, value in node.kwargs)
