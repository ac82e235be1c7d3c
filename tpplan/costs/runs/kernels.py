"""Logs the kernels that operators launch below autograd, and prices each on a machine.

A kernel is a matmul (M, N, K), an attention (FLOP), or memory-bound (bytes read plus written). Views launch none.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod
from typing import Any

import torch

from tpplan.core.units import DTYPE_BYTES
from tpplan.machine.profile import AttentionSizes, Estimate, HardwareProfile
from tpplan.machine.tables import ALIGNED_BYTES
from tpplan.plan.plan import WorkKind
from tpplan.torch_internals.operators import gives_views
from tpplan.torch_internals.recording import TorchDispatchMode
from tpplan.trace.hooks.live_storages import Storages


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """A batch of products (m, k) @ (k, n). A grouped product counts as one product of all its rows.

    `leading` are the leading dimensions of both operands and of the result, as BLAS calls them: elements from where a
    row begins to where the next one does (a column, in a transposed matrix); () where they are not known.
    `further_bytes` are those of a grouped product's matrices beside the first, which it reads, or writes as gradients.
    """

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    leading: tuple[int, ...] = ()
    further_bytes: int = 0

    @property
    def alignment(self) -> int:
        """The largest power of two up to ALIGNED_BYTES, in bytes, that all rows begin at multiples of."""
        return gcd(ALIGNED_BYTES, *(DTYPE_BYTES[self.dtype] * size for size in self.leading))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A fused attention kernel; `flop` are the executed FLOP: half of the full product's where it is causal."""

    flop: float
    dtype: str
    is_backward: bool
    sizes: AttentionSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """A kernel whose time depends on the bytes that it reads and writes."""

    num_bytes: int


Kernel = Matmul | Attention | MemoryBound
#: the work that a kernel does
WORK = {Matmul: WorkKind.PRODUCT, Attention: WorkKind.ATTENTION, MemoryBound: WorkKind.REST}


def flop_of(kernels: Iterable[Kernel]) -> float:
    """The FLOP of products (convolutions among them) and attention; elementwise work counts as none."""
    found = 0.0
    for kernel in kernels:
        match kernel:
            case Matmul(m=m, n=n, k=k, batch=batch):
                found += 2.0 * m * n * k * batch
            case Attention(flop=flop):
                found += flop
            case MemoryBound():
                pass
    return found


_VIEW_LIKE = frozenset({"aten.empty_like.default", "aten.new_empty.default", "aten.empty.memory_format",
                        "aten.new_empty_strided.default", "aten.empty_strided.default", "aten.detach.default",
                        "aten._unsafe_view.default", "aten.lift_fresh.default"})  # fmt: skip

#: products of rows with their group's matrix
_GROUPED = frozenset({"aten._grouped_mm.default", "tpplan.grouped_product.default"})

#: ops that read only as many bytes of their first operand as they return
_LOOKUPS = frozenset({"aten.embedding.default", "aten.index_select.default", "aten.gather.default",
                      "aten.index.Tensor"})  # fmt: skip

#: ops that take the shape or the dtype of an operand, and read none of its elements
_SHAPED_LIKE = frozenset({"aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default",
                          "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default",
                          "aten.rand_like.default", "aten.randn_like.default"})  # fmt: skip

#: FLOP of backward over forward: flash attention's backward recomputes the scores, 5 products against 2 [Dao 2023,
#: section 3.1]
ATTENTION_BACKWARD_PRODUCTS = 2.5


def bytes_of(tensors: Iterator[torch.Tensor]) -> int:
    """Returns the bytes of all elements of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples and lists, left to right."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_in(item)


class KernelLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs the kernels of each operator that runs below autograd, and in `made` the storages that operators make.

    `held` are the bytes that are held after each tensor that is made.
    """

    def __init__(self, causal: bool, operands: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.held: list[int] = []
        self.causal = causal
        self.made = Storages(without=operands)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_view(func):
            self.kernels.extend(self._kernels(str(func), args, result))
        for tensor in tensors_in(result):
            self.made.add(tensor)
            self.held.append(self.made.live_bytes)
        return result

    def restart(self) -> None:
        """Clears the kernels and the bytes held; living storages still count."""
        self.kernels, self.held = [], []

    def _kernels(self, name: str, args: Any, result: Any) -> Iterator[Kernel]:
        match name:
            case "aten.convolution.default":
                yield _convolution(args[0], args[1], result, transposed=args[6], groups=args[8])
            case "aten.convolution_backward.default":
                product = _convolution(args[1], args[2], args[0], transposed=args[7], groups=args[9])
                # The gradients of input and weight are the forward's product with two of the sizes exchanged.
                if args[10][0]:
                    yield replace(product, n=product.k, k=product.n)
                if args[10][1]:
                    yield replace(product, m=product.k, k=product.m)
            case _:
                yield self._kernel(name, args, result)

    def _kernel(self, name: str, args: Any, result: Any) -> Kernel:
        if name in ("aten.mm.default", "aten.bmm.default"):
            return _product(args[0], args[1], result)
        if name in ("aten.addmm.default", "aten.baddbmm.default"):
            return _product(args[1], args[2], result)
        if name in _GROUPED:
            return _grouped_product(args[0], args[1], result)
        if name in _LOOKUPS:
            indices = [tensor for tensor in tensors_in(args) if not tensor.is_floating_point()]
            return MemoryBound(num_bytes=2 * bytes_of(tensors_in(result)) + bytes_of(iter(indices)))
        if name in _SHAPED_LIKE:
            return MemoryBound(num_bytes=bytes_of(tensors_in(result)))
        if name == "aten.scatter_add_.default":
            return MemoryBound(num_bytes=bytes_of(iter(args[2:3])) + 3 * bytes_of(iter(args[3:4])))
        if "_scaled_dot_product_" in name or "_flash_attention_" in name:
            return self.attention(name, args)
        return MemoryBound(num_bytes=bytes_of(tensors_in(args)) + bytes_of(tensors_in(result)))

    def attention(self, name: str, args: Any) -> Attention:
        """Returns the kernel of an attention operator, forward or backward by its name."""
        is_backward = "backward" in name
        query, key, value = args[1:4] if is_backward else args[:3]
        products = ATTENTION_BACKWARD_PRODUCTS if is_backward else 1.0
        width = query.shape[-1] + value.shape[-1]
        flop = 2.0 * prod(query.shape[:-1]) * key.shape[-2] * width * products
        sizes = AttentionSizes(
            batch_heads=prod(query.shape[:-2]),
            queries=query.shape[-2],
            keys=key.shape[-2],
            head_dim=width / 2,
            causal=self.causal,
        )
        flop = flop / 2 if self.causal else flop
        return Attention(flop=flop, dtype=dtype_name(query.dtype), is_backward=is_backward, sizes=sizes)


@cache
def is_view(func: Any) -> bool:
    """True for an operator that launches no kernel: a view, or uninitialized memory."""
    return str(func) in _VIEW_LIKE or gives_views(func)


def _product(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> Matmul:
    batch = left.shape[0] if left.dim() == 3 else 1
    leading = tuple(map(_leading_dimension, (left, right, result)))
    m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
    return _matmul(m=m, n=n, k=k, batch=batch, dtype=left.dtype, leading=leading)


def _matmul(*, m: int, n: int, k: int, batch: int, dtype: torch.dtype, leading: tuple[int, ...] = ()) -> Matmul:
    """Returns a Matmul; one of complex numbers counts as four real ones, with twice as much between rows."""
    if dtype.is_complex:
        batch, dtype, leading = 4 * batch, dtype.to_real(), tuple(2 * size for size in leading)
    return Matmul(m=m, n=n, k=k, batch=batch, dtype=dtype_name(dtype), leading=leading)


def _leading_dimension(matrix: torch.Tensor) -> int:
    """Returns the elements between rows of a matrix [.., rows, columns], or between columns of a transposed one. What
    is neither is copied by torch before it is multiplied."""
    (rows, columns), (of_row, of_column) = matrix.shape[-2:], matrix.stride()[-2:]
    if of_column == 1 and of_row >= columns:
        return of_row
    if of_row == 1 and of_column >= rows:
        return of_column
    return columns


def _grouped_product(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> Matmul:
    """Returns a grouped product: rows by matrices [N, K] x [E, K, J], or the matrices' gradients [K, N] x [N, J]."""
    if left.dim() == right.dim() == 3:
        return _product(left, right, result)
    product = replace(_product(left, right, result), batch=1)
    first, *further = next(tensor for tensor in (left, right, result) if tensor.dim() == 3)
    return replace(product, further_bytes=len(further) * bytes_of(iter([first])))


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, *, transposed: bool, groups: int
) -> Matmul:
    """Returns a convolution as the matrix product (positions, channels in * window) @ (channels in * window, out).

    x [N, Ci, *sizes], weight [Co, Ci / groups, *window] ([Ci, Co / groups, *window] transposed). The batch is groups.
    """
    window = prod(weight.shape[2:])
    if transposed:
        sizes = (x.shape[0] * prod(x.shape[2:]), weight.shape[1] * window, weight.shape[0] // groups)
    else:
        sizes = (result.shape[0] * prod(result.shape[2:]), weight.shape[0] // groups, weight.shape[1] * window)
    m, n, k = map(int, sizes)
    return _matmul(m=m, n=n, k=k, batch=groups, dtype=x.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def kernels_of(work: Callable[[], object]) -> int:
    """Returns how many kernels a function launches, counted as costs count them."""
    log = KernelLog(False, ())
    with log:
        work()
    return len(log.kernels)


def _stand_in(dtype: str, covered: Iterable[str]) -> str:
    """Returns the dtype if it is covered, else the narrowest covered dtype that is not narrower, else the widest."""
    known = sorted(covered, key=lambda name: DTYPE_BYTES[name])
    if dtype in known or not known:
        return dtype
    return next((name for name in known if DTYPE_BYTES[name] >= DTYPE_BYTES[dtype]), known[-1])


def _as_if(found: Estimate, dtype: str, stand_in: str) -> Estimate:
    """Returns the time of a stand-in dtype's kernel, scaled by width where `dtype` is wider, with an error of 100 %."""
    if dtype == stand_in:
        return found
    seconds = found.seconds * max(1.0, DTYPE_BYTES[dtype] / DTYPE_BYTES[stand_in])
    return Estimate(seconds=seconds, error_s=seconds, extrapolated=True)


def _moving(profile: HardwareProfile, num_bytes: int) -> Estimate:
    """Returns the time that bytes take within a kernel, which is launched for more than them."""
    seconds = num_bytes / profile.bandwidth.hbm_bytes_per_s
    return Estimate(seconds=seconds, error_s=seconds * profile.bandwidth.relative_error)


def further_time(profile: HardwareProfile, kernel: Matmul) -> float:
    """Returns the seconds that a matmul takes longer than an aligned one of its sizes; 0 where it is aligned."""
    return kernel_time(profile, kernel).seconds - kernel_time(profile, replace(kernel, leading=())).seconds


def kernel_time(profile: HardwareProfile, kernel: Kernel) -> Estimate:
    """Returns the seconds of one kernel in training, with the time to issue it where the device is a CPU.

    A grouped product takes the time of one product of all its rows and the time to move its other matrices, one after
    the other: so it was measured to within a tenth (profiles/README.md).
    A dtype that the profile has no table for is priced by another dtype's table. Raises ProfileError where the profile
    has no table of this kind of kernel at all.
    """
    match kernel:
        case Matmul(m=m, n=n, k=k, batch=batch, dtype=dtype):
            stand_in = _stand_in(dtype, (table.dtype for table in profile.matmuls))
            found = profile.matmul(m=m, n=n, k=k, batch=batch, dtype=stand_in, alignment=kernel.alignment)
            time = profile.matmul_slowdown * _as_if(found, dtype, stand_in) + _moving(profile, kernel.further_bytes)
        case Attention(flop=flop, dtype=dtype, is_backward=is_backward, sizes=sizes):
            stand_in = _stand_in(dtype, (rate.dtype for rate in profile.attention_rates))
            found = profile.attention(flop=flop, dtype=stand_in, backward=is_backward, sizes=sizes)
            time = _as_if(found, dtype, stand_in)
        case MemoryBound(num_bytes=num_bytes):
            time = profile.memory_bound(num_bytes=num_bytes)
    return time + profile.issuing
