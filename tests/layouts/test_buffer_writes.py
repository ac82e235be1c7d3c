"""Buffers that a forward writes to from rows of the batch: found in the graph, and refused on data-parallel ranks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import tpplan
from tpplan.core.errors import UsageError
from tpplan.layouts.buffer_writes import buffers_written
from tpplan.layouts.typecheck import Mistyped, typecheck
from tpplan.plan.plan import MeshPlan, Plan, ProofStatus
from tpplan.trace.trace import trace

ROWS, LENGTH, DIM, HIDDEN, CODES = 8, 4, 8, 32, 4


class Model(nn.Module):
    """Two layers, between which code may write to the buffers `mean`, `again` and `codes`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.mean, self.again, self.codes = (
            nn.Buffer(torch.zeros(size)) for size in ((HIDDEN,), (HIDDEN,), (CODES, HIDDEN))
        )

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(F.gelu(self.up(x)))).square().mean()


class Average(Model):
    """A moving average that is subtracted."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(h.mean((0, 1)), 0.1)
        return h - self.mean


class ReadFirst(Model):
    """What one step writes, the next one reads."""

    def between(self, h: Tensor) -> Tensor:
        centered = h - self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        return centered


class Replaces(Model):
    def between(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        return h - self.mean


class PartByPart(Model):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean[: HIDDEN // 2].copy_(h.mean((0, 1))[: HIDDEN // 2])
        return h - self.mean


class Codebook(Model):
    """The nearest code of each row; codes move to the mean of their rows."""

    def between(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, 1)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        quantized = self.codes[nearest].view_as(h)
        with torch.no_grad():
            chosen = F.one_hot(nearest, CODES).to(h.dtype)
            self.codes.lerp_(chosen.t() @ flat, 0.1)
        return h + (quantized - h).detach()


class Handed(Model):
    """One buffer is written from rows, a second one from it, and that is read."""

    def between(self, h: Tensor) -> Tensor:
        centered = h - self.again
        with torch.no_grad():
            self.again.copy_(self.mean)
            self.mean.copy_(h.mean((0, 1)))
        return centered


class Together(Model):
    """Several at once."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_add_([self.again, self.mean], [h.mean((0, 1)), h.mean((0, 1))])
        return h - self.mean - self.again


class Norms(Model):
    """Running statistics, which evaluation alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


class Watches(Model):
    """A buffer for a log."""

    def between(self, h: Tensor) -> Tensor:
        self.mean.add_(h.detach().mean((0, 1)))
        return h


class Scratch(Model):
    """A buffer that every forward overwrites before it reads it."""

    def between(self, h: Tensor) -> Tensor:
        self.mean.copy_(h.detach().abs().amax((0, 1)))
        return h / (self.mean + 1)


class Counts(Model):
    """A buffer of which every rank has the same: its forwards are counted, and its shape is that of rows."""

    def between(self, h: Tensor) -> Tensor:
        self.mean += torch.ones_like(h[0, 0]) + h.new_zeros(HIDDEN)
        return h / self.mean


class Attribute(Model):
    """A moving average in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.running = torch.zeros(HIDDEN)

    def between(self, h: Tensor) -> Tensor:
        centered = h - self.running
        self.running = 0.9 * self.running + 0.1 * h.detach().mean((0, 1))
        return centered


class InPlace(Attribute):
    def between(self, h: Tensor) -> Tensor:
        centered = h - self.running
        self.running.lerp_(h.detach().mean((0, 1)), 0.1)
        return centered


class InList(Attribute):
    """The last step's activations, and what they were made of."""

    def __init__(self) -> None:
        super().__init__()
        self.last = {"all": [torch.zeros(2, LENGTH, HIDDEN)]}

    def between(self, h: Tensor) -> Tensor:
        moved = h - self.last["all"][0].mean()
        self.last = {"all": [h.detach()]}
        return moved


class Shown(Attribute):
    """Attributes that forward alone writes, for whoever looks at them."""

    def between(self, h: Tensor) -> Tensor:
        self.seen = h.detach()
        self.largest = h.detach().amax()
        return h


class Lazily(Attribute):
    """A table that the first step makes, of numbers alone."""

    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.table = torch.arange(HIDDEN, device=h.device).to(h.dtype).cos()
        return h * self.table


class Once(Attribute):
    """What the first step found, for all others."""

    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.first = h.detach().mean((0, 1))
        return h - self.first


class KeepsInput(Attribute):
    """The last step's rows themselves, from the second step on."""

    def forward(self, x: Tensor) -> Tensor:
        moved = x - self.rows.mean() if hasattr(self, "rows") else x
        self.rows = x
        return super().forward(moved)


class Spectral(Model):
    """Buffers that are written from weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = spectral_norm(self.up)


def batch(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, DIM)}


def written(build: type[nn.Module]) -> dict[str, bool]:
    with torch.device("meta"):
        model = build()
    return {own.label: own.is_read for own in buffers_written(trace(model, batch(2, LENGTH)))}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Average, {"mean": True}),
        (ReadFirst, {"mean": True}),
        (Replaces, {"mean": True}),
        (PartByPart, {"mean": True}),
        (Codebook, {"codes": True}),
        (Handed, {"mean": True, "again": True}),
        (Together, {"mean": True, "again": True}),
        (Norms, {"norm.running_mean": False, "norm.running_var": False}),
        (Watches, {"mean": False}),
        (Scratch, {"mean": False}),
        (Counts, {}),
        (Attribute, {"running": True}),
        (InPlace, {"running": True}),
        (InList, {"last.all.0": True}),
        (Shown, {}),
        (Lazily, {}),
        (Spectral, {}),
        (Model, {}),
    ],
)
def test_buffers_written_from_rows_are_found_and_whether_a_later_step_reads_them(
    build: type[nn.Module], expected: dict[str, bool]
) -> None:
    assert written(build) == expected


class Hidden(nn.Module):
    """Code that is not seen through, as it asks for a value of a weight, around the code of another class."""

    def __init__(self, inner: type[Model]) -> None:
        super().__init__()
        self.inner, self.scale = inner(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x) * self.scale.item()


@pytest.mark.parametrize(
    "inner",
    [Average, ReadFirst, Replaces, PartByPart, Codebook, Handed, Together, Attribute, InPlace, Once, KeepsInput],
)
def test_where_code_is_not_seen_through_its_buffers_are_found_too(inner: type[Model]) -> None:
    with pytest.raises(
        UsageError, match=r"(buffer|attribute) inner.* from rows of the batch .*on 2 data-parallel ranks"
    ):
        solve(lambda: Hidden(inner), tp=1, fsdp=2)


@pytest.mark.parametrize("inner", [Norms, Watches, Scratch, Counts, Spectral])
def test_where_code_is_not_seen_through_buffers_that_may_differ_may(inner: type[Model]) -> None:
    plan = solve(lambda: Hidden(inner), tp=1, fsdp=2)
    assert plan.opaque
    written = any("buffers that the forward writes to (inner." in note for note in plan.notes or ())
    assert written is (inner in (Norms, Watches, Scratch))


def solve(build: Callable[[], nn.Module], **options: object) -> Plan:
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    given = {"global_batch": ROWS, "micro_batch": ROWS // 2, "seq_len": LENGTH, "precision": "fp32"} | options
    return tpplan.solve(build, batch, cluster=cluster, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [Average, ReadFirst, Replaces, Codebook])
def test_data_parallel_ranks_are_refused_by_name_and_line(build: type[nn.Module]) -> None:
    name = "codes" if build is Codebook else "mean"
    why = rf"buffer {name} from rows of the batch .*test_buffer_writes.py:\d+: .*on 2 data-parallel ranks.*--fsdp 1"
    with pytest.raises(UsageError, match=why):
        solve(build, tp=1, fsdp=2)


@pytest.mark.parametrize(("build", "name"), [(Attribute, "running"), (InPlace, "running"), (InList, "last.all.0")])
def test_so_are_those_that_would_keep_their_own_rows_in_an_attribute(build: type[nn.Module], name: str) -> None:
    with pytest.raises(UsageError, match=rf"attribute {name} from rows of the batch .*on 2 data-parallel ranks"):
        solve(build, micro_batch=2, tp=1, fsdp=2)


def test_of_several_meshes_one_whose_ranks_have_the_same_rows_is_taken() -> None:
    plan = solve(Average)
    assert plan.mesh.data_parallel == 1
    assert plan.proof.status is ProofStatus.PROVEN


@pytest.mark.parametrize("build", [Norms, Watches, Scratch, Counts, Shown, Lazily, Spectral])
def test_buffers_that_training_does_not_read_or_that_are_alike_stand_beside_data_parallel_ranks(
    build: type[nn.Module],
) -> None:
    assert solve(build, tp=1, fsdp=2).proof.status is ProofStatus.PROVEN


def test_a_plan_whose_ranks_would_write_their_own_does_not_type() -> None:
    plan = solve(Average, tp=2)
    with torch.device("meta"):
        model = Average()
    graph = trace(model, batch(ROWS // 2, LENGTH))
    assert typecheck(graph, plan) is None
    problem = typecheck(graph, replace(plan, mesh_degrees=MeshPlan(replicate=2, shard=1, tp=2)))
    assert isinstance(problem, Mistyped)
    assert "on 2 data-parallel ranks each would write what its own rows give" in problem.message
