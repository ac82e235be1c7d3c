"""Follows, through the operators of a run below autograd, what values are made of: rows of the batch, and buffers.

As tpplan.layouts.buffer_writes does it for a graph, here for the code of a module that runs whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tpplan.layouts.buffer_writes import BATCH, reached
from tpplan.torch_internals import pytree
from tpplan.torch_internals.operators import is_higher_order, written_by
from tpplan.torch_internals.tensors import storage_key

#: batch norms, whose running statistics are their arguments 3 and 4; in training they write these and do not read them
_STATISTICS = ("aten.native_batch_norm.", "aten._native_batch_norm_legit.", "aten.cudnn_batch_norm.",
               "aten.miopen_batch_norm.")  # fmt: skip


class RowOrigins:
    """By a storage's key, the buffers that its values follow from, by name, and BATCH.

    given: the tensors that follow from rows. buffers: those of the module, by name.
    """

    def __init__(self, given: Iterable[Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._found = {storage_key(tensor): frozenset({BATCH}) for tensor in given}
        self._found |= {storage_key(buffer): frozenset({name}) for name, buffer in buffers.items()}
        self._known = set(buffers)

    def start(self, held: Mapping[str, Tensor]) -> None:
        """Notes the tensors that the module holds before it runs in plain attributes, by name, as further buffers."""
        self._known |= held.keys()
        self._found |= {storage_key(tensor): frozenset({name}) for name, tensor in held.items()}

    def follow(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Iterable[Tensor]) -> None:
        """Notes what a call made and wrote to."""
        name = str(op).split(".")[1] if "." in str(op) else ""
        statistics = _statistics(str(op), args)
        held = {storage_key(tensor) for tensor in statistics}
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_of_shape = name.startswith("new_") or name.endswith("_like")
        read = self._of(() if is_of_shape else (own for own in operands if storage_key(own) not in held))
        before = set(map(storage_key, operands))
        for tensor in made:
            if storage_key(tensor) not in before:
                self._found[storage_key(tensor)] = read
        written = () if is_higher_order(op) else written_by(op, args, kwargs)
        for tensor in (*written, *statistics):
            key = storage_key(tensor)
            is_over = name in ("copy_", "fill_", "zero_") and _is_all_of_its_storage(tensor)
            self._found[key] = self._of(operands[1:]) if is_over else read | self._found.get(key, frozenset())

    def written(self, after: Mapping[str, Tensor], outputs: Iterable[Tensor]) -> tuple[tuple[str, bool], ...]:
        """The buffers that follow from rows `after` the run, each with whether outputs of a later run follow from it;
        one that was not there before the run is taken to be read."""
        ends = {name: self._of((buffer,)) for name, buffer in after.items()}
        read = reached(self._of(outputs), ends)
        return tuple(
            (name, name in read or name not in self._known) for name in ends if BATCH in reached(ends[name], ends)
        )

    def _of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        return frozenset().union(*(self._found.get(storage_key(tensor), frozenset()) for tensor in tensors))


def _statistics(op: str, args: Sequence[Any]) -> tuple[Tensor, ...]:
    is_training = op.startswith(_STATISTICS) and len(args) > 5 and args[5] is True
    return tuple(own for own in args[3:5] if isinstance(own, Tensor)) if is_training else ()


def _is_all_of_its_storage(tensor: Tensor) -> bool:
    """True where the tensor's elements are known to be all that its storage has; not where data decides sizes."""
    sizes = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    return all(isinstance(size, int) for size in sizes) and sizes[0] == sizes[1]
