"""Models for scripts/evidence/adversary.py, composed at random: a seed and a number give one, and how it is solved.

A Spec says all of a model and is printed; build(spec) makes it. Shapes: B batch, T length, D model, V vocabulary.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpplan
from adversary_parts.blocks import BLOCKS, ROWS, Attention, Norm, Sizes, weight

Inputs = dict[str, Tensor]

FRONTS = ("embedding", "embedding", "embedding", "table", "one hot", "features", "patches", "padded")
POSITIONS = ("none", "cut table", "cut table", "whole table", "embedding", "sine", "buffer", "expanded", "narrow")
RESIDUALS = ("pre", "pre", "post", "parallel", "none", "scaled", "gated", "in place")
SHARES = ("none", "none", "none", "none", "layer twice", "norm", "block", "weight", "factor", "list", "object", "index")
HEADS = ("linear", "linear", "biased", "tied", "functional tied", "einsum", "pooled", "two", "transposed")
LOSSES = ("inside", "inside log softmax", "inside sliced", "outside", "outside own", "inside mean square", "inside sum",
          "outside z loss")  # fmt: skip
OUTPUTS = ("loss", "tuple", "dict", "list")
EXTRAS = ("none", "none", "none", "none", "auxiliary", "penalty", "read elsewhere", "frozen", "scalar", "detached",
          "recurrent depth", "input twice", "no grad", "half frozen")  # fmt: skip
#: how the plan is made: as it is, within less memory, under prices or wishes that are others'
SOLVES = ("plain", "memory", "prices", "wishes", "wishes", "wishes", "recompute", "slow links")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A block, and what was drawn for it."""

    kind: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{key}={value}' for key, value in self.options.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A model and how it is solved. Layers are `layers`, `repeats` times; a layer is a sequence of parts."""

    seed: int
    number: int
    sizes: Sizes
    vocab: int
    front: str
    position: str
    norm: str
    residual: str
    layers: tuple[tuple[Part, ...], ...]
    repeats: int
    share: str
    head: str
    loss: str
    outputs: str
    extra: str
    solve: str
    is_unused: bool

    def __str__(self) -> str:
        words = [f"{name}={getattr(self, name)!r}" for name in self.__slots__ if name not in ("sizes", "layers")]
        layers = "".join(f"\n    layer {i}: {' + '.join(map(str, layer))}" for i, layer in enumerate(self.layers))
        return f"{self.sizes} {' '.join(words)}{layers}"


def draw_part(rng: random.Random, kind: str) -> Part:
    """A block of a kind, each option drawn."""
    return Part(kind=kind, options={key: rng.choice(values) for key, values in BLOCKS[kind].OPTIONS.items()})


def draw(seed: int, number: int) -> Spec:
    """The model of a number."""
    rng = random.Random(f"{seed}/{number}")
    kinds = ("attention", "attention", "mlp", "mlp", "mlp", "mixer", "experts")
    num_kinds = rng.choice((1, 1, 1, 2))
    usual = ("attention", "mlp")
    layers = tuple(
        tuple(
            draw_part(rng, kind)
            for kind in (usual if rng.random() < 0.4 else rng.choices(kinds, k=rng.choice((1, 1, 2, 2, 3))))
        )
        for _ in range(num_kinds)
    )
    heads = rng.choice((2, 4, 4))
    sizes = Sizes(
        dim=rng.choice((16, 16, 32)),
        heads=heads,
        hidden=rng.choice((32, 48, 64)),
        batch=rng.choice((2, 4, 4)),
        seq_len=rng.choice((8, 8, 6, 4)),
    )
    loss = rng.choice(LOSSES)
    return Spec(
        seed=seed,
        number=number,
        sizes=sizes,
        vocab=rng.choice((32, 48, 64, 33)),
        front=rng.choice(FRONTS),
        position=rng.choice(POSITIONS),
        norm=rng.choice(Norm.OPTIONS["kind"]),
        residual=rng.choice(RESIDUALS),
        layers=layers,
        repeats=rng.choice((1, 2, 2, 3)),
        share=rng.choice(SHARES),
        head=rng.choice(HEADS),
        loss=loss,
        outputs=rng.choice(OUTPUTS),
        extra=rng.choice(EXTRAS),
        solve=rng.choice(SOLVES),
        is_unused=rng.random() < 0.7,
    )


@dataclass(slots=True)
class Shared:
    """An object that layers hold; it has a weight."""

    scale: nn.Parameter
    factor: float = 1.5
    seen: list[int] = field(default_factory=list)


class Layer(nn.Module):
    """Parts beside the residual stream."""

    def __init__(self, spec: Spec, parts: Sequence[Part], index: int) -> None:
        super().__init__()
        self.residual, self.index, dim = spec.residual, index, spec.sizes.dim
        self.parts = nn.ModuleList(BLOCKS[part.kind](spec.sizes, **part.options) for part in parts)
        self.norms = nn.ModuleList(Norm(spec.sizes, spec.norm) for _ in parts)
        self.factor = 1.0
        self.shared: Shared | None = None
        if spec.residual == "scaled":
            self.scales = nn.ParameterList(torch.rand(dim) for _ in parts)
        if spec.residual == "gated":
            self.alpha = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        if self.residual == "parallel":
            h = self.norms[0](x)
            return x + sum(part(h) for part in self.parts) * self.factor
        for number, (part, norm) in enumerate(zip(self.parts, self.norms, strict=True)):
            match self.residual:
                case "post":
                    x = norm(x + part(x))
                case "none":
                    x = part(norm(x)) * self.factor
                case "scaled":
                    x = x + self.scales[number] * part(norm(x))
                case "gated":
                    x = self.alpha * x + (1 - self.alpha) * part(norm(x))
                case "in place":
                    h = part(norm(x))
                    h += x
                    x = h
                case _:
                    x = x + self.factor * part(norm(x))
        if self.shared is not None:
            x = x * self.shared.scale * self.shared.factor
        if losses is not None:
            losses.append(x.square().mean())
        return x


class Model(nn.Module):
    """tokens [B, T] or features [B, T, D] -> what the spec's `outputs` say."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, sizes, dim, vocab = spec, spec.sizes, spec.sizes.dim, spec.vocab
        match spec.front:
            case "features":
                self.front = nn.Linear(dim // 2, dim)
            case "patches":
                self.patches = nn.Conv2d(1, dim, (1, dim // 2), stride=(1, dim // 2))
        if spec.front not in ("features", "patches"):
            self.embed = nn.Embedding(vocab, dim, padding_idx=0 if spec.front == "padded" else None)
        match spec.position:
            case "cut table" | "narrow":
                self.positions = nn.Parameter(torch.randn(ROWS, dim) * 0.1)
            case "expanded":
                self.positions = nn.Parameter(torch.randn(1, ROWS, dim) * 0.1)
            case "whole table":
                self.positions = nn.Parameter(torch.randn(sizes.seq_len, dim) * 0.1)
            case "embedding":
                self.position = nn.Embedding(ROWS, dim)
            case "buffer":
                self.register_buffer("positions", torch.randn(1, ROWS, dim) * 0.1)
        layers = [
            Layer(spec, parts, index) for index, parts in enumerate(p for _ in range(spec.repeats) for p in spec.layers)
        ]
        self.layers = nn.ModuleList(layers * 2 if spec.share == "layer twice" else layers)
        share(spec, layers, self)
        self.norm = Norm(sizes, spec.norm)
        self.build_head(spec)
        if spec.extra == "scalar":
            self.temperature = nn.Parameter(torch.tensor(1.3))
        if spec.extra in ("frozen", "half frozen"):
            freeze(layers[0] if spec.extra == "frozen" else layers[0].parts[0])

    def build_head(self, spec: Spec) -> None:
        dim, vocab = spec.sizes.dim, spec.vocab
        match spec.head:
            case "einsum":
                self.w_head = weight(vocab, dim)
            case "transposed":
                self.w_head = weight(dim, vocab)
            case "two":
                self.head, self.value = nn.Linear(dim, vocab), nn.Linear(dim, 1)
            case "functional tied" if hasattr(self, "embed"):
                pass
            case _:
                self.head = nn.Linear(dim, vocab, bias=spec.head == "biased")
        if spec.head == "tied" and hasattr(self, "embed"):
            self.head.weight = self.embed.weight

    def embedded(self, tokens: Tensor) -> Tensor:
        """[B, T, D]"""
        match self.spec.front:
            case "features":
                return self.front(tokens)
            case "patches":
                return self.patches(tokens.unsqueeze(1)).squeeze(-1).transpose(1, 2)
            case "table":
                return F.embedding(tokens, self.embed.weight)
            case "one hot":
                return F.one_hot(tokens, self.spec.vocab).to(self.embed.weight.dtype) @ self.embed.weight
        out: Tensor = self.embed(tokens)
        return out

    def positioned(self, x: Tensor) -> Tensor:
        """x [B, T, D] with positions."""
        length = x.shape[1]
        match self.spec.position:
            case "cut table" | "whole table":
                return x + self.positions[:length]
            case "narrow":
                return x + self.positions.narrow(0, 0, length)
            case "expanded":
                return x + self.positions[:, :length, :].expand(x.shape[0], -1, -1)
            case "buffer":
                return x + self.positions[:, :length]
            case "embedding":
                return x + self.position(torch.arange(length, device=x.device)[None])
            case "sine":
                angles = torch.arange(length, device=x.device, dtype=x.dtype)[:, None] * torch.logspace(
                    0, -2, x.shape[-1] // 2, device=x.device, dtype=x.dtype
                )
                return x + torch.cat([angles.sin(), angles.cos()], dim=-1)
        return x

    def logits_of(self, x: Tensor) -> Tensor:
        """[B, T, V]"""
        match self.spec.head:
            case "einsum":
                return torch.einsum("btd,vd->btv", x, self.w_head)
            case "transposed":
                return x @ self.w_head
            case "functional tied" if hasattr(self, "embed"):
                return F.linear(x, self.embed.weight)
            case "pooled":
                return self.head(x + x.mean(1, keepdim=True))
        out: Tensor = self.head(x)
        return out

    def extra_of(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        """What is added to a loss."""
        match self.spec.extra:
            case "auxiliary":
                return 0.1 * x.square().mean() + 0.1 * x.softmax(-1).amax()
            case "penalty":
                return 1e-2 * sum(p.square().sum() for p in self.parameters() if p.dim() > 1)
            case "read elsewhere":
                return next(p for p in self.layers.parameters()).abs().mean()
        return sum(losses) * 0.1 if losses else x.new_zeros(())

    def hidden(self, tokens: Tensor, losses: list[Tensor]) -> Tensor:
        """[B, T, D]"""
        spec = self.spec
        x = first = self.positioned(self.embedded(tokens))
        for _ in range(2 if spec.extra == "recurrent depth" else 1):
            for layer in self.layers:
                x = layer(x, losses) if spec.share == "list" else layer(x)
        match spec.extra:
            case "detached":
                x = x + x.detach().tanh()
            case "input twice":
                x = x + first.roll(1, 0)
            case "no grad":
                with torch.no_grad():
                    scale = x.abs().mean(-1, keepdim=True)
                x = x / (scale + 1)
            case "scalar":
                x = x / self.temperature
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        losses: list[Tensor] = []
        x = self.hidden(tokens, losses)
        logits = self.logits_of(x)
        extra = self.extra_of(x, losses)
        if self.spec.head == "two":
            extra = extra + self.value(x).square().mean()
        if targets is None or self.spec.loss.startswith("outside"):
            return {"logits": logits, "extra": extra}
        loss = loss_inside(self.spec.loss, logits, targets) + extra
        match self.spec.outputs:
            case "tuple":
                return logits, loss
            case "dict":
                return {"logits": logits, "loss": loss}
            case "list":
                return [loss, x]
        return loss


def freeze(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def share(spec: Spec, layers: Sequence[Layer], model: Model) -> None:
    """Makes layers share what the spec says."""
    match spec.share:
        case "norm":
            for layer in layers[1:]:
                layer.norms[0] = layers[0].norms[0]
        case "block":
            for layer in layers[1:]:
                if type(layer.parts[0]) is type(layers[0].parts[0]):
                    layer.parts[0] = layers[0].parts[0]
        case "weight":
            tie_first_weights([layer.parts[0] for layer in layers])
        case "factor":
            for index, layer in enumerate(layers):
                layer.factor = 1.0 / (1 + index)
        case "index":
            for layer in layers:
                layer.shared = Shared(layers[0].norms[0].scale) if hasattr(layers[0].norms[0], "scale") else None
        case "object":
            model.common = nn.Parameter(torch.rand(spec.sizes.dim))
            common = Shared(model.common)
            for layer in layers:
                layer.shared = common


def tie_first_weights(blocks: Sequence[nn.Module]) -> None:
    """The first matrix of each, one tensor, where shapes agree."""
    first = next((name, p) for name, p in blocks[0].named_parameters() if p.dim() > 1)
    for block in blocks[1:]:
        found = dict(block.named_parameters())
        if first[0] in found and found[first[0]].shape == first[1].shape:
            owner, _, name = first[0].rpartition(".")
            setattr(block.get_submodule(owner), name, first[1])


def loss_inside(kind: str, logits: Tensor, targets: Tensor) -> Tensor:
    """A scalar of logits [B, T, V]."""
    match kind:
        case "inside log softmax":
            return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
        case "inside sliced":
            shifted = logits[:, :-1].contiguous()
            return F.cross_entropy(shifted.view(-1, shifted.size(-1)), targets[:, 1:].reshape(-1))
        case "inside mean square":
            return (logits - F.one_hot(targets, logits.shape[-1])).square().mean()
        case "inside sum":
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def loss_outside(outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    return tpplan.cross_entropy(outputs["logits"], inputs["targets"]) + outputs["extra"]


def own_loss_outside(outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    logits = outputs["logits"]
    return F.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten()) + outputs["extra"]


def z_loss_outside(outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    return own_loss_outside(outputs, inputs) + 1e-2 * outputs["logits"].logsumexp(-1).square().mean()


def loss_of_outputs(outputs: Any, inputs: Inputs) -> Tensor:
    """The model's own loss, among what it returns."""
    if isinstance(outputs, Mapping):
        return outputs["loss"]
    leaves = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return next(leaf for leaf in leaves if leaf.dim() == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is solved, proven and run: a model, its inputs by batch and length, its loss, the shapes to run it at."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    loss: Callable[[Any, Inputs], Tensor]
    unused: tuple[str, ...]
    batch: int
    seq_len: int
    others: tuple[tuple[int, int], ...]
    solve: str = "plain"
    text: str = ""


def subject_of(spec: Spec) -> Subject:
    """A spec's model."""
    sizes = spec.sizes
    outside = {"outside": loss_outside, "outside own": own_loss_outside, "outside z loss": z_loss_outside}
    names = {"tuple": "0", "dict": "logits", "list": "1"}
    is_inside = not spec.loss.startswith("outside")
    unused = (names[spec.outputs],) if is_inside and spec.is_unused and spec.outputs in names else ()
    batch = sizes.batch * 2 if spec.number % 2 else max(1, sizes.batch // 2)
    seq_len = sizes.seq_len * 2 if spec.number % 3 else sizes.seq_len // 2
    return Subject(
        build=lambda: built(spec),
        inputs=lambda b, t: inputs_of(spec, b, t),
        loss=loss_of_outputs if is_inside else outside[spec.loss],
        unused=unused,
        batch=sizes.batch,
        seq_len=sizes.seq_len,
        others=((batch, sizes.seq_len), (sizes.batch, seq_len)),
        solve=spec.solve,
        text=str(spec),
    )


def built(spec: Spec) -> nn.Module:
    """The same weights at every call, none of them at a value that hides an error."""
    torch.manual_seed(spec.seed * 1000 + spec.number)
    model = Model(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def inputs_of(spec: Spec, batch: int, seq_len: int) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * batch + seq_len)
    targets = torch.randint(spec.vocab, (batch, seq_len), generator=generator)
    if spec.front in ("features", "patches"):
        return {"tokens": torch.randn(batch, seq_len, spec.sizes.dim // 2, generator=generator), "targets": targets}
    return {"tokens": torch.randint(spec.vocab, (batch, seq_len), generator=generator), "targets": targets}


PLAINEST: Mapping[str, Any] = {
    "front": "embedding", "position": "none", "norm": "none", "residual": "pre", "repeats": 1, "share": "none",
    "head": "linear", "loss": "inside", "outputs": "loss", "extra": "none", "solve": "plain", "is_unused": True,
}  # fmt: skip
PLAINEST_PARTS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"projection": "view", "kernel": "sdpa", "mask": "causal", "groups": 1, "merge": "reshape",
                  "rope": False, "bias": False, "sharing": "repeat_interleave"},
    "mlp": {"kind": "plain", "activation": "relu", "between": "none", "bias": False},
    "experts": {"style": "stacked", "k": 1, "renormalized": False},
}  # fmt: skip


def simpler(spec: Spec) -> Iterator[Spec]:
    """Specs that are simpler than this by one thing: a part or a layer less, or one choice as plain as can be."""
    for index, layer in enumerate(spec.layers):
        if len(spec.layers) > 1:
            yield replace(spec, layers=(*spec.layers[:index], *spec.layers[index + 1 :]))
        for at in range(len(layer)) if len(layer) > 1 else ():
            yield replace(spec, layers=with_layer(spec, index, (*layer[:at], *layer[at + 1 :])))
    for name, value in PLAINEST.items():
        if getattr(spec, name) != value:
            yield replace(spec, **{name: value})
    for index, layer in enumerate(spec.layers):
        for at, part in enumerate(layer):
            for key, value in PLAINEST_PARTS.get(part.kind, {}).items():
                if part.options[key] != value:
                    plain = replace(part, options={**part.options, key: value})
                    yield replace(spec, layers=with_layer(spec, index, (*layer[:at], plain, *layer[at + 1 :])))


def with_layer(spec: Spec, index: int, layer: tuple[Part, ...]) -> tuple[tuple[Part, ...], ...]:
    return (*spec.layers[:index], layer, *spec.layers[index + 1 :])


__all__ = ["Attention", "Inputs", "Spec", "Subject", "draw", "simpler", "subject_of"]
