"""Sizes that a module reads off its values and hands on as numbers: the layout that they were read from is blamed."""

import torch
from examples import solve_eagerly
from torch import Tensor, nn

from tpplan.core.layout import S

CHANNELS, SIZE, DIM = 4, 16, 16


class Patches(nn.Module):
    """Images [B, C, H, W] to rows [B, H * W, D], and the height."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Conv2d(CHANNELS, DIM, 3, padding=1), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.proj(x)
        rows = x.flatten(2).transpose(1, 2)
        for _ in range(8):
            rows = nn.functional.layer_norm(rows.sigmoid(), (DIM,))
        return self.norm(rows), x.shape[2]


class Depthwise(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)

    def forward(self, x: Tensor, height: int) -> Tensor:
        x = x.transpose(1, 2).reshape(len(x), x.shape[-1], height, SIZE)
        return self.conv(x).flatten(2).transpose(1, 2)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.middle, self.down = nn.Linear(DIM, 4 * DIM), Depthwise(4 * DIM), nn.Linear(4 * DIM, DIM)

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
