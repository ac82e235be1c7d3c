"""Constructs that models are written in, each as a small model: what scripts/evidence/export_gaps.py plans and exports.

Most are a function of activations x [B, T, D] and a weight w [D, D] (FUNCTIONS), or a module that maps x to the same
shape (MODULES); both stand between a layer and a feed-forward that can be sharded. Others are whole models (MODELS).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from export_gaps_parts.layers import LAYERS, heads, joined
from export_gaps_parts.models import MODELS
from export_gaps_parts.modules import DIM, HIDDEN, LENGTH, MODULES

BATCH = 4

Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Construct:
    """A model that gives a scalar loss, or outputs one among others, and the keyword arguments of its forward."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, object]]


class Between(nn.Module):
    """A construct between a layer and a feed-forward."""

    def __init__(self, construct: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.construct = nn.Linear(DIM, DIM), construct()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.construct(self.first(x).tanh())
        return self.down(F.gelu(self.up(y))).square().mean()


class Applies(nn.Module):
    """A function of activations and a weight."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(0.1 * torch.randn(DIM, DIM) + torch.eye(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def like(x: Tensor, y: Tensor) -> Tensor:
    """x, and all of y in its first element: for results of another shape."""
    return x + y.float().sum()


def image(x: Tensor) -> Tensor:
    """[B, 1, T, D]"""
    return x.unsqueeze(1)


def positive(w: Tensor) -> Tensor:
    """A symmetric matrix with eigenvalues above 1 that are all different."""
    return w @ w.T + torch.diag(torch.arange(1.0, DIM + 1, device=w.device))


def written(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    """A copy, after something wrote to it."""
    y = x.clone()
    change(y)
    return y


class Doubling(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * gradient


@torch.library.custom_op("export_gaps::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    """A custom op with a fake kernel and a backward."""
    return x.roll(1, -1)


shifted.register_fake(lambda x: torch.empty_like(x))
shifted.register_autograd(lambda ctx, gradient: gradient.roll(-1, -1))


@torch.library.custom_op("export_gaps::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    """A custom op without a backward."""
    return (x > 0).sum().float()


counted.register_fake(lambda x: x.new_empty((), dtype=torch.float32))


@torch.library.custom_op("export_gaps::undescribed", mutates_args=())
def undescribed(x: Tensor) -> Tensor:
    """A custom op without a fake kernel."""
    return x.flip(-1)


@torch.compile
def compiled(x: Tensor, w: Tensor) -> Tensor:
    """A function that torch.compile wraps."""
    return (x @ w).relu()


def loop(x: Tensor, w: Tensor) -> Tensor:
    """torch.while_loop over a product."""
    first = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, (y @ w).tanh()), (first, x))[1]


def recurrence(x: Tensor, w: Tensor) -> Tensor:
    """A scan over the tokens."""

    def combine(carry: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(token @ w + carry)
        return state, state.clone()

    return scan(combine, torch.zeros_like(x[:, 0]), x, dim=1)[1]


def penalty(x: Tensor, w: Tensor) -> Tensor:
    """x, and the gradient's norm of something made of it."""
    (gradient,) = torch.autograd.grad((x @ w).tanh().square().sum(), x, create_graph=True)
    return x + gradient.square().mean()


def sorted_by_expert(x: Tensor, w: Tensor) -> Tensor:
    """Rows that data routes, one group after the other."""
    rows = x.flatten(0, 1)
    expert = (rows @ w)[:, :4].argmax(-1)
    out = torch.zeros_like(rows)
    for number in range(4):
        (taken,) = torch.where(expert == number)
        out.index_add_(0, taken, rows[taken] @ w * (number + 1))
    return out.view_as(x)


FUNCTIONS: Mapping[str, Function] = {
    # functions of torch.nn.functional
    "ctc_loss": lambda x, w: like(
        x,
        F.ctc_loss(
            (x @ w).transpose(0, 1).log_softmax(-1),
            torch.ones(BATCH, 3, dtype=torch.long, device=x.device),
            torch.full((BATCH,), LENGTH, device=x.device),
            torch.full((BATCH,), 3, device=x.device),
        ),
    ),
    "ctc_loss, lengths in lists": lambda x, w: like(
        x,
        F.ctc_loss(
            (x @ w).transpose(0, 1).log_softmax(-1),
            torch.ones(BATCH, 3, dtype=torch.long, device=x.device),
            [LENGTH] * BATCH,
            [3] * BATCH,
        ),
    ),
    "grid_sample": lambda x, w: F.grid_sample(
        image(x), torch.stack([image(x @ w)[:, 0], image(x)[:, 0]], -1).tanh(), align_corners=False
    ).squeeze(1),
    "affine_grid": lambda x, w: F.grid_sample(
        image(x), F.affine_grid((x @ w)[:, 0, :6].view(-1, 2, 3), [BATCH, 1, LENGTH, DIM], False), align_corners=False
    ).squeeze(1),
    "interpolate bilinear": lambda x, w: F.interpolate(image(x @ w), scale_factor=2.0, mode="bilinear")[:, 0, ::2, ::2],
    "interpolate bicubic": lambda x, w: F.interpolate(image(x @ w), size=(LENGTH, DIM), mode="bicubic").squeeze(1),
    "interpolate nearest": lambda x, w: F.interpolate((x @ w), scale_factor=2)[..., :DIM],
    "unfold and fold": lambda x, w: F.fold(
        F.unfold(image(x @ w), (2, 2), stride=2), (LENGTH, DIM), (2, 2), stride=2
    ).squeeze(1),
    "bilinear": lambda x, w: F.bilinear(x, x, w.expand(DIM, DIM, DIM).contiguous()),
    "pdist": lambda x, w: like(x, F.pdist((x @ w).flatten(0, 1))),
    "cdist": lambda x, w: like(x, torch.cdist(x @ w, x)),
    "embedding_bag": lambda x, w: like(
        x, F.embedding_bag(torch.arange(12, device=x.device) % DIM, w, torch.tensor([0, 5], device=x.device))
    ),
    "adaptive_avg_pool": lambda x, w: F.adaptive_avg_pool1d(x @ w, DIM),
    "adaptive_max_pool": lambda x, w: F.adaptive_max_pool2d(image(x @ w), (LENGTH, DIM)).squeeze(1),
    "fractional_max_pool": lambda x, w: like(x, F.fractional_max_pool2d(image(x @ w), 2, output_size=(4, 8))),
    "max_unpool": lambda x, w: F.max_unpool1d(*F.max_pool1d(x @ w, 2, return_indices=True), 2),
    "pixel_shuffle": lambda x, w: F.pixel_unshuffle(F.pixel_shuffle((x @ w)[:, :, :, None], 2), 2).squeeze(-1),
    "multi_margin_loss": lambda x, w: like(
        x, F.multi_margin_loss((x @ w)[:, 0], torch.zeros(BATCH, dtype=torch.long, device=x.device))
    ),
    "multilabel_margin_loss": lambda x, w: like(
        x, F.multilabel_margin_loss((x @ w)[:, 0], torch.zeros(BATCH, DIM, dtype=torch.long, device=x.device))
    ),
    "triplet and cosine losses": lambda x, w: like(
        x, F.triplet_margin_loss(x @ w, x, x.roll(1, 0)) + F.cosine_similarity(x @ w, x, -1).mean()
    ),
    "kl_div and nll": lambda x, w: like(
        x,
        F.kl_div((x @ w).log_softmax(-1), x.softmax(-1), reduction="batchmean")
        + F.nll_loss((x @ w)[:, 0].log_softmax(-1), torch.zeros(BATCH, dtype=torch.long, device=x.device)),
    ),
    "gumbel_softmax": lambda x, w: F.gumbel_softmax(x @ w, hard=True),
    "local_response_norm": lambda x, w: F.local_response_norm(x @ w, 3),
    "rms_norm": lambda x, w: F.rms_norm(x, (DIM,), w[0]),
    "scaled_dot_product_attention": lambda x, w: joined(
        F.scaled_dot_product_attention(heads(x @ w), heads(x), heads(x), is_causal=True)
    ),
    "shifted windows": lambda x, w: windows((x @ w).roll(-2, 1)).roll(2, 1),
    "weight of unit rows": lambda x, w: F.linear(x, w / w.norm(dim=1, keepdim=True)),
    "dropouts": lambda x, w: F.alpha_dropout(F.dropout1d(F.dropout(x @ w, 0.1), 0.1), 0.1),
    # fft and complex
    "fft": lambda x, w: torch.fft.ifft(torch.fft.fft(x @ w, dim=1), dim=1).real,
    "rfft": lambda x, w: torch.fft.irfft(torch.fft.rfft(x @ w, dim=-1) * 2, n=DIM, dim=-1),
    "fft2 mixing": lambda x, w: torch.fft.fft2(x @ w).real,
    "stft": lambda x, w: like(x, torch.stft((x @ w).flatten(1), 16, return_complex=True, window=None).abs()),
    "complex rotary": lambda x, w: torch.view_as_real(
        torch.view_as_complex((x @ w).unflatten(-1, (-1, 2)))
        * torch.polar(torch.ones(LENGTH, DIM // 2), torch.arange(LENGTH * DIM // 2).view(LENGTH, -1) / 9.0).to(x.device)
    ).flatten(-2),
    "complex product": lambda x, w: (x.to(torch.complex64) @ torch.complex(w, w)).abs(),
    "complex literal": lambda x, w: ((x @ w) * 1j).imag,
    # linear algebra
    "svd": lambda x, w: x @ torch.diag(torch.linalg.svdvals(w)),
    "svd with vectors": lambda x, w: x * torch.linalg.svd(positive(w))[1],
    "qr": lambda x, w: x @ torch.linalg.qr(w)[0],
    "eigh": lambda x, w: x * torch.linalg.eigh(positive(w))[0],
    "solve": lambda x, w: torch.linalg.solve(positive(w), x.transpose(1, 2)).transpose(1, 2),
    "cholesky": lambda x, w: x @ torch.linalg.cholesky(positive(w)),
    "inverse and det": lambda x, w: x @ torch.linalg.inv(positive(w)) * torch.linalg.slogdet(positive(w))[1],
    "lstsq": lambda x, w: like(x, torch.linalg.lstsq(positive(w), x[0].T).solution),
    "matrix_exp": lambda x, w: x @ torch.matrix_exp(0.1 * w),
    "triangular solve": lambda x, w: torch.linalg.solve_triangular(
        positive(w).tril(), x.transpose(1, 2), upper=False
    ).transpose(1, 2),
    "norms": lambda x, w: x / torch.linalg.norm(x @ w, dim=-1, keepdim=True) / torch.linalg.matrix_norm(w, ord=2),
    # scans, sorts and searches
    "cumsum and cumprod": lambda x, w: (x @ w).cumsum(1) + (x @ w).tanh().cumprod(-1),
    "logcumsumexp": lambda x, w: (x @ w).logcumsumexp(1),
    "cummax": lambda x, w: (x @ w).cummax(1).values,
    "sort": lambda x, w: (x @ w).sort(-1).values,
    "topk": lambda x, w: like(x, (x @ w).topk(3, -1).values),
    "kthvalue and median": lambda x, w: like(x, (x @ w).kthvalue(3, -1).values + (x @ w).median(-1).values),
    "searchsorted": lambda x, w: x * torch.searchsorted(w[0].detach().sort().values, x.detach()),
    "bucketize": lambda x, w: (x @ w) * torch.bucketize(x.detach(), torch.linspace(-1, 1, 5, device=x.device)),
    "quantile": lambda x, w: like(x, (x @ w).quantile(0.3, dim=-1)),
    "histc": lambda x, w: (x @ w) * torch.histc(x.detach(), DIM, -1, 1),
    "mode": lambda x, w: like(x, (x @ w).mode(-1).values),
    "unique": lambda x, w: like(x @ w, torch.unique((x @ w).round().detach())),
    "unique with counts": lambda x, w: like(x @ w, torch.unique((x @ w).round().detach(), return_counts=True)[1]),
    # einsum
    "einsum": lambda x, w: torch.einsum("btd,de->bte", x, w),
    "einsum of heads": lambda x, w: (
        torch.einsum("bhqd,bhkd,bhke->bhqe", heads(x @ w), heads(x), heads(x)).transpose(1, 2).flatten(2)
    ),
    "einsum with ellipsis": lambda x, w: torch.einsum("...d,ed->...e", x, w),
    "einsum of three": lambda x, w: torch.einsum("btd,de,ef->btf", x, w, w),
    "einsum of a diagonal": lambda x, w: x * torch.einsum("ii->i", w),
    "einsum with sublists": lambda x, w: torch.einsum(x, [0, 1, 2], w, [2, 3], [0, 1, 3]),
    "tensordot and kron": lambda x, w: torch.tensordot(x, w, 1) + torch.kron(w[:2, :2], w[:4, :8]).sum(),
    # writing in place
    "in-place ops": lambda x, w: (x @ w).add_(1).mul_(2).relu_(),
    "in-place on a view": lambda x, w: written(x @ w, lambda y: y[:, 0].mul_(2)),
    "slices written": lambda x, w: written(x @ w, lambda y: y.__setitem__((slice(None), 1), y[:, 0] * 2)),
    "index_put_": lambda x, w: written(
        x @ w, lambda y: y.index_put_((torch.tensor([0, 1], device=x.device),), y[2:4] * 2, accumulate=True)
    ),
    "index_put_ to one place twice": lambda x, w: written(
        x @ w, lambda y: y.index_put_((torch.tensor([0, 0, 1], device=x.device),), y[1:4] * 2, accumulate=True)
    ),
    "masked_fill_": lambda x, w: written(x @ w, lambda y: y.masked_fill_(y > 0, 0.0)),
    "scatter": lambda x, w: (x @ w).scatter(-1, (x @ w).argsort(-1), x),
    "scatter_add and reduce": lambda x, w: torch.zeros_like(x).scatter_reduce(
        1, torch.zeros_like(x, dtype=torch.long), x @ w, "amax"
    ),
    "index_add and index_copy": lambda x, w: torch.zeros_like(x).index_add(
        1, torch.arange(LENGTH, device=x.device), x @ w
    ),
    "put_ and take": lambda x, w: like(x, (x @ w).take(torch.tensor([0, 5], device=x.device))),
    # sizes that data decides
    "where": lambda x, w: like(x, (x @ w)[torch.where((x @ w) > 0)]),
    "nonzero": lambda x, w: like(x, (x @ w).flatten()[(x.flatten() > 0).nonzero().squeeze(-1)]),
    "masked_select": lambda x, w: like(x, torch.masked_select(x @ w, x > 0)),
    "mask assigned": lambda x, w: written(x @ w, lambda y: y.__setitem__(y > 0.5, 0.0)),
    "routed by data": sorted_by_expert,
    "a loop over nonzero": lambda x, w: x @ w + sum(x.flatten()[i] for i in (x[0, 0] > 0).nonzero()),
    # numbers out of tensors
    "item of a weight": lambda x, w: (x @ w) * w[0, 0].item(),
    "a branch on a weight": lambda x, w: x @ w if w.sum() > 0 else x,
    "a branch on activations": lambda x, w: x @ w if x.mean() > 0 else x @ w.T,
    "a branch on shapes": lambda x, w: x @ w if x.shape[1] > 4 else x,
    "tolist": lambda x, w: x @ w * sum(x[0, 0].tolist()),
    "numpy of a constant": lambda x, w: x @ w * torch.from_numpy(torch.ones(DIM, device="cpu").numpy()).to(x.device),
    "numpy of activations": lambda x, w: x @ w * torch.from_numpy(x.detach().cpu().numpy()).to(x.device),
    "an assertion on values": lambda x, w: (torch._assert_async(x.isfinite().all()), x @ w)[1],
    # transforms
    "vmap": lambda x, w: torch.vmap(lambda row: row @ w)(x),
    "vmap nested": lambda x, w: torch.vmap(torch.vmap(lambda row: (row @ w).softmax(-1)))(x),
    "func.grad": lambda x, w: torch.func.grad(lambda y: (y @ w).tanh().square().sum())(x),
    "func.jvp": lambda x, w: torch.func.jvp(lambda y: (y @ w).tanh(), (x,), (torch.ones_like(x),))[1],
    "func.jacrev": lambda x, w: x + torch.func.jacrev(lambda y: (y @ w).tanh())(x[0, 0]).sum(0),
    "func.hessian": lambda x, w: x + torch.func.hessian(lambda y: (y @ w).tanh().sum())(x[0, 0]).sum(0),
    "forward-mode AD": lambda x, w: forward_mode(x, w),
    "autograd.grad": lambda x, w: penalty(x, w),
    "autograd.functional": lambda x, w: x + torch.autograd.functional.vjp(lambda y: (y @ w).tanh(), x, x)[1],
    "cond": lambda x, w: torch.cond(x.sum() > 0, lambda y: y @ w, lambda y: (y @ w).relu(), (x,)),
    "while_loop": loop,
    "scan": recurrence,
    "associative_scan": lambda x, w: associative_scan(torch.add, x @ w, dim=1, combine_mode="generic"),
    "map": lambda x, w: map_rows(lambda row: (row @ w).tanh(), x),
    "flex_attention": lambda x, w: joined(flex_attention(heads(x @ w), heads(x), heads(x))),
    "torch.compile": compiled,
    "torch.jit.script": lambda x, w: scripted(x, w),
    # functions of the model's own
    "autograd.Function": lambda x, w: Doubling.apply(x @ w),
    "custom op": lambda x, w: shifted(x @ w),
    "custom op without backward": lambda x, w: (x @ w) * counted(x),
    "custom op without a fake kernel": lambda x, w: (x @ w) * undescribed(x.detach()),
    # gradients
    "no_grad": lambda x, w: x @ w + torch.no_grad()(lambda y: y @ w)(x),
    "inference_mode": lambda x, w: x @ w + torch.inference_mode()(lambda y: (y @ w).clone())(x.detach()),
    "detach": lambda x, w: x @ w + (x @ w).detach() - (x @ w.detach()),
    "straight-through": lambda x, w: (x @ w) + ((x @ w).round() - x @ w).detach(),
    "hook on a gradient": lambda x, w: hooked(x @ w),
    "autocast": lambda x, w: autocasting(x, w),
    "half": lambda x, w: (x.half() @ w.half()).float(),
    "float64": lambda x, w: (x.double() @ w.double()).float(),
    "channels last": lambda x, w: image(x @ w).contiguous(memory_format=torch.channels_last).squeeze(1),
    # chance
    "rand_like": lambda x, w: x @ w + 0.1 * torch.rand_like(x),
    "bernoulli": lambda x, w: (x @ w) * torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x, w: (x @ w) * torch.multinomial(x[:, 0].detach().softmax(-1), DIM).unsqueeze(1),
    "randperm": lambda x, w: (x @ w)[:, torch.randperm(LENGTH, device=x.device)],
    "a generator": lambda x, w: x @ w + torch.rand(DIM, generator=torch.Generator().manual_seed(3)).to(x.device),
    "distributions": lambda x, w: torch.distributions.Normal(x @ w, 1.0, validate_args=False).rsample(),
    "checked distributions": lambda x, w: torch.distributions.Normal(x @ w, torch.ones_like(x)).rsample(),
    # other tensors
    "sparse product": lambda x, w: torch.sparse.mm(torch.eye(DIM, device=x.device).to_sparse(), w) + x,
    "nested tensors": lambda x, w: like(x, torch.nested.as_nested_tensor(list(x @ w)).values()),
    "nested jagged": lambda x, w: like(
        x, (torch.nested.nested_tensor_from_jagged(x[0], torch.tensor([0, 3, LENGTH], device=x.device)) @ w).values()
    ),
    "quantized weights": lambda x, w: x @ torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -128, 127),
    "int8 product": lambda x, w: (
        x @ w
        + torch._int_mm(
            torch.ones(32, 16, dtype=torch.int8, device=x.device), torch.ones(16, 16, dtype=torch.int8, device=x.device)
        )
        .float()
        .mean()
    ),
    "foreach": lambda x, w: torch._foreach_add([x @ w, x], 1.0)[0],
    "as_strided": lambda x, w: (x @ w).as_strided((BATCH, LENGTH, DIM), (LENGTH * DIM, DIM, 1)),
    "roll and flip": lambda x, w: (x @ w).roll(1, 1).flip(-1),
    "unfold of a dim": lambda x, w: like(x, (x @ w).unfold(1, 4, 2)),
    "block_diag": lambda x, w: x @ torch.block_diag(w[:8, :8], w[8:, 8:]),
    "meshgrid": lambda x, w: x @ w * torch.meshgrid(*[torch.arange(3.0, device=x.device)] * 2, indexing="ij")[0].sum(),
    "tensor_split": lambda x, w: torch.cat((x @ w).tensor_split(3, -1), -1),
}


def windows(x: Tensor) -> Tensor:
    """Attention among four neighbours."""
    own = x.reshape(-1, 4, DIM)
    return F.scaled_dot_product_attention(own, own, own).view_as(x)


def forward_mode(x: Tensor, w: Tensor) -> Tensor:
    """A directional derivative by dual numbers."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual((dual @ w).tanh()).tangent


def hooked(x: Tensor) -> Tensor:
    """With a hook on its gradient."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return x


def autocasting(x: Tensor, w: Tensor) -> Tensor:
    """A product in bfloat16."""
    with torch.autocast(x.device.type if x.device.type != "meta" else "cpu", torch.bfloat16):
        y = x @ w
    return y.float()


def scripted(x: Tensor, w: Tensor) -> Tensor:
    """A function of TorchScript."""
    return _script()(x, w)


@functools.cache
def _script() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.jit.script(lambda_free)


def lambda_free(x: Tensor, w: Tensor) -> Tensor:
    """What is scripted."""
    return torch.relu(torch.matmul(x, w))


def activations() -> dict[str, object]:
    """x [B, T, D]"""
    return {"x": torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(1))}


def constructs() -> list[Construct]:
    """All of them, by kind."""
    functions = (
        Construct(name=name, build=functools.partial(Between, functools.partial(Applies, f)), inputs=activations)
        for name, f in FUNCTIONS.items()
    )
    modules = (
        Construct(name=name, build=functools.partial(Between, module), inputs=activations)
        for name, module in (*MODULES.items(), *LAYERS.items())
    )
    models = (Construct(name=name, build=build, inputs=inputs) for name, (build, inputs) in MODELS.items())
    return [*modules, *models, *functions]
