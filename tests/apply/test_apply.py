"""Applied plans on real ranks against one process: losses, every gradient, optimizer steps; and what is refused."""

import copy
import dataclasses
import io
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny_llama
import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.nn.functional as F
from one_process import TOLERANCE, assert_same, gradients, mean_over_replicas, whole
from plans import handmade_plan
from ranks import RankError, run_ranks
from tiny_llama import (
    Style,
    batch,
    build,
    data_parallel,
    loss_of,
    my_part,
    sequence_parallel,
    tensor_parallel,
    vocabulary_parallel,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from tpplan.apply.apply import apply_plan, no_sync
from tpplan.apply.collectives.tp_gradients import buckets
from tpplan.apply.parallel_style import styles
from tpplan.core.errors import PlanError, PlanMismatchError, UsageError
from tpplan.core.layout import Conversion, R, S
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import BoundaryPlan, CrossingPlan, Plan, Precision, Recompute

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

Read = Callable[[int], tuple[Tensor, Tensor]]


# ---- losses and gradients


def one_backward(style: Style, mesh: Mesh, is_tied: bool) -> None:
    reference = build(is_tied=is_tied)
    expected_loss = loss_of(reference, *batch())
    expected_loss.backward()
    model = build(dist.get_rank(), is_tied=is_tied)  # each rank has other values: rank 0's must win
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    description = repr(model)
    applied = apply_plan(model, style(model, mesh))
    assert applied is model
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    if mesh.data_parallel == 1:
        assert repr(model) == description
    loss = loss_of(model, *my_part(mesh))
    assert abs(mean_over_replicas(loss) - expected_loss.item()) < TOLERANCE
    loss.backward()
    assert_same(gradients(model), gradients(reference))
    if is_tied:
        assert model.head._parameters["weight"] is model.embedding._parameters["weight"]


@pytest.mark.parametrize(
    ("style", "mesh", "is_tied"),
    [
        (tensor_parallel, Mesh(tp=2), False),
        (tensor_parallel, Mesh(shard=2, tp=2), True),
        (sequence_parallel, Mesh(tp=4), False),
        (sequence_parallel, Mesh(replicate=2, tp=2), False),
        (vocabulary_parallel, Mesh(tp=2), True),
        (vocabulary_parallel, Mesh(tp=4), False),
        (vocabulary_parallel, Mesh(shard=2, tp=2), False),
        (data_parallel, Mesh(replicate=2, shard=2), False),
        (data_parallel, Mesh(shard=4), True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_loss_and_gradients_equal_one_process(style: Style, mesh: Mesh, is_tied: bool) -> None:
    run_ranks(mesh.num_gpus, one_backward, style, mesh, is_tied)


# ---- accumulation, clipping, optimizer


STEPS = 2
#: whether each micro-batch's backward reduces over replicas and the tp axis, or leaves it to a later one
ALL_SYNC, LAST_SYNCS, SECOND_LEAVES = (True, True), (False, True), (True, False, True)


def accumulate(model: nn.Module, step: int, read: Read, syncs: tuple[bool, ...]) -> float:
    total = 0.0
    for number, syncs_now in enumerate(syncs):
        with nullcontext() if syncs_now else no_sync(model):
            loss = loss_of(model, *read(10 * step + number)) / len(syncs)
            loss.backward()
        total += float(loss.detach())
    return total


def train(model: nn.Module, read: Read, syncs: tuple[bool, ...]) -> tuple[list[float], list[float]]:
    """Losses of this rank's data, and gradient norms before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(accumulate(model, step, read, syncs=syncs))
        norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses, norms


def train_and_compare(style: Style, mesh: Mesh, is_tied: bool, variants: tuple[tuple[bool, ...], ...]) -> None:
    for syncs in variants:
        expected_losses, expected_norms = train(build(is_tied=is_tied), batch, (True,) * len(syncs))
        model = build(is_tied=is_tied)
        apply_plan(model, style(model, mesh))
        losses, norms = train(model, lambda step: my_part(mesh, step), syncs)
        means = [mean_over_replicas(torch.tensor(loss)) for loss in losses]
        assert means == pytest.approx(expected_losses, rel=TOLERANCE)
        assert norms == pytest.approx(expected_norms, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("style", "mesh", "is_tied", "variants"),
    [
        (vocabulary_parallel, Mesh(tp=2), False, (ALL_SYNC, LAST_SYNCS, SECOND_LEAVES)),
        (sequence_parallel, Mesh(shard=2, tp=2), True, (ALL_SYNC, LAST_SYNCS)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_accumulation_clipping_and_adamw_equal_one_process(
    style: Style, mesh: Mesh, is_tied: bool, variants: tuple[tuple[bool, ...], ...]
) -> None:
    run_ranks(mesh.num_gpus, train_and_compare, style, mesh, is_tied, variants)


def accumulate_over_replicas() -> None:
    mesh = Mesh(replicate=2, tp=2)
    reference, model = build(), build()
    apply_plan(model, vocabulary_parallel(model, mesh))
    for step, syncs in enumerate((SECOND_LEAVES, LAST_SYNCS)):  # the second adds to what the first reduced
        accumulate(reference, step, batch, (True,) * len(syncs))
        accumulate(model, step, lambda number: my_part(mesh, number), syncs)
        assert_same(gradients(model), gradients(reference))


def test_accumulation_over_replicas_equals_one_process() -> None:
    run_ranks(4, accumulate_over_replicas)


def gradients_between_backwards() -> None:
    mesh = Mesh(tp=2)
    reference, model = build(), build()
    apply_plan(model, sequence_parallel(model, mesh))
    for step in range(3):  # whole after each of them, though each adds to the last
        loss_of(reference, *batch(step)).backward()
        loss_of(model, *batch(step)).backward()
        assert_same(gradients(model), gradients(reference))
    reference.zero_grad()
    model.zero_grad()
    losses = [loss_of(m, *batch(0)) + loss_of(m, *batch(1)) for m in (reference, model)]  # two forwards, one backward
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(model), gradients(reference))
    with no_sync(model):
        loss_of(model, *batch(2)).backward()
    loss_of(reference, *batch(2)).backward()
    summed = model.norm.weight.grad.to_local().clone()  # a summand of it now
    dist.all_reduce(summed)
    assert_same({"norm": summed}, {"norm": reference.norm.weight.grad})
    loss_of(reference, *batch(3)).backward()
    loss_of(model, *batch(3)).backward()
    assert_same(gradients(model), gradients(reference))


def test_gradients_are_whole_after_every_backward() -> None:
    run_ranks(2, gradients_between_backwards)


def test_buckets_hold_one_dtype_and_at_most_their_size() -> None:
    sizes = [3, 3, 5, 20, 1]
    tensors = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes] + [torch.zeros(2)]
    found = [[tensor.numel() for tensor in bucket] for bucket in buckets(tensors, 2 * 10)]
    assert found == [[1, 3, 3], [5], [20], [2]]


# ---- recomputation


class Recomputing(nn.Module):
    """Recomputes a function of its own, which reads parameters with no module's forward running."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = tiny_llama.Norm()
        self.weight = nn.Parameter(torch.randn(tiny_llama.D, tiny_llama.D) / 5)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight) * self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def recompute_blocks(style: Style, mesh: Mesh, when: str) -> None:
    reference = build()
    loss_of(reference, *batch()).backward()
    model = build(recomputes=when == "in the model")
    plan = style(model, mesh)
    if when == "wrapped before":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, tiny_llama.Block))
    apply_plan(model, plan)
    if when == "wrapped after":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, tiny_llama.Block))
    loss_of(model, *my_part(mesh)).backward()
    assert_same(gradients(model), gradients(reference))


def recompute_a_function() -> None:
    torch.manual_seed(0)
    reference = Recomputing()
    x = torch.randn(4, tiny_llama.D)
    reference(x).pow(2).sum().backward()
    model = copy.deepcopy(reference)
    parameters = {"weight": ("R", "R*"), "norm.weight": ("R", {"": "R*"})}
    boundaries = {"": ({"x": "R -> S(0)"}, {"output": "S(0) -> R"})}
    apply_plan(model, handmade_plan(model, Mesh(tp=2), parameters=parameters, boundaries=boundaries))
    model(x).pow(2).sum().backward()
    assert_same(gradients(model), gradients(reference))


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each op runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def planned(style: Style, mesh: Mesh, recompute: dict[str, Recompute]) -> Counter[str]:
    """Ops of a forward and backward under a plan with this recomputation, gradients compared with one process."""
    reference = build()
    loss_of(reference, *batch()).backward()
    model = build(dist.get_rank())
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    apply_plan(model, dataclasses.replace(style(model, mesh), recompute=recompute))
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))) if mesh.data_parallel == 1 else ():
        assert type(twin.layers[0]) is type(model.layers[0])
        loss_of(twin, *my_part(mesh)).backward()
        assert_same(gradients(twin), gradients(reference))
    with Counted() as counted:
        loss_of(model, *my_part(mesh)).backward()
    assert_same(gradients(model), gradients(reference))
    return counted.counts


def recompute_as_planned(style: Style, mesh: Mesh) -> None:
    kept = planned(style, mesh, {})
    full = planned(style, mesh, {"layers.0": Recompute.FULL, "layers.1": Recompute.FULL})
    whole_model = planned(style, mesh, {"<root>": Recompute.FULL})  # FSDP's units in it gather again
    selective = planned(style, mesh, {"layers.0": Recompute.SELECTIVE, "layers.1": Recompute.SELECTIVE})
    mixed = planned(style, mesh, {"layers.0": Recompute.FULL, "layers.1.mlp": Recompute.FULL})
    products, pointwise = "aten::mm", "aten::silu"
    assert kept[products] == selective[products] < mixed[products] < full[products] <= whole_model[products]
    assert kept[pointwise] == 2
    assert selective[pointwise] == mixed[pointwise] == full[pointwise] == 4
    sums = "_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor"
    assert [selective[name] for name in sums] == [kept[name] for name in sums]


@pytest.mark.parametrize(
    ("style", "mesh"),
    [
        (sequence_parallel, Mesh(tp=2)),
        (tensor_parallel, Mesh(tp=2)),
        (data_parallel, Mesh(shard=2)),
        (sequence_parallel, Mesh(shard=2, tp=2)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planned_recomputation_repeats_what_it_says_and_changes_nothing(style: Style, mesh: Mesh) -> None:
    run_ranks(mesh.num_gpus, recompute_as_planned, style, mesh)


def test_recomputation_is_of_training_forwards_and_of_modules_that_run() -> None:
    run_ranks(1, recompute_alone)


def recompute_alone() -> None:
    """On one rank there is no tensor parallelism and no FSDP, and recomputation all the same."""
    model = build()
    region = {"layers.0": Recompute.FULL}
    apply_plan(model, handmade_plan(model, Mesh(), recompute=region))
    with torch.no_grad(), Counted() as counted:
        loss_of(model, *batch())
    assert counted.counts["aten::silu"] == 2
    with pytest.raises(UsageError, match="apply a plan once"):
        apply_plan(model, handmade_plan(model, Mesh()))
    model = build()
    with pytest.raises(PlanMismatchError, match=r"recompute.layers: ModuleList has no forward"):
        apply_plan(model, handmade_plan(model, Mesh(), recompute={"layers": Recompute.FULL}))
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, tiny_llama.Block))
    with pytest.raises(UsageError, match=r"recompute.layers.0: .*checkpoint wrapper"):
        apply_plan(model, handmade_plan(build(), Mesh(), recompute=region))


def recompute_all() -> None:
    recompute_blocks(vocabulary_parallel, Mesh(tp=2), "in the model")
    recompute_blocks(sequence_parallel, Mesh(tp=2), "wrapped before")
    recompute_blocks(sequence_parallel, Mesh(tp=2), "wrapped after")
    recompute_a_function()


def test_recomputation_converts_and_reads_as_the_first_time() -> None:
    run_ranks(2, recompute_all)


def recompute_sharded() -> None:
    recompute_blocks(sequence_parallel, Mesh(shard=2, tp=2), "in the model")
    recompute_blocks(sequence_parallel, Mesh(shard=2, tp=2), "wrapped before")


def test_recomputation_goes_with_fsdp() -> None:
    run_ranks(4, recompute_sharded)


# ---- reading parameters


class Readers(nn.Module):
    """One weight read in three ways, another module's read by its parent, an embedding inside a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.part = Part(self.scale)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unread = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, *rest: Tensor, ids: Tensor, options: dict[str, Tensor]) -> dict[str, object]:
        x = x * self.scale + self.embedding(ids)
        x = F.linear(x, self.inner.weight) + self.inner(x) + self.frozen + rest[0] * options["gain"]
        return {"hidden": self.part(x), "rest": (x.sum(), "text", None), "dtype": self.unread.dtype}


class Part(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


def read_in_several_ways() -> None:
    torch.manual_seed(0)
    reference = Readers()
    inputs = {"ids": torch.randint(0, 8, (2, 6)), "options": {"gain": torch.randn(2, 6, 1)}}
    x, rest = torch.randn(2, 6, 4), torch.randn(2, 6, 4)

    def backward(model: nn.Module) -> dict[str, Tensor]:
        output = model(x, rest, **inputs)
        (output["hidden"].pow(2).sum() + output["rest"][0]).backward()
        assert output["rest"][1:] == ("text", None)
        return gradients(model) | {"hidden": output["hidden"].detach()}

    expected = backward(reference)
    model = copy.deepcopy(reference)
    parameters = {
        "embedding.weight": ("S(0)", "S(0)"),
        "inner.weight": ("S(1)", {"": "R", "inner": "R"}),
        "scale": ("R", {"": "R", "part": "R*"}),
        "unread": ("R", {}),
    }
    boundaries = {
        "embedding": ({"input": "R -> rows"}, {"output": "rows -> R"}),
        "part": ({"x": "R -> S(1)"}, {}),
        "": ({}, {"output.hidden": "S(1) -> R"}),
    }
    apply_plan(model, handmade_plan(model, Mesh(tp=2), parameters=parameters, boundaries=boundaries))
    assert_same(backward(model), expected)
    assert isinstance(model.inner.weight, DTensor)  # outside forward
    # Arguments deeper in: all of them sharded on the way in, wherever they stand.
    model = copy.deepcopy(reference)
    slices = {"x": "R -> S(1)", "args1": "R -> S(1)", "ids": "R -> S(1)", "options.gain": "R -> S(1)"}
    boundaries = {"": (slices, {"output.hidden": "S(1) -> R", "output.rest.0": "P -> R"})}
    parameters = dict.fromkeys(("embedding.weight", "scale"), ("R", "R*"))
    parameters |= {"inner.weight": ("R", {"": "R*", "inner": "R*"}), "unread": ("R", {})}
    apply_plan(model, handmade_plan(model, Mesh(tp=2), parameters=parameters, boundaries=boundaries))
    assert_same(backward(model), expected)


def test_each_reader_sees_the_layout_planned_for_it() -> None:
    run_ranks(2, read_in_several_ways)


def read_unplanned() -> None:
    model = Readers()
    parameters = {"scale": ("R", {"part": "R*", "embedding": "R"})}
    apply_plan(model, handmade_plan(model, Mesh(tp=2), parameters=parameters))
    ids = torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(PlanMismatchError, match=r"scale is read by module <root>.*embedding as R, part as R\*"):
        model(torch.randn(2, 6, 4), torch.ones(1), ids=ids, options={"gain": torch.ones(1)})
    assert not model.part.__dict__["_tpplan_site"].shared.frames  # the error left no forward running


def test_a_reader_that_is_not_planned_is_refused_where_the_planned_ones_differ() -> None:
    run_ranks(2, read_unplanned)


def cross_in_another_dtype() -> None:
    model = build()
    plan = sequence_parallel(model, Mesh(tp=2), precision=Precision.BF16_MIXED)
    apply_plan(model, dataclasses.replace(plan, precision=Precision.FP32))
    with pytest.warns(UserWarning, match=r"input x: the tensor is torch.float32.* priced for torch.bfloat16") as warned:
        loss_of(model, *batch()).backward()
    assert len([w for w in warned if "priced for" in str(w.message)]) == 1
    crossing = CrossingPlan(Conversion(R, S(1)), "float31")
    odd = dataclasses.replace(plan, boundaries={"layers.0": BoundaryPlan(inputs={"x": crossing}, outputs={})})
    with pytest.raises(PlanError, match=r"boundaries.layers.0.inputs.x: 'float31' is no dtype of torch"):
        apply_plan(build(), odd)


def test_another_dtype_than_planned_is_said_once() -> None:
    run_ranks(2, cross_in_another_dtype)


class Masked(nn.Module):
    """Multiplies by a mask where there is one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (x if mask is None else x * mask).sum()


def pass_nothing_where_a_conversion_is_planned() -> None:
    model, x = Masked(), torch.randn(2, 4)
    plan = handmade_plan(
        model, Mesh(tp=2), boundaries={"": ({"x": "R -> S(1)", "mask": "R -> S(1)"}, {"output": "P -> R"})}
    )
    apply_plan(model, plan)
    torch.testing.assert_close(model(x, x), (x * x).sum())
    with pytest.raises(
        PlanMismatchError, match=r"<root>: the plan converts 'mask' \(R -> S\(1\)\), and nothing is passed"
    ):
        model(x)
    with pytest.raises(PlanMismatchError, match="and nothing is passed there"):
        model(x, mask=None)


def test_another_way_through_the_model_than_planned_is_refused() -> None:
    """Libraries build a mask while they are traced, and pass None and is_causal when they run."""
    run_ranks(2, pass_nothing_where_a_conversion_is_planned)


# ---- other ways in


def copies_and_styles() -> None:
    mesh = Mesh(tp=2)
    reference = build()
    loss_of(reference, *batch()).backward()
    expected = gradients(reference)
    model = build()
    plan = sequence_parallel(model, mesh)
    apply_plan(model, plan)
    loss_of(model, *batch(5)).backward()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        assert type(twin.norm) is type(model.norm)
        twin.zero_grad()
        loss_of(twin, *batch()).backward()
        assert_same(gradients(twin), expected)
    assert all(parameter.grad is not None for parameter in model.parameters())
    by_styles = build()
    parallelize_module(by_styles, init_device_mesh("cpu", (2,)), styles(plan))
    loss_of(by_styles, *batch()).backward()
    assert_same(gradients(by_styles), expected)


def test_copies_pickles_and_parallelize_module_give_the_same_model() -> None:
    run_ranks(2, copies_and_styles)


def from_meta(mesh: Mesh) -> None:
    reference = build(is_tied=True)
    loss_of(reference, *batch()).backward()
    with torch.device("meta"):
        model = build(is_tied=True)
    plan = vocabulary_parallel(model, mesh)
    apply_plan(model, plan)
    assert all(parameter.is_meta for parameter in model.parameters())
    weight = model.layers[0].attention._parameters.get("weight", model.layers[0].attention.q._parameters["weight"])
    assert weight.shape == (tiny_llama.D, tiny_llama.D)
    assert weight.to_local().numel() == weight.numel() // (mesh.tp * mesh.shard)
    model.to_empty(device="cpu")
    values = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole_value = values[name].detach()
            parameter.copy_(
                torch.distributed.tensor.distribute_tensor(whole_value, parameter.device_mesh, parameter.placements)
            )
    for _ in range(2):
        loss_of(model, *my_part(mesh)).backward()
    for parameter in reference.parameters():
        parameter.grad *= 2
    assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(shard=2, tp=2)], ids=str)
def test_a_model_on_meta_stays_there_until_it_is_filled(mesh: Mesh) -> None:
    run_ranks(mesh.num_gpus, from_meta, mesh)


def with_precision(precision: Precision, mesh: Mesh) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    model = build()
    apply_plan(model, sequence_parallel(model, mesh, precision=precision))
    loss = loss_of(model, *my_part(mesh))
    loss.backward()
    found = {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}
    return *found, mean_over_replicas(loss.float())


def test_precisions_keep_their_dtypes() -> None:
    exact = loss_of(build(), *batch()).item()
    bf16, fp32 = {torch.bfloat16}, {torch.float32}
    for parameters, grads, loss in run_ranks(2, with_precision, Precision.BF16_MIXED, Mesh(tp=2)):
        assert (parameters, grads) == (fp32, fp32)
        assert loss == pytest.approx(exact, rel=1e-2)
    for parameters, grads, loss in run_ranks(2, with_precision, Precision.BF16, Mesh(tp=2)):
        assert (parameters, grads) == (bf16, bf16)
        assert loss == pytest.approx(exact, rel=1e-2)


def fsdp_units() -> tuple[list[str], set[bool]]:
    model = build()
    apply_plan(model, sequence_parallel(model, Mesh(shard=2, tp=1)))
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    with torch.no_grad():
        loss_of(model, *batch())
    gathered = {p.to_local().shape == p.shape for p in model.layers.parameters()}
    return units, gathered


def test_fsdp_wraps_the_units_and_reshards_after_forward() -> None:
    assert run_ranks(2, fsdp_units) == [(["", "layers.0", "layers.1"], {False})] * 2


# ---- refusals


def refused(model: nn.Module, plan: Plan | str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply_plan(model, plan)


def refuse(folder: Path) -> None:
    mesh, rank = Mesh(tp=2), dist.get_rank()
    model = build()
    plan = sequence_parallel(model, mesh)
    refused(model, sequence_parallel(model, Mesh(tp=4)), PlanMismatchError, r"for 4 GPUs \(.*tp 4\), and 2 ranks")
    refused(build(is_tied=True), plan, PlanMismatchError, "embedding.weight, head.weight are one parameter in the")
    refused(nn.Linear(2, 3), plan, PlanMismatchError, "layers.0.attention.q.weight: in the plan, not in the model")
    other = tensor_parallel(model, mesh) if rank else plan
    refused(model, other, PlanMismatchError, r"rank 0 has sha256:\w+, rank 1 has sha256:\w+.*1 of 2 differ")
    path = folder / f"rank{rank}.json"
    if rank == 0:
        plan.dump(path)
    refused(model, path, PlanError, "cannot be read")
    unknown = with_boundary(plan, "norm", {"y": "R -> S(1)"})
    refused(model, unknown, PlanMismatchError, "module norm, input y: Norm.forward takes no argument")
    refused(model, with_boundary(plan, "nonesuch", {"x": "R -> S(1)"}), PlanMismatchError, "names module 'nonesuch'")
    with pytest.raises(UsageError, match="expected check=True, False or 'warn', got 'off'"):
        apply_plan(model, plan, check="off")  # type: ignore[arg-type]
    apply_plan(model, plan)  # none of the refusals left a trace
    refused(model, plan, UsageError, "sharded already")
    ids, targets = batch()
    with pytest.raises(PlanMismatchError, match=r"module layers.0, input x: R -> S\(1\): dim 1 of shape \[4, 7, 32\]"):
        loss_of(model, ids[:, :7], targets[:, :7])
    model = build()
    plan = with_boundary(plan, "head", {}, {"output.logits": "S(1) -> R"})
    apply_plan(model, plan)
    with pytest.raises(PlanMismatchError, match=r"module head: the plan converts 'output.logits'.*it is a Tensor"):
        loss_of(model, ids, targets)
    wrong = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("replicate", "shard", "tp"))
    with pytest.raises(PlanMismatchError, match="the plan's mesh is"):
        apply_plan(build(), plan, mesh=wrong)


def with_boundary(plan: Plan, module: str, inputs: dict[str, str], outputs: dict[str, str] | None = None) -> Plan:
    extra = handmade_plan(nn.Module(), Mesh(), boundaries={module: (inputs, outputs or {})}).boundaries
    return dataclasses.replace(plan, boundaries=dict(plan.boundaries) | dict(extra))


class Twins(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)


def refuse_twins() -> None:
    model = Twins()
    plan = handmade_plan(model, Mesh(tp=2))
    for losses in ({"first": 8, "second": 8}, {"first": 8}):
        apply_plan(Twins(), dataclasses.replace(plan, losses=losses))
    differently = dataclasses.replace(plan, losses={"first": 8, "second": 16})
    refused(model, differently, PlanError, "second is a module that has another name too")


def test_one_module_is_rewritten_in_one_way() -> None:
    run_ranks(2, refuse_twins)


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, refuse, tmp_path)


def test_a_process_group_is_needed() -> None:
    model = build()
    with pytest.raises(UsageError, match="run under torchrun"):
        apply_plan(model, sequence_parallel(model, Mesh(tp=2)))


def broken_on_one_rank() -> None:
    model = build() if dist.get_rank() == 0 else build(is_tied=True)
    apply_plan(model, sequence_parallel(build(), Mesh(tp=2)))


def test_an_error_of_one_rank_is_no_hang_of_the_others() -> None:
    with pytest.raises(RankError, match="PlanMismatchError"):
        run_ranks(2, broken_on_one_rank, timeout_s=20)
