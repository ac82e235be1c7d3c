"""The vocabulary-parallel loss against torch's, on real ranks. N rows, V classes."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.apply.collectives.cross_entropy import cross_entropy
from tpplan.core.errors import UsageError

B, T, V = 2, 3, 24
MANY = 4099


def inputs(dtype: torch.dtype = torch.float64, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[0, 1] = -100
    return logits.to(dtype), targets


def of_torch(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Loss and gradient of 3 * loss, so that an upstream gradient is seen."""
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.flatten(0, -2), targets.flatten(), ignore_index=ignore_index)
    (3 * loss).backward()
    return loss.detach(), leaf.grad


def of_ranks(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """The same from logits sharded over the ranks; this rank's slice of the gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    leaf = logits.chunk(mesh.size(), -1)[dist.get_rank()].clone().requires_grad_()
    sharded = DTensor.from_local(leaf, mesh, [Shard(logits.dim() - 1)], run_check=False)
    loss = cross_entropy(sharded, targets, ignore_index=ignore_index)
    (3 * loss).backward()
    assert not isinstance(loss, DTensor)
    return loss.detach(), leaf.grad


def cases() -> list[tuple[Tensor, Tensor, int]]:
    logits, targets = inputs()
    extreme = logits.clone()
    extreme[0, 0] = 0.0
    extreme[0, 0, 5] = 800.0  # exp overflows without the maximum
    extreme[1, :, 7] = float("-inf")
    targets_finite = targets.clone().masked_fill_(targets == 7, 8)
    return [
        (logits, targets, -100),
        (logits, targets.masked_fill(targets == -100, 5), 5),
        (logits[0], targets[0], -100),
        (extreme, targets_finite, -100),
        (logits, torch.full_like(targets, -100), -100),
        (*of_many_rows(), -100),
    ]


def of_many_rows() -> tuple[Tensor, Tensor]:
    """More rows than are computed at once, which is no number of equal parts."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(MANY, V, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, V, (MANY,), generator=generator)
    return logits, targets.masked_fill(targets == 3, -100)


def compare_float64() -> None:
    for logits, targets, ignore_index in cases():
        loss, gradient = of_ranks(logits, targets, ignore_index)
        expected_loss, expected = of_torch(logits, targets, ignore_index)
        part = expected.chunk(dist.get_world_size(), -1)[dist.get_rank()]
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(gradient, part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_loss_and_gradient_equal_torch_in_float64(num_ranks: int) -> None:
    run_ranks(num_ranks, compare_float64)


def compare_bfloat16() -> None:
    logits, targets = inputs(torch.bfloat16)
    loss, gradient = of_ranks(logits, targets)
    exact_loss, exact = of_torch(logits.double(), targets)
    assert loss.dtype is gradient.dtype is torch.bfloat16
    # Computed in float32 and rounded once: half a unit in the last place of 8 bits.
    torch.testing.assert_close(loss.double(), exact_loss, rtol=2**-8, atol=0)
    part = exact.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    torch.testing.assert_close(gradient.double(), part, rtol=2**-7, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert of_ranks(logits, targets)[0].dtype is whole.dtype


def test_bfloat16_logits_are_computed_in_float32() -> None:
    run_ranks(2, compare_bfloat16)


class Messages(TorchDispatchMode):
    """Elements of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "_c10d_functional" and "wait" not in func.overloadpacket.__name__:
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def count_messages() -> list[int]:
    with Messages() as messages:
        of_ranks(*inputs())
    return messages.elements


def test_two_all_reduces_of_one_and_two_numbers_a_row_replace_the_gather() -> None:
    assert run_ranks(2, count_messages) == [[B * T, 2 * B * T]] * 2


class Largest(TorchDispatchMode):
    """The most rows of slices of the classes in a dtype that an operator makes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.num_rows = dtype, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is self.dtype and result.shape[1:] == (V // 2,):
            self.num_rows = max(self.num_rows, len(result))
        return result


def largest_in_float32() -> int:
    logits, targets = of_many_rows()
    with Largest(torch.float32) as largest:
        of_ranks(logits.bfloat16(), targets)
    return largest.num_rows


def test_float32_is_for_an_eighth_of_many_rows_at_once() -> None:
    assert run_ranks(2, largest_in_float32) == [513, 513]


def other_layouts() -> None:
    mesh = init_device_mesh("cpu", (2,))
    logits, targets = inputs()
    expected, _ = of_torch(logits, targets)
    replicated = DTensor.from_local(logits, mesh, [Replicate()], run_check=False)
    torch.testing.assert_close(cross_entropy(replicated, targets), expected, rtol=1e-12, atol=0)
    as_dtensor = DTensor.from_local(targets, mesh, [Replicate()], run_check=False)
    torch.testing.assert_close(cross_entropy(replicated, as_dtensor), expected, rtol=1e-12, atol=0)
    for placement in (Shard(0), Shard(1), Partial()):
        laid_out = DTensor.from_local(logits, mesh, [placement], run_check=False)
        with pytest.raises(UsageError, match="laid out as"):
            cross_entropy(laid_out, torch.zeros(laid_out.shape[:-1], dtype=torch.long))
    with pytest.raises(IndexError, match="out of bounds"):
        of_ranks(logits, torch.full_like(targets, V))


def test_other_layouts_are_local_or_refused() -> None:
    run_ranks(2, other_layouts)


def test_plain_logits_are_torch_s_own() -> None:
    logits, targets = inputs()
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, targets)
    (3 * loss).backward()
    expected_loss, expected = of_torch(logits, targets)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(leaf.grad, expected)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[2, 3, 24\] and \[6\]"):
        cross_entropy(torch.zeros(2, 3, 24), torch.zeros(6, dtype=torch.long))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, V)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.linear(x), targets)


def test_it_is_one_operator_in_an_exported_graph() -> None:
    model = Classifier().to("meta")
    example = (torch.empty(B, T, 4, device="meta"), torch.empty(B, T, dtype=torch.long, device="meta"))
    graph = torch.export.export(model, example, strict=False).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called == ["aten.linear.default", "tpplan.cross_entropy.default"]
