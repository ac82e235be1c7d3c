"""Every conversion on real ranks, both directions, against what the layouts mean. t ranks, float64."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.apply.collectives.redistribute import TpGroup, convert, local_rows, mask_rows
from tpplan.core.errors import PlanMismatchError
from tpplan.core.layout import (
    COLLECTIVE_STEPS,
    R_STAR,
    Conversion,
    Layout,
    LayoutKind,
    P,
    R,
    S,
    Step,
    conversions_between,
    copied,
    fits,
    layouts_of,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}
#: how the dispatcher names each collective
COLLECTIVES = {
    "all_reduce": Step.ALL_REDUCE,
    "all_gather_into_tensor": Step.ALL_GATHER,
    "reduce_scatter_tensor": Step.REDUCE_SCATTER,
    "all_to_all_single": Step.ALL_TO_ALL,
}


class CollectiveCounter(TorchDispatchMode):
    """Which collectives run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Step] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in COLLECTIVES:
            self.seen.append(COLLECTIVES[name])
        return func(*args, **(kwargs or {}))


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def summand(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Random summands, of which the last makes up the rest."""
    others = [random(100 + i, *whole.shape) for i in range(num_ranks - 1)]
    return others[rank] if rank < num_ranks - 1 else whole - sum(others)


def slice_of(whole: Tensor, layout: Layout, rank: int, num_ranks: int) -> Tensor:
    parts = whole.split(layout.parts or (whole.shape[layout.dim],), layout.dim)
    return torch.cat([part.chunk(num_ranks, layout.dim)[rank] for part in parts], layout.dim)


def local_value(whole: Tensor, layout: Layout) -> Tensor:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    match layout.kind:
        case LayoutKind.SHARD:
            return slice_of(whole, layout, rank, num_ranks)
        case LayoutKind.PARTIAL:
            return summand(whole, rank, num_ranks)
        case _:
            return whole.clone()


def local_gradient(whole: Tensor, layout: Layout) -> Tensor:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    match layout.kind:
        case LayoutKind.SHARD:
            return slice_of(whole, layout, rank, num_ranks)
        case LayoutKind.REPLICATE_PARTIAL_GRADIENT:
            return summand(whole, rank, num_ranks)
        case _:
            return whole.clone()


def total(local: Tensor) -> Tensor:
    summed = local.clone()
    dist.all_reduce(summed)
    return summed


def check_value(local: Tensor, layout: Layout, whole: Tensor) -> None:
    if layout == P:
        torch.testing.assert_close(total(local), whole, **EXACT)
    else:
        torch.testing.assert_close(local, local_value(whole, layout), **EXACT)


def check_gradient(local: Tensor, layout: Layout, whole: Tensor) -> None:
    if layout == R_STAR:
        torch.testing.assert_close(total(local), whole, **EXACT)
    else:
        torch.testing.assert_close(local, local_gradient(whole, layout), **EXACT)


def collectives(steps: tuple[Step, ...]) -> list[Step]:
    return [step for step in steps if step in COLLECTIVE_STEPS]


def shapes(num_ranks: int) -> Iterator[tuple[int, ...]]:
    yield 2 * num_ranks, 3 * num_ranks, num_ranks
    yield 1, 2 * num_ranks, 3 * num_ranks  # no copies around collectives on dim 1


def turned(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """A copy of x whose dims lie in memory in this order, the outermost first."""
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def every_order_in_memory() -> int:
    num_ranks, group = dist.get_world_size(), dist.group.WORLD
    shape, checked = (2 * num_ranks, 3 * num_ranks, 2 * num_ranks), 0  # no slice has a dim of one, which lies anywhere
    layouts = (*layouts_of(shape, carries_gradient=True, tp=num_ranks), S(1, num_ranks, 2 * num_ranks))
    value, gradient = random(1, *shape), random(2, *shape)
    for conversion in conversions_between(layouts, layouts, carries_gradient=True):
        for order in itertools.permutations(range(3)):
            x = turned(local_value(value, conversion.source), order).requires_grad_()
            y = convert(x, conversion, group)
            check_value(y.detach(), conversion.target, value)
            assert y.permute(order).is_contiguous(), (conversion, order)
            (found,) = torch.autograd.grad(y, x, turned(local_gradient(gradient, conversion.target), order))
            check_gradient(found, conversion.source, gradient)
            assert found.permute(order).is_contiguous(), (conversion, order)
            checked += 1
    return checked


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_conversions_keep_the_order_in_memory(num_ranks: int) -> None:
    assert run_ranks(num_ranks, every_order_in_memory) == [6 * 7 * 7] * num_ranks


def every_conversion() -> int:
    num_ranks, group = dist.get_world_size(), dist.group.WORLD
    checked = 0
    for shape in shapes(num_ranks):
        n = num_ranks
        parted = (S(0, n, n), S(1, n, 2 * n), S(1, *[n] * (shape[1] // n)), S(2, 2 * n, n))
        fused = (layout for layout in parted if fits(shape, layout, n))
        layouts = (*layouts_of(shape, carries_gradient=True, tp=n), *fused)
        value, gradient = random(1, *shape), random(2, *shape)
        for conversion in conversions_between(layouts, layouts, carries_gradient=True):
            x = local_value(value, conversion.source).requires_grad_()
            with CollectiveCounter() as forward:
                y = convert(x, conversion, group)
            check_value(y.detach(), conversion.target, value)
            upstream = local_gradient(gradient, conversion.target)
            with CollectiveCounter() as backward:
                y.backward(upstream)
            check_gradient(x.grad, conversion.source, gradient)
            assert forward.seen == collectives(conversion.forward), conversion
            assert backward.seen == collectives(conversion.backward), conversion
            with torch.no_grad():
                assert torch.equal(convert(x, conversion, group), y), conversion
            checked += 1
    return checked


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_conversions_move_value_and_gradient_as_the_layouts_say(num_ranks: int) -> None:
    # From each layout to each: R, R*, P, shards of three dims and three of parts; two and two in the second shape.
    assert run_ranks(num_ranks, every_conversion) == [9 * 9 + 7 * 7] * num_ranks


def shared_slices() -> None:
    """R* -> S(d)/m: neighbours get the same slice, and the sum over all ranks of what comes back is the gradient."""
    num_ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    value, gradient = random(1, 12, 24), random(2, 12, 24)
    for dim in (0, 1):
        for num_slices in (n for n in range(2, num_ranks) if num_ranks % n == 0):
            copies = num_ranks // num_slices
            x = value.clone().requires_grad_()
            with CollectiveCounter() as counter:
                y = convert(x, Conversion(R_STAR, copied(dim, num_slices)), group)
                assert torch.equal(y, value.chunk(num_slices, dim)[rank // copies])
                y.backward(summand(gradient.chunk(num_slices, dim)[rank // copies], rank % copies, copies))
            assert not counter.seen
            torch.testing.assert_close(total(x.grad), gradient, **EXACT)
            with pytest.raises(PlanMismatchError):
                convert(torch.zeros(7, 7), Conversion(R_STAR, copied(dim, num_slices)), group)


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_neighbours_share_slices_whose_gradients_add_up(num_ranks: int) -> None:
    run_ranks(num_ranks, shared_slices)


def rows_of_an_embedding() -> None:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    group = TpGroup.of(dist.group.WORLD)
    ids = torch.randint(0, 3 * num_ranks, (2 * num_ranks, num_ranks), generator=torch.Generator().manual_seed(0))
    table = random(3, 3 * num_ranks, 2 * num_ranks).requires_grad_()
    expected = F.embedding(ids, table)
    upstream = random(4, *expected.shape)
    expected.backward(upstream)
    for target in (R, R_STAR, P, S(0), S(1), S(2)):
        local_table = table.detach().chunk(num_ranks)[rank].clone().requires_grad_()
        local_ids, foreign = local_rows(ids, 3, group)
        assert local_ids.min() >= 0
        assert local_ids.max() < 3
        looked_up = mask_rows(F.embedding(local_ids, local_table), foreign)
        y = convert(looked_up, Conversion(P, target), dist.group.WORLD)
        check_value(y.detach(), target, expected.detach())
        y.backward(local_gradient(upstream, target))
        torch.testing.assert_close(local_table.grad, table.grad.chunk(num_ranks)[rank], **EXACT)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_of_an_embedding_are_looked_up_where_they_are(num_ranks: int) -> None:
    run_ranks(num_ranks, rows_of_an_embedding)


def aliasing() -> None:
    group = dist.group.WORLD
    x = random(1, 2, 4).requires_grad_()
    assert convert(x, Conversion(R, R), group) is x
    y = convert(x, Conversion(R, R_STAR), group)
    assert y.data_ptr() == x.data_ptr()
    assert y.requires_grad
    assert convert(x.detach(), Conversion(R, R_STAR), group).data_ptr() == x.data_ptr()
    part = convert(x.detach(), Conversion(R, S(0)), group)
    assert part.untyped_storage().nbytes() == x.untyped_storage().nbytes() // 2  # the whole is not kept alive


def test_what_need_not_be_copied_is_not() -> None:
    run_ranks(2, aliasing)


def uneven() -> list[str]:
    group = dist.group.WORLD
    messages = []
    for conversion in (Conversion(R, S(1)), Conversion(P, S(1)), Conversion(S(0), S(1)), Conversion(R, S(3))):
        for x in (torch.zeros(2, 15, 4), torch.zeros(2, 15, 4, requires_grad=True)):
            with pytest.raises(PlanMismatchError) as caught:
                convert(x, conversion, group)
            messages.append(str(caught.value))
    with pytest.raises(PlanMismatchError):
        convert(torch.zeros(3), Conversion(S(1), R), group)
    return messages


def test_a_dim_that_does_not_divide_raises_on_every_rank_before_the_collective() -> None:
    for messages in run_ranks(2, uneven):
        assert "dim 1 of shape [2, 15, 4] does not divide by tp = 2" in messages[0]


def integers_and_masks() -> None:
    num_ranks = dist.get_world_size()
    ids = torch.arange(4 * num_ranks).reshape(2, 2 * num_ranks)
    for whole in (ids, ids % 3 == 0, ids.to(torch.bfloat16)):
        part = convert(whole, Conversion(R, S(1)), dist.group.WORLD)
        assert torch.equal(convert(part, Conversion(S(1), R), dist.group.WORLD), whole)


def test_values_without_a_gradient_are_sliced_and_gathered() -> None:
    run_ranks(2, integers_and_masks)
