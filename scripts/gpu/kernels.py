"""Times kernels of training steps on one GPU, forward and backward, beside what a profile says of each.

    python scripts/gpu/kernels.py --profile results/profile.json --out results/kernels.json    about 30 s
    python scripts/gpu/kernels.py --profile cpu-gloo --toy                                     on a CPU

A profile times matmuls, attention and copies; every other kernel is priced by the bytes that it reads and writes, a
grouped product as one product of all its rows and the moving of its other matrices. The table shows where that is
wrong. A ratio is predicted / measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpplan.core.errors import TpplanError, UsageError
from tpplan.core.files import write_atomically
from tpplan.core.units import format_seconds
from tpplan.costs.runs.kernels import Kernel, KernelLog, Matmul, kernel_time
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.measure.timer import Stopwatch

WINDOW_S, REPEATS = 0.02, 5
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A function of tensors. `inputs` need gradients where they are floating point; `constants` never do.

    kernels: stands for what an operator launches forward, where the log of operators does not say it.
    """

    name: str
    work: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...] = ()
    causal: bool = False
    kernels: tuple[Kernel, ...] | None = None
    backward_kernels: tuple[Kernel, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of a case in one direction."""

    name: str
    direction: str
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Above 1 where it ran faster than predicted."""
        return self.predicted_s / self.measured_s


def cases(device: torch.device, *, toy: bool) -> Iterator[Case]:
    """What the layers of transformers, of image models and of experts launch beside plain products."""
    dtype = torch.float32 if toy else torch.bfloat16
    tokens, width, hidden, vocabulary = (64, 32, 64, 128) if toy else (8192, 4096, 14336, 128_256)

    def make(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=of)

    x, gate = make(tokens, width), make(tokens, hidden)
    yield Case(name="add", work=torch.add, inputs=(x, make(tokens, width)))
    yield Case(name="rms_norm", work=lambda x, w: F.rms_norm(x, (width,), w), inputs=(x, make(width)))
    yield Case(name="rms_norm written out", work=written_out_norm, inputs=(x, make(width)))
    yield Case(
        name="layer_norm",
        work=lambda x, w, b: F.layer_norm(x, (width,), w, b),
        inputs=(x, make(width), make(width)),
    )
    yield Case(name="silu(a) * b", work=lambda a, b: F.silu(a) * b, inputs=(gate, make(tokens, hidden)))
    yield Case(name="gelu", work=F.gelu, inputs=(gate,))
    yield Case(name="dropout", work=lambda x: F.dropout(x, 0.1), inputs=(gate,))
    yield Case(name="bias", work=torch.add, inputs=(gate, make(hidden)))
    yield Case(name="to float32", work=lambda x: x.float(), inputs=(gate,))
    yield Case(name="transposed copy", work=lambda x: x.t().contiguous(), inputs=(gate,))
    heads = make(2, tokens // 2, 8, width // 8)
    angles = make(tokens // 2, 1, width // 8)
    yield Case(name="rotary", work=rotary, inputs=(heads,), constants=(angles, angles))
    scores = make(2, 8, tokens // 4, tokens // 4)
    yield Case(name="softmax", work=lambda x: x.softmax(-1), inputs=(scores,))
    yield Case(
        name="softmax in float32", work=lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), inputs=(scores,)
    )
    ids = torch.randint(vocabulary, (tokens,), device=device)
    yield Case(
        name="embedding", work=lambda w, i: F.embedding(i, w), inputs=(make(vocabulary, width),), constants=(ids,)
    )
    logits = make(tokens, vocabulary)
    yield Case(name="cross_entropy", work=F.cross_entropy, inputs=(logits,), constants=(ids,))
    yield Case(
        name="cross_entropy in float32",
        work=lambda x, t: F.cross_entropy(x.float(), t),
        inputs=(logits,),
        constants=(ids,),
    )
    del logits
    order = torch.randperm(tokens, device=device)
    yield Case(name="rows by index", work=lambda x, i: x[i], inputs=(x,), constants=(order,))
    yield Case(
        name="index_add",
        work=lambda x, i: torch.zeros_like(x).index_add(0, i, x),
        inputs=(x,),
        constants=(order,),
    )
    yield Case(name="sum of rows", work=lambda x: x.sum(0), inputs=(gate,))
    yield from attentions(make, toy=toy)
    yield from convolutions(make, toy=toy)
    yield from grouped_products(device, toy=toy)


def written_out_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm as transformers writes it: in float32, by elementwise operators."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, D] rotated by halves, as transformers does."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def attentions(make: Callable[..., Tensor], *, toy: bool) -> Iterator[Case]:
    """Fused attention: other head dims than a profile's, fewer heads of keys, masks, other lengths of keys."""
    time = 64 if toy else 4096

    def attention(name: str, heads: int, kv_heads: int, dim: int, keys: int = time, **options: object) -> Case:
        query, kv = (1, heads, time, dim), (1, kv_heads, keys, dim)
        return Case(
            name=f"attention {name}",
            work=lambda q, k, v, *mask: F.scaled_dot_product_attention(
                q, k, v, *mask, is_causal=bool(options.get("causal")), enable_gqa=heads != kv_heads
            ),
            inputs=(make(*query), make(*kv), make(*kv)),
            constants=tuple([make(1, 1, time, keys)] if options.get("masked") else []),
            causal=bool(options.get("causal")),
        )

    yield attention("32 heads of 128, causal", 32, 32, 128, causal=True)
    yield attention("32 heads of 128 on 8, causal", 32, 8, 128, causal=True)
    yield attention("32 heads of 128", 32, 32, 128)
    yield attention("16 heads of 256, causal", 16, 16, 256, causal=True)
    yield attention("32 heads of 96, causal", 32, 32, 96, causal=True)
    yield attention("32 heads of 64, a mask", 32, 32, 64, masked=True)
    yield attention("32 heads of 64, 77 keys", 32, 32, 64, keys=77)


def convolutions(make: Callable[..., Tensor], *, toy: bool) -> Iterator[Case]:
    """Of ResNet-50 and of an image generator, in the default memory format."""
    batch, channels, side = (2, 8, 8) if toy else (64, 256, 56)
    yield Case(
        name="conv 3x3", work=lambda x, w: F.conv2d(x, w, padding=1),
        inputs=(make(batch, channels, side, side), make(channels, channels, 3, 3)),
    )  # fmt: skip
    yield Case(
        name="conv 1x1", work=F.conv2d, inputs=(make(batch, channels, side, side), make(channels, channels, 1, 1))
    )
    yield Case(
        name="conv 7x7 depthwise", work=lambda x, w: F.conv2d(x, w, padding=3, groups=channels),
        inputs=(make(batch, channels, side, side), make(channels, 1, 7, 7)),
    )  # fmt: skip


#: rows a rank, its experts, model dim, hidden dim: Mixtral 8x7B, Qwen3 235B and DeepSeek-V3 on some ranks of experts
GROUPED = {
    "Mixtral": (16384, 8, 4096, 14336),
    "Mixtral, ep 8": (16384, 1, 4096, 14336),
    "Mixtral, tp 4": (16384, 8, 4096, 3584),
    "Qwen3 235B, ep 8": (32768, 16, 4096, 1536),
    "Qwen3 235B, all": (32768, 128, 4096, 1536),
    "DeepSeek-V3, ep 32": (32768, 8, 7168, 2048),
    "DeepSeek-V3, ep 8": (32768, 32, 7168, 2048),
    "DeepSeek-V3, ep 8, few rows": (4096, 32, 7168, 2048),
}


def grouped_products(device: torch.device, *, toy: bool) -> Iterator[Case]:
    """Rows [N, K] by experts [E, K, J], as many rows an expert, or as a softmax of random numbers shares them out."""
    if device.type != "cuda":
        return
    for name, (rows, experts, model_dim, hidden) in {"toy": (64, 4, 32, 64)}.items() if toy else GROUPED.items():
        for how in ("even", "uneven") if experts > 1 else ("even",):
            share = torch.ones(experts) if how == "even" else torch.randn(experts).mul(0.5).exp()
            ends = (share.cumsum(0) / share.sum() * rows).round().to(torch.int32).to(device)
            further_bytes = (experts - 1) * model_dim * hidden * 2
            product = Matmul(m=rows, n=hidden, k=model_dim, batch=1, dtype="bfloat16", further_bytes=further_bytes)
            yield Case(
                name=f"grouped {name}, {how}",
                work=lambda x, w, ends: torch._grouped_mm(x, w, offs=ends),
                inputs=(
                    torch.randn(rows, model_dim, device=device, dtype=torch.bfloat16),
                    torch.randn(experts, model_dim, hidden, device=device, dtype=torch.bfloat16),
                ),
                constants=(ends,),
                kernels=(product,),
                backward_kernels=(product, product),
            )


def rows_of(case: Case, profile: HardwareProfile, device: torch.device) -> Iterator[Row]:
    """Forward, and backward to every input."""
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in case.inputs)
    stopwatch = Stopwatch(device=device, window_s=WINDOW_S, repeats=REPEATS)

    def row(direction: str, work: Callable[[], object], known: Sequence[Kernel] | None) -> Row:
        kernels = logged(work, causal=case.causal) if known is None else known
        seconds = sum(kernel_time(profile, kernel).seconds for kernel in kernels)
        measured_s = float(sorted(stopwatch.samples(work))[REPEATS // 2])
        return Row(name=case.name, direction=direction, predicted_s=seconds, measured_s=measured_s)

    with sdpa_kernel(FUSED):
        yield row("forward", lambda: case.work(*inputs, *case.constants), case.kernels)
        result = case.work(*inputs, *case.constants)
        gradient = torch.randn_like(result)
        yield row(
            "backward",
            lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True),
            case.backward_kernels,
        )


def logged(work: Callable[[], object], *, causal: bool) -> list[Kernel]:
    """The kernels that a function launches."""
    log = KernelLog(causal, ())
    with log:
        work()
    return log.kernels


def table(rows: Sequence[Row]) -> Table:
    """A line a case and direction."""
    found = Table(box=None, pad_edge=False)
    found.add_column("kernel", no_wrap=True)
    found.add_column("")
    for name in ("predicted", "measured", "ratio"):
        found.add_column(name, justify="right")
    for row in rows:
        times = (format_seconds(row.predicted_s), format_seconds(row.measured_s))
        found.add_row(row.name, row.direction, *times, f"{row.ratio:.2f}")
    return found


def main() -> int:
    """Measure, price, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", required=True, help="a profile's name or file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the rows go as JSON")
    parser.add_argument("--toy", action="store_true", help="small, on the CPU")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.toy else torch.device("cuda", 0)
    try:
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError("no GPU in sight: --toy runs the same at toy size on the CPU")
        profile = load_profile(arguments.profile)
    except TpplanError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return error.exit_code
    torch.manual_seed(0)
    rows: list[Row] = []
    for case in cases(device, toy=arguments.toy):
        try:
            rows += rows_of(case, profile, device)
        except RuntimeError as error:
            print(f"kernels: {case.name} does not run here: {error}", file=sys.stderr)
    if arguments.out:
        write_atomically(arguments.out, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    Console(width=max(110, Console().width)).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
