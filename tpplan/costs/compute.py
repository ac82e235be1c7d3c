"""Compute cost of an op, executed: run it on meta tensors of the local shapes, forward and backward, and log kernels.

A kernel is a matmul (M, N, K), an attention (FLOP), or memory-bound (bytes read plus written). Views launch nothing.
Which tensors autograd saves comes from the same run, by storage, and so does what the op holds for itself while it
runs. Runs are cached by signature: an op of the same target, literals and local operands costs the same wherever it
stands.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from tpplan.convert import TpGroup
from tpplan.counts import COUNTING, counting_by
from tpplan.errors import ModelError
from tpplan.graph import Argument, Ref, Value
from tpplan.layout import Layout, LayoutKind, R, local_shape
from tpplan.losses import vocabulary_parallel
from tpplan.opaque import Observed, Ran
from tpplan.profile import AttentionSizes, Estimate, HardwareProfile
from tpplan.rules import OPAQUE, Call, Strategy, localized_arguments
from tpplan.rules.matmul import GROUPED_PRODUCTS
from tpplan.units import DTYPE_BYTES

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """batch x (m, k) @ (k, n)."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A fused attention kernel; flop is what is executed, half where causal."""

    flop: float
    dtype: str
    is_backward: bool
    sizes: AttentionSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """A kernel whose time is the bytes it reads and writes."""

    num_bytes: int


Kernel = Matmul | Attention | MemoryBound


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What running an op showed. `saves`: indices of operands whose storage autograd keeps; `saves_results`: of
    results; `saved_bytes`: of tensors that are neither (statistics, masks, log-probabilities).

    `forward_bytes` are the most that forward held besides what it leaves behind, `backward_bytes` the most that
    backward held, the gradients of results and operands among them. `gradients` are those of operands. `guesses` say
    what was not seen, and what is taken in its place.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saves: frozenset[int]
    saves_results: frozenset[int]
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradients: tuple["Gradient | None", ...] = ()
    guesses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gradient:
    """An operand's gradient: its bytes, and whether its memory is that of a result's gradient."""

    num_bytes: int
    is_view: bool


_VIEW_LIKE = frozenset({"aten.empty_like.default", "aten.new_empty.default", "aten.empty.memory_format",
                        "aten.new_empty_strided.default", "aten.empty_strided.default", "aten.detach.default",
                        "aten._unsafe_view.default", "aten.lift_fresh.default"})  # fmt: skip

#: ops that read as much of their first operand as they return
_LOOKUPS = frozenset({"aten.embedding.default", "aten.index_select.default", "aten.gather.default",
                      "aten.index.Tensor"})  # fmt: skip

#: what is taken of an op whose kernels are not seen
_BY_BYTES = "priced by bytes alone"

#: backward of flash attention recomputes the scores: 5 products against the forward's 2 [Dao 2023, section 3.1]
_ATTENTION_BACKWARD_PRODUCTS = 2.5


def _bytes(tensors: Iterator[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)


class _KernelLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns each operator below autograd into the kernel it launches; adds up the storages made, while they live."""

    def __init__(self, causal: bool, operands: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.causal = causal
        self.live_bytes = self.peak_bytes = 0
        self._known = WeakIdKeyDictionary({operand.untyped_storage(): True for operand in operands})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_view(func):
            self.kernels.extend(self._kernels(str(func), args, result))
        for tensor in _tensors(result):
            self._hold(tensor.untyped_storage())
        return result

    def restart(self) -> None:
        """Forgets kernels and peak; what lives counts on."""
        self.kernels = []
        self.peak_bytes = self.live_bytes

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = True
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    def _kernels(self, name: str, args: Any, result: Any) -> Iterator[Kernel]:
        match name:
            case "aten.convolution.default":
                yield _convolution(args[0], args[1], result, transposed=args[6], groups=args[8])
            case "aten.convolution_backward.default":
                product = _convolution(args[1], args[2], args[0], transposed=args[7], groups=args[9])
                # The input's gradient and the weight's are the same product with the sizes changing places.
                if args[10][0]:
                    yield replace(product, n=product.k, k=product.n)
                if args[10][1]:
                    yield replace(product, m=product.k, k=product.m)
            case _:
                yield self._kernel(name, args, result)

    def _kernel(self, name: str, args: Any, result: Any) -> Kernel:
        if name in ("aten.mm.default", "aten.bmm.default"):
            return _product(args[0], args[1])
        if name in ("aten.addmm.default", "aten.baddbmm.default"):
            return _product(args[1], args[2])
        if name in _LOOKUPS:
            indices = [tensor for tensor in _tensors(args) if not tensor.is_floating_point()]
            return MemoryBound(num_bytes=2 * _bytes(_tensors(result)) + _bytes(iter(indices)))
        if name == "aten.scatter_add_.default":
            return MemoryBound(num_bytes=_bytes(iter(args[2:3])) + 3 * _bytes(iter(args[3:4])))
        if "_scaled_dot_product_" in name or "_flash_attention_" in name:
            return self._attention(name, args)
        return MemoryBound(num_bytes=_bytes(_tensors(args)) + _bytes(_tensors(result)))

    def _attention(self, name: str, args: Any) -> Attention:
        is_backward = "backward" in name
        query, key, value = args[1:4] if is_backward else args[:3]
        products = _ATTENTION_BACKWARD_PRODUCTS if is_backward else 1.0
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
        return Attention(flop=flop, dtype=_name(query.dtype), is_backward=is_backward, sizes=sizes)


def _is_view(func: Any) -> bool:
    if str(func) in _VIEW_LIKE:
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _product(left: torch.Tensor, right: torch.Tensor) -> Matmul:
    batch = left.shape[0] if left.dim() == 3 else 1
    return _matmul(m=left.shape[-2], n=right.shape[-1], k=left.shape[-1], batch=batch, dtype=left.dtype)


def _matmul(*, m: int, n: int, k: int, batch: int, dtype: torch.dtype) -> Matmul:
    """A product of complex numbers is four of real ones."""
    if dtype.is_complex:
        batch, dtype = 4 * batch, dtype.to_real()
    return Matmul(m=m, n=n, k=k, batch=batch, dtype=_name(dtype))


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, *, transposed: bool, groups: int
) -> Matmul:
    """As an implicit matrix product: positions x (channels in * window) @ (channels in * window) x channels out.

    x [N, Ci, *sizes], weight [Co, Ci / groups, *window] ([Ci, Co / groups, *window] transposed), a batch of groups.
    """
    window = prod(weight.shape[2:])
    if transposed:
        sizes = (x.shape[0] * prod(x.shape[2:]), weight.shape[1] * window, weight.shape[0] // groups)
    else:
        sizes = (result.shape[0] * prod(result.shape[2:]), weight.shape[0] // groups, weight.shape[1] * window)
    m, n, k = map(int, sizes)
    return _matmul(m=m, n=n, k=k, batch=groups, dtype=x.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class Executor:
    """Runs calls on meta tensors and remembers what they did."""

    _cache: dict[object, Execution] = field(default_factory=dict)
    #: of opaque modules, by the key of the call
    _observed: dict[str, Execution] = field(default_factory=dict)
    #: what a call did that was asked for before, by its id; the call is kept, so that no other gets that
    _known: dict[tuple[int, Strategy, int], tuple[Call, Execution]] = field(default_factory=dict)
    #: what follows of executions in a graph
    _memo: dict[Hashable, tuple[object, object]] = field(default_factory=dict)

    def once(self, key: Hashable, about: object, make: Callable[[], T]) -> T:
        """What follows of executions, for the first who asks; the key names `about` by its id, and so it is kept."""
        if key not in self._memo:
            self._memo[key] = (about, make())
        return cast(T, self._memo[key][1])

    def observe(self, calls: Mapping[str, Observed]) -> None:
        """From now on these calls of opaque modules cost what they were seen to run. Warns of what is a guess."""
        for key, observed in calls.items():
            if key in self._observed:
                continue
            self._observed[key] = seen = _execution_of(observed)
            for guess in seen.guesses:
                warnings.warn(f"in a module that runs whole, {guess}", stacklevel=2)

    def execute(self, call: Call, strategy: Strategy, tp: int) -> Execution:
        """One rank's share of a call under a strategy. Warns where the op, or its backward, cannot run on meta tensors,
        and takes its bytes then."""
        if call.target == OPAQUE:
            seen = self._observed.get(str(call.args[2]))
            if seen is None:
                raise ModelError(f"{call.target}: no module was observed that gives {call.args[2]}")
            return _of_call(seen, call)
        known = self._known.get((id(call), strategy, tp))
        if known is None:
            known = self._known[id(call), strategy, tp] = (call, self._executed(call, strategy, tp))
        return known[1]

    def _executed(self, call: Call, strategy: Strategy, tp: int) -> Execution:
        """The same, for like calls once."""
        shapes = tuple(
            local_shape(value.shape, layout, tp) for value, layout in zip(call.operands, strategy.operands, strict=True)
        )
        args = localized_arguments(call, strategy, tp)
        flags = tuple((value.dtype, value.carries_gradient) for value in call.operands)
        carries = tuple(value.carries_gradient for value in call.results)
        structure = _anonymous((args, call.kwargs))
        function = _callable(call, strategy)
        key = (function, structure, shapes, flags, carries)
        if key not in self._cache:
            try:
                self._cache[key] = _run(call, function, args, shapes)
            except ModelError as error:
                self._cache[key] = moved = _by_bytes(call, strategy, tp, str(error).splitlines()[0])
                warnings.warn(moved.guesses[0], stacklevel=2)
        return self._cache[key]


def _execution_of(observed: Observed) -> Execution:
    """Kernels of what an opaque module ran, and what it kept of what it was given and gave."""
    return Execution(
        forward=tuple(kernel for ran in observed.forward for kernel in _kernels_of(ran)),
        backward=tuple(kernel for ran in observed.backward for kernel in _kernels_of(ran)),
        saves=observed.keeps,
        saves_results=observed.keeps_results,
        saved_bytes=observed.kept_bytes,
        forward_bytes=observed.forward_bytes,
        backward_bytes=observed.backward_bytes,
        guesses=tuple(_guesses_of(observed)),
    )


def _of_call(seen: Execution, call: Call) -> Execution:
    """The same of an opaque module's call, which gives each operand that carries one its gradient."""
    carries = any(value.carries_gradient for value in call.results)
    return replace(
        seen,
        gradients=tuple(
            Gradient(value.num_bytes, False) if carries and value.carries_gradient else None for value in call.operands
        ),
    )


def _guesses_of(observed: Observed) -> Iterator[str]:
    """What an opaque module ran that is not seen to the last."""
    unseen = sorted({str(ran.op) for ran in (*observed.forward, *observed.backward) if _is_guess(ran)})
    if unseen:
        yield f"{', '.join(unseen)}: {_BY_BYTES}"
    if not observed.is_bounded:
        yield "a size that data decides is priced as 1"


def _kernels_of(ran: Ran) -> tuple[Kernel, ...]:
    """The kernels of an operator that ran on fake tensors. One that meta tensors do not run moves what it is given."""
    name = str(ran.op)
    num_bytes = _bytes(_tensors(ran.args)) + _bytes(iter(ran.results))
    log = _KernelLog(any(argument is True for argument in ran.args), ())
    if "flex_attention" in name:
        is_backward = "backward" in name
        return (log._attention(name, (None, *ran.args[:3]) if is_backward else ran.args),)
    if not isinstance(ran.op, torch._ops.OpOverload):
        return (MemoryBound(num_bytes=num_bytes),)
    if not _runs(ran, log):
        return () if _is_view(ran.op) else (MemoryBound(num_bytes=num_bytes),)
    return tuple(log.kernels)


def _is_guess(ran: Ran) -> bool:
    """True for an operator that computes tensors by kernels that are not seen. Functions of loops and choices are seen,
    beside their own."""
    is_op = isinstance(ran.op, torch._ops.OpOverload) and "flex_attention" not in str(ran.op)
    return is_op and bool(ran.results) and not _is_view(ran.op) and not _runs(ran, contextlib.nullcontext())


def _runs(ran: Ran, log: contextlib.AbstractContextManager[object]) -> bool:
    """Runs an operator on meta tensors; False where it does not."""
    try:
        with torch.no_grad(), log:
            ran.op(*ran.args, **_on_meta(ran.kwargs))
    except Exception:
        return False
    return True


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.device("meta") if name == "device" else value for name, value in kwargs.items()}


def _anonymous(argument: object) -> object:
    """An argument with references made alike: the cache's key holds shapes, not names."""
    if isinstance(argument, Ref):
        return Ref("")
    return tuple(map(_anonymous, argument)) if isinstance(argument, tuple) else argument


def _run(
    call: Call, function: Callable[..., Any], args: tuple[Argument, ...], shapes: tuple[tuple[int, ...], ...]
) -> Execution:
    leaves = [
        torch.empty(shape, dtype=getattr(torch, value.dtype), device="meta", requires_grad=value.carries_gradient)
        for shape, value in zip(shapes, call.operands, strict=True)
    ]
    # In-place ops may not write to leaves that require grad; a clone's backward runs no kernel.
    operands = [leaf.clone() for leaf in leaves] if call.is_in_place else leaves
    supply = iter(operands)
    real_args = tuple(_materialize(argument, supply) for argument in args)
    real_kwargs = {name: _materialize(value, supply) for name, value in call.kwargs}
    is_causal = bool(call.target.startswith("aten.scaled_dot_product_attention") and call.argument(5, "is_causal"))
    log = _KernelLog(is_causal, operands)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    carries = any(value.carries_gradient for value in call.results)
    try:
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with _counting_as(call), torch.set_grad_enabled(carries), saving, log:
            output = function(*real_args, **real_kwargs)
        forward = tuple(log.kernels) or _hidden_copy(call, output)
        left_bytes, forward_bytes = log.live_bytes, log.peak_bytes - log.live_bytes
        log.restart()
        results = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients: tuple[Gradient | None, ...] = ()
        if carries and results and wanted:
            with log:
                given = [torch.empty_like(result) for result in results]
                found = iter(torch.autograd.grad(results, wanted, given, allow_unused=True))
            gradients = tuple(_gradient(next(found), given) if leaf.requires_grad else None for leaf in leaves)
    except Exception as error:
        shown = ", ".join(f"{value.dtype}{list(shape)}" for value, shape in zip(call.operands, shapes, strict=True))
        raise ModelError(f"{call.target} on ({shown}) cannot be costed on meta tensors: {error}") from error
    execution = _execution(forward, tuple(log.kernels), saved, operands, list(_tensors(output)))
    backward_bytes = log.peak_bytes - left_bytes
    return replace(execution, forward_bytes=forward_bytes, backward_bytes=backward_bytes, gradients=gradients)


def _by_bytes(call: Call, strategy: Strategy, tp: int, reason: str) -> Execution:
    """An op that reads its operands and writes its results, keeps all of both, and does so twice in backward; the
    reason says why that is taken of it."""

    def num_bytes(value: Value, layout: Layout) -> int:
        return prod(local_shape(value.shape, layout, tp)) * DTYPE_BYTES[value.dtype]

    given = [num_bytes(value, layout) for value, layout in zip(call.operands, strategy.operands, strict=True)]
    made = [num_bytes(value, layout) for value, layout in zip(call.results, strategy.results, strict=True)]
    carries = any(value.carries_gradient for value in call.results)
    moved = MemoryBound(num_bytes=sum(given) + sum(made))
    return Execution(
        forward=(moved,),
        backward=(moved, moved) if carries else (),
        saves=frozenset(range(len(given))) if carries else frozenset(),
        saves_results=frozenset(range(len(made))) if carries else frozenset(),
        saved_bytes=0,
        forward_bytes=0,
        backward_bytes=sum(given) if carries else 0,
        gradients=tuple(
            Gradient(size, False) if carries and value.carries_gradient else None
            for value, size in zip(call.operands, given, strict=True)
        ),
        guesses=(f"{reason}: {_BY_BYTES}",),
    )


def _gradient(found: torch.Tensor | None, given: list[torch.Tensor]) -> Gradient | None:
    if found is None:
        return None
    storage = found.untyped_storage()
    is_view = any(tensor.untyped_storage()._cdata == storage._cdata for tensor in given)
    return Gradient(storage.nbytes(), is_view)


def _counting_as(call: Call) -> contextlib.AbstractContextManager[None]:
    """Data decides how large a result is: it is as large as in the model."""
    if _operator(call) not in COUNTING:
        return contextlib.nullcontext()
    indices = call.argument(1, "indices") if call.target == "aten.index.Tensor" else ()
    dim = next((i for i, index in enumerate(indices) if isinstance(index, Ref)), 0) if isinstance(indices, tuple) else 0
    sizes = call.results[0].shape
    return counting_by(lambda _op, counting, args, kwargs: sizes[dim or counting.dim(*args, **kwargs)])


def _hidden_copy(call: Call, output: Any) -> tuple[Kernel, ...]:
    """A reshape that had to copy in the model (its operand was transposed) is a view of the contiguous operand here."""
    copied = bool(call.results) and bool(call.operands) and call.results[0].storage == call.results[0].name
    return (MemoryBound(num_bytes=2 * _bytes(_tensors(output))),) if copied else ()


def _execution(
    forward: tuple[Kernel, ...],
    backward: tuple[Kernel, ...],
    saved: list[torch.Tensor],
    operands: list[torch.Tensor],
    results: list[torch.Tensor],
) -> Execution:
    def storage(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    kept = {storage(tensor): tensor for tensor in saved}
    own = {storage(operand): i for i, operand in reversed(list(enumerate(operands)))}
    made = {storage(result): i for i, result in reversed(list(enumerate(results))) if storage(result) not in own}
    extra = [tensor for key, tensor in kept.items() if key not in own and key not in made]
    return Execution(
        forward=forward,
        backward=backward,
        saves=frozenset(own[key] for key in kept if key in own),
        saves_results=frozenset(made[key] for key in kept if key in made),
        saved_bytes=sum(tensor.untyped_storage().nbytes() for tensor in extra),
        forward_bytes=0,
        backward_bytes=0,
    )


def _materialize(argument: Argument, operands: Iterator[torch.Tensor]) -> Any:
    match argument:
        case Ref():
            return next(operands)
        case tuple():
            return [_materialize(item, operands) for item in argument]
        case str() if argument.startswith(("dtype:", "torch:")):
            return getattr(torch, argument.partition(":")[2])
        case str() if argument.startswith("device:"):
            return torch.device("meta")
        case _:
            return argument


def _callable(call: Call, strategy: Strategy) -> Callable[..., Any]:
    """The operator, or what runs for it: the fused kernel of a GPU where meta tensors would take a decomposed path, the
    loss on slices of the classes where they are sharded."""
    match call.target:
        case "tpplan.cross_entropy.default" if strategy.operands[0].kind is LayoutKind.SHARD:
            return _sharded_cross_entropy
        case "aten.scaled_dot_product_attention.default":
            return fused_attention
        case "aten.rms_norm.default":
            return fused_rms_norm
        case target if target in GROUPED_PRODUCTS:
            return _grouped_product
    return _operator(call)


def _operator(call: Call) -> Callable[..., Any]:
    namespace, name, overload = call.target.split(".")
    operator: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return operator


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_options: Any,
) -> Any:
    """Flash attention, or the memory-efficient kernel where there is a mask; on meta the plain op is the math path."""
    if query.dim() != 4 or key.shape[1] != value.shape[1]:
        return torch.ops.aten.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    bias = attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    bias = bias.expand(*query.shape[:-1], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout_p, is_causal)[
        0
    ]


def fused_rms_norm(
    x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """GPUs run one kernel each way (aten._fused_rms_norm); it moves what layer norm's kernel moves."""
    normalized: torch.Tensor = torch.ops.aten.layer_norm(x, normalized_shape, weight, None, eps or 1e-6)
    return normalized


def _sharded_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The collectives apart, which are priced by their bytes."""
    return vocabulary_parallel(logits, targets, ignore_index, TpGroup(name="", size=1, rank=0))


def _grouped_product(rows: torch.Tensor, experts: torch.Tensor, _offsets: torch.Tensor) -> torch.Tensor:
    """As many products as there are rows, whosever they are: rows [N, K], experts [E, K, J]. It needs no bfloat16."""
    return rows @ experts[0]


def kernels_of(work: Callable[[], object]) -> int:
    """How many kernels a call launches, counted as costs count them."""
    log = _KernelLog(False, ())
    with log:
        work()
    return len(log.kernels)


def whole_strategy(call: Call) -> Strategy:
    """Every rank does all of it."""
    return Strategy((R,) * len(call.operands), (R,) * len(call.results))


def _stand_in(dtype: str, covered: Iterable[str]) -> str:
    """The dtype itself where it is covered, else the narrowest that is no narrower, else the widest."""
    known = sorted(covered, key=lambda name: DTYPE_BYTES[name])
    if dtype in known or not known:
        return dtype
    return next((name for name in known if DTYPE_BYTES[name] >= DTYPE_BYTES[dtype]), known[-1])


def _as_if(found: Estimate, dtype: str, stand_in: str) -> Estimate:
    """The time of another dtype's kernel as this one's: longer as this one is wider, and as uncertain as it is long."""
    if dtype == stand_in:
        return found
    seconds = found.seconds * max(1.0, DTYPE_BYTES[dtype] / DTYPE_BYTES[stand_in])
    return Estimate(seconds=seconds, error_s=seconds, extrapolated=True)


def kernel_time(profile: HardwareProfile, kernel: Kernel) -> Estimate:
    """Seconds of one kernel in training, issuing it included where it is not beside. What a profile has in no table of
    its dtype stands in that of another. Raises ProfileError where it has no table at all."""
    match kernel:
        case Matmul(m=m, n=n, k=k, batch=batch, dtype=dtype):
            stand_in = _stand_in(dtype, (table.dtype for table in profile.matmuls))
            found = profile.matmul(m=m, n=n, k=k, batch=batch, dtype=stand_in)
            time = profile.matmul_slowdown * _as_if(found, dtype, stand_in)
        case Attention(flop=flop, dtype=dtype, is_backward=is_backward, sizes=sizes):
            stand_in = _stand_in(dtype, (rate.dtype for rate in profile.attention_rates))
            found = profile.attention(flop=flop, dtype=stand_in, backward=is_backward, sizes=sizes)
            time = _as_if(found, dtype, stand_in)
        case MemoryBound(num_bytes=num_bytes):
            time = profile.memory_bound(num_bytes=num_bytes)
    return time + profile.issuing
