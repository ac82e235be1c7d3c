"""Trees of containers, flattened as torch does it: containers that libraries register (model outputs) are nodes, too.

torch.utils.checkpoint, FSDP2 and torch.export use torch.utils._pytree; torch has no public module for it.
"""

from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
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
    )


PROBES = (
    Probe(
        name="trees of containers",
        uses="torch.utils._pytree",
        needed_for="paths of a module's arguments and results",
        works=_round_trip,
    ),
)
