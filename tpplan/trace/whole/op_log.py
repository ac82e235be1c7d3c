"""The log of a run on fake tensors: the operators that run below autograd, and the bytes that are alive."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import FakeTensor, ShapeEnv, unset_fake_temporarily, upper_bound
from tpplan.torch_internals.operators import is_higher_order, written_by
from tpplan.torch_internals.recording import TorchDispatchMode
from tpplan.torch_internals.tensors import storage_key
from tpplan.trace.hooks.live_storages import Storages
from tpplan.trace.whole.opaque import OpRecord
from tpplan.trace.whole.opaque_fakes import UnobservableError
from tpplan.trace.whole.row_origins import RowOrigins

#: elements counted for a dim whose size data decides, where nothing bounds it
UNKNOWN_SIZE = 1


class ForeignError(UnobservableError):
    """The module reads a tensor that is neither an argument nor one of its own."""


class OpLog(TorchDispatchMode):
    """A mode that notes the operators that run below autograd, and the bytes that are alive.

    Functions handed to loops and choices run once each. `operands` are tensors whose bytes do not count; `origins`
    follows what values are made of.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, as torch compiles the functions of its higher-order operators only while every mode says so."""
        return True

    def __init__(self, environment: ShapeEnv, operands: list[Tensor], origins: RowOrigins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.environment = environment
        self.origins = origins
        self.ran: list[OpRecord] = []
        self.bodies: set[str] = set()
        self.is_bounded = True
        self.made = Storages(without=operands)
        #: keys of storages whose contents were changed
        self.written: set[int] = set()

    def restart(self) -> None:
        """Forgets the operators so far, and starts the peak anew from the bytes that are alive."""
        self.ran = []
        self.made.forget_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in pytree.tree_leaves((args, kwargs)):
            is_foreign = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)
            if is_foreign and (tensor.is_meta or tensor.requires_grad):
                raise ForeignError(f"it reads a tensor of shape {list(tensor.shape)} that it is not given")
        if is_higher_order(func):
            results = func(*(self._logged(str(func), argument) for argument in args), **kwargs)
        else:
            self.written.update(map(storage_key, written_by(func, args, kwargs)))
            results = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        self.origins.follow(func, args, kwargs, made)
        if not str(func).startswith("prim."):
            noted = pytree.tree_map(self._as_data, (tuple(args), kwargs))
            self.ran.append(OpRecord(op=func, args=noted[0], kwargs=noted[1], results=tuple(map(self._as_data, made))))
        for tensor in made:
            self.made.add(tensor, num_bytes(tensor, self.environment))
        return results

    def _logged(self, name: str, argument: Any) -> Any:
        """An argument of the higher-order operator `name`; a function notes the operators that run in it, too."""
        if isinstance(argument, Tensor) or not callable(argument):
            return argument
        self.bodies.add(name)

        def run(*args: Any) -> Any:
            with self:
                return argument(*args)

        return run

    def _as_data(self, leaf: Any) -> Any:
        """A leaf to keep in a record: tensors on the meta device, symbolic numbers as int, functions as None."""
        if isinstance(leaf, Tensor):
            self.is_bounded &= all(_bound(size, self.environment) is not None for size in leaf.shape)
            return on_meta(leaf, self.environment)
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return _known_size(leaf, self.environment)
        return None if callable(leaf) and not isinstance(leaf, torch.dtype) else leaf


def _known_size(size: Any, environment: ShapeEnv) -> int:
    """A size as a number: where data decides it, its upper bound, or UNKNOWN_SIZE where it has none."""
    bound = _bound(size, environment)
    return UNKNOWN_SIZE if bound is None else bound


def _bound(size: Any, environment: ShapeEnv) -> int | None:
    """The most that a size can be; None where it has no bound."""
    if isinstance(size, int):
        return size
    if not isinstance(size, torch.SymInt):
        return None
    return upper_bound(size, environment)


def num_bytes(tensor: Tensor, environment: ShapeEnv) -> int:
    """Bytes of a tensor's elements, which stand for those of its storage."""
    return prod(_known_size(size, environment) for size in tensor.shape) * tensor.element_size()


def on_meta(tensor: Tensor, environment: ShapeEnv) -> Tensor:
    """A plain meta tensor of a fake tensor's sizes and dtype, and of its strides where data decides none of them."""
    sizes = [_known_size(size, environment) for size in tensor.shape]
    is_known = all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))
    with unset_fake_temporarily():
        if is_known:
            return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device="meta")
        return torch.empty(sizes, dtype=tensor.dtype, device="meta")
