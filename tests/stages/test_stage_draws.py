"""Random numbers of a model in stages: drawn once, by the stage that reads them, or refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stage_models import WIDTH, Stack
from stage_runs import solved
from torch import Tensor, nn

from tpplan.core.errors import ModelError


class Denoising(Stack):
    """A model whose root adds noise to the first layer's input; in `Told` it hands it to the head, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        noise = torch.randn(*tokens.shape, WIDTH, device=tokens.device)
        x = x + noise
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(self.told(x, noise)))
        return logits

    def told(self, x: Tensor, noise: Tensor) -> Tensor:
        return x


class Told(Denoising):
    def told(self, x: Tensor, noise: Tensor) -> Tensor:
        return x - noise


class Dropping(Stack):
    """A model whose root has one dropout, with which it begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.dropout(self.norm(x)))
        return logits


class Masking(Stack):
    """A model that begins and ends with one mask of dropout."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        kept = F.dropout(torch.ones(*tokens.shape, WIDTH, device=tokens.device), 0.1, self.training)
        x = x * kept
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x * kept))
        return logits


@pytest.mark.parametrize("build", [Denoising, Dropping])
def test_what_one_stage_reads_may_be_drawn(build: Any) -> None:
    assert len(solved(build, stages=2, gpus=2).stages) == 2


@pytest.mark.parametrize(("build", "line"), [(Told, "torch.randn"), (Masking, "F.dropout")])
def test_what_two_stages_read_is_refused_by_its_line(build: Any, line: str) -> None:
    why = rf"an earlier one compute with the random numbers of test_stage_draws.py:\d+: .*{line}.*as an input"
    with pytest.raises(ModelError, match=why):
        solved(build, stages=2, gpus=2)
