"""Sample calls of every op that has a sharding rule; dims divide by 2 and 3 where that tells something.

A new rule needs an entry here: test_rules.py fails without one.
"""

import torch
from torch import Tensor
from validate import Sample

_generator = torch.Generator().manual_seed(0)


def x(*shape: int) -> Tensor:
    """A value that carries a gradient."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64).requires_grad_()


def positive(*shape: int) -> Tensor:
    """A value above zero that carries a gradient."""
    return (torch.rand(shape, generator=_generator, dtype=torch.float64) + 0.2).requires_grad_()


def complex_x(*shape: int) -> Tensor:
    """A complex value that carries a gradient."""
    return torch.randn(shape, generator=_generator, dtype=torch.complex128).requires_grad_()


def const(*shape: int) -> Tensor:
    """A value without a gradient."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def ids(high: int, *shape: int) -> Tensor:
    """Integers below `high`."""
    return torch.randint(high, shape, generator=_generator)


def mask(*shape: int) -> Tensor:
    """Booleans."""
    return torch.rand(shape, generator=_generator) < 0.5


def _named(target: str, *args: object, **kwargs: object) -> Sample:
    return Sample(target=target, args=args, kwargs=kwargs)


def _each(names: str, overload: str, *args: object) -> list[Sample]:
    return [_named(f"aten.{name}.{overload}", *args) for name in names.split()]


def _unary() -> list[Sample]:
    smooth = (
        "gelu silu sigmoid tanh exp expm1 abs sign sin cos square erf softplus leaky_relu elu hardtanh hardswish relu "
        "hardsigmoid mish log_sigmoid relu6 selu floor ceil round isnan isinf zeros_like ones_like nan_to_num atan "
        "hardshrink softshrink erfc exp2 celu neg clone contiguous alias detach _to_copy positive tan logical_not "
        "cosh sinh trunc frac isfinite absolute special_expit negative lift_fresh_copy"
    )
    return [
        *_each(smooth, "default", x(6, 4)),
        *_each("log log1p sqrt rsqrt reciprocal log2 log10", "default", positive(6, 4)),
        *_each("logical_not bitwise_not", "default", mask(6, 4)),
        *_each("relu silu gelu tanh neg clone", "default", x(2, 6, 4)),
        *_each("relu_ silu_ tanh_ neg_ sigmoid_", "default", x(6, 4)),
        *_each("relu_ neg_", "default", const(6, 4)),
        *_each("relu", "default", x(6)),
        *_each("neg clone contiguous", "default", x(2, 4, 3)),
        *_each("relu neg clone", "default", x()),
        _named("aten.gelu.default", x(6, 4), approximate="tanh"),
        _named("aten.clamp.default", x(6, 4), -0.5, 0.5),
        _named("aten.clamp_.default", x(6, 4), None, 0.5),
        _named("aten.clip.default", x(6, 4), -0.5),
        _named("aten.threshold.default", x(6, 4), 0.1, 2.0),
        *_each("acos asin", "default", (x(6, 4) * 0.1).detach().clamp(-0.9, 0.9).requires_grad_()),
        _named("aten.clamp_min.default", x(6, 4), 0.1),
        _named("aten.clamp_max.default", x(6, 4), 0.1),
        _named("aten.clamp.Tensor", x(6, 4), const(4), const(6, 1)),
        _named("aten.clamp.Tensor", x(6, 4), None, const(6, 4)),
        _named("aten.clip.Tensor", x(6, 4), const(6, 4)),
        _named("aten.full_like.default", x(6, 4), 2.5),
        _named("aten.full_like.default", mask(6, 4), 1),
        _named("aten.pow.Tensor_Scalar", x(6, 4), 2),
        _named("aten.pow_.Scalar", x(6, 4), 3),
        _named("aten.pow.Scalar", 2.0, x(6, 4)),
        _named("aten.rsub.Scalar", x(6, 4), 1.0),
        _named("aten.dropout.default", x(6, 4), 0.5, True),
        _named("aten.dropout.default", x(6, 4), 0.5, False),
        _named("aten.dropout.default", x(6, 4), 0.0, True),
        _named("aten.dropout_.default", x(6, 4), 0.5, True),
        _named("aten.dropout.default", const(6, 4), 0.5, True),
    ]


def _casts() -> list[Sample]:
    cpu = torch.device("cpu")
    return [
        _named("aten.to.dtype", x(6, 4), torch.float64),
        _named("aten.to.dtype", x(6, 4), torch.int64),
        _named("aten.to.dtype", x(6, 4), torch.bool),
        _named("aten.to.dtype", mask(6, 4), torch.float64),
        _named("aten.to.dtype", ids(5, 6, 4), torch.float64),
        _named("aten._to_copy.default", x(6, 4), dtype=torch.int32),
        _named("aten.to.dtype_layout", x(6, 4), dtype=torch.float64, device=cpu),
        _named("aten.to.device", x(6, 4), cpu, torch.float64),
        _named("aten.to.other", ids(5, 6, 4), x(3)),
        _named("aten.to.other", x(6, 4), const(3)),
        _named("aten.type_as.default", x(6, 4), x(6, 4)),
        _named("aten.type_as.default", x(6, 4), const(1)),
        _named("aten.type_as.default", x(6, 4), x(4, 2)),
        _named("aten.clone.default", mask(6, 4)),
        _named("aten.clone.default", ids(5, 6, 4)),
    ]


def _binary() -> list[Sample]:
    samples = []
    for name in ("add", "sub", "mul", "div"):
        target = f"aten.{name}.Tensor"
        samples += [
            _named(target, x(6, 4), positive(6, 4)),
            _named(target, x(6, 4), positive(4)),
            _named(target, x(2, 6, 4), positive(6, 1)),
            _named(target, x(6, 1), positive(1, 6)),
            _named(target, x(6, 4), positive()),
            _named(target, x(4), positive(6, 4)),
            _named(target, x(6, 4), const(6, 4)),
            _named(target, const(6, 4), positive(4)),
            _named(target, x(6, 4), 2.0),
            _named(target, const(6, 4), const(4)),
            _named(target, ids(5, 6, 4), positive(6, 4)),
            _named(f"aten.{name}_.Tensor", x(6, 4), positive(4)),
            _named(f"aten.{name}_.Tensor", x(6, 4), 2.0),
            _named(f"aten.{name}_.Tensor", const(6, 4), positive(6, 4)),
            _named(f"aten.{name}_.Tensor", x(6, 4), const(6, 1)),
        ]
    for name in ("add", "sub"):
        samples.append(_named(f"aten.{name}.Tensor", x(6, 4), x(6, 4), alpha=0.5))
    for target in ("multiply.Tensor", "true_divide.Tensor", "subtract.Tensor", "rsub.Tensor"):
        samples += [
            _named(f"aten.{target}", x(6, 4), positive(4)),
            _named(f"aten.{target}", x(6, 4), positive(6, 4)),
        ]
    for name in ("add", "sub"):
        samples.append(_named(f"aten.{name}.Scalar", x(6, 4), 2.0))
    for name in ("mul", "div"):
        samples.append(_named(f"aten.{name}.Scalar", x(6, 4), 2.0))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        samples += [
            _named(f"aten.{name}.Scalar", ids(3, 6, 4), 1),
            _named(f"aten.{name}.Scalar", x(6, 4), 0.1),
            _named(f"aten.{name}.Tensor", ids(3, 6, 1), ids(3, 4)),
            _named(f"aten.{name}.Tensor", x(6, 4), const(4)),
        ]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        samples += [
            _named(f"aten.{name}.Scalar", ids(8, 6, 4), 3),
            _named(f"aten.{name}.Tensor", mask(6, 1), mask(4)),
        ]
    for name in ("remainder", "fmod"):
        samples += [
            _named(f"aten.{name}.Scalar", x(6, 4), 0.7),
            _named(f"aten.{name}.Tensor", x(6, 4), positive(4)),
        ]
    return [
        *samples,
        _named("aten.floor_divide.default", ids(9, 6, 4), ids(3, 4) + 1),
        _named("aten.floor_divide.Scalar", ids(9, 6, 4), 2),
        _named("aten.div.Tensor_mode", x(6, 4), positive(4), rounding_mode="floor"),
        _named("aten.div.Scalar_mode", x(6, 4), 0.3, rounding_mode="trunc"),
        _named("aten.logical_xor.default", mask(6, 4), mask(4)),
        _named("aten.logaddexp.default", x(6, 4), x(6, 1)),
        _named("aten.broadcast_tensors.default", [x(6, 4), x(4)]),
        _named("aten.broadcast_tensors.default", [x(6, 1), const(4)]),
        _named("aten.logical_and.default", mask(6, 1), mask(6, 4)),
        _named("aten.logical_or.default", mask(6, 4), mask(4)),
        _named("aten.__and__.Tensor", mask(6, 4), mask(4)),
        _named("aten.__or__.Tensor", mask(6, 4), mask(6, 4)),
        _named("aten.maximum.default", x(6, 4), x(4)),
        _named("aten.minimum.default", x(6, 4), x(6, 4)),
        _named("aten.pow.Tensor_Tensor", positive(6, 4), x(4)),
        _named("aten.atan2.default", x(6, 4), positive(6, 4)),
        _named("aten.xlogy.Tensor", x(6, 4), positive(4)),
        _named("aten.where.self", mask(6, 4), x(6, 4), x(4)),
        _named("aten.where.self", mask(6, 1), x(6, 4), const()),
        _named("aten.where.ScalarOther", mask(6, 4), x(6, 4), 0.0),
        _named("aten.where.ScalarOther", mask(6, 4), x(6, 4), 1.0),
        _named("aten.where.ScalarSelf", mask(6, 4), 0.0, x(6, 4)),
        _named("aten.where.ScalarSelf", mask(6, 4), 2.0, x(4)),
        _named("aten.where.self", mask(6, 4), x(6, 4), x(6, 4)),
        _named("aten.where.self", mask(6, 4), ids(4, 6, 4), ids(4, 6, 4)),
        _named("aten.where.Scalar", mask(6, 4), 0.0, 1.0),
        _named("aten.masked_fill.Scalar", x(6, 4), mask(4), -1.0),
        _named("aten.masked_fill.Scalar", x(6, 4), mask(6, 4), 0.0),
        _named("aten.masked_fill_.Scalar", x(6, 4), mask(6, 1), -1.0),
        _named("aten.masked_fill.Tensor", x(6, 4), mask(6, 4), const()),
        _named("aten.lerp.Scalar", x(6, 4), x(6, 4), 0.3),
        _named("aten.lerp.Tensor", x(6, 4), x(6, 4), x(4)),
        _named("aten.addcmul.default", x(6, 4), x(6, 4), x(4)),
        _named("aten.addcdiv.default", x(6, 4), x(6, 4), positive(4)),
        _named("aten.addcmul_.default", x(6, 4), x(6, 4), x(6, 4), value=0.5),
    ]


def _products() -> list[Sample]:
    linear = "aten.linear.default"
    return [
        _named(linear, x(6, 4), x(12, 4)),
        _named(linear, x(6, 4), x(12, 4), x(12)),
        _named(linear, x(2, 6, 12), x(6, 12), x(6)),
        _named(linear, x(2, 2, 6, 6), x(4, 6)),
        _named(linear, x(6), x(4, 6), x(4)),
        _named(linear, x(6, 4), x(4)),
        _named(linear, const(6, 4), x(6, 4), x(6)),
        _named(linear, x(6, 6), const(6, 6), const(6)),
        _named(linear, x(6, 6), const(4, 6)),
        _named(linear, const(6, 6), const(4, 6), const(4)),
        _named(linear, x(6, 1), x(6, 1)),
        _named("aten.mm.default", x(6, 4), x(4, 12)),
        _named("aten.mm.default", x(6, 6), const(6, 6)),
        _named("aten.mv.default", x(6, 4), x(4)),
        _named("aten.dot.default", x(6), x(6)),
        _named("aten.outer.default", x(6), x(4)),
        _named("aten.bmm.default", x(6, 4, 2), x(6, 2, 6)),
        _named("aten.addmm.default", x(6), x(6, 4), x(4, 6)),
        _named("aten.addmm.default", x(6, 6), x(6, 4), x(4, 6), beta=0.5, alpha=2),
        _named("aten.addmm.default", x(1, 6), x(6, 6), x(6, 6)),
        _named("aten.addmm.default", x(6, 1), x(6, 6), x(6, 6)),
        _named("aten.addmm.default", x(), x(6, 6), x(6, 6)),
        _named("aten.addmm.default", x(1), x(6, 6), x(6, 6)),
        *(
            _named(target, x(6, 4), x(3, 4, 6), torch.tensor([2, 3, 6]))
            for target in ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
        ),
        _named("aten.baddbmm.default", x(6, 4, 6), x(6, 4, 2), x(6, 2, 6)),
        _named("aten.baddbmm.default", x(1, 4, 1), x(6, 4, 6), x(6, 6, 6), beta=0.5),
        _named("aten.baddbmm.default", x(6), x(6, 4, 6), x(6, 6, 6)),
        _named("aten.matmul.default", x(6), x(6)),
        _named("aten.matmul.default", x(6), x(6, 4)),
        _named("aten.matmul.default", x(4, 6), x(6)),
        _named("aten.matmul.default", x(4, 6), x(6, 4)),
        _named("aten.matmul.default", x(2, 4, 6), x(6, 4)),
        _named("aten.matmul.default", x(2, 4, 6), x(6)),
        _named("aten.matmul.default", x(6), x(2, 6, 4)),
        _named("aten.matmul.default", x(4, 6), x(2, 6, 4)),
        _named("aten.matmul.default", x(2, 6, 4, 6), x(2, 6, 6, 4)),
        _named("aten.matmul.default", x(6, 4, 6), x(1, 6, 4)),
        _named("aten.matmul.default", x(2, 1, 4, 6), x(6, 6, 4)),
        _named("aten.matmul.default", x(2, 6, 4), const(4, 6)),
        _named("aten.einsum.default", "bik,bkj->bij", [x(6, 4, 2), x(6, 2, 4)]),
        _named("aten.einsum.default", "bthd,bshd->bhts", [x(2, 2, 6, 4), x(2, 4, 6, 4)]),
        _named("aten.einsum.default", "i,j->ij", [x(6), x(4)]),
        _named("aten.einsum.default", "ij->ji", [x(6, 4)]),
        _named("aten.einsum.default", "ij->i", [x(6, 4)]),
        _named("aten.einsum.default", "ab,bc,cd->ad", [x(2, 6), x(6, 4), x(4, 6)]),
        _named("aten.einsum.default", "ii->i", [x(6, 6)]),
        _named("aten.einsum.default", "ij,jk", [x(6, 4), x(4, 6)]),
        _named("aten.einsum.default", "...k,kn->...n", [x(2, 6, 4), x(4, 6)]),
        _named("aten.einsum.default", "...ik,...kj", [x(6, 2, 4), x(4, 6)]),
        _named("aten.einsum.default", "b...k,nk->b...n", [x(2, 6, 4), x(6, 4)]),
        _named("aten.einsum.default", "ij,ij", [x(6, 4), x(6, 4)]),
        _named("aten.einsum.default", "bk,k->b", [x(6, 1), x(6)]),
    ]


def _attention() -> list[Sample]:
    target = "aten.scaled_dot_product_attention.default"

    def heads(h: int, t: int, d: int = 4, b: int = 2) -> Tensor:
        return x(b, h, t, d)

    return [
        _named(target, heads(6, 4), heads(6, 6), heads(6, 6, 2)),
        _named(target, heads(6, 6), heads(6, 6), heads(6, 6), None, 0.0, True),
        _named(target, heads(6, 6), heads(6, 6), heads(6, 6), is_causal=True, scale=0.3),
        _named(target, heads(12, 4), heads(6, 4), heads(6, 4), None, 0.0, True, enable_gqa=True),
        _named(target, heads(4, 6), heads(2, 6), heads(2, 6), enable_gqa=True),
        _named(target, heads(4, 6), heads(1, 6), heads(1, 6), enable_gqa=True),
        _named(target, heads(8, 6), heads(2, 6), heads(2, 6, 2), None, 0.0, True, enable_gqa=True),
        _named(target, heads(8, 6), heads(2, 4), heads(2, 4), const(8, 6, 4), enable_gqa=True),
        _named(target, heads(12, 6), heads(3, 4), heads(3, 4), x(2, 1, 6, 4), enable_gqa=True),
        _named(target, heads(6, 6), heads(6, 4), heads(6, 4), const(6, 4)),
        _named(target, heads(6, 6), heads(6, 4), heads(6, 4), const(2, 1, 6, 4)),
        _named(target, heads(6, 6), heads(6, 4), heads(6, 4), x(6, 6, 4)),
        _named(target, heads(6, 6), heads(6, 4), heads(6, 4), x(1, 6, 6, 4)),
        _named(target, heads(6, 6), heads(6, 4), heads(6, 4), attn_mask=mask(2, 1, 1, 4) | True),
        _named(target, heads(6, 6), heads(6, 6), heads(6, 6), attn_mask=torch.ones(6, 6).tril().bool()),
        _named(target, heads(6, 6), heads(6, 6), heads(6, 6), None, 0.5),
        _named(target, x(6, 6, 4), x(6, 6, 4), x(6, 6, 4), None, 0.0, True),
    ]


def _lookups() -> list[Sample]:
    embedding = "aten.embedding.default"
    return [
        _named(embedding, x(12, 6), ids(12, 2, 6)),
        _named(embedding, x(12, 6), ids(12, 6)),
        _named(embedding, x(12, 6), ids(12, 6, 4), 3),
        _named(embedding, x(12, 4), ids(12)),
        _named(embedding, x(12, 6), ids(3, 2, 6), -1, True),
        _named(embedding, const(12, 6), ids(12, 2, 6)),
    ]


def _picks() -> list[Sample]:
    index, gather = "aten.index.Tensor", "aten.gather.default"
    return [
        _named("aten.index_select.default", x(6, 4), 0, ids(6, 6)),
        _named("aten.index_select.default", x(6, 4), 0, ids(6)),
        _named("aten.index_select.default", x(2, 6, 4), -1, ids(4, 6)),
        _named(index, x(6, 4), [ids(6, 6)]),
        _named(index, x(6, 4), [None, ids(4, 2, 6)]),
        _named(index, x(2, 6, 4), [None, ids(6)]),
        _named(index, x(6, 4), [ids(6, 2), ids(4, 2)]),
        _named(index, ids(9, 6, 4), [None, ids(4, 6)]),
        _named(index, const(6, 4), [ids(6, 6)]),
        _named(index, x(6, 4), [mask(6)]),
        _named(index, x(6, 4, 6), [None, mask(4)]),
        _named(index, x(6, 4, 6), [mask(6, 4)]),
        _named(index, x(6, 4), [mask(6, 4)]),
        _named("aten.masked_select.default", x(6, 4), mask(6, 4)),
        _named("aten.masked_select.default", x(6, 4), mask(4)),
        _named("tpplan.send_rows.default", x(6, 4), ids(3, 6), 2),
        _named("tpplan.return_rows.default", x(6, 4), ids(3, 6), 2),
        _named("aten.index_add.default", x(6, 4), 0, ids(6, 4), x(4, 4)),
        _named("aten.index_add.default", x(2, 6, 4), -1, ids(4, 6), x(2, 6, 6), alpha=2),
        _named("aten.index_add.default", const(6, 4), 1, ids(4, 6), x(6, 6)),
        _named("aten.scatter_add.default", x(6, 4), 0, ids(6, 6, 4), x(6, 4)),
        _named("aten.scatter_add.default", x(6, 4), 1, ids(4, 6, 2), x(6, 2)),
        _named("aten.scatter_add.default", x(6, 4), 1, ids(4, 2, 2), x(2, 2)),
        _named(gather, x(6, 4), 1, ids(4, 6, 2)),
        _named(gather, x(6, 4), 1, ids(4, 2, 6)),
        _named(gather, x(2, 6, 4), -2, ids(6, 2, 6, 4)),
        _named(gather, x(6), 0, ids(6, 4)),
        _named(gather, x(), 0, ids(1)),
        _named("aten.topk.default", x(6, 4), 2),
        _named("aten.topk.default", x(6, 4), 2, 0),
        _named("aten.sort.default", x(6, 4)),
        _named("aten.sort.default", x(6, 4), 0, True),
        _named("aten.argsort.default", x(6, 4)),
        _named("aten.one_hot.default", ids(6, 2, 6), 6),
        _named("aten.repeat_interleave.self_int", x(6, 4), 2, 0),
        _named("aten.repeat_interleave.self_int", x(2, 6, 4), 3, -1),
        _named("aten.repeat_interleave.self_int", x(6, 2, 4), 4, 1),
        _named("aten.repeat_interleave.self_int", x(6, 1, 4), 12, -2),
        _named("aten.repeat_interleave.self_int", x(2, 6), 2, 1, output_size=12),
        _named("aten.repeat_interleave.self_int", x(2, 6), 2),
        _named("aten.repeat.default", x(6, 4), [1, 3]),
        _named("aten.repeat.default", x(6, 4), [2, 1, 1]),
        _named("aten.repeat.default", x(1, 6), [6, 1]),
    ]


def _creations() -> list[Sample]:
    def written(target: str, *args: object, **kwargs: object) -> Sample:
        return Sample(target=target, args=args, kwargs=kwargs, is_written_later=True)

    copies = "aten.copy_.default"
    return [
        written("aten.empty.memory_format", [6, 4], dtype=torch.float64),
        written("aten.zeros.default", [2, 6, 4], dtype=torch.float64),
        written("aten.ones.default", [6, 4], dtype=torch.float64),
        written("aten.full.default", [6, 4], 2.5, dtype=torch.float64),
        written("aten.full.default", [6], 0.0, dtype=torch.float64),
        written("aten.new_empty.default", x(2, 6, 4), [2, 6, 12]),
        written("aten.new_zeros.default", x(6, 4), [6, 4]),
        written("aten.new_ones.default", x(6, 4), [4]),
        written("aten.new_full.default", const(6, 4), [6, 6], -1.0),
        written("aten.new_full.default", x(6), [], 0.0),
        _named("aten.new_zeros.default", x(6, 4), [6, 6]),
        _named("aten.new_zeros.default", x(6, 4), [12]),
        _named("aten.new_full.default", x(6, 4), [4, 2], 3.0),
        _named("aten.zeros.default", [6, 4], dtype=torch.float64),
        _named(copies, x(6, 4), x(6, 4)),
        _named(copies, x(2, 6, 4), x(6, 1)),
        _named(copies, x(6, 4), const(4)),
        _named(copies, const(6, 4), x()),
        _named(copies, ids(5, 6, 4), ids(5, 4)),
        _named("aten.fill_.Scalar", x(6, 4), 0.0),
        _named("aten.fill_.Scalar", x(6, 4), 2.0),
        _named("aten.fill_.Tensor", x(6, 4), x()),
        _named("aten.zero_.default", x(6, 4)),
        _named("aten.slice_scatter.default", x(6, 4), x(6, 2), 1, 0, 2),
        _named("aten.slice_scatter.default", x(6, 4), x(3, 4), 0, 0, 6, 2),
        _named("aten.select_scatter.default", x(2, 6, 4), x(2, 6), 2, 1),
        _named("aten.select_scatter.default", x(6, 4), const(4), 0, -1),
    ]


def _convolutions() -> list[Sample]:
    samples = [
        _named("aten.conv1d.default", x(6, 4, 6), x(6, 4, 3)),
        _named("aten.conv1d.padding", x(6, 4, 6), x(6, 4, 3), x(6), [1], "same"),
        _named("aten.conv2d.default", x(6, 2, 6, 6), x(4, 2, 2, 2), x(4), [2, 2]),
        _named("aten.conv2d.default", x(6, 4, 6), x(2, 6, 1, 1)),
        _named("aten.conv2d.default", x(2, 6, 4, 4), x(6, 1, 3, 3), x(6), [1, 1], [1, 1], [1, 1], 6),
        _named("aten.conv2d.default", x(2, 4, 4, 4), x(6, 2, 3, 3), x(6), [1, 1], [1, 1], [1, 1], 2),
        _named("aten.conv2d.padding", x(6, 2, 4, 4), x(6, 2, 3, 3), x(6), [1, 1], "valid"),
        _named("aten.conv3d.default", x(2, 6, 2, 2, 2), x(6, 6, 2, 2, 2)),
        _named("aten.conv3d.padding", x(2, 2, 2, 2, 2), x(2, 2, 1, 1, 1)),
        _named("aten.conv_transpose1d.default", x(6, 4, 6), x(4, 6, 3), x(6)),
        _named("aten.conv_transpose1d.default", x(4, 6), x(4, 2, 3)),
        _named("aten.conv_transpose2d.input", x(2, 6, 4, 4), x(6, 4, 2, 2), x(4), [2, 2]),
        _named("aten.conv_transpose2d.input", x(2, 6, 2, 2), x(6, 1, 2, 2), x(6), [1, 1], [0, 0], [0, 0], 6),
        _named("aten.conv_transpose2d.input", x(2, 4, 2, 2), x(4, 3, 2, 2), x(6), [1, 1], [0, 0], [0, 0], 2),
        _named("aten.conv_transpose3d.input", x(2, 6, 2, 2, 2), x(6, 4, 1, 1, 1)),
        _named("aten.max_pool1d.default", x(2, 6, 6), [2]),
        _named("aten.max_pool2d.default", x(2, 6, 4, 4), [2, 2]),
        _named("aten.max_pool3d.default", x(6, 2, 2, 2), [2, 2, 2]),
        _named("aten.avg_pool1d.default", x(2, 6, 6), [2]),
        _named("aten.avg_pool2d.default", x(2, 6, 4, 4), [2, 2]),
        _named("aten.avg_pool3d.default", x(2, 6, 2, 2, 2), [2, 2, 2]),
        _named("aten.adaptive_avg_pool1d.default", x(2, 6, 6), [3]),
        _named("aten.adaptive_avg_pool2d.default", x(2, 6, 4, 4), [1, 1]),
        _named("aten.adaptive_avg_pool3d.default", x(2, 6, 2, 2, 2), [1, 1, 1]),
        _named("aten.upsample_nearest2d.vec", x(2, 6, 2, 2), [4, 4], None),
        _named("aten.upsample_nearest2d.vec", x(2, 6, 2, 2), None, [2.0, 2.0]),
    ]
    for name in ("bilinear", "bicubic"):
        samples.append(_named(f"aten.upsample_{name}2d.vec", x(2, 6, 2, 2), [6, 6], False, None))
    return samples


def _losses() -> list[Sample]:
    samples = []
    for reduction in (0, 1, 2):
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
            samples.append(_named(f"aten.{name}.default", x(6, 4), const(6, 4), reduction))
        chance = (positive(6, 4) / 2).detach().clamp(0.1, 0.9)
        class_loss, nll = "aten.cross_entropy_loss.default", "aten.nll_loss_nd.default"
        samples += [
            _named("aten.kl_div.default", x(6, 4), chance, reduction),
            _named("aten.binary_cross_entropy.default", chance.clone().requires_grad_(), chance, None, reduction),
            _named("aten.binary_cross_entropy_with_logits.default", x(6, 4), chance, None, None, reduction),
            _named("aten.binary_cross_entropy_with_logits.default", x(6, 4), chance, const(6, 1), const(4), reduction),
            _named(class_loss, x(6, 4), ids(4, 6), None, reduction),
            _named(class_loss, x(6, 6), ids(6, 6), const(6).abs(), reduction, 2),
            _named(class_loss, x(6, 6), ids(6, 6), const(6).abs(), reduction, 2, 0.1),
            _named(class_loss, x(2, 6, 6), ids(6, 2, 6), None, reduction),
            _named(class_loss, x(6, 4), const(6, 4).softmax(-1), None, reduction),
            _named(class_loss, x(6), ids(6), None, reduction),
            _named(nll, x(6, 4), ids(4, 6), None, reduction),
            _named(nll, x(2, 6, 6), ids(6, 2, 6), const(6).abs(), reduction),
        ]
    return [*samples, _named("aten.mse_loss.default", x(6, 4), const(6, 4))]


def _more_picks() -> list[Sample]:
    put, bag = "aten.index_put.default", "aten.embedding_bag.padding_idx"
    flex = "tpplan.flex_attention.default"
    starts, own_bag = torch.tensor([0, 2, 2, 5]), "tpplan.embedding_bag.default"
    return [
        _named("aten.index.Tensor", x(6, 4, 6, 2), [None, ids(4, 2, 6), None, ids(2, 6)]),
        _named("aten.index.Tensor", x(6, 4, 6, 2), [None, ids(4, 2, 6), ids(6, 6)]),
        _named("aten.index.Tensor", x(6, 4, 4), [None, mask(4), ids(4, 1)]),
        _named(put, x(6, 4), [torch.tensor([0, 3])], x(2, 4)),
        _named(put, x(6, 4), [None, torch.tensor([0, 3])], x(6, 1)),
        _named(put, x(6, 4, 6), [None, torch.tensor([[0], [3]]), torch.tensor([1, 2])], x(6, 2, 2)),
        _named(put, x(6, 4, 6), [torch.tensor([0, 3]), None, torch.tensor([1, 2])], x(2, 4)),
        _named(put, x(6, 4), [torch.tensor([0, 3, 3])], x(3, 4), True),
        _named("aten.index_put_.default", x(6, 4), [mask(6)], x(4)),
        _named("aten.index_put_.default", x(6, 4), [mask(6, 4)], x()),
        _named("aten.index_put_.default", x(6, 4), [mask(6, 4)], const(1), True),
        _named(put, x(6, 4, 6), [mask(6, 4)], x(6)),
        _named(put, ids(9, 6, 4), [None, torch.tensor([0, 3])], ids(9, 6, 2)),
        _named("aten.index_copy.default", x(6, 4), 1, torch.tensor([0, 3]), x(6, 2)),
        _named("aten.index_fill_.int_Scalar", x(6, 4), 0, torch.tensor([0, 3]), 0.0),
        _named("aten.index_fill.int_Scalar", x(6, 4), -1, torch.tensor([0, 3]), 2.0),
        _named("aten.scatter.src", x(6, 4), 1, torch.tensor([[0, 3]] * 6), x(6, 2)),
        _named("aten.scatter.src", x(6, 4), 0, ids(1, 1, 2), const(6, 4)),
        _named("aten.scatter.value", x(6, 4), 1, ids(4, 6, 2), 0),
        _named("aten.scatter_.value", x(6, 4), 1, ids(4, 6, 2), 2.0),
        _named("aten.scatter_reduce.two", x(6, 4), 1, ids(4, 6, 6), x(6, 6), "amax"),
        _named("aten.scatter_reduce.two", x(6, 4), 0, ids(6, 2, 4), x(2, 4), "mean", include_self=False),
        *(_named(bag, x(12, 6), ids(12, 8), starts, False, mode, False, None, False, None) for mode in (0, 1, 2)),
        _named(bag, x(12, 6), ids(12, 8), starts, False, 0, False, x(8), False, 3),
        _named(bag, x(12, 6), ids(3, 8), starts, True, 1, False, None, True, None),
        _named("aten.embedding_bag.default", x(12, 6), ids(12, 8), starts),
        *(_named(own_bag, x(12, 6), ids(12, 8), starts, None, mode, False, 3) for mode in ("sum", "mean", "max")),
        *(_named(own_bag, x(12, 6), ids(12, 12, 4), None, None, mode, False, None) for mode in ("sum", "mean", "max")),
        _named(own_bag, x(12, 6), ids(12, 12, 4), None, x(12, 4), "sum", False, -2),
        _named(own_bag, x(12, 6), ids(12, 12, 4), None, None, "mean", False, 5),
        _named(own_bag, x(12, 6), ids(12, 8), starts, x(8), "sum", False, None),
        _named(own_bag, x(12, 6), ids(12, 5), starts, None, "mean", True, 1),
        *(
            _named(flex, x(6, 6, 3, 4), x(6, heads, 5, 4), x(6, heads, 5, 2), [x(3, 5)], "", *cut, 1.0)
            for heads, cut in ((6, (True, True)), (2, (False, True)), (1, (True, False)), (1, (True, True)))
        ),
        _named(flex, x(6, 6, 3, 4), x(6, 6, 5, 4), x(6, 6, 5, 2), [], "", False, True, 1.0),
    ]


def _solves() -> list[Sample]:
    def regular(*batch: int) -> Tensor:
        return (const(*batch, 4, 4) + 4 * torch.eye(4, dtype=torch.float64)).requires_grad_()

    def definite(*batch: int) -> Tensor:
        root = regular(*batch).detach()
        return (root @ root.mT).requires_grad_()

    alone = "inv inverse det slogdet qr matrix_exp svdvals inv_ex"
    symmetric = "cholesky cholesky_ex eigvalsh"
    solve, triangular = "aten.linalg_solve.default", "aten.linalg_solve_triangular.default"
    return [
        *(_named(f"aten.linalg_{name}.default", regular(6, 2)) for name in alone.split() if name != "inverse"),
        *(_named(f"aten.{name}.default", regular(6)) for name in ("inverse", "det", "slogdet", "matrix_exp")),
        *(_named(f"aten.linalg_{name}.default", definite(6, 2)) for name in symmetric.split()),
        *(_named(f"aten.{name}.default", definite(6)) for name in ("logdet", "linalg_eigh")),
        _named("aten.linalg_svd.default", regular(6), False),
        *(_named(f"aten.{name}.default", regular(6), 3) for name in ("linalg_matrix_power", "matrix_power")),
        _named(solve, regular(6), x(6, 4, 6)),
        _named(solve, regular(6), x(6, 4)),
        _named(solve, regular(), x(4)),
        _named(solve, regular(), x(4, 6)),
        _named(solve, regular(6, 1), x(2, 4, 6)),
        _named(solve, regular(6), x(6, 6, 4), left=False),
        _named(triangular, regular(6), x(6, 4, 6), upper=True),
        _named(triangular, regular(6), x(6, 6, 4), upper=False, left=False),
        _named("aten.cholesky_solve.default", x(6, 4, 6), regular(6)),
    ]


def _recurrent() -> list[Sample]:
    def weights(gates: int) -> list[Tensor]:
        return [x(6 * gates, 4), x(6 * gates, 6), x(6 * gates), x(6 * gates)]

    settings = (True, 1, 0.0, True, False)
    return [
        _named("aten.lstm_cell.default", x(6, 4), [x(6, 6), x(6, 6)], *weights(4)),
        _named("aten.gru_cell.default", x(6, 4), x(6, 6), *weights(3)),
        _named("aten.gru_cell.default", x(6, 4), x(6, 6), *weights(3)[:2]),
        *(_named(f"aten.rnn_{name}_cell.default", x(6, 4), x(6, 6), *weights(1)) for name in ("tanh", "relu")),
        _named("aten.rnn_tanh_cell.default", x(2, 4), x(2, 6), *weights(1)[:2]),
        _named("aten.lstm.input", x(6, 4, 4), [x(1, 6, 6), x(1, 6, 6)], weights(4), *settings, True),
        _named("aten.lstm.input", x(4, 6, 4), [x(1, 6, 6), x(1, 6, 6)], weights(4)[:2], False, *settings[1:], False),
        _named("aten.gru.input", x(6, 4, 4), x(1, 6, 6), weights(3), *settings, True),
        _named("aten.gru.input", x(6, 4, 4), x(2, 6, 6), weights(3) * 2, *settings[:-1], True, True),
        *(
            _named(f"aten.rnn_{name}.input", x(4, 6, 4), x(1, 6, 6), weights(1), *settings, False)
            for name in ("tanh", "relu")
        ),
    ]


def _statistics() -> list[Sample]:
    batch, instance = "aten.batch_norm.default", "aten.instance_norm.default"
    ends = (0.1, 1e-5, True)
    return [
        _named(batch, x(6, 6, 4), x(6), x(6), None, None, True, *ends),
        _named(batch, x(6, 4), x(4), None, None, None, True, *ends),
        _named(batch, x(2, 6, 2, 2), x(6), x(6), const(6), const(6).square(), True, *ends),
        _named(batch, x(6, 4, 6), x(4), x(4), const(4), const(4).square(), False, *ends),
        _named(instance, x(6, 4, 6), x(4), x(4), None, None, True, *ends),
        _named(instance, x(6, 4, 6), None, None, None, None, True, *ends),
        _named(instance, x(6, 4, 6), x(4), x(4), const(4), const(4).square(), True, *ends),
        _named(instance, x(6, 4, 6), x(4), x(4), const(4), const(4).square(), False, *ends),
        _named("aten.prelu.default", x(6, 4, 2), x(4)),
        _named("aten.prelu.default", x(6, 4), x(1)),
        _named("aten.prelu.default", x(6), x(1)),
        _named("aten.unfold.default", x(6, 4, 6), 1, 2, 1),
        _named("aten.unfold.default", x(6, 4), -1, 2, 2),
        _named("aten.im2col.default", x(2, 6, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
        _named("aten.col2im.default", x(2, 24, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
        _named("aten.im2col.default", x(6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    ]


def _norms() -> list[Sample]:
    layer, rms = "aten.layer_norm.default", "aten.rms_norm.default"
    return [
        _named(layer, x(2, 6, 6), [6], x(6), x(6)),
        _named(layer, x(6, 6), [6], x(6)),
        _named(layer, x(6, 6), [6]),
        _named(layer, x(6, 2, 6), [2, 6], x(2, 6), x(2, 6)),
        _named(layer, x(6, 4), [4], None, x(4)),
        _named(layer, const(6, 4), [4], x(4), x(4)),
        _named("aten.group_norm.default", x(6, 6, 4), 2, x(6), x(6)),
        _named("aten.group_norm.default", x(6, 4), 2),
        _named("aten.group_norm.default", x(6, 12, 4), 6, x(12), x(12)),
        _named(rms, x(2, 6, 6), [6], x(6), 1e-5),
        _named(rms, x(6, 6), [6]),
        _named(rms, x(6, 6), [6], const(6)),
        _named("aten._weight_norm.default", x(6, 6), x(6, 1)),
        _named("aten._weight_norm.default", x(6, 4, 6), x(1, 1, 6), 2),
        _named("aten._weight_norm.default", x(6, 6), x(), -1),
    ]


def _reductions() -> list[Sample]:
    samples = []
    for target in ("aten.sum.dim_IntList", "aten.mean.dim"):
        samples += [
            _named(target, x(2, 6, 4), [1]),
            _named(target, x(2, 6, 4), [-1], True),
            _named(target, x(2, 6, 4), [0, 2]),
            _named(target, x(6), [0]),
            _named(target, x(), [0]),
            _named(target, x(6, 4), None),
        ]
    for name in ("amax", "amin"):
        samples += [
            _named(f"aten.{name}.default", x(6, 4), [1]),
            _named(f"aten.{name}.default", x(6, 4), [0], True),
            _named(f"aten.{name}.default", x(6, 4)),
        ]
    for name in ("argmax", "argmin"):
        samples += [
            _named(f"aten.{name}.default", x(6, 4), 1),
            _named(f"aten.{name}.default", x(6, 4), -2, True),
            _named(f"aten.{name}.default", x(6, 4)),
        ]
    for name in ("max", "min"):
        samples += [
            _named(f"aten.{name}.dim", x(6, 4), 1),
            _named(f"aten.{name}.dim", x(6, 4), -2, True),
            _named(f"aten.{name}.default", x(6, 4)),
        ]
    for name in ("any", "all"):
        samples.append(_named(f"aten.{name}.default", mask(6, 4)))
    for name in ("softmax", "log_softmax"):
        samples += [
            _named(f"aten.{name}.int", x(2, 6, 4), -1),
            _named(f"aten.{name}.int", x(2, 6, 4), 1, torch.float64),
            _named(f"aten.{name}.int", x(6), 0),
            _named(f"aten.{name}.int", x(), 0),
            _named(f"aten._{name}.default", x(6, 4), 1, False),
        ]
    for name in ("var", "std"):
        samples += [
            _named(f"aten.{name}.correction", x(6, 6), [1], correction=1, keepdim=True),
            _named(f"aten.{name}.correction", x(6, 6), [0]),
            _named(f"aten.{name}.correction", x(6, 6)),
        ]
    return [
        *samples,
        _named("aten.sum.default", x(6, 4)),
        _named("aten.sum.default", x(6, 4), dtype=torch.float64),
        _named("aten.sum.default", mask(6, 4)),
        _named("aten.sum.default", x()),
        _named("aten.mean.default", x(6, 4)),
        _named("aten.sum.dim_IntList", ids(5, 6, 4), [0]),
        _named("aten.var.dim", x(6, 6), [1], False, True),
        _named("aten.std.dim", x(6, 6), [0]),
        _named("aten.var_mean.dim", x(6, 6), [1]),
        _named("aten.var_mean.correction", x(6, 6), [0], correction=0, keepdim=True),
        _named("aten.linalg_vector_norm.default", x(6, 4), 2, [-1]),
        _named("aten.linalg_vector_norm.default", x(6, 4), 2, [0], True),
        _named("aten.linalg_vector_norm.default", x(6, 4)),
        _named("aten.norm.ScalarOpt_dim", x(6, 4), 2, [1], True),
        _named("aten.glu.default", x(6, 4)),
        _named("aten.glu.default", x(6, 4), 0),
        _named("aten.any.dim", mask(6, 4), 1),
        _named("aten.all.dim", mask(6, 4), 0, True),
        _named("aten.logsumexp.default", x(6, 4), [1]),
        _named("aten.logsumexp.default", x(6, 4), [-2], True),
        _named("aten.prod.dim_int", x(6, 4), 0),
        _named("aten.cumsum.default", x(6, 4), 1),
        _named("aten.cumsum.default", x(6, 4), -2),
        _named("aten.cumsum_.default", x(6, 4), 0),
        _named("aten.cumsum.default", ids(5, 6, 4), 0),
        _named("aten.cumsum.default", x(), 0),
        _named("aten.flip.default", x(6, 4), [1]),
        _named("aten.flip.default", x(2, 6, 4), [0, -1]),
        _named("aten.roll.default", x(6, 4), [1], [1]),
        _named("aten.roll.default", x(6, 4), [1]),
        _named("aten.roll.default", x(2, 6, 4), [1, 2], [0, -1]),
        _named("aten.tril.default", x(2, 6, 4)),
        _named("aten.triu.default", x(6, 6), 1),
        _named("aten.tril.default", mask(2, 6, 4)),
    ]


def _reshapes() -> list[Sample]:
    samples = []
    shapes = (
        ((2, 6, 4), (12, 4)),
        ((12, 4), (2, 6, 4)),
        ((2, 6, 4), (2, 24)),
        ((2, 6, 12), (2, 6, 6, 2)),
        ((2, 6, 12), (2, 6, -1, 2)),
        ((2, 6, 6, 2), (2, 6, 12)),
        ((4, 6), (6, 4)),
        ((6, 4), (6, 1, 4)),
        ((1, 6, 4), (6, 4)),
        ((6, 2, 2, 6), (12, 12)),
        ((2, 3, 4), (6, 2, 2)),
        ((3, 2, 12), (3, 12, 2)),
        ((3, 12, 2), (6, 12)),
        ((6,), (2, 3)),
        ((6, 1), (6,)),
        ((1,), ()),
        ((0, 6), (6, 0)),
    )
    for source, target in shapes:
        for name in ("view", "reshape", "_unsafe_view"):
            samples.append(_named(f"aten.{name}.default", x(*source), list(target)))
    return [
        *samples,
        _named("aten.view.default", ids(5, 6, 4), [24]),
        _named("aten.reshape.default", x(6, 2, 4, 3), [6, 8, 3]),
        _named("aten.reshape.default", x(6, 2, 4, 3), [6, 24]),
        _named("aten.reshape.default", x(4, 6).detach().mT.requires_grad_(), [24]),
        _named("aten.flatten.using_ints", x(2, 6, 4)),
        _named("aten.flatten.using_ints", x(2, 6, 4), 0, -2),
        _named("aten.flatten.using_ints", x(2, 6, 4), 1),
        _named("aten.unflatten.int", x(2, 12, 4), 1, [6, 2]),
        _named("aten.unflatten.int", x(2, 12), -1, [6, -1]),
        _named("aten.unflatten.int", x(12, 4), 0, [2, 6]),
        _named("aten.view_as.default", x(2, 6), const(12)),
        _named("aten.reshape_as.default", x(2, 6), x(12)),
        _named("aten.view_as.default", x(6, 2, 2), x(6, 4)),
        _named("aten.ravel.default", x(6, 4)),
        _named("aten.unsqueeze.default", x(6, 4), 1),
        _named("aten.unsqueeze.default", x(6, 4), -1),
        _named("aten.squeeze.default", x(6, 1, 4)),
        _named("aten.squeeze.default", x(2, 1, 3)),
        _named("aten.squeeze.dim", x(6, 1, 4), 1),
        _named("aten.squeeze.dim", x(2, 3, 4), 0),
        _named("aten.squeeze.dim", x(2, 3, 4), -2),
        _named("aten.squeeze.dims", x(6, 1, 1, 4), [1, 2]),
        _named("aten.squeeze.dims", x(2, 1, 3), [0, -1]),
        _named("aten.squeeze.dims", x(2, 1, 3), [1]),
        _named("aten.squeeze.dim", x(), 0),
    ]


def _views() -> list[Sample]:
    return [
        _named("aten.permute.default", x(2, 6, 4), [2, 0, 1]),
        _named("aten.permute.default", x(2, 6, 4), [0, -1, -2]),
        _named("aten.transpose.int", x(2, 6, 4), 1, 2),
        _named("aten.transpose.int", x(2, 6, 4), -1, 0),
        _named("aten.transpose.int", x(6), 0, 0),
        _named("aten.swapaxes.default", x(2, 6, 4), 0, 1),
        _named("aten.swapdims.default", x(2, 6, 4), -1, 1),
        _named("aten.movedim.int", x(2, 6, 4), 0, -1),
        _named("aten.movedim.intlist", x(2, 6, 4), [0, 2], [1, 0]),
        _named("aten.t.default", x(6)),
        _named("aten.view_as_complex.default", x(6, 4, 2)),
        _named("aten.view_as_real.default", complex_x(6, 4)),
        _named("aten.mul.Tensor", complex_x(6, 4), complex_x(4).detach()),
        _named("aten.t.default", x(6, 4)),
        _named("aten.t.default", x(6)),
        _named("aten.numpy_T.default", x(6, 4)),
        _named("aten.mT.default", x(2, 6, 4)),
        _named("aten.expand.default", x(6, 1), [6, 4]),
        _named("aten.expand.default", x(6, 1), [-1, 6]),
        _named("aten.expand.default", x(4), [6, 4]),
        _named("aten.expand.default", x(2, 1, 4), [2, 6, 4]),
        _named("aten.expand.default", x(6, 2, 1, 4), [6, 2, 4, 4]),
        _named("aten.expand.default", x(2, 1, 3), [6, 2, 4, 3]),
        _named("aten.expand_as.default", x(6, 2, 1, 4), x(6, 2, 4, 4)),
        _named("aten.expand.default", x(), [6]),
        _named("aten.broadcast_to.default", x(6, 1), [2, 6, 6]),
        _named("aten.expand_as.default", x(6, 1), x(6, 4)),
        _named("aten.expand_as.default", x(4), const(6, 4)),
        _named("aten.expand.default", mask(1, 6), [4, 6]),
        _named("aten.slice.Tensor", x(6, 6), 1, 0, 4),
        _named("aten.slice.Tensor", x(6, 6), 1),
        _named("aten.slice.Tensor", x(2, 6, 4), -1, 1, 9223372036854775807, 2),
        _named("aten.slice.Tensor", x(8, 12), 1, 0, 9223372036854775807, 2),
        _named("aten.slice.Tensor", x(12, 3), 0, 1, 12, 3),
        _named("aten.slice.Tensor", x(12, 3), 0, 2, 9, 3),
        _named("aten.slice.Tensor", x(12, 3), 0, 4, 12, 3),
        _named("aten.slice.Tensor", x(9), 0, 0, 9, 2),
        _named("aten.slice.Tensor", x(6, 4), 0, 0, 9223372036854775807),
        _named("aten.slice.Tensor", x(6, 4), 0, 0, 6),
        _named("aten.slice.Tensor", x(6, 4), 0, -6, 6),
        _named("aten.slice.Tensor", x(6, 4), 0, None, -3),
        _named("aten.slice.Tensor", x(6, 4), 0, -100, 100),
        _named("aten.slice.Tensor", x(6, 4), 0, 0, 0),
        _named("aten.slice.Tensor", x(6, 4), 0, 6, 9),
        _named("aten.slice.Tensor", x(6, 4), 0, 5, 2),
        _named("aten.slice.Tensor", x(6, 4), 0, 0, 6, 100),
        _named("aten.slice.Tensor", x(6, 4), 0, 1, -1, 2),
        _named("aten.slice.Tensor", x(6, 4), -1, 0, 100),
        _named("aten.narrow.default", x(6, 4), 0, 1, 2),
        _named("aten.narrow.default", x(6, 4), 0, 0, 6),
        _named("aten.narrow.default", x(6, 12), -1, 0, 12),
        _named("aten.narrow.default", x(6, 4), 0, -6, 6),
        _named("aten.narrow.default", x(6, 4), 0, 3, 0),
        _named("aten.index_select.default", x(6, 4), 1, ids(4, 6)),
        _named("aten.split.Tensor", x(6, 4), 2, 1),
        _named("aten.split.Tensor", x(6, 4), 4),
        _named("aten.split.sizes", x(6, 6), [2, 4], -1),
        _named("aten.split_with_sizes.default", x(6, 6), [2, 4], 1),
        _named("aten.chunk.default", x(6, 6), 2, -1),
        _named("aten.chunk.default", x(6, 6), 3),
        _named("aten.tensor_split.sections", x(6, 4), 2, 1),
        _named("aten.tensor_split.sections", x(6, 4), 3),
        _named("aten.select.int", x(2, 6, 4), 1, 0),
        _named("aten.select.int", x(2, 6, 4), -1, -1),
        _named("aten.unbind.int", x(2, 6, 4)),
        _named("aten.unbind.int", x(2, 6, 3), -1),
        _named("aten.cat.default", [x(6, 4), x(6, 2)], 1),
        _named("aten.cat.default", [x(6, 4), const(6, 4)], -1),
        _named("aten.cat.default", [x(2, 4), x(6, 4)]),
        _named("aten.cat.default", [x(0), x(6, 4)]),
        _named("aten.cat.default", [x(6, 4)], -1),
        _named("aten.cat.default", [ids(5, 6, 4), ids(5, 6, 4)], -1),
        _named("aten.concat.default", [x(6, 4), x(6, 4)]),
        _named("aten.concatenate.default", [x(6, 4), x(6, 4)], -1),
        _named("aten.stack.default", [x(6, 4), x(6, 4)]),
        _named("aten.stack.default", [x(6, 4), x(6, 4)], -1),
        _named("aten.constant_pad_nd.default", x(6, 4), [1, 1]),
        _named("aten.constant_pad_nd.default", x(2, 6, 4), [0, 0, 2, -1], 1.0),
        _named("aten.pad.default", x(6, 4), [1, 2]),
        _named("aten.pad.default", x(6, 4), [0, 0, 1, 2]),
        _named("aten.pad.default", x(6, 4), [1, 2], "constant", 3.0),
        _named("aten.pad.default", x(2, 6, 4), [2, 1], "reflect"),
    ]


SAMPLES = (
    *_unary(),
    *_casts(),
    *_binary(),
    *_products(),
    *_attention(),
    *_lookups(),
    *_picks(),
    *_creations(),
    *_convolutions(),
    *_losses(),
    *_more_picks(),
    *_solves(),
    *_recurrent(),
    *_statistics(),
    *_norms(),
    *_reductions(),
    *_reshapes(),
    *_views(),
)
