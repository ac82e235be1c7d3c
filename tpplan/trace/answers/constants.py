"""Constants: tensors of numbers that code wrote down, which a trace tells apart by a digest of the numbers."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from tpplan.torch_internals import pytree

#: functions that make a tensor of values that the code wrote down
_CONSTRUCTORS = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "scalar_tensor"})
#: functions that make a tensor of an index that is a list
_INDEXING = frozenset({"__getitem__", "__setitem__"})


def digest_of_constant(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Sixteen hex digits of the numbers in a call that makes a tensor of them, without its tensors; "" for a call that
    makes none."""
    if name not in _CONSTRUCTORS and not (name in _INDEXING and _has_list(args)):
        return ""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
    data = [leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode() for leaf in leaves]
    return hashlib.sha256(b"\0".join(data)).hexdigest()[:16]


def _has_list(args: tuple[Any, ...]) -> bool:
    """True where a tensor is indexed by a list or an array, or by several indices with one among them."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:2]
    return any(isinstance(index, list | np.ndarray) for index in indices)
