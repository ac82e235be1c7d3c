"""Finds repeated blocks: sibling modules with the same structure, shapes and order."""

from collections import defaultdict
from dataclasses import replace

import networkx as nx

from tpplan.graph import Argument, Boundary, ModelGraph, Op, Ref, RepeatedBlock, within


def find_repeated_blocks(graph: ModelGraph) -> ModelGraph:
    """The graph with its outermost repeated blocks.

    Siblings are modules `prefix.0`, `prefix.1`, ...; those whose labelled graphs are equal form one RepeatedBlock.
    """
    prefixes: dict[str, set[int]] = defaultdict(set)
    for node in graph.nodes:
        parts = node.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal():
                prefixes[".".join(parts[:depth])].add(int(part))
    found: list[RepeatedBlock] = []
    for prefix in sorted(prefixes, key=lambda name: (name.count("."), name)):
        if not any(within(prefix, name) for block in found for name in block.names):
            found += _alike(graph, prefix, sorted(prefixes[prefix]))
    return replace(graph, blocks=tuple(found))


def members(graph: ModelGraph, module: str) -> tuple[Op | Boundary, ...]:
    """The nodes of a module and of what stands inside it, in order."""
    return tuple(node for node in graph.nodes if within(node.module, module))


def like_nodes(graph: ModelGraph, node: Op | Boundary) -> tuple[Op | Boundary, ...]:
    """The nodes in the same place of like blocks, this one among them; itself alone outside of blocks."""
    for block in graph.blocks:
        for name in block.names:
            if within(node.module, name):
                position = members(graph, name).index(node)
                return tuple(members(graph, other)[position] for other in block.names)
    return (node,)


def _alike(graph: ModelGraph, prefix: str, indices: list[int]) -> list[RepeatedBlock]:
    classes: list[tuple[nx.DiGraph[int], list[int]]] = []
    for index in indices:
        labelled = _labelled(graph, f"{prefix}.{index}" if prefix else str(index))
        for representative, siblings in classes:
            if nx.utils.graphs_equal(representative, labelled):
                siblings.append(index)
                break
        else:
            classes.append((labelled, [index]))
    return [RepeatedBlock(prefix=prefix, indices=tuple(siblings)) for _, siblings in classes if len(siblings) > 1]


def _labelled(graph: ModelGraph, module: str) -> "nx.DiGraph[int]":
    """The block's nodes by position, labelled by all that must agree; what comes from outside by shape and order."""
    labelled: nx.DiGraph[int] = nx.DiGraph()
    parameters = {source.result: source.label for source in graph.sources}
    local: dict[str, str] = {}
    outside: dict[str, str] = {}

    def rename(name: str) -> str:
        if name in local:
            return local[name]
        label = parameters.get(name, "")
        if label.startswith(module + "."):
            return f"own {label.removeprefix(module)} {_kind(graph, name)}"
        return outside.setdefault(name, f"outside {len(outside)} {label} {_kind(graph, name)}")

    for position, node in enumerate(members(graph, module)):
        labelled.add_node(position, label=(_label(node, module, rename), [_kind(graph, r) for r in node.results]))
        for operand in node.operands:
            if operand in local:
                labelled.add_edge(int(local[operand].split()[0]), position)
        local.update({result: f"{position} {i}" for i, result in enumerate(node.results)})
    return labelled


def _kind(graph: ModelGraph, name: str) -> tuple[object, ...]:
    value = graph.values[name]
    return value.shape, value.dtype, value.carries_gradient


def _label(node: Op | Boundary, module: str, rename: "object") -> tuple[object, ...]:
    assert callable(rename)
    place = node.module.removeprefix(module)
    if isinstance(node, Boundary):
        return place, node.direction, node.path, rename(node.operand)

    def relative(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return rename(argument.name)
        return tuple(map(relative, argument)) if isinstance(argument, tuple) else argument

    return place, node.target, relative(node.args), tuple((key, relative(value)) for key, value in node.kwargs)
