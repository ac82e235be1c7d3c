"""Fake tensors: tensors without memory that report any device, and sizes that data decides; torch.cond and
flex_attention, which compile themselves, as ordinary code."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from tpplan.torch_internals.probes import Probe

__all__ = ["PROBES", "FakeTensor", "FakeTensorMode", "ShapeEnv", "unset_fake_temporarily"]

#: modules of the functions through which torch compiles and calls a higher-order op from eager code
HIGHER_ORDER_OPS = "torch._higher_order_ops."
#: the one of these functions that torch.cond uses
COND = "_cond_op_wrapper"
#: the function of torch.nn.attention.flex_attention that torch compiles
FLEX = "_flex_attention_hop_wrapper"


def is_of_values(error: BaseException) -> bool:
    """True for the errors of code that asks fake tensors for their values, or for a size that data decides."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode)


def upper_bound(size: torch.SymInt, environment: ShapeEnv) -> int | None:
    """The upper bound of a size that data decides; None where it has none."""
    upper = environment.bound_sympy(size.node.expr).upper
    return int(upper) if upper.is_finite and upper < 2**40 else None


class _NoTensor:
    """A type that no tensor has."""


def seeming_real() -> contextlib.AbstractContextManager[object]:
    """A context in which code that checks for fake tensors (torch._subclasses.FakeTensor) finds none."""
    return patch.object(torch._subclasses, "FakeTensor", _NoTensor)


@contextlib.contextmanager
def flex_attention_anywhere() -> Iterator[None]:
    """Makes flex_attention take fake CPU tensors that carry gradients; torch refuses them, as it has no CPU
    backward."""
    check = vars(flex).get("_validate_device")
    if check is None:  # a release that checks elsewhere, for which the probe fails
        yield
        return
    with patch.object(flex, "_validate_device", lambda *_: None):
        yield


@contextlib.contextmanager
def flex_masks_by(create: Callable[..., Tensor]) -> Iterator[None]:
    """Makes create_block_mask use create(function, B, H, T, J, device) as its mask [B, H, T, J].

    The blocks that it lists for the backward have their sizes and dtypes, and no meaningful values.
    """

    def dense(counts: Tensor, columns: Tensor, num_columns: int | None = None) -> Tensor:
        """Stands for _ordered_to_dense, which runs under torch.vmap: counts [..., M], columns [..., M, N]."""
        found = columns.sum(-1, keepdim=True, dtype=torch.int32) + counts.unsqueeze(-1)
        return found.expand(*found.shape[:-1], num_columns or columns.shape[-1]).contiguous()

    with patch.multiple(flex, create_mask=create, _ordered_to_dense=dense):
        yield


@contextlib.contextmanager
def higher_order_ops_by(call: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """Makes a higher-order op of eager code (torch.cond, ...) run as call(its name)(...), instead of compiled."""
    compile_ = torch.compile

    def opened(model: Any = None, **options: Any) -> Any:
        home = getattr(model, "__module__", "")
        if getattr(model, "__name__", "") == FLEX:
            return call("flex_attention")
        if not home.startswith(HIGHER_ORDER_OPS):
            return compile_(model, **options)
        return call("cond" if model.__name__ == COND else home.removeprefix(HIGHER_ORDER_OPS))

    with patch.object(torch, "compile", opened):
        yield


# ---- probes


def _fakes() -> bool:
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        x = torch.ones(4, 4, device="cpu", requires_grad=True)
        y = (x @ x).sum()
        y.backward()  # type: ignore[no-untyped-call]
        with unset_fake_temporarily():
            is_real = not isinstance(torch.ones(1), FakeTensor)
        with seeming_real():
            is_hidden = not isinstance(x, torch._subclasses.FakeTensor)
    return isinstance(x.grad, FakeTensor) and is_real and is_hidden


def _questions() -> bool:
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.ones(4)
        try:
            return not (x.sum() > 0)
        except Exception as error:
            return is_of_values(error)


def _bounds() -> bool:
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        found: Tensor = torch.nonzero(torch.ones(4))
    size: Any = found.shape[0]
    return isinstance(size, torch.SymInt) and upper_bound(size, environment) in (4, None)


def _cond() -> bool:
    seen: list[str] = []

    def call(name: str) -> Callable[..., Any]:
        seen.append(name)
        return lambda condition, if_true, if_false, operands: if_true(*operands)

    x = torch.ones(2, requires_grad=True)
    with higher_order_ops_by(call):
        found = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return seen == ["cond"] and torch.equal(found, x.sin())


def _flex() -> bool:
    seen: list[str] = []

    def call(name: str) -> Callable[..., Any]:
        seen.append(name)
        return lambda query, *_: (query, query, query)

    x = torch.ones(1, 1, 2, 2)
    with higher_order_ops_by(call), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises to compile it
        found = flex.flex_attention(x, x, x)
    return seen == ["flex_attention"] and found is x


PROBES = (
    Probe(
        name="fake tensors",
        uses="torch._subclasses.fake_tensor.FakeTensorMode, unset_fake_temporarily",
        needed_for="modules that run whole, `tpplan verify --dry`",
        works=_fakes,
    ),
    Probe(
        name="sizes that data decides",
        uses="torch.fx.experimental.symbolic_shapes.ShapeEnv.bound_sympy",
        needed_for="the cost of routing to experts",
        works=_bounds,
    ),
    Probe(
        name="questions about fake tensors' values",
        uses="DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode",
        needed_for="loops over the experts that rows have chosen",
        works=_questions,
    ),
    Probe(
        name="flex_attention on fake tensors",
        uses="torch.nn.attention.flex_attention._validate_device, create_mask, _ordered_to_dense, replaced",
        needed_for="models with flex_attention",
        works=lambda: {"_validate_device", "create_mask", "_ordered_to_dense"} <= vars(flex).keys(),
    ),
    Probe(
        name="torch.cond as ordinary code",
        uses=f"torch.compile as {HIGHER_ORDER_OPS}cond calls it, replaced",
        needed_for="models with torch.cond",
        works=_cond,
    ),
    Probe(
        name="flex_attention as one operator",
        uses=f"torch.compile as torch.nn.attention.flex_attention calls it for {FLEX}, replaced",
        needed_for="models with flex_attention",
        works=_flex,
    ),
)
