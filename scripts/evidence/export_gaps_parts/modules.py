"""Modules [B, T, D] -> [B, T, D] for scripts/evidence/export_gaps.py: ways in which models hold weights, call code."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

DIM, HIDDEN, LENGTH, NUM_HEADS = 16, 64, 8, 4


class Inner(nn.Module):
    """A layer, and what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x).relu())


# Where weights are


class InClosure(Inner):
    def __init__(self) -> None:
        super().__init__()
        weight = self.layer.weight
        self.function = lambda x: x @ weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function(x))


class SelfInClosure(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.function = lambda x: self.other(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function(x))


class InPartial(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(F.linear, weight=self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function(x))


class MethodInList(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [self.layer.forward, self.half, functools.partial(torch.mul, other=2)]

    def half(self, x: Tensor) -> Tensor:
        return self.other(x) / 2

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class WeightsInList(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.layer.weight, self.other.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.weights[0])


class UnregisteredWeight(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.full((DIM, DIM), 0.1))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.hidden[0])


class UnregisteredModule(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(DIM, DIM)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.hidden[0](x))


class ModuleOfAnother(Inner):
    """A module that knows the one around it, not as its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Knows(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class Knows(nn.Module):
    def __init__(self, owner: Inner) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.owner[0].layer.weight + self.owner[0].other(x)


class ParameterLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([nn.Parameter(torch.eye(DIM)), nn.Parameter(torch.eye(DIM))])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(DIM))})
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(DIM)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.some:
            x = x @ weight
        return self.parts["norm"](x * self.named["scale"])


class Scalar(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.half()).float()


class Shared(Inner):
    """One weight in two modules, transposed in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.layer.weight


class SharedModule(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return self.again(super().forward(x))


class Frozen(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.layer.requires_grad_(False)


class Unused(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(DIM, DIM)


class EmptyParameter(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))


class SparseGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, DIM, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(LENGTH, device=x.device))


class EmbeddingBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(32, DIM, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        ids, offsets = torch.arange(20, device=x.device), torch.arange(0, 16, 2, device=x.device)
        return x + self.bag(ids, offsets)


class LowRank(Inner):
    """Frozen, and a product of two thin matrices beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, DIM)), nn.Parameter(torch.zeros(DIM, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


# What changes while it runs


class Counts(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().forward(x - self.mean)


class ReplacesBuffer(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return super().forward(x - self.mean)


class Caches(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2 * LENGTH, DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:, : x.shape[1]] = x.detach()
        return super().forward(x) + self.cache[:, :LENGTH].mean(1, keepdim=True)


class SetsAttribute(Inner):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return x + self.last


class CountsCalls(Inner):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls > 0 else 2)


class ReplacesModule(Inner):
    """A new module without weights in place of one."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.pool = nn.Dropout(0.0)
        return super().forward(self.pool(x))


class ReplacesParameter(Inner):
    """A parameter wrapped anew."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = nn.Parameter(self.layer.weight.detach())
        return super().forward(x)


class ComputesWeight(Inner):
    """A weight computed into a plain attribute before use."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.eye(DIM))
        del self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = self.raw.tanh()
        return super().forward(x)


class ClampsWeight(Inner):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class WritesData(Inner):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class LearnsMask(Inner):
    """A lazily made mask."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.shape[0] != x.shape[1]:
            self.mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        return super().forward(self.mask @ x)


class Teacher(Inner):
    """A student, a frozen teacher that follows it, and how far they differ."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for own, theirs in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.mul_(0.99).add_(theirs, alpha=0.01)

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            wanted = self.teacher(x)
        return super().forward(x) + (self.layer(x) - wanted).square()


# Who else sees what


class ForwardHooks(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
        self.layer.register_forward_hook(lambda _m, _args, out: out + 1)


class HookKeeps(Inner):
    """A hook that puts features aside, as code that looks into models does."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.layer.register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _args: Any, out: Tensor) -> None:
        self.features["layer"] = out

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.features["layer"].mean()


class HookOfSelf(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.layer.register_forward_hook(lambda _m, _args, out: out * self.scale)


class BackwardHooks(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_full_backward_hook(lambda _m, given, _out: (given[0] / given[0].norm(),))
        self.other.register_full_backward_pre_hook(lambda _m, out: (out[0] * 0.5,))


class GradientHook(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient / gradient.norm())


class AccumulatedHook(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_post_accumulate_grad_hook(self.clip)

    @staticmethod
    def clip(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.div_(weight.grad.norm() + 1)


class OwnCall(Inner):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


class PatchedForward(Inner):
    """A forward put on the instance."""

    def __init__(self) -> None:
        super().__init__()
        forward = self.layer.forward
        self.layer.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]


class CallsForward(Inner):
    """A child's forward, past its hooks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.other.forward(self.layer.forward(x))


class Functional(Inner):
    def forward(self, x: Tensor) -> Tensor:
        weights = {name: weight * 2 for name, weight in self.layer.named_parameters()}
        return self.other(torch.func.functional_call(self.layer, weights, (x,)))


class Ensemble(nn.Module):
    """Models stacked and mapped over."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, buffers = torch.func.stack_module_state(list(self.members))  # type: ignore[arg-type]
        one = self.members[0]
        return torch.vmap(lambda w, b: torch.func.functional_call(one, (w, b), (x,)))(weights, buffers).mean(0)


# Torch's own


def normed(kind: Callable[..., nn.Module]) -> type[nn.Module]:
    """A layer with a weight that is computed."""

    class Normed(Inner):
        def __init__(self) -> None:
            super().__init__()
            kind(self.layer)

    return Normed


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class CachedParametrization(Inner):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.layer, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.layer(super().forward(x))


class Recurrent(nn.Module):
    """torch's recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cells = kind(DIM, DIM, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0][..., :DIM]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([LENGTH, 5, 4, 3], device="cpu")
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        found = []
        for token in x.unbind(1):
            h, c = self.cell(token, (h, c))
            found.append(h)
        return torch.stack(found, 1)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, NUM_HEADS, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(DIM, NUM_HEADS, HIDDEN, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        return self.decoder(x, x, tgt_mask=mask, tgt_is_causal=True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, NUM_HEADS, HIDDEN, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device))


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(LENGTH, LENGTH, 3, padding=1), nn.BatchNorm1d(LENGTH)
        self.back = nn.ConvTranspose1d(LENGTH, LENGTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.norm(self.conv(x)))


# Code that runs again


class Checkpointed(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedReentrant(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class CheckpointedInSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


class CheckpointedWhole(Inner):
    """Inside a module that can only run whole."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) * self.layer.weight.mean().item()


class CheckpointedWholeReentrant(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True) * self.layer.weight.mean().item()


class Retries(Inner):
    """Falls back where something fails."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x[..., :3])
        except RuntimeError:
            return super().forward(x)


class ByConfiguration(Inner):
    """Goes where a dict of options says."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"act": "gelu", "depth": 2, "dtype": torch.float32}

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.config["depth"]):
            x = getattr(F, self.config["act"])(self.layer(x)).to(self.config["dtype"])
        return self.other(x)


class ReturnsNumber(nn.Module):
    """A child that returns a number of a weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.layer = Temperature(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.temperature()


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1))

    def forward(self) -> float:
        return self.log.exp().item()


class ReturnsView(Inner):
    """A child that runs whole and gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Passes()

    def forward(self, x: Tensor) -> Tensor:
        same, scaled = self.child(x)
        return super().forward(same) + scaled


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * self.scale.item()


class WritesToInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child, self.layer = Writes(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.child(y)
        return y


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.scale.item())


class GivesObject(nn.Module):
    """Children that hand each other an object of a class of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.layer = MakesState(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        state = self.maker(x)
        return self.layer(state.x) + state.mask


class State:
    """Neither a tuple nor a dict."""

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self.x, self.mask = x, mask


class MakesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> State:
        return State(self.layer(x), x > 0)


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "weight in a closure": InClosure,
    "self in a closure": SelfInClosure,
    "weight in a partial": InPartial,
    "methods in a list": MethodInList,
    "weights in a list": WeightsInList,
    "weight that is not registered": UnregisteredWeight,
    "module that is not registered": UnregisteredModule,
    "module that knows its owner": ModuleOfAnother,
    "ParameterList, ParameterDict, ModuleDict": ParameterLists,
    "parameter without dims": Scalar,
    "complex parameter": Complex,
    "half parameter": Half,
    "weight in two modules": Shared,
    "module under two names": SharedModule,
    "frozen parameters": Frozen,
    "unused parameters": Unused,
    "empty parameter": EmptyParameter,
    "sparse gradient": SparseGradient,
    "EmbeddingBag with offsets": EmbeddingBags,
    "LoRA": LowRank,
    "buffers that count": Counts,
    "buffer replaced": ReplacesBuffer,
    "cache in a buffer": Caches,
    "attribute set in forward": SetsAttribute,
    "calls counted in Python": CountsCalls,
    "module replaced in forward": ReplacesModule,
    "parameter replaced in forward": ReplacesParameter,
    "weight computed into an attribute": ComputesWeight,
    "weight clamped in forward": ClampsWeight,
    "weight.data written": WritesData,
    "mask made when first needed": LearnsMask,
    "EMA teacher": Teacher,
    "forward hooks": ForwardHooks,
    "hook that keeps features": HookKeeps,
    "hook that reads self": HookOfSelf,
    "full backward hooks": BackwardHooks,
    "gradient hook": GradientHook,
    "hook on an accumulated gradient": AccumulatedHook,
    "own __call__": OwnCall,
    "forward patched on an instance": PatchedForward,
    "forward called past hooks": CallsForward,
    "functional_call": Functional,
    "ensemble by vmap": Ensemble,
    "weight_norm, old": normed(weight_norm),
    "weight_norm": normed(parametrizations.weight_norm),
    "spectral_norm, old": normed(spectral_norm),
    "spectral_norm": normed(parametrizations.spectral_norm),
    "orthogonal": normed(parametrizations.orthogonal),
    "parametrization, cached": CachedParametrization,
    "LSTM": functools.partial(Recurrent, nn.LSTM),
    "LSTM, two layers both ways": functools.partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True),
    "GRU": functools.partial(Recurrent, nn.GRU),
    "RNN": functools.partial(Recurrent, nn.RNN),
    "packed sequence": Packed,
    "LSTMCell": Cells,
    "MultiheadAttention": SelfAttention,
    "MultiheadAttention with bias_kv": functools.partial(SelfAttention, add_bias_kv=True, add_zero_attn=True),
    "TransformerDecoder": Decoder,
    "TransformerEncoder": Encoder,
    "Conv1d, BatchNorm1d, ConvTranspose1d": Convolves,
    "checkpoint": Checkpointed,
    "checkpoint, reentrant": CheckpointedReentrant,
    "checkpoint_sequential": CheckpointedInSequence,
    "checkpoint in what runs whole": CheckpointedWhole,
    "checkpoint, reentrant, in what runs whole": CheckpointedWholeReentrant,
    "an error that is caught": Retries,
    "configuration in a dict": ByConfiguration,
    "child that returns a number": ReturnsNumber,
    "child that returns its input": ReturnsView,
    "child that writes to its input": WritesToInput,
    "objects between modules": GivesObject,
}
