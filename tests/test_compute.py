"""Kernels that running an op on meta tensors shows, against torch's own count of FLOP."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tpplan.costs.compute import Executor, Kernel, Matmul
from tpplan.graph import Argument, Ref, Value
from tpplan.layout import R
from tpplan.rules import Call, Strategy

X = (2, 8, 12, 12)
#: target, arguments after the tensors, the weight's shape
CALLS: list[tuple[str, tuple[Argument, ...], tuple[int, ...], tuple[int, ...]]] = [
    ("aten.linear.default", (), (4, 6, 8), (16, 8)),
    ("aten.conv2d.default", (None, (1, 1), (1, 1), (1, 1), 1), X, (16, 8, 3, 3)),
    ("aten.conv2d.default", (None, (2, 2), (0, 0), (1, 1), 1), X, (16, 8, 3, 3)),
    ("aten.conv2d.default", (None, (1, 1), (1, 1), (1, 1), 4), X, (16, 2, 3, 3)),
    ("aten.conv1d.default", (None, (1,), (2,), (2,), 8), (2, 8, 20), (8, 1, 3)),
    ("aten.conv_transpose2d.input", (None, (2, 2), (0, 0), (0, 0), 1, (1, 1)), X, (8, 16, 2, 2)),
]


@pytest.mark.parametrize(("target", "rest", "x", "weight"), CALLS)
def test_products_have_the_flop_that_torch_counts(
    target: str, rest: tuple[Argument, ...], x: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    """A convolution is as much work as its products, not as its bytes: forward, and both gradients."""
    _, name, overload = target.split(".")
    operator = getattr(getattr(torch.ops.aten, name), overload)
    tensors = [torch.empty(shape, device="meta", requires_grad=True) for shape in (x, weight)]
    with FlopCounterMode(display=False) as forward:
        result: Tensor = operator(*tensors, *rest)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(result, tensors, torch.empty_like(result))

    values = tuple(
        Value(name=n, shape=tuple(s), dtype="float32", carries_gradient=True, storage=n)
        for n, s in (("x", x), ("w", weight), ("y", result.shape))
    )
    call = Call(target=target, args=(Ref("x"), Ref("w"), *rest), kwargs=(), operands=values[:2], results=values[2:])
    execution = Executor().execute(call, Strategy((R, R), (R,)), 1)
    # Both gradients take each multiplication of the forward once; torch's count of a weight's forgets its groups.
    assert flop(execution.forward) == forward.get_total_flops() > 0
    assert flop(execution.backward) == 2 * forward.get_total_flops()
    if weight[1] == x[1] or target == "aten.linear.default":
        assert flop(execution.backward) == backward.get_total_flops()


def flop(kernels: tuple[Kernel, ...]) -> int:
    """A multiplication and an addition for each of m * n * k."""
    return sum(2 * p.batch * p.m * p.n * p.k for p in kernels if isinstance(p, Matmul))
