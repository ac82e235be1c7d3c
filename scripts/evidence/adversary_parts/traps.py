"""Modules written so that what a trace sees is not what ranks run, for scripts/evidence/adversary.py --traps.

Each takes x [B, T, D] and ids [B, T] and returns a loss. What is planned must equal one process, or be refused.
"""

import contextlib
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BATCH, LENGTH, DIM, HIDDEN, CLASSES, LAYERS = 4, 8, 32, 64, 48, 3

#: the process in which this was read first: forks are others
PLANNER = os.getpid()
TRAPS: dict[str, Callable[[], nn.Module]] = {}


def trap(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def registered(cls: type[nn.Module]) -> type[nn.Module]:
        TRAPS[name] = cls
        return cls

    return registered


class Layer(nn.Module):
    """x + down(f(up(x))): split by columns and by rows, where nothing forbids it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def between(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Stack(nn.Module):
    """Like layers, and a mean of squares."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(LAYERS))

    def stacked(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.stacked(x).square().mean()


def of(layer: type[Layer]) -> type[Stack]:
    return type(f"{layer.__name__}s", (Stack,), {"layer": layer})


# ---- 1: layers that are alike for all that vars(module) says


class Scale:
    """No tensor and no module: state of Python."""

    def __init__(self) -> None:
        self.value = 0.5

    def next(self) -> float:
        self.value *= 2
        return self.value


class WithArgument(Layer):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scale = args[0] if args else kwargs["scale"]
        return x + scale.next() * self.down(F.gelu(self.up(x)))


@trap("an object as argument")
class ObjectArgument(Stack):
    layer = WithArgument

    def stacked(self, x: Tensor) -> Tensor:
        scale = Scale()
        for layer in self.layers:
            x = layer(x, scale)
        return x


@trap("an object as keyword")
class ObjectKeyword(Stack):
    layer = WithArgument

    def stacked(self, x: Tensor) -> Tensor:
        scale = Scale()
        for layer in self.layers:
            x = layer(x, scale=scale)
        return x


class FromIterator(Layer):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x + next(args[0]) * self.down(F.gelu(self.up(x)))


@trap("an iterator as argument")
class IteratorArgument(Stack):
    layer = FromIterator

    def stacked(self, x: Tensor) -> Tensor:
        rates = iter([0.5, 1.0, 2.0, 4.0])
        for layer in self.layers:
            x = layer(x, rates)
        return x


class HoldsObject(Layer):
    held: Any = None

    def between(self, h: Tensor) -> Tensor:
        return F.gelu(h) * self.held.next()


@trap("an object that layers hold")
class HeldObject(Stack):
    layer = HoldsObject

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        scale = Scale()
        for layer in self.layers:
            layer.held = scale
        return super().forward(x, ids)


class Counting(nn.Module):
    """A module that layers hold, and which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (1.0 if self.calls % 2 else 3.0)


class HoldsModule(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.common: nn.Module = nn.Identity()

    def between(self, h: Tensor) -> Tensor:
        return self.common(F.gelu(h))


@trap("a module that layers hold")
class HeldModule(Stack):
    layer = HoldsModule

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        common = Counting()
        for layer in self.layers:
            layer.common = common
        return super().forward(x, ids)


@trap("a module of its own that counts")
class HeldFromStart(Stack):
    layer = HoldsModule

    def __init__(self) -> None:
        super().__init__()
        common = Counting()
        for layer in self.layers:
            layer.common = common

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.layers[0].common.calls = 0
        return super().forward(x, ids)


RATES = [0.5]


class FromGlobal(Layer):
    def between(self, h: Tensor) -> Tensor:
        RATES.append(RATES[-1] * 2)
        return F.gelu(h) * RATES[-1]


@trap("a list of the module's file")
class GlobalList(Stack):
    layer = FromGlobal

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        RATES[:] = [0.5]
        return super().forward(x, ids)


BY_ID: dict[int, float] = {}


class ById(Layer):
    def between(self, h: Tensor) -> Tensor:
        return F.gelu(h) * BY_ID[id(self)]


@trap("a table by id(self)")
class TableById(Stack):
    layer = ById

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        BY_ID.update({id(layer): 0.5 * 2**index for index, layer in enumerate(self.layers)})
        return super().forward(x, ids)


class WithClosure(Layer):
    function: Callable[[Tensor], Tensor] = staticmethod(F.gelu)

    def between(self, h: Tensor) -> Tensor:
        return self.function(h)


def scaled_by(index: int) -> Callable[[Tensor], Tensor]:
    return lambda h: F.gelu(h) * (0.5 * 2**index)


@trap("a closure in each layer")
class Closures(Stack):
    layer = WithClosure

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.function = scaled_by(index)


@trap("a closure over a counter")
class CountingClosure(Stack):
    layer = WithClosure

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        calls = [0]

        def counted(h: Tensor) -> Tensor:
            calls[0] += 1
            return F.gelu(h) * calls[0]

        for layer in self.layers:
            layer.function = counted
        return super().forward(x, ids)


class OnClass(Layer):
    calls = 0

    def between(self, h: Tensor) -> Tensor:
        OnClass.calls += 1
        return F.gelu(h) * OnClass.calls


@trap("a counter on the class")
class ClassCounter(Stack):
    layer = OnClass

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        OnClass.calls = 0
        return super().forward(x, ids)


class KnowsOwner(Layer):
    owner: Any = None

    def between(self, h: Tensor) -> Tensor:
        return F.gelu(h) * (1 + [*self.owner[0].layers].index(self))


@trap("its place in the model around it")
class KnownOwner(Stack):
    layer = KnowsOwner

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.owner = [self]


DEPTH: list[int] = [0]


class InContext(Layer):
    def between(self, h: Tensor) -> Tensor:
        return F.gelu(h) * (1 + DEPTH[0])


@contextlib.contextmanager
def at_depth(depth: int) -> Iterator[None]:
    DEPTH[0] = depth
    yield
    DEPTH[0] = 0


@trap("a context around each layer")
class Contexts(Stack):
    layer = InContext

    def stacked(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            with at_depth(index):
                x = layer(x)
        return x


class FromGenerator(Layer):
    generator: Any = None

    def between(self, h: Tensor) -> Tensor:
        return F.gelu(h) * float(self.generator.uniform())


@trap("random numbers of Python")
class PythonRandom(Stack):
    layer = FromGenerator

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        import random

        common = random.Random(0)
        for layer in self.layers:
            layer.generator = _Uniform(common)
        return super().forward(x, ids)


class _Uniform:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def uniform(self) -> float:
        return 0.5 + float(self.rng.random())


# ---- 2: code that takes another path on ranks


def asks(name: str, question: Callable[[Tensor], bool]) -> None:
    """A trap whose layers answer a question in two ways."""

    class Asking(Layer):
        def between(self, h: Tensor) -> Tensor:
            return F.gelu(h) if question(h) else h.softmax(-1)

    TRAPS[name] = of(Asking)


def _fails_on_meta(h: Tensor) -> bool:
    try:
        h.detach().flatten()[0].item()
    except Exception:
        return True
    return False


def _has_data(h: Tensor) -> bool:
    try:
        h.detach().numpy()
    except Exception:
        return False
    return True


def _succeeds(question: Callable[[Tensor], object]) -> Callable[[Tensor], bool]:
    """True where the question is answered, whatever the answer."""

    def asked(h: Tensor) -> bool:
        try:
            question(h)
        except Exception:
            return False
        return True

    return asked


def _is_fake(h: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(h, FakeTensor)


asks("x.device.type", lambda h: h.device.type != "cpu")
asks("str(x.device)", lambda h: str(h.device) == "meta")
asks("x.is_cuda", lambda h: not h.is_cuda)
asks("x.is_meta", lambda h: h.is_meta)
asks("x.is_cpu", lambda h: not h.is_cpu)
asks("dist.is_initialized()", lambda h: not dist.is_initialized())
asks("dist.get_world_size()", lambda h: not (dist.is_initialized() and dist.get_world_size() > 1))
asks("torch.cuda.is_available()", lambda h: not torch.cuda.is_available())
asks("what fails on meta, caught", _fails_on_meta)
asks("numpy of it, caught", _has_data)
asks("type(x)", lambda h: type(h) is Tensor)
asks("x.data_ptr()", lambda h: h.data_ptr() == 0 if not h.is_meta else True)
asks("x.storage().nbytes()", lambda h: h.untyped_storage().nbytes() > 4 * BATCH * LENGTH * HIDDEN // 2)
asks("x.stride()", lambda h: h.stride(1) == HIDDEN)
asks("x.numel()", lambda h: h.numel() == BATCH * LENGTH * HIDDEN)
asks("len(x[0, 0])", lambda h: len(h[0, 0]) == HIDDEN)
asks("an environment variable of ranks", lambda h: "GLOO_SOCKET_IFNAME" not in os.environ)
asks("x.is_contiguous() and width", lambda h: h.is_contiguous() and h.size(-1) > HIDDEN // 2)
asks("torch.is_grad_enabled()", lambda h: torch.is_grad_enabled())
asks("another batch", lambda h: h.shape[0] == BATCH)
asks("x.untyped_storage().data_ptr()", lambda h: h.untyped_storage().data_ptr() == 0)
asks("x.storage().data_ptr(), caught", _succeeds(lambda h: 1 / h.storage().data_ptr()))
asks("x._cdata", lambda h: h._cdata % 3 == 0)
asks("x.__dlpack_device__()", lambda h: h.__dlpack_device__()[0] != 1)
asks("torch.from_dlpack(x), caught", lambda h: not _succeeds(torch.from_dlpack)(h.detach()))
asks("x.is_set_to(x), caught", lambda h: not _succeeds(lambda h: h.is_set_to(h))(h))
asks("x.is_pinned()", lambda h: h.is_pinned())
asks("bytes of its storage, caught", lambda h: not _succeeds(lambda h: bytes(h.untyped_storage()))(h))
asks("numpy.asarray(x), caught", lambda h: not _succeeds(lambda h: np.asarray(h.detach()))(h))
asks("a copy on the CPU, caught", lambda h: not _succeeds(lambda h: h.detach().cpu().numpy())(h))
asks("x.__cuda_array_interface__, caught", _succeeds(lambda h: h.__cuda_array_interface__))
asks("repr(x)", lambda h: "..." in repr(h.detach()[0, 0, :2]))
asks("complex(x), caught", lambda h: not _succeeds(lambda h: complex(h.flatten()[0]))(h))
asks("x.nonzero(), caught", lambda h: not _succeeds(lambda h: h.nonzero().tolist())(h))
asks("isinstance(x, FakeTensor)", _is_fake)
asks("isinstance(x, DTensor)", lambda h: isinstance(h, DTensor))
asks("torch.compiler.is_compiling()", lambda h: torch.compiler.is_compiling())
asks("torch.jit.is_tracing()", lambda h: torch.jit.is_tracing())
asks("torch.is_inference_mode_enabled()", lambda h: torch.is_inference_mode_enabled())
asks("torch.get_default_device()", lambda h: torch.get_default_device().type == "meta")
asks("torch.get_default_dtype()", lambda h: torch.get_default_dtype() is torch.float32)
asks("torch.cuda.device_count()", lambda h: torch.cuda.device_count() > 0)
asks("torch.cuda.device_count(), caught", lambda h: not _succeeds(lambda h: 1 / torch.cuda.device_count())(h))
asks("torch.cuda.get_device_name(), caught", lambda h: not _succeeds(lambda h: torch.cuda.get_device_name())(h))
asks("torch.cuda.current_stream(), caught", _succeeds(lambda h: torch.cuda.current_stream()))
asks("torch.accelerator.is_available()", lambda h: not torch.accelerator.is_available())
asks("torch.accelerator.current_accelerator()", lambda h: torch.accelerator.current_accelerator() is None)
asks("dist.get_rank(), caught", _succeeds(lambda h: dist.get_rank()))
asks("dist.get_rank() of the rank", lambda h: _succeeds(lambda h: 1 / dist.get_rank())(h))
asks("dist.get_backend(), caught", _succeeds(lambda h: dist.get_backend()))
asks("dist.group.WORLD", lambda h: dist.group.WORLD is None)
asks("the world size of the environment", lambda h: int(os.environ.get("WORLD_SIZE", "1")) == 1)
asks("the process", lambda h: os.getpid() == PLANNER)
asks("the process's name", lambda h: multiprocessing.current_process().daemon)
asks("the machine", lambda h: platform.system() == "Linux")
asks("modules that are loaded", lambda h: "tpplan.trace.fx_to_graph" in sys.modules)
asks("deterministic algorithms", lambda h: torch.are_deterministic_algorithms_enabled())
asks("gradients of the weights", lambda h: h.grad_fn is None)


def takes(name: str, way: Callable[[Layer, Tensor], Tensor]) -> None:
    """A trap whose layers compute something in a way of their own."""

    class Taking(Layer):
        def between(self, h: Tensor) -> Tensor:
            return way(self, h)

    TRAPS[name] = of(Taking)


def _is_on_ranks() -> bool:
    return "GLOO_SOCKET_IFNAME" in os.environ


def _without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        return F.gelu(h)


takes("another dim on ranks", lambda _, h: h.softmax(-1 if _is_on_ranks() else 1))
takes("another dim by name on ranks", lambda _, h: h.cumsum(dim=2 if _is_on_ranks() else 0))
takes("turned on ranks", lambda _, h: F.gelu(h) * (h.mT if _is_on_ranks() else h.sin()).sum(1).mean())
takes("cast on ranks", lambda _, h: F.gelu(h.type(torch.float64) if _is_on_ranks() else h).to(h.dtype))
takes("another view on ranks", lambda _, h: h.view((BATCH, -1) if _is_on_ranks() else (-1, h.shape[-1])).view_as(h))
takes("an approximation on ranks", lambda _, h: F.gelu(h, approximate="tanh" if _is_on_ranks() else "none"))
takes("no gradient on ranks", lambda _, h: _without_gradient(h) if _is_on_ranks() else F.gelu(h))
takes("a scale on ranks", lambda _, h: F.gelu(h) * (2.0 if _is_on_ranks() else 1.0))


@trap("the layers' order on ranks")
class OtherOrder(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Softmax(-1), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.stacked(x)
        y = self.first(self.second(y)) if _is_on_ranks() else self.second(self.first(y))
        return y.square().mean()


@trap("a layer less on ranks")
class LayerLess(Stack):
    def stacked(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:] if _is_on_ranks() else self.layers:
            x = layer(x)
        return x


@trap("training for a while")
class TrainingAtFirst(Stack):
    """Training at first, and then no more."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.stacked(x)
        loss = (y if self.training else y.softmax(-1)).square().mean()
        self.training = False
        return loss


@trap("on ranks, beside a backward of its own")
class BesideOwnBackward(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            h = _Scaled.apply(h)
            return h.softmax(-1) if _is_on_ranks() else F.gelu(h)


@trap("on ranks, beside a choice of torch.cond")
class BesideChoice(Stack):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.stacked(x)
        y = y.cumsum(1) if _is_on_ranks() else y
        chosen = torch.where(ids.sum() > 0, y.square().mean(), y.abs().mean())
        return chosen * (2.0 if not _is_on_ranks() else 1.0)


@trap("on ranks, beside layers that run whole")
class BesideWhole(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            return F.gelu(h) * (1.0 if _has_data(h) else 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Sequential(Layer(), Layer())
        for layer in self.after:
            layer.between = lambda h: h.softmax(-1) if _is_on_ranks() else F.gelu(h)

    def stacked(self, x: Tensor) -> Tensor:
        return self.after(super().stacked(x))


@trap("the weight's device")
class WeightsDevice(Stack):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.stacked(x)
        return (y if self.layers[0].up.weight.device.type == "meta" else y.softmax(-1)).square().mean()


@trap("the weight's shape")
class WeightsShape(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            return F.gelu(h) / self.up.weight.shape[0] ** 0.5 * self.up.out_features**0.25


@trap("the second call")
class SecondCall(Stack):
    calls = 0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        y = self.stacked(x)
        return (y if self.calls < 2 else y.cumsum(-1)).square().mean()


# ---- 3 and 4: lengths, and tables


def cut_by(name: str, rows: int, cut: Callable[[Tensor, int], Tensor]) -> None:
    """A trap whose table of rows is cut by the length."""

    class Table(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(rows, DIM))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.stacked(x + cut(self.table, x.shape[1])).square().mean()

    TRAPS[name] = Table


cut_by("a table cut at the length", 24, lambda table, n: table[:n])
cut_by("a table of just the length", LENGTH, lambda table, n: table[:n])
cut_by("a whole slice", LENGTH, lambda table, n: table[:])
cut_by("an empty slice", 24, lambda table, n: torch.cat([table[:0], table[:n]]))
cut_by("a slice by steps", 2 * LENGTH, lambda table, n: table[: 2 * n : 2])
cut_by("all by steps of one", LENGTH, lambda table, n: table[::1])
cut_by("the table's end", 24, lambda table, n: table[-n:])
cut_by("beyond the table", LENGTH, lambda table, n: table[: n + 100])
cut_by("two halves", 2 * LENGTH, lambda table, n: table[:n] + table[n : 2 * n])
cut_by("narrow to all", LENGTH, lambda table, n: table.narrow(0, 0, n))
cut_by("index_select", 24, lambda table, n: table.index_select(0, torch.arange(n, device=table.device)))
cut_by("columns cut at the length", 24, lambda table, n: table[:n, :].narrow(1, 0, DIM))
cut_by("interpolated", 4, lambda table, n: F.interpolate(table.t()[None], size=n, mode="linear")[0].t())


@trap("lengths of the width")
class LengthLikeWidth(Stack):
    """A slice of the width at a number that is the length."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.stacked(x)
        return torch.cat([y[..., : x.shape[1]].sin(), y[..., x.shape[1] :]], dim=-1).square().mean()


def repeated_by(name: str, repeat: Callable[[Tensor, int], Tensor]) -> None:
    """A trap in which rows are repeated as often as a layer has heads, and as often as it has every STRIDE-th token:
    the same call, in which at a length of STRIDE * HEADS both numbers are equal."""

    class Repeats(Layer):
        def between(self, h: Tensor) -> Tensor:
            batch, length, _ = h.shape
            row = torch.ones(batch, HIDDEN // HEADS, device=h.device)
            scales, others = repeat(row, HEADS), repeat(row, h[:, ::STRIDE].shape[1])
            heads = h.view(batch, length, HEADS, HIDDEN // HEADS) * (1 + scales[:, None])
            return (heads * (1 + others.sum((1, 2))[:, None, None, None])).reshape(batch, length, HIDDEN)

    TRAPS[name] = of(Repeats)


#: as many tokens as there are heads are left of twice the planned length
HEADS, STRIDE = 4, 2 * LENGTH // 4
repeated_by("heads and tokens in expand", lambda row, n: row[:, None].expand(row.shape[0], n, row.shape[1]))
repeated_by(
    "heads and tokens in zeros",
    lambda row, n: torch.zeros(row.shape[0], n, row.shape[1], device=row.device) + row[:, None],
)
repeated_by("heads and tokens in new_zeros", lambda row, n: row.new_zeros(row.shape[0], n, row.shape[1]) + row[:, None])
repeated_by("heads and tokens in repeat_interleave", lambda row, n: row[:, None].repeat_interleave(n, 1))
repeated_by("heads and tokens in broadcast_to", lambda row, n: row[:, None].broadcast_to(row.shape[0], n, row.shape[1]))


@trap("divided by the length")
class ByLength(Stack):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return (self.stacked(x).square().sum(1) / x.shape[1]).mean() * torch.tensor(x.shape[1] ** 0.5)


# ---- 5: what is left behind


class LeavesLoss(Layer):
    aux_loss: Any = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        h = self.between(self.up(x))
        self.aux_loss = h.square().mean() + h.amax(-1).mean()
        return x + self.down(h)


@trap("a loss left on layers, added by the model")
class AddedInside(Stack):
    layer = LeavesLoss

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        loss = super().forward(x, ids)
        return loss + sum(layer.aux_loss for layer in self.layers)


@trap("a tensor kept from the call before")
class KeptBefore(Stack):
    kept: Tensor | None = None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.stacked(x)
        before, self.kept = self.kept, y.detach().mean()
        return y.square().mean() * (1 if before is None else 1 + before.abs())


@trap("a buffer that is written")
class Written(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.stacked(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
        return (y - self.mean).square().mean()


@trap("a buffer of the layers that is written")
class LayerWrites(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("peak", torch.zeros(HIDDEN))

        def between(self, h: Tensor) -> Tensor:
            self.peak = torch.maximum(self.peak, h.detach().abs().amax((0, 1)))
            return F.gelu(h) / (1 + self.peak)


# ---- 6: values that no op of torch shows; lists written to at once


@trap("the mean by .data")
class MeanOfData(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            return F.gelu(h) - h.data.mean(-1, keepdim=True)


@trap("weights normalized by .data")
class NormOfData(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            weight = self.down.weight
            return F.gelu(h) * (weight / weight.data.norm(dim=1, keepdim=True)).sum(0)


@trap("a subclass of a tensor")
class AsSubclass(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            return F.gelu(h) - h.detach().as_subclass(Tensor).amax(-1, keepdim=True)


@trap("lists of tensors are written to at once")
class ForEach(Stack):
    class layer(Layer):  # noqa: N801 - a class attribute by this name
        def between(self, h: Tensor) -> Tensor:
            parts = [part.clone() for part in F.gelu(h).chunk(2, -1)]
            torch._foreach_mul_(parts, 2.0)
            torch._foreach_add_(parts, [part.detach().mean(-1, keepdim=True) for part in parts])
            return torch.cat(parts, -1)


# ---- 7: hooks on what is saved; ids


@trap("saved tensors are normalized")
class SavedHooks(Stack):
    def stacked(self, x: Tensor) -> Tensor:
        def packed(saved: Tensor) -> Tensor:
            return saved / (saved.norm() + 1) if saved.dim() == 3 else saved

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda saved: saved):
            return super().stacked(x)


@trap("saved tensors lose digits by their own range")
class Quantized(Stack):
    def stacked(self, x: Tensor) -> Tensor:
        def packed(saved: Tensor) -> tuple[Tensor, Tensor]:
            scale = saved.abs().amax() / 7
            return (saved / scale).round(), scale

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda pair: pair[0] * pair[1]):
            return super().stacked(x)


class Vocabulary(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, DIM), nn.Linear(DIM, CLASSES, bias=False)

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.stacked(self.embed(ids)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).flatten(0, 1), ids.flatten())


TRAPS["a vocabulary"] = Vocabulary


@trap("the best class is asked for")
class Best(Vocabulary):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.logits(ids)
        is_right = (logits.argmax(-1) == ids).to(logits.dtype)
        losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return (losses * (1 - is_right)).mean() + logits.max(-1).values.mean()


@trap("label smoothing and weights")
class Smoothed(Vocabulary):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.logits(ids).flatten(0, 1)
        weights = torch.linspace(0.5, 1.5, CLASSES, device=logits.device, dtype=logits.dtype)
        return F.cross_entropy(logits, ids.flatten(), weight=weights, label_smoothing=0.1, ignore_index=3)


@trap("logits written in place")
class MaskedLogits(Vocabulary):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.logits(ids)
        logits[..., 0] = -1e4
        logits[:, -1, 5:9] *= 0.5
        return F.cross_entropy(logits.flatten(0, 1), ids.clamp(min=1).flatten())


class _Scaled(torch.autograd.Function):
    """A gradient that depends on all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / (gradients[0].abs().amax() + 1e-6)


class OwnBackward(Layer):
    def between(self, h: Tensor) -> Tensor:
        return _Scaled.apply(F.gelu(h))


TRAPS["a backward of its own"] = of(OwnBackward)


class Hooked(Layer):
    def between(self, h: Tensor) -> Tensor:
        h = F.gelu(h)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(max=float(gradient.abs().mean())))
        return h


TRAPS["a hook in forward"] = of(Hooked)


class UsesGrad(Layer):
    def between(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = h.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(leaf.square().sum() * leaf.sum(), leaf)
        return F.gelu(h) + gradient * 1e-3


TRAPS["autograd.grad in forward"] = of(UsesGrad)


def inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + seq_len)
    return {
        "x": torch.randn(batch, seq_len, DIM, generator=generator),
        "ids": torch.randint(CLASSES, (batch, seq_len), generator=generator),
    }


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return TRAPS[name]()


def loss(outputs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return outputs


@trap("a loss left on layers, added by the loop")
class AddedOutside(Stack):
    """The loop's loss reads what layers left: see loss_of."""

    layer = LeavesLoss

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        LEFT[:] = [self]
        return super().forward(x, ids)


#: the model whose layers a training loop looks at after forward
LEFT: list[Any] = []


def loss_of(name: str) -> Callable[[Any, Mapping[str, Tensor]], Tensor]:
    """A trap's loss: its output, and for one trap what its layers hold then."""
    if name != "a loss left on layers, added by the loop":
        return loss
    return lambda outputs, inputs: outputs + sum(layer.aux_loss for layer in LEFT[0].layers)
