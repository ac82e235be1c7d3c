"""Loops over experts that ask which of them some row has chosen, as people write them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, VOCAB, EXPERTS, TOP = 16, 32, 16, 2

#: x [N, D], the experts' weights for it [N, K], their numbers [N, K], and the experts -> [N, D]
Way = Callable[[Tensor, Tensor, Tensor, nn.ModuleList], Tensor]


def if_any(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        mask = chosen == number
        if mask.any():
            token, place = torch.where(mask)
            y[token] += weights[token, place, None] * expert(x[token])
    return y


def if_rows(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Asks a shape, which a trace knows: this is traced, and experts are skipped all the same."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = torch.where(chosen == number)
        if token.numel() == 0:
            continue
        y[token] += weights[token, place, None] * expert(x[token])
    return y


def each_hit(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As transformers does."""
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, len(experts)).permute(2, 1, 0)
    for hit in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        place, token = torch.where(mask[hit].squeeze(0))
        y.index_add_(0, token, experts[hit.item()](x[token]) * weights[token, place, None])
    return y


def each_unique(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    y = torch.zeros_like(x)
    for number in chosen.unique().tolist():
        token, place = torch.where(chosen == number)
        y.index_add_(0, token, experts[number](x[token]) * weights[token, place, None])
    return y


def by_counts(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """As the code that came with DeepSeek's weights does: rows sorted by expert, counts as a NumPy array."""
    ones = chosen.new_zeros((chosen.shape[0], len(experts)))
    ones.scatter_(1, chosen, 1)
    order = chosen.view(-1).argsort()
    rows = x[order // chosen.shape[1]]
    outputs, start = [], 0
    for number, count in enumerate(ones.sum(0).cpu().numpy()):
        end = start + count
        if count == 0:
            continue
        outputs.append(experts[number](rows[start:end]))
        start = end
    y = torch.cat(outputs)
    placed = torch.empty_like(y)
    placed[order] = y
    return (placed.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


def by_bins(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    y, counts = torch.zeros_like(x), torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    for number, expert in enumerate(experts):
        if counts[number] > 0:
            mask = (chosen == number).any(-1)
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            y[mask] += expert(x[mask]) * weight[mask]
    return y


def selected(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Rows picked by masked_select."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        mask = (chosen == number).any(-1, keepdim=True)
        if bool(mask.any()):
            rows = x.masked_select(mask).view(-1, x.shape[-1])
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            y = y + torch.zeros_like(x).masked_scatter(mask, expert(rows)) * weight
    return y


ASKING = (if_any, each_hit, each_unique, by_counts, by_bins, selected)


class Mixture(nn.Module):
    """Experts that are walked by a loop: x [B, T, D] -> [B, T, D]."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, DIM)
        weights, chosen = self.router(rows).softmax(-1).topk(TOP)
        return self.way(rows, weights, chosen, self.experts).view(x.shape)


class Layer(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.up, self.down, self.mixture = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM), Mixture(way)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return x + self.mixture(x)


class Model(nn.Module):
    """A language model of two layers: tokens [B, T] -> [B, T, V]."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Layer(way) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
