"""Kernels that the code of published runs launches beside those of a layer as a compiler fuses it.

tpplan prices the layers of accuracy_parts.parallel_models as fused, as most kernels of these runs are. What their code
runs op by op all the same is restated here and run on tensors without memory, forward and backward; its kernels are
logged and priced as tpplan logs and prices a model's own. parallel_code.csv names them by run, with where that was
read.

A mask has a byte for each number, and all else 16 bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from accuracy_parts.parallel_read import ParallelRun
from tpplan.costs.runs.kernels import Kernel, KernelLog, MemoryBound, kernel_time
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Recompute

#: what GPT-OSS clamps its gates to [swiglu_limit of the model's public config]
CLAMP = 7.0
#: bytes of a number in 16 bits, and of one in a mask
HALF, MASK = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of a layer and micro-batch on a rank; `is_activation` where recomputation of activations alone runs the
    forward ones again, too."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    is_activation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a micro-batch on a rank. Experts get rows evenly."""

    scores: tuple[int, int, int, int]
    queries: tuple[int, int, int, int]
    keys: tuple[int, int, int, int]
    hidden: tuple[int, int]
    rows: int
    experts: int
    moe_ffn: int

    @classmethod
    def of(cls, run: ParallelRun) -> "Sizes":
        """Those of a run."""
        shape, batch, length = run.shape, run.micro_batch, run.shape.seq_len
        heads, kv_heads = shape.heads // run.tp, max(1, shape.kv_heads // run.tp)
        tokens = batch * length // (run.tp if run.sequence_parallel else 1)
        return cls(
            scores=(batch, heads, length, length),
            queries=(batch, heads, length, shape.head_dim),
            keys=(batch, kv_heads, length, shape.head_dim),
            hidden=(tokens, shape.hidden),
            rows=tokens * shape.top_k,
            experts=max(1, shape.experts // run.ep),
            moe_ffn=shape.moe_ffn,
        )


def run_as_code(code: Callable[..., Tensor], *shapes: Sequence[int]) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The kernels of code on tensors of these shapes, of its forward and of its backward to all of them."""
    leaves = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    log = KernelLog(causal=True, operands=leaves)
    with log:
        found = code(*leaves)
        forward = tuple(log.kernels)
        log.restart()
        torch.autograd.grad(found, leaves, torch.empty_like(found))
    return forward, tuple(log.kernels)


def attention_dropout(sizes: Sizes) -> Kernels:
    """Dropout of attention's probabilities, a kernel of its own after the fused softmax [Megatron-LM,
    megatron/model/transformer.py]: it reads and writes them, and writes a mask, or reads it backwards."""
    num = prod(sizes.scores)
    once = (MemoryBound(num_bytes=num * (2 * HALF + MASK)),)
    return Kernels(forward=once, backward=once)


def hidden_dropout(sizes: Sizes) -> Kernels:
    """What dropout adds to the two kernels of a layer that add to the residual [Megatron-LM,
    megatron/model/transformer.py, bias_dropout_add_fused_train]: a mask each."""
    once = (MemoryBound(num_bytes=prod(sizes.hidden) * MASK),) * 2
    return Kernels(forward=once, backward=once)


def alibi(sizes: Sizes) -> Kernels:
    """A bias of attention's scores that torch.baddbmm copies into its result and the product then reads
    [bigscience-workshop/Megatron-DeepSpeed, model/transformer.py]."""
    num = prod(sizes.scores)
    return Kernels(forward=(MemoryBound(num_bytes=num * HALF),) * 2, backward=())


def fused_rotation(sizes: Sizes) -> Kernels:
    """Rotary embeddings of queries and keys in a kernel each [Megatron-Core, Transformer Engine's
    fused_apply_rotary_pos_emb]."""
    once = tuple(MemoryBound(num_bytes=2 * HALF * prod(shape)) for shape in (sizes.queries, sizes.keys))
    return Kernels(forward=once, backward=once)


def rotation(sizes: Sizes) -> Kernels:
    """Rotary embeddings of queries and keys, op by op, as where they are scaled (YaRN) or nothing fuses them
    [Megatron-Core, models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd]. Cosines and sines, which are
    no larger than one head, are not counted."""

    def rotate(x: Tensor) -> Tensor:
        turned, rest = x[..., : x.shape[-1]], x[..., x.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        angles = torch.empty(x.shape[-2:], dtype=x.dtype, device=x.device)
        turned = turned * angles + torch.cat((-second, first), dim=-1) * angles
        return torch.cat((turned, rest), dim=-1)

    (of_queries, to_queries), (of_keys, to_keys) = run_as_code(rotate, sizes.queries), run_as_code(rotate, sizes.keys)
    return Kernels(forward=of_queries + of_keys, backward=to_queries + to_keys)


def query_key_norms(sizes: Sizes) -> Kernels:
    """RMSNorm of each query and key: one kernel reads and writes it, one backwards reads it and its gradient."""
    shapes = (sizes.queries, sizes.keys)
    return Kernels(
        forward=tuple(MemoryBound(num_bytes=2 * HALF * prod(shape)) for shape in shapes),
        backward=tuple(MemoryBound(num_bytes=3 * HALF * prod(shape)) for shape in shapes),
    )


def clamped_gates(sizes: Sizes) -> Kernels:
    """Clamps of both halves of what gated experts' first product returns, before the fused activation [Megatron-Core,
    fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl]."""

    def clamp(wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return torch.cat((gate.clamp(max=CLAMP), up.clamp(min=-CLAMP, max=CLAMP)), dim=-1)

    forward, backward = run_as_code(clamp, (sizes.rows, 2 * sizes.moe_ffn))
    return Kernels(forward=forward, backward=backward, is_activation=True)


def expert_biases(sizes: Sizes) -> Kernels:
    """Biases of experts' second product, times each row's weight, expert by expert [Megatron-Core,
    transformer/moe/experts.py, TEGroupedMLP._apply_bias]. Those of the first are added by the product's own kernel."""
    each = [sizes.rows // sizes.experts] * sizes.experts

    def add(rows: Tensor, weights: Tensor, *biases: Tensor) -> Tensor:
        parts = zip(rows.split(each), biases, weights.split(each), strict=True)
        return torch.cat([own + bias * weight for own, bias, weight in parts])

    width = sizes.hidden[-1]
    forward, backward = run_as_code(add, (sum(each), width), (sum(each), 1), *[(width,)] * sizes.experts)
    return Kernels(forward=forward, backward=backward)


#: by the words of parallel_code.csv
FURTHER: Mapping[str, Callable[[Sizes], Kernels]] = {
    "attention dropout": attention_dropout,
    "hidden dropout": hidden_dropout,
    "alibi": alibi,
    "fused rotation": fused_rotation,
    "rotation": rotation,
    "query and key norms": query_key_norms,
    "clamped gates": clamped_gates,
    "expert biases": expert_biases,
}


def further_seconds(run: ParallelRun, profile: HardwareProfile) -> tuple[float, float, float]:
    """Seconds of the further kernels of a layer and micro-batch: forward, backward, and recomputed."""
    sizes = Sizes.of(run)
    forward = backward = again = 0.0
    for name in run.code.further:
        found = FURTHER[name](sizes)
        own = sum(kernel_time(profile, kernel).seconds for kernel in found.forward)
        forward += own
        backward += sum(kernel_time(profile, kernel).seconds for kernel in found.backward)
        if run.recompute is Recompute.FULL or (run.recompute is Recompute.SELECTIVE and found.is_activation):
            again += own
    return forward, backward, again
