"""Modules that compute in ways of their own, for scripts/evidence/adversary.py --traps.

They compute oddly with weights, between products, in attention and in the loss; layers agree at some lengths alone.
Each takes x [B, T, D] and ids [B, T] and returns a loss.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from adversary_parts.traps import CLASSES, DIM, HIDDEN, LENGTH, TRAPS, Layer, Stack, of, takes, trap

HEADS = 4


def reads(name: str, read: Callable[[Tensor], Tensor]) -> None:
    """A trap whose layers compute with read(weight) in place of the weight, of both products."""

    class Reading(Layer):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            h = F.gelu(F.linear(x, read(self.up.weight), self.up.bias))
            return x + F.linear(h, read(self.down.weight), self.down.bias)

    TRAPS[f"a weight {name}"] = of(Reading)


reads("divided by its largest", lambda w: w / w.abs().max())
reads("divided by its mean magnitude", lambda w: w.sign() * w.abs().mean() + w)
reads("divided by the largest of rows", lambda w: w / w.abs().amax(1, keepdim=True))
reads("divided by the largest of columns", lambda w: w / w.abs().amax(0, keepdim=True))
reads("normalized by rows", lambda w: F.normalize(w, dim=1))
reads("normalized by columns", lambda w: F.normalize(w, dim=0))
reads("standardized", lambda w: (w - w.mean()) / w.std())
reads("standardized by rows", lambda w: (w - w.mean(1, keepdim=True)) / (w.var(1, keepdim=True) + 1e-5).sqrt())
reads("standardized by columns", lambda w: (w - w.mean(0)) / (w.var(0, correction=0) + 1e-5).sqrt())
reads("rounded and passed straight through", lambda w: w + ((w * 8).round() / 8 - w).detach())
reads("rounded by its largest", lambda w: w + ((w / w.abs().max() * 8).round() * w.abs().max() / 8 - w).detach())
reads("softened by rows", lambda w: w.softmax(0))
reads("softened by columns", lambda w: w.softmax(1))
reads("rolled by rows", lambda w: w.roll(1, 0))
reads("rolled by columns", lambda w: w.roll(1, 1))
reads("flipped", lambda w: w.flip(0, 1))
reads("summed up along rows", lambda w: w.cumsum(0) / 8)
reads("summed up along columns", lambda w: w.cumsum(1) / 8)
reads("sorted", lambda w: w.sort(0).values)
reads("thinned by its median", lambda w: w * (w.abs() > w.abs().median()))
reads("thinned by the largest of rows", lambda w: torch.where(w.abs() >= w.abs().topk(4, 1).values[:, -1:], w, 0))
reads("halved by rows", lambda w: torch.cat([w[: w.shape[0] // 2], 2 * w[w.shape[0] // 2 :]]))
reads("halved by columns", lambda w: torch.cat([w[:, : w.shape[1] // 2], 2 * w[:, w.shape[1] // 2 :]], 1))
reads("every second row doubled", lambda w: torch.stack([w[::2], 2 * w[1::2]], 1).reshape(w.shape))
reads("in parts exchanged", lambda w: torch.cat(list(reversed(w.chunk(4)))))
reads("turned around twice", lambda w: w.t().contiguous().view(w.shape[1], w.shape[0]).t())
reads("read as if it were turned", lambda w: w.reshape(w.shape[1], w.shape[0]).t())
reads("flat and back", lambda w: w.flatten().mul(2).view_as(w))
reads("masked by its triangle", lambda w: w.tril())
reads("with its rows picked", lambda w: w[torch.arange(w.shape[0] - 1, -1, -1, device=w.device)])
reads("with the diagonal doubled", lambda w: w + torch.eye(*w.shape, device=w.device, dtype=w.dtype))
reads("scaled by its number of elements", lambda w: w * (w.numel() / (DIM * HIDDEN)))
reads("scaled by its rows", lambda w: w * w.shape[0] ** 0.5 / 8)
reads("scaled by its Frobenius norm", lambda w: w * (8 / torch.linalg.matrix_norm(w)))
reads("clipped at a quantile", lambda w: w.clamp(max=w.detach().flatten().quantile(0.9)))
reads("of low rank", lambda w: w + (w @ w.t()[:, :2]) @ w[:2] / 8)
reads("in complex numbers", lambda w: torch.view_as_complex(w.view(*w.shape[:-1], -1, 2)).abs().repeat(1, 2))
reads("with noise from a generator", lambda w: w + torch.rand(w.shape, generator=torch.Generator().manual_seed(3)))


def penalized(name: str, penalty: Callable[[nn.Module], Tensor]) -> None:
    """A trap whose loss has a penalty on weights."""

    class Penalized(Stack):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.stacked(x).square().mean() + penalty(self)

    TRAPS[f"a penalty on {name}"] = Penalized


penalized("squares of weights", lambda m: 1e-2 * sum(p.square().sum() for p in m.parameters()))
penalized("norms of weights", lambda m: 1e-2 * sum(p.norm() for p in m.parameters()))
penalized("magnitudes of weights", lambda m: 1e-2 * sum(p.abs().mean() for p in m.parameters()))
penalized("the largest weights", lambda m: 1e-2 * torch.stack([p.abs().max() for p in m.parameters()]).sum())
penalized("all weights as one", lambda m: torch.cat([p.flatten() for p in m.parameters()]).norm() * 1e-2)
penalized("the products of rows", lambda m: (m.layers[0].up.weight @ m.layers[0].up.weight.t()).square().mean())
penalized("the products of columns", lambda m: (m.layers[0].up.weight.t() @ m.layers[0].up.weight).square().mean())
penalized("how layers differ", lambda m: (m.layers[0].up.weight - m.layers[1].up.weight).square().mean())
penalized("the angle of layers", lambda m: F.cosine_similarity(*(m.layers[i].up.weight for i in (0, 1)), dim=0).mean())
penalized("a vector of norms", lambda m: torch._foreach_norm([*m.parameters()])[0] * 1e-2)


# ---- weights of other layers, and of functions


@trap("weights lent by the first layer")
class Lent(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        lender: list[Layer]

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x) + F.linear(F.linear(x, self.lender[0].up.weight), self.lender[0].up.weight.t())

    def __init__(self) -> None:
        super().__init__()
        for each in self.layers:
            each.lender = [self.layers[0]]


@trap("a functional call with other weights")
class Functional(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            h = torch.func.functional_call(self.up, {"weight": 2 * self.up.weight, "bias": self.up.bias}, (x,))
            return x + self.down(F.gelu(h))


@trap("a weight's transpose kept from the first call")
class Kept(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        turned: Tensor | None = None

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.turned is None:
                self.turned = self.up.weight.t()
            return x + self.down(F.gelu(x @ self.turned))


@trap("spectral norms")
class Spectral(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def __init__(self) -> None:
            super().__init__()
            parametrizations.spectral_norm(self.up)


@trap("weight norms by columns")
class WeightNorms(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def __init__(self) -> None:
            super().__init__()
            parametrizations.weight_norm(self.up, dim=1)
            parametrizations.weight_norm(self.down, dim=0)


@trap("a weight that is a property")
class ByProperty(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        @property
        def scaled(self) -> Tensor:
            return self.up.weight * self.up.weight.shape[0] ** -0.5

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return x + self.down(F.gelu(F.linear(x, self.scaled)))


# ---- between the products


takes("divided by the norm of all", lambda _, h: h / h.norm())
takes("divided by the norm of samples", lambda _, h: h / h.norm(dim=(1, 2), keepdim=True))
takes("a gate by the mean of tokens", lambda _, h: h * h.mean(1, keepdim=True).sigmoid())
takes("a gate by the mean of the width", lambda _, h: h * h.mean(-1, keepdim=True).sigmoid())
takes("the largest four of the width", lambda _, h: h * (h >= h.topk(4, -1).values[..., -1:]))
takes("straight through", lambda _, h: h + (h.sign() - h).detach())
takes("written in place, and read before", lambda _, h: (h + 1) + (h + 1).mul_(2).cos() + h.mul_(2))
takes("written in a part", lambda _, h: _halved_in_place(h * 1))
takes("maxout", lambda _, h: h.unflatten(-1, (HIDDEN // 2, 2)).amax(-1).repeat(1, 1, 2))
takes("gated by the other half", lambda _, h: torch.cat([h.chunk(2, -1)[0] * h.chunk(2, -1)[1].sigmoid()] * 2, -1))
takes("gated by every second", lambda _, h: (h[..., ::2] * h[..., 1::2].sigmoid()).repeat_interleave(2, -1))
takes("positions of the width", lambda _, h: h * torch.linspace(0, 1, h.shape[-1], device=h.device))
takes("positions of tokens", lambda _, h: h * torch.arange(h.shape[1], device=h.device)[:, None].float().cos())
takes("numbered samples", lambda _, h: h * (1 + torch.arange(h.shape[0], device=h.device))[:, None, None])
takes("the first token added", lambda _, h: h + h[:, :1])
takes("the last token added", lambda _, h: h + h[:, -1:])
takes("the token before", lambda _, h: F.pad(h, (0, 0, 1, 0))[:, :-1] + h)
takes("the token before by roll", lambda _, h: h + h.roll(1, 1))
takes("other samples", lambda _, h: h + h.flip(0))
takes("differences of tokens", lambda _, h: F.pad(h.diff(dim=1), (0, 0, 1, 0)))
takes("running maximum", lambda _, h: h.cummax(1).values)
takes("a scan over tokens", lambda _, h: _scan(h))
takes("a hook that divides by the norm", lambda _, h: _hooked(h * 1, lambda g: g / (g.norm() + 1)))
takes("a hook that centers gradients", lambda _, h: _hooked(h * 1, lambda g: g - g.mean(-1, keepdim=True)))
takes("recomputed by hand", lambda _, h: checkpoint(lambda y: F.gelu(y).cumsum(1), h, use_reentrant=False))
takes("vmapped over samples", lambda _, h: torch.vmap(lambda y: y.softmax(0) * y)(h))
takes("vmapped over the width", lambda _, h: torch.vmap(lambda y: y.cumsum(1), in_dims=2, out_dims=2)(h))
takes("convolved over tokens", lambda _, h: F.avg_pool1d(h.mT, 3, 1, 1).mT)
takes("convolved over the width", lambda _, h: F.avg_pool1d(h, 3, 1, 1))
takes("normed by groups", lambda _, h: F.group_norm(h.mT, 4).mT)
takes("normed over tokens", lambda _, h: F.instance_norm(h.mT).mT)
takes("normed over samples", lambda _, h: (h - h.mean(0)) / (h.var(0) + 1))
takes("clamped by the mean", lambda _, h: torch.minimum(h, h.mean() + h.std()))
takes("interpolated over the width", lambda _, h: F.interpolate(h, scale_factor=0.5, mode="linear").repeat(1, 1, 2))
takes("outer products of halves", lambda _, h: torch.einsum("bti,btj->btij", h[..., :8], h[..., 8:16]).flatten(2))
takes("in double", lambda _, h: (h.double() ** 2 / (1 + h.double() ** 2)).to(h.dtype))
takes("a histogram of signs", lambda _, h: h * (h > 0).sum(-1, keepdim=True) / HIDDEN)
takes("ranks of values", lambda _, h: h * h.argsort(-1).argsort(-1) / HIDDEN)
takes("one hot of the largest", lambda _, h: h * F.one_hot(h.argmax(-1), h.shape[-1]))
takes("a distance of tokens", lambda _, h: h + torch.cdist(h, h).softmax(-1) @ h)
takes("a determinant of four", lambda _, h: h * (1 + torch.linalg.det(h[..., :4, :4]))[:, None, None])


def _halved_in_place(h: Tensor) -> Tensor:
    h[..., : h.shape[-1] // 2] *= 0.5
    h[:, 0] += 1
    return h


def _scan(h: Tensor) -> Tensor:
    state, found = torch.zeros_like(h[:, 0]), []
    for t in range(h.shape[1]):
        state = 0.9 * state + h[:, t].tanh()
        found.append(state)
    return torch.stack(found, 1)


def _hooked(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if h.requires_grad:
        h.register_hook(hook)
    return h


# ---- attention


def attends(name: str, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    """A trap with layers of attention by attend(q, k, v, ids), each [B, H, T, D / H] but ids [B, T]."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            q, k, v = (each(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
            return x + self.o(attend(q, k, v, ids).transpose(1, 2).flatten(2))

    class Attends(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleList(Attention() for _ in self.layers)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            for layer, attention in zip(self.layers, self.attention, strict=True):
                x = layer(attention(x, ids))
            return x.square().mean()

    TRAPS[f"attention {name}"] = Attends


def _after(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()


_sdpa = F.scaled_dot_product_attention
attends("to documents", lambda q, k, v, ids: _sdpa(q, k, v, (ids[:, None, :, None] // 24 == ids[:, None, None] // 24)))
attends("in windows", lambda q, k, v, ids: _sdpa(q, k, v, _after(ids) & ~_after(ids).tril(-3)))
attends("by slopes", lambda q, k, v, ids: _sdpa(q, k, v, _slopes(q, k)))
attends("by slopes of all heads", lambda q, k, v, ids: _sdpa(q, k, v, _slopes(q, k, HEADS)))
attends("with a sink", lambda q, k, v, ids: _sdpa(q, F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))))
attends("with talking heads", lambda q, k, v, ids: torch.einsum("bhts,bhsd->bhtd", _talking(q @ k.mT), v))
attends("scaled by heads", lambda q, k, v, ids: _sdpa(q, k, v, scale=q.shape[1] ** -0.5))
attends("scaled by length", lambda q, k, v, ids: _sdpa(q * q.shape[2] ** 0.5 / 3, k, v, is_causal=True))
attends("of fewer keys", lambda q, k, v, ids: _sdpa(q, k[:, :, ::2], v[:, :, ::2]))
attends("of the first half", lambda q, k, v, ids: _sdpa(q, k[:, :, : k.shape[2] // 2], v[:, :, : v.shape[2] // 2]))
attends("of heads turned", lambda q, k, v, ids: _sdpa(q, k.roll(1, 1), v))
attends("of normed heads", lambda q, k, v, ids: _sdpa(F.normalize(q, dim=1), F.normalize(k, dim=-1), v))
attends("linear", lambda q, k, v, ids: q.softmax(-1) @ (k.softmax(-2).mT @ v))
attends("linear and causal", lambda q, k, v, ids: torch.einsum("bhtd,bhtde->bhte", q.sigmoid(), _states(k, v)))
attends("shared by pairs", lambda q, k, v, ids: _sdpa(q, k[:, ::2], v[:, ::2], enable_gqa=True))
attends(
    "with soft caps", lambda q, k, v, ids: (5 * (q @ k.mT / 5).tanh()).masked_fill(~_after(ids), -1e9).softmax(-1) @ v
)
attends("by distance", lambda q, k, v, ids: (-torch.cdist(q, k)).softmax(-1) @ v)


def _slopes(q: Tensor, k: Tensor, heads: int | None = None) -> Tensor:
    number = q.shape[1] if heads is None else heads
    slopes = 2.0 ** -torch.arange(1, number + 1, device=q.device, dtype=q.dtype)
    away = torch.arange(k.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device)[:, None]
    return slopes[:, None, None] * away.abs().neg()


def _talking(scores: Tensor) -> Tensor:
    return (scores + scores.mean(1, keepdim=True)).softmax(-1)


def _states(k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhtd,bhte->bhtde", k.sigmoid(), v).cumsum(2)


# ---- layers that agree at some lengths alone, and what is hidden from them


def agree(name: str, differs: Callable[[Tensor, int], bool], layers: int = 5) -> None:
    """A trap of like layers of which one does something else where differs(h, index) is true. The index is hidden."""
    table: dict[int, int] = {}

    class Differing(Layer):
        def between(self, h: Tensor) -> Tensor:
            return F.gelu(h) * (2.0 if differs(h, table[id(self)]) else 1.0)

    class Agreeing(Stack):
        layer = Differing

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.layers = nn.ModuleList(Differing() for _ in range(layers))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            table.update({id(layer): index for index, layer in enumerate(self.layers)})
            return super().forward(x, ids)

    TRAPS[name] = Agreeing


agree("the fourth layer at half the length", lambda h, i: i == 3 and h.shape[1] == LENGTH // 2)
agree("the fourth layer at a quarter of the length", lambda h, i: i == 3 and h.shape[1] == LENGTH // 4)
agree("the fourth layer below the length", lambda h, i: i == 3 and h.shape[1] < LENGTH // 2)
agree("the fourth layer at twice the length", lambda h, i: i == 3 and h.shape[1] == 2 * LENGTH)
agree("the fourth layer at other batches", lambda h, i: i == 3 and h.shape[0] == 8)
agree("the fourth layer at one sample", lambda h, i: i == 3 and h.shape[0] == 1)
agree("all layers at a quarter of the length", lambda h, i: h.shape[1] == LENGTH // 4)
agree("all layers at one sample", lambda h, i: h.shape[0] == 1)
agree("all layers of few tokens", lambda h, i: h.shape[0] * h.shape[1] < 10)

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
LOCAL = threading.local()


@trap("a context variable")
class InVariable(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            return F.gelu(h) * (1 + VARIABLE.get())

    def stacked(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            token = VARIABLE.set(index)
            x = layer(x)
            VARIABLE.reset(token)
        return x


@trap("a variable of the thread")
class InThread(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            LOCAL.depth = getattr(LOCAL, "depth", 0) + 1
            return F.gelu(h) * LOCAL.depth

    def stacked(self, x: Tensor) -> Tensor:
        LOCAL.depth = 0
        return super().stacked(x)


# ---- the loss


def lost(name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A trap with a head of classes, and a loss of the logits [B, T, C] and ids [B, T]."""

    class Lost(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(DIM, CLASSES)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return loss(self.head(self.stacked(x)), ids)

    TRAPS[f"a loss {name}"] = Lost


lost("of shifted tokens", lambda y, ids: F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
lost("of some tokens", lambda y, ids: F.cross_entropy(y.flatten(0, 1), ids.flatten().where(ids.flatten() > 9, -100)))
lost("weighted by classes", lambda y, ids: F.cross_entropy(y.mT, ids, weight=torch.linspace(0, 1, CLASSES)))
lost("by tokens, then weighted", lambda y, ids: (F.cross_entropy(y.mT, ids, reduction="none") * ids).sum() / ids.sum())
lost("of gathered logarithms", lambda y, ids: -y.log_softmax(-1).gather(-1, ids[..., None]).mean())
lost("of one hot", lambda y, ids: -(F.one_hot(ids, CLASSES) * y.log_softmax(-1)).sum(-1).mean())
lost("with the normalizer squared", lambda y, ids: F.cross_entropy(y.mT, ids) + y.logsumexp(-1).square().mean())
lost("of the last token", lambda y, ids: F.cross_entropy(y[:, -1], ids[:, -1]))
lost("of the mean token", lambda y, ids: F.cross_entropy(y.mean(1), ids[:, 0]))
lost("of margins", lambda y, ids: F.multi_margin_loss(y.flatten(0, 1), ids.flatten()))
lost("of a focus", lambda y, ids: _focal(F.cross_entropy(y.mT, ids, reduction="none")))
lost("of contrasts over samples", lambda y, ids: F.cross_entropy(_pairs(y.mean(1)), torch.arange(len(y))))
lost(
    "of two passes",
    lambda y, ids: F.kl_div(y.log_softmax(-1), y.detach().softmax(-1).roll(1, 0), reduction="batchmean"),
)
lost("by perplexity", lambda y, ids: F.cross_entropy(y.mT, ids, reduction="none").mean(1).exp().mean())


def _focal(losses: Tensor) -> Tensor:
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def _pairs(y: Tensor) -> Tensor:
    return F.normalize(y, dim=-1) @ F.normalize(y, dim=-1).t() / 0.1
