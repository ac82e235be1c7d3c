"""Operators: schemas, kernels for meta tensors, ops that tpplan knows by name, calls inside functions, a busy GPU."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from tpplan.torch_internals import pytree
from tpplan.torch_internals.probes import Probe

#: kernels by the name of an op of aten, "op" or "op.overload"
Kernels = Mapping[str, Callable[..., Any]]
#: names of functional collectives and of fused attention, which torch does not document
COLLECTIVES = (
    "_c10d_functional.all_reduce.default", "_c10d_functional.all_reduce_.default",
    "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default", "_c10d_functional.wait_tensor.default",
)  # fmt: skip
ATTENTION = (
    "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_efficient_attention.default",
)  # fmt: skip
#: ops that give a number or a bool of a tensor's values, and ops that take masks in place of indices
ASKING = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default}
)
TAKING_MASKS = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
    }
)
#: the functions by which Python code of torch asks whether a mode is to run it
_GUARDS = frozenset({"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"})
#: methods of tensors that take sizes
_SHAPING = frozenset({"view", "reshape", "expand"})
#: key in the __dict__ of a function made by seen_by, for the variant that asks no mode to run it
_INSIDE = "_tpplan_inside"


def is_op(target: object) -> bool:
    """True for an overload of an operator; False for a higher-order op or a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: object) -> bool:
    """True for an operator that takes functions, such as that of torch.cond."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_pointwise(target: Any) -> bool:
    """True for one of torch's own operators that torch tags as pointwise, which gives tensors, draws no numbers, and
    writes to no operand, or to the first alone (`add_`). Others' tags are their authors' word."""
    if not is_op(target) or target.namespace != "aten" or torch.Tag.pointwise not in target.tags:
        return False
    schema = schema_of(target)
    if not all(str(returned.type) == "Tensor" for returned in schema.returns):
        return False
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    name = str(target).split(".")[1]
    is_in_place = name.endswith("_") and not name.endswith("__") and not any(writes[1:])
    return torch.Tag.nondeterministic_seeded not in target.tags and (is_in_place or not any(writes))


@functools.cache
def draws_numbers(target: str) -> bool:
    """True for an operator, such as `aten.rand.default`, that torch tags as one that draws random numbers; a dropout
    and an attention are, whatever their probability."""
    namespace, name, overload = target.split(".", 2)
    op: Any = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    return is_op(op) and torch.Tag.nondeterministic_seeded in op.tags


def schema_of(op: Any) -> Any:
    """The operator's schema: `arguments` and `returns`, each with its `name` and `alias_info`."""
    return op._schema


def argument_names(op: Any) -> set[str]:
    """Names of the operator's arguments."""
    return {argument.name for argument in schema_of(op).arguments}


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors among a call's arguments that the operator writes to."""
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))


def only_writes(op: Any) -> bool:
    """True where the operator gives nothing, and writes to an argument."""
    schema = schema_of(op)
    return not schema.returns and any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def gives_views(op: Any) -> bool:
    """True where every result of the operator is a view of an argument, which it does not write to."""
    returns = schema_of(op).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, by few kernels for all."""
    torch._foreach_copy_(list(targets), list(sources))


def assert_on_device(condition: Tensor, message: str) -> None:
    """Raises RuntimeError where the condition (one bool) is False; on a GPU when the kernel runs, without waiting."""
    torch._assert_async(condition, message)


def check_within(positions: Tensor, size: int, message: str) -> None:
    """Checks that positions (integers, of any shape) are within 0 to size - 1, as torch checks indices.

    Raises IndexError on the CPU, with the message and the first position outside. On a GPU, and in compiled code, the
    message is asserted when the kernel runs. Never raises for tensors without values.
    """
    if positions.numel() == 0:
        return
    low, high = positions.aminmax()
    inside = (low >= 0) & (high < size)
    if torch.compiler.is_compiling() or positions.device.type != "cpu":
        assert_on_device(inside, message)
        return
    try:
        assert_on_device(inside, message)
    except RuntimeError:
        outside = positions[(positions < 0) | (positions >= size)].flatten()[0].item()
        raise IndexError(f"{message}: got {outside}") from None


def collectives() -> Any:
    """The namespace of functional collectives, which return their results: all_reduce(x, "sum", group name), ..."""
    return torch.ops._c10d_functional


def flash_attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool) -> Tensor:
    """Attention [B, H, T, D] by the fused kernel without a mask; query, key, value [B, H, T, D]."""
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    return found


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout_p: float, is_causal: bool
) -> Tensor:
    """Attention [B, H, T, D] by the fused kernel with a bias [B, H, T, S] added to scores; saves what backward
    needs."""
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    found: Tensor = attend(query, key, value, bias, True, dropout_p, is_causal)[0]
    return found


def busy_gpu(cycles: int) -> None:
    """Queues a kernel on the current GPU that runs for this many clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs kernels in this thread alone: a process with a pool of threads cannot be forked by whoever plans in it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def missing_ops(names: Iterable[str]) -> list[str]:
    """The names ("aten.mm", "aten.mm.default", "aten::mm") that are no operator of this torch."""
    return [name for name in names if not _has(name.replace("::", "."))]


def _has(name: str) -> bool:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


@contextlib.contextmanager
def meta_kernels(kernels: Kernels) -> Iterator[None]:
    """Makes ops of aten, and of other namespaces ("tpplan::arriving"), run on meta tensors by these kernels, instead of
    any that they have."""
    namespaces = dict.fromkeys(name.rpartition("::")[0] or "aten" for name in kernels)
    libraries: dict[str, Any] = {
        namespace: torch.library.Library(namespace, "IMPL", "Meta")  # type: ignore[no-untyped-call]
        for namespace in namespaces
    }
    try:
        for name, kernel in kernels.items():
            namespace, _, own = name.rpartition("::")
            libraries[namespace or "aten"].impl(own, kernel, allow_override=True)
        yield
    finally:
        for library in libraries.values():
            library._destroy()


@contextlib.contextmanager
def more_shapes_known() -> Iterator[None]:
    """Gives two ops meta kernels for operands that torch's own refuse.

    aten._grouped_mm: torch's takes what its CUDA kernel does, bfloat16 in rows of whole 16 bytes; other kernels take
    more. aten._ctc_loss: torch's takes no lengths that are tensors.
    """

    def product(a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
        groups = (offs.shape[0],) if a.dim() == b.dim() == 2 else a.shape[:1] if a.dim() == b.dim() else ()
        return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)

    def ctc(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The losses [N] and what backward needs [N, T, 2 S + 1], for log_probs [T, N, C] and targets [N, S]."""
        length, rows = log_probs.shape[0], log_probs.shape[1:-1]
        return log_probs.new_empty(rows), log_probs.new_empty(*rows, length, 2 * targets.shape[-1] + 1)

    with meta_kernels({"_grouped_mm": product, "_ctc_loss.Tensor": ctc}):
        yield


# ---- functions in Python, whose first step is to ask modes to run them


def hides_sizes(function: object) -> bool:
    """True for a function of torch.nn.functional that modes see as one call, though it calls view, reshape or expand
    with sizes; and for a function that seen_by made of one."""
    if not isinstance(function, FunctionType):
        return False
    is_public: bool = vars(F).get(function.__name__) is function
    names = frozenset(function.__code__.co_names)
    is_made = hasattr(function, _INSIDE)  # torch 2.11 compiles no vars(function)
    return is_made or (is_public and not names.isdisjoint(_GUARDS) and not names.isdisjoint(_SHAPING))


def seen_by(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same, of which `mode` sees every inner call.

    Modes around `mode` see one call under the function's own name, and may call seen_by on it in turn. To be called
    while the mode is off.
    """
    inside = getattr(function, _INSIDE, None) or _body(function)

    def seen(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return inside(*args, **kwargs)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function((None,)):  # None has no class of tensors to ask: True where a mode is on
            return handle_torch_function(call, (), *args, **kwargs)
        return seen(*args, **kwargs)

    setattr(call, _INSIDE, seen)
    return call


@functools.cache
def _body(function: FunctionType) -> Callable[..., Any]:
    """The function's code with _GUARDS that answer False, so that it runs whatever modes are on."""
    names = function.__globals__ | dict.fromkeys(_GUARDS, lambda *_: False)
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


# ---- probes


def _schemas() -> bool:
    x = torch.zeros(2)
    add_, view = torch.ops.aten.add_.Tensor, torch.ops.aten.view.default
    return (
        is_op(add_)
        and not is_op(torch.add)
        and is_higher_order(torch.ops.higher_order.cond)
        and argument_names(add_) == {"self", "other", "alpha"}
        and [tensor is x for tensor in written_by(add_, (x, 1), {})] == [True]
        and gives_views(view)
        and not gives_views(add_)
        and not gives_views(torch.ops.aten.add.Tensor)
    )


def _kernels() -> bool:
    x = torch.empty(3, device="meta")
    with meta_kernels({"nonzero": lambda x: x.new_empty((7, x.dim()), dtype=torch.int64)}):
        inside = tuple(torch.nonzero(x).shape)
    return inside == (7, 1)


def _positions() -> bool:
    """check_within raises on the CPU, with the position; on meta tensors, which have no values, it never does."""
    check_within(torch.tensor([[0, 2]]), 3, "inside")
    check_within(torch.tensor([[0, 3]], device="meta"), 3, "unknown")
    try:
        check_within(torch.tensor([[0, 3]]), 3, "outside")
    except IndexError as error:
        return str(error) == "outside: got 3"
    return False


def _calls_are_seen() -> bool:
    seen: list[object] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            run = seen_by(self, func) if hides_sizes(func) else func
            return run(*args, **(kwargs or {}))

    x = torch.ones(1, 2, 4)
    weight, bias = torch.ones(12, 4), torch.ones(12)
    with Noting():
        F.multi_head_attention_forward(
            x, x, x, 4, 2, weight, bias, None, None, False, 0.0, weight[:4], bias[:4], need_weights=False
        )
    return {F.multi_head_attention_forward, F.linear, torch.Tensor.view, torch.Tensor.unflatten} <= set(seen)


PROBES = (
    Probe(
        name="a GPU kept busy",
        uses="torch.cuda._sleep",
        needed_for="`tpplan profile` on a GPU",
        works=lambda: callable(getattr(torch.cuda, "_sleep", None)),
    ),
    Probe(
        name="schemas of operators",
        uses="OpOverload._schema, torch._ops.HigherOrderOperator",
        needed_for="knowing what an operator writes to",
        works=_schemas,
    ),
    Probe(
        name="kernels for meta tensors",
        uses='torch.library.Library("aten", "IMPL", "Meta"), allow_override, _destroy',
        needed_for="sizes that data decides, grouped products",
        works=_kernels,
    ),
    Probe(
        name="functional collectives",
        uses="torch.ops._c10d_functional",
        needed_for="every conversion of a layout",
        works=lambda: not missing_ops(COLLECTIVES),
    ),
    Probe(
        name="fused attention",
        uses=", ".join(ATTENTION),
        needed_for="the cost of attention",
        works=lambda: not missing_ops(ATTENTION),
    ),
    Probe(
        name="assertions on the device",
        uses="torch._assert_async",
        needed_for="refusing ids and targets outside of a sharded vocabulary",
        works=_positions,
    ),
    Probe(
        name="calls inside of torch's functions",
        uses="torch.overrides.has_torch_function in torch.nn.functional, handle_torch_function",
        needed_for="sizes of heads in nn.MultiheadAttention",
        works=_calls_are_seen,
    ),
)
