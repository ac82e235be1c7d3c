"""Products under selective recomputation on real ranks: let go once they are summed, kept where anything else reads
them; gradients equal those without recomputation bit by bit."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tpplan.apply.collectives.redistribute import convert
from tpplan.apply.recompute import recompute
from tpplan.core.errors import UsageError
from tpplan.core.layout import Conversion, P, R, S
from tpplan.plan.plan import Recompute

RANKS, BATCH, LENGTH, WIDTH = 2, 3, 4, 6


def converted(x: Tensor, *layouts: object) -> Tensor:
    return convert(x, Conversion(*layouts), dist.group.WORLD)  # type: ignore[arg-type]


class Products(nn.Module):
    """x, two products, and what a case does with the second; `seen` refers to the second's memory in the first run."""

    def __init__(self, case: Callable[[Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.case = case
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        self.seen.append(StorageWeakRef(y.untyped_storage()))
        return self.case(y).sin() * x.mean()


def summed(y: Tensor) -> Tensor:
    return converted(y, P, R)


def scattered(y: Tensor) -> Tensor:
    return converted(y, P, S(1))  # by a copy in order of ranks


def scattered_in_front(y: Tensor) -> Tensor:
    return converted(y[:2], P, S(0))  # no copy


def exchanged(y: Tensor) -> Tensor:
    return converted(y, S(2), S(1))


def transposed(y: Tensor) -> Tensor:
    return converted(y.transpose(1, 2), P, S(1))


def viewed(y: Tensor) -> Tensor:
    return converted(y.view(BATCH * LENGTH, -1)[:4], P, R)


def summed_twice(y: Tensor) -> Tensor:
    return converted(y, P, R) + converted(y, P, S(1)).sum()


def summed_behind_a_copy(y: Tensor) -> Tensor:
    return converted(y.clone(), P, R)  # the copy is made again of the product


def read_before(y: Tensor) -> Tensor:
    return y.exp() + converted(y, P, R)


def read_after(y: Tensor) -> Tensor:
    return converted(y, P, R) * y.exp()


def read_after_a_copy(y: Tensor) -> Tensor:
    return converted(y, P, S(1)).sum() * y[:2].exp()


def gathered(y: Tensor) -> Tensor:
    return converted(y, S(2), R).exp()


def only_read(y: Tensor) -> Tensor:
    return y.exp()


LET_GO = (summed, scattered, scattered_in_front, exchanged, transposed, viewed, summed_twice)
KEPT = (summed_behind_a_copy, read_before, read_after, read_after_a_copy, gathered, only_read)


def ran(case: Callable[[Tensor], Tensor], mode: Recompute) -> tuple[list[Tensor], bool]:
    """The gradients, and whether the second product is gone between forward and backward."""
    module = Products(case)
    recompute(module, mode)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = module(x)
    is_gone = module.seen[0].expired()
    found.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())], is_gone  # type: ignore[list-item]


def outcomes() -> list[tuple[str, bool, bool]]:
    """Of each case whether gradients are those without recomputation, and whether the product was let go."""
    found = []
    for case in (*LET_GO, *KEPT):
        expected, _ = ran(case, Recompute.NONE)
        own, is_gone = ran(case, Recompute.SELECTIVE)
        is_same = all(torch.equal(*pair) and bool(pair[0].any()) for pair in zip(own, expected, strict=True))
        found.append((case.__name__, is_same, is_gone))
    return found


def test_products_that_are_summed_alone_are_let_go() -> None:
    for found in run_ranks(RANKS, outcomes):
        gone = {case.__name__ for case in LET_GO}
        assert found == [(case.__name__, True, case.__name__ in gone) for case in (*LET_GO, *KEPT)]


def in_place() -> list[str]:
    """What is said of a write to a product: after its sum, before it, and without one."""
    found = []
    for case in (lambda y: summed(y) * y.add_(1), lambda y: summed(y.add_(1)), lambda y: y.relu_()):
        module = Products(case)
        recompute(module, Recompute.SELECTIVE)
        try:
            module(torch.ones(BATCH, LENGTH, WIDTH, requires_grad=True))
        except UsageError as error:
            found.append(str(error).partition(",")[0])
    return found


def test_writes_to_products_are_refused() -> None:
    added, rectified = (f"aten::{op} writes to the result of a product" for op in ("add_.Tensor", "relu_"))
    assert run_ranks(RANKS, in_place) == [[added, added, rectified]] * RANKS


def in_a_row() -> bool:
    """Two layers, the second of which runs after the first has let its product go, whose memory it may get."""
    first, second = Products(scattered), Products(read_before)
    plain = [Products(scattered), Products(read_before)]
    for module in (first, second):
        recompute(module, Recompute.SELECTIVE)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    for own in ((first, second), plain):
        hidden = own[0](x)
        own[1](torch.cat([hidden, hidden], 1)).sum().backward()
    pairs = zip([*first.parameters(), *second.parameters()], [p for m in plain for p in m.parameters()], strict=True)
    return all(torch.equal(own.grad, other.grad) for own, other in pairs)  # type: ignore[arg-type]


def test_layers_in_a_row() -> None:
    assert run_ranks(RANKS, in_a_row) == [True] * RANKS
