"""Kernels that running an op on meta tensors shows, against torch's own count of FLOP."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import tpplan
from profiles import full_profile
from tpplan.core.graph import Argument, Ref, Value
from tpplan.core.layout import R
from tpplan.core.units import DTYPE_BYTES
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.execution import Execution
from tpplan.costs.runs.kernels import Attention, Kernel, KernelLog, Matmul, MemoryBound, kernel_time
from tpplan.layouts.rules import Call, Strategy
from tpplan.machine.profile import AttentionSizes, HardwareProfile
from tpplan.plan.plan import Plan
from tpplan.plan.report import render
from tpplan.trace.whole.opaque import OpaqueTrace, OpRecord

X = (2, 8, 12, 12)
#: target, arguments after the tensors, the weight's shape
CALLS: list[tuple[str, tuple[Argument, ...], tuple[int, ...], tuple[int, ...]]] = [
    ("aten.linear.default", (), (4, 6, 8), (16, 8)),
    ("aten.conv2d.default", (None, (1, 1), (1, 1), (1, 1), 1), X, (16, 8, 3, 3)),
    ("aten.conv2d.default", (None, (2, 2), (0, 0), (1, 1), 1), X, (16, 8, 3, 3)),
    ("aten.conv2d.default", (None, (1, 1), (1, 1), (1, 1), 4), X, (16, 2, 3, 3)),
    ("aten.conv1d.default", (None, (1,), (2,), (2,), 8), (2, 8, 20), (8, 1, 3)),
    ("aten.conv_transpose2d.input", (None, (2, 2), (0, 0), (0, 0), 1, (1, 1)), X, (8, 16, 2, 2)),
]


@pytest.mark.parametrize(("target", "rest", "x", "weight"), CALLS)
def test_products_have_the_flop_that_torch_counts(
    target: str, rest: tuple[Argument, ...], x: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    """A convolution is as much work as its products, not as its bytes: forward, and both gradients."""
    _, name, overload = target.split(".")
    operator = getattr(getattr(torch.ops.aten, name), overload)
    tensors = [torch.empty(shape, device="meta", requires_grad=True) for shape in (x, weight)]
    with FlopCounterMode(display=False) as forward:
        result: Tensor = operator(*tensors, *rest)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(result, tensors, torch.empty_like(result))

    values = tuple(
        Value(name=n, shape=tuple(s), dtype="float32", carries_gradient=True, storage=n)
        for n, s in (("x", x), ("w", weight), ("y", result.shape))
    )
    call = Call(target=target, args=(Ref("x"), Ref("w"), *rest), kwargs=(), operands=values[:2], results=values[2:])
    execution = Executor().execute(call, Strategy((R, R), (R,)), 1)
    # Both gradients take each multiplication of the forward once; torch's count of a weight's forgets its groups.
    assert flop(execution.forward) == forward.get_total_flops() > 0
    assert flop(execution.backward) == 2 * forward.get_total_flops()
    if weight[1] == x[1] or target == "aten.linear.default":
        assert flop(execution.backward) == backward.get_total_flops()


def attention_kernels(*, causal: bool, mask: bool = False) -> tuple[Kernel, ...]:
    """Forward and backward of attention: query [2, 8, 32, 16], keys and values [2, 2, 48, 16], grouped."""
    q, kv = (2, 8, 32, 16), (2, 2, 48, 16)
    keys = kv if not mask else (2, 8, 48, 16)
    shapes = (q, keys, keys, *([(32, 48)] if mask else []))
    operands = tuple(
        Value(name=n, shape=s, dtype="bfloat16", carries_gradient=n != "mask", storage=n)
        for n, s in zip(("q", "k", "v", "mask"), shapes, strict=False)
    )
    result = Value(name="y", shape=q, dtype="bfloat16", carries_gradient=True, storage="y")
    refs = tuple(Ref(value.name) for value in operands)
    args = (*refs, *(() if mask else (None,)), 0.0, causal)
    call = Call(
        target="aten.scaled_dot_product_attention.default", args=args, kwargs=(), operands=operands, results=(result,)
    )
    execution = Executor().execute(call, Strategy((R,) * len(operands), (R,)), 1)
    return (*execution.forward, *execution.backward)


@pytest.mark.parametrize(("causal", "mask"), [(False, False), (True, False), (False, True)])
def test_attention_carries_the_sizes_that_its_table_asks_for(causal: bool, mask: bool) -> None:
    expected = AttentionSizes(batch_heads=16, queries=32, keys=48, head_dim=16, causal=causal)
    found = [kernel for kernel in attention_kernels(causal=causal, mask=mask) if isinstance(kernel, Attention)]
    assert [(kernel.is_backward, kernel.sizes) for kernel in found] == [(False, expected), (True, expected)]
    assert found[0].flop == 4 * 16 * 32 * 48 * 16 / (2 if causal else 1)


def test_attention_is_priced_by_its_table() -> None:
    profile = HardwareProfile.from_dict(full_profile(), "full")
    sizes = AttentionSizes(batch_heads=16, queries=1024, keys=1024, head_dim=64, causal=True)
    kernel = Attention(flop=1.0, dtype="bfloat16", is_backward=True, sizes=sizes)
    assert kernel_time(profile, kernel).seconds == 5e-6 + 5 * 16 * 1024**2 * 64 / 4e14


@pytest.mark.parametrize("frozen", [False, True])
def test_a_grouped_product_is_logged_as_torch_runs_it(frozen: bool) -> None:
    """32 rows by 4 matrices 16 x 24: the kernels of torch's own operator, in float32 too, which it does not take."""
    rows = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randn(4, 16, 24, dtype=torch.bfloat16, requires_grad=not frozen)
    log = KernelLog(False, ())
    with log:
        result = torch._grouped_mm(rows, experts, offs=torch.tensor([8, 16, 24, 32], dtype=torch.int32))
        result.backward(torch.ones_like(result))
    issued = [kernel for kernel in log.kernels if isinstance(kernel, Matmul)]
    for dtype in ("bfloat16", "float32"):
        execution = grouped_product(dtype, frozen=frozen)
        expected = tuple(
            replace(kernel, dtype=dtype, further_bytes=kernel.further_bytes * DTYPE_BYTES[dtype] // 2)
            for kernel in issued
        )
        assert sorted((*execution.forward, *execution.backward), key=str) == sorted(expected, key=str)
        assert execution.saves >= ({0} if not frozen else {1})
        gradients = [gradient and gradient.num_bytes for gradient in execution.gradients]
        assert gradients == [32 * 16 * DTYPE_BYTES[dtype], None if frozen else 4 * 16 * 24 * DTYPE_BYTES[dtype], None]
    assert [kernel.further_bytes for kernel in issued] == [3 * 16 * 24 * 2] * (2 if frozen else 3)


def test_a_grouped_product_takes_one_product_of_its_rows_and_the_reading_of_its_further_matrices() -> None:
    profile = HardwareProfile.from_dict(full_profile(), "full")
    one = Matmul(m=256, n=512, k=512, batch=1, dtype="bfloat16")
    grouped = replace(one, further_bytes=10**9)
    more_s = kernel_time(profile, grouped).seconds - kernel_time(profile, one).seconds
    assert more_s == pytest.approx(10**9 / profile.bandwidth.hbm_bytes_per_s)


@pytest.mark.parametrize(
    ("inputs", "outputs", "alignment"), [(64, 128, 16), (64, 100, 8), (50257, 64, 2), (64, 50257, 2), (66, 64, 4)]
)
def test_a_layers_products_are_aligned_as_the_rows_of_their_matrices(inputs: int, outputs: int, alignment: int) -> None:
    """x [6, inputs], w [outputs, inputs], y [6, outputs]: the number of rows of x is in no leading dimension."""
    shapes = (("x", (6, inputs)), ("w", (outputs, inputs)), ("y", (6, outputs)))
    x, w, y = (Value(name=n, shape=s, dtype="bfloat16", carries_gradient=True, storage=n) for n, s in shapes)
    args = (Ref("x"), Ref("w"))
    call = Call(target="aten.linear.default", args=args, kwargs=(), operands=(x, w), results=(y,))
    execution = Executor().execute(call, Strategy((R, R), (R,)), 1)
    products = [kernel for kernel in (*execution.forward, *execution.backward) if isinstance(kernel, Matmul)]
    assert len(products) == 3
    assert {product.alignment for product in products} == {alignment}
    assert all(set(product.leading) <= {inputs, outputs} for product in products)


def test_a_matrix_that_is_no_view_of_rows_or_columns_is_copied() -> None:
    log = KernelLog(False, ())
    with log:
        torch.randn(6, 20)[:, ::2] @ torch.randn(10, 9)
        torch.randn(6, 20)[:, :10] @ torch.randn(7, 10).T
        torch.randn(10).expand(6, 10) @ torch.randn(10, 9)
    leading = [kernel.leading for kernel in log.kernels if isinstance(kernel, Matmul)]
    assert leading == [(10, 9, 9), (20, 10, 7), (10, 9, 9)]


def grouped_product(dtype: str, *, frozen: bool) -> Execution:
    """Rows [32, 16] by experts [4, 16, 24]."""
    operands = tuple(
        Value(name=n, shape=s, dtype=d, carries_gradient=g, storage=n)
        for n, s, d, g in (
            ("rows", (32, 16), dtype, True),
            ("experts", (4, 16, 24), dtype, not frozen),
            ("offsets", (4,), "int32", False),
        )
    )
    result = Value(name="y", shape=(32, 24), dtype=dtype, carries_gradient=True, storage="y")
    args = tuple(Ref(value.name) for value in operands)
    call = Call(target="aten._grouped_mm.default", args=args, kwargs=(), operands=operands, results=(result,))
    return Executor().execute(call, Strategy((R, R, R), (R,)), 1)


def flop(kernels: tuple[Kernel, ...]) -> int:
    """A multiplication and an addition for each of m * n * k."""
    return sum(2 * p.batch * p.m * p.n * p.k for p in kernels if isinstance(p, Matmul))


def observed(key: str, *ran: OpRecord, is_bounded: bool = True) -> dict[str, OpaqueTrace]:
    """A call of a module that runs whole, which ran this forward."""
    outputs = tuple(result for op in ran for result in op.results)
    return {
        key: OpaqueTrace(
            key=key,
            outputs=outputs,
            spec=pytree.tree_structure(outputs),
            forward=ran,
            backward=(),
            keeps=frozenset(),
            keeps_results=frozenset(),
            written=frozenset(),
            kept_bytes=0,
            forward_bytes=0,
            backward_bytes=0,
            bodies=(),
            is_bounded=is_bounded,
        )
    }


def test_what_is_guessed_of_a_module_that_runs_whole_is_said() -> None:
    """Meta tensors do not run geqrf, and nonzero only reads and writes. Said once for each call that was seen."""
    x = torch.empty(6, 8, device="meta")
    product = OpRecord(op=torch.ops.aten.mm.default, args=(x, x.T), kwargs={}, results=(x.new_empty(6, 6),))
    sifts = OpRecord(op=torch.ops.aten.nonzero.default, args=(x,), kwargs={}, results=(x.new_empty(48, 2),))
    square = x.new_empty(8, 8)
    factors = OpRecord(op=torch.ops.aten.geqrf.default, args=(square,), kwargs={}, results=(square, x.new_empty(8)))
    executor = Executor()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor.observe(observed("seen", product, sifts), {})
    with pytest.warns(
        UserWarning, match=r"module sieve, which runs whole: aten\.geqrf\.default: priced by bytes alone"
    ):
        executor.observe(observed("guessed", product, factors), {"guessed": "sieve"})
    with pytest.warns(UserWarning, match="module <root>, which runs whole: a size that data decides is priced as 1"):
        executor.observe(observed("unbounded", product, is_bounded=False), {"unbounded": ""})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor.observe(observed("guessed", product, factors), {"guessed": "sieve"})


def test_what_meta_tensors_do_not_run_moves_its_bytes_and_says_so() -> None:
    def value(name: str, *shape: int) -> Value:
        return Value(name=name, shape=shape, dtype="float32", carries_gradient=False, storage=name)

    factors = Call(
        target="aten.geqrf.default",
        args=(Ref("x"),),
        kwargs=(),
        operands=(value("x", 8, 8),),
        results=(value("a", 8, 8), value("tau", 8)),
    )
    with pytest.warns(UserWarning, match=r"aten\.geqrf\.default.*priced by bytes alone") as warned:
        execution = Executor().execute(factors, Strategy((R,), (R, R)), 1)
    assert execution.forward == (MemoryBound(num_bytes=4 * (8 * 8 + 8 * 8 + 8)),)
    assert execution.guesses == tuple(str(warning.message) for warning in warned)


class Sifts(nn.Module):
    """Asks for a weight's value, so that it runs whole, and for as many rows as data says, which nothing bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave((x[:, 0] > 0).long(), 0).sum(0) * self.scale.sum().item() * self.scale


class Built(nn.Module):
    """Asks for a weight's value while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sifts() for _ in range(2))
        self.up = nn.Linear(8, 8)
        assert self.layers[0].scale.sum().item() == 8

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.layers[1](x) + self.layers[0](x)).sum()


def example_inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(batch, 8)}


@pytest.mark.filterwarnings("ignore:module .*, which runs whole:UserWarning")
def test_what_was_guessed_stands_in_the_plan() -> None:
    """However often a shared trace was warned of, and when a file is priced again."""
    reuse, cluster = tpplan.Reuse(), tpplan.Cluster(gpus=1, gpus_per_node=1, profile="cpu-gloo")

    def solved(build_model: type[nn.Module]) -> Plan:
        return tpplan.solve(
            build_model,
            example_inputs,
            cluster=cluster,
            global_batch=4,
            seq_len=1,
            prove=False,
            reuse=reuse,
            micro_batch=1,
        )

    with pytest.warns(UserWarning, match="the builder fails on the meta device"):
        plan = solved(Built)
    assert plan.notes is not None
    assert len(plan.notes) == 2
    assert plan.notes[0].startswith("the builder fails on the meta device, and runs on the CPU: ")
    assert plan.notes[1] == "layers.*: a size that data decides is priced as 1"
    assert all(note in " ".join(render(plan).split()) for note in plan.notes)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert solved(Built).notes == plan.notes
    with pytest.warns(UserWarning, match="the builder fails on the meta device"):
        assert tpplan.price(plan, Built, example_inputs, profile="cpu-gloo").notes == plan.notes


@pytest.mark.parametrize("first", [True, False], ids=["a copy first", "a view first"])
def test_a_reshape_that_copies_costs_its_copy_whichever_call_comes_first(first: bool) -> None:
    """Of two equal calls, one on a transposed operand, only that one's result has memory of its own."""
    sizes = ((6, 4, 8), (24, 8))

    def reshape(copies: bool) -> Call:
        shape, into = sizes
        x = Value(name="x", shape=shape, dtype="float32", carries_gradient=False, storage="x")
        y = Value(name="y", shape=into, dtype="float32", carries_gradient=False, storage="y" if copies else "x")
        return Call(target="aten.reshape.default", args=(Ref("x"), into), kwargs=(), operands=(x,), results=(y,))

    executor, whole = Executor(), Strategy((R,), (R,))
    found = {copies: executor.execute(reshape(copies), whole, 1).forward for copies in (first, not first)}
    assert found == {True: (MemoryBound(num_bytes=2 * 24 * 8 * 4),), False: ()}
