"""Trees of containers, flattened as torch does it: containers that libraries register (model outputs) are nodes, too.

torch.utils.checkpoint, FSDP2 and torch.export use torch.utils._pytree; torch has no public module for it.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import (
    SUPPORTED_NODES,
    MappingKey,
    SequenceKey,
    TreeSpec,
    _get_node_type,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

from tpplan.torch_internals.probes import Probe

__all__ = [
    "PROBES",
    "TreeSpec",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]


#: keys from the root of a tree to a leaf
Path = tuple[Any, ...]


def tree_flatten_with_path(tree: Any) -> tuple[list[tuple[Path, Any]], TreeSpec]:
    """((path, leaf) of each leaf, structure), as torch's own, but also for containers that libraries register without a
    function for their keys."""
    return list(_leaves(tree, ())), tree_structure(tree)


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    kind: Any = _get_node_type(tree)
    if kind not in SUPPORTED_NODES:
        yield path, tree
        return
    node = SUPPORTED_NODES[kind]
    if node.flatten_with_keys_fn is not None:
        children, _ = node.flatten_with_keys_fn(tree)
    else:
        values, context = node.flatten_fn(tree)
        is_named = isinstance(context, list | tuple) and len(context) == len(values)
        keys = map(MappingKey, context) if is_named else map(SequenceKey, range(len(values)))
        children = list(zip(keys, values, strict=True))
    for key, child in children:
        yield from _leaves(child, (*path, key))


def _round_trip() -> bool:
    tree = {"a": [1, (2, None)], "b": {"c": 3}}
    leaves, spec = tree_flatten(tree)
    paths = [len(path) for path, _ in tree_flatten_with_path(tree)[0]]
    doubled = tree_map_only(int, lambda leaf: 2 * leaf, tree)
    return (
        tree_unflatten(leaves, spec) == tree
        and tree_structure(tree) == spec
        and tree_leaves(doubled)[:2] == [2, 4]
        and paths == [2, 3, 3, 2]
        and [leaf for _, leaf in tree_flatten_with_path(tree)[0]] == leaves
    )


PROBES = (
    Probe(
        name="trees of containers",
        uses="torch.utils._pytree, SUPPORTED_NODES, _get_node_type",
        needed_for="paths of a module's arguments and results",
        works=_round_trip,
    ),
)
