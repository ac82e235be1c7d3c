"""Sizes that a module reads off its values and hands on as numbers: the layout that they were read from is blamed."""

import itertools

import pytest
import torch
from examples import solve_eagerly
from torch import Tensor, nn

from tpplan.core.layout import S
from tpplan.plan.plan import ProofStatus
from tpplan.search import branch_and_bound

CHANNELS, SIZE, DIM = 4, 16, 16


class Patches(nn.Module):
    """Images [B, C, H, W] to rows [B, H * W, D], and the height."""

    def __init__(self, channels: int = CHANNELS, dim: int = DIM) -> None:
        super().__init__()
        self.dim, self.proj, self.norm = dim, nn.Conv2d(channels, dim, 3, padding=1), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.proj(x)
        rows = x.flatten(2).transpose(1, 2)
        for _ in range(8):
            rows = nn.functional.layer_norm(rows.sigmoid(), (self.dim,))
        return self.norm(rows), x.shape[2]


class Depthwise(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)

    def forward(self, x: Tensor, height: int) -> Tensor:
        x = x.transpose(1, 2).reshape(len(x), x.shape[-1], height, SIZE)
        return self.conv(x).flatten(2).transpose(1, 2)


class Mixed(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.middle, self.down = nn.Linear(dim, 4 * dim), Depthwise(4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, height: int) -> Tensor:
        return x + self.down(self.middle(self.up(self.norm(x)), height).relu())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.blocks = Patches(), nn.ModuleList(Mixed() for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        x, height = self.patches(images)
        for block in self.blocks:
            x = block(x, height)
        return x.square().mean()


def test_a_size_handed_on_as_a_number_is_blamed_where_it_was_read() -> None:
    plan = solve_eagerly(
        Encoder,
        lambda batch, seq_len: {"images": torch.zeros(batch, CHANNELS, SIZE, SIZE)},
        batch=1,
        seq_len=1,
        tp=2,
    )
    (cut,) = plan.proof.cuts
    assert cut.startswith("on 2 ranks output of patches.proj as S(2): aten.reshape.default in blocks.0.middle: ")
    assert plan.parameters["blocks.*.up.weight"].placement == S(0)


class Level(nn.Module):
    """Images [B, C, H, W] to images of another number of channels."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.dim, self.patches, self.block = dim, Patches(channels, dim), Mixed(dim)

    def forward(self, images: Tensor) -> Tensor:
        x, height = self.patches(images)
        return self.block(x, height).transpose(1, 2).reshape(len(x), self.dim, SIZE, SIZE)


class Pyramid(nn.Module):
    """Levels of the same code, each of another width."""

    def __init__(self) -> None:
        super().__init__()
        widths = (CHANNELS, DIM, 2 * DIM, 4 * DIM)
        self.levels = nn.Sequential(*(Level(*pair) for pair in itertools.pairwise(widths)))

    def forward(self, images: Tensor) -> Tensor:
        return self.levels(images).square().mean()


def test_levels_of_other_widths_are_refuted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a round for each, the search would forbid something for as many rounds as there are levels."""
    rounds = []
    forbid = branch_and_bound.forbid
    monkeypatch.setattr(branch_and_bound, "forbid", lambda *args: rounds.append(args) or forbid(*args))
    plan = solve_eagerly(
        Pyramid,
        lambda batch, seq_len: {"images": torch.zeros(batch, CHANNELS, SIZE, SIZE)},
        batch=1,
        seq_len=1,
        tp=2,
    )
    assert plan.proof.status is ProofStatus.PROVEN
    assert len(rounds) == 1
