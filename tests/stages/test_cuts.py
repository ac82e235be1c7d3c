"""Where models may be cut, and that a stage which is not its part of the model is seen."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from stage_models import LENGTH, WIDTH, Layer, Skipping, Stack, loss, text
from torch import Tensor, nn

import tpplan
from profiles import synthetic_profile
from tpplan.core.errors import InfeasibleError, UsageError
from tpplan.core.graph import ModelGraph
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan, Precision, StagePlan
from tpplan.search.models.subject import Subject
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.search.pipelines.solve_stages import why_no_parts
from tpplan.search.planner import solve_request
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.request import Request
from tpplan.stages.cut_proof import difference
from tpplan.stages.cuts import cuts_of, end_cuts_of, stages_of
from tpplan.stages.stage_model import as_stage
from tpplan.trace.record_fx import given_on_meta
from tpplan.trace.trace import called_layers, repeated_children

MACHINE = HardwareProfile.from_dict(synthetic_profile(), origin="synthetic")


def subject_of(build: Callable[[], nn.Module]) -> Subject:
    options = Options(loss=loss, precision=Precision.FP32)
    cluster = Cluster(gpus=2, gpus_per_node=2, profile=MACHINE)
    return Request.of(build, text, cluster, Batch(4, 2, LENGTH), options, None).subject


def sum_of(outputs: tuple[Tensor, ...], _inputs: object) -> Tensor:
    return torch.stack([tensor.sum() for tensor in outputs]).sum()


def traced(subject: Subject) -> ModelGraph:
    return TraceCache(subject, Reuse()).really_traced(2).graph


def test_every_layer_may_end_a_stage() -> None:
    graph = traced(subject_of(Stack))
    cuts = cuts_of(graph, [f"layers.{i}" for i in range(4)])
    assert [(cut.unit, cut.why_not) for cut in cuts] == [(f"layers.{i}", "") for i in range(3)]


class InPairs(Stack):
    """A model whose code calls what is in its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(self.layers[i : i + 2]) for i in (0, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for first, second in self.layers:
            x = second(first(x))
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_stages_meet_between_what_is_called() -> None:
    graph = traced(subject_of(InPairs))
    layers = called_layers(InPairs(), graph)
    assert layers == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")
    cuts = cuts_of(graph, layers)
    assert [(cut.unit, cut.why_not) for cut in cuts] == [(name, "") for name in layers[:-1]]
    for stage in stages_of(graph, cuts, [4, 3, 2, 1], 2):
        model = as_stage(InPairs(), stage, Precision.FP32, (), given_on_meta)
        held = {name for name in layers for own, _ in model.named_parameters() if own.startswith(f"{name}.")}
        assert set(repeated_children(model)) == held
        assert len(held) == 1


def test_the_embedding_and_the_head_may_be_stages_of_their_own() -> None:
    units = [f"layers.{i}" for i in range(4)]
    first, last = end_cuts_of(traced(subject_of(Stack)), units)
    assert [cut.unit for cut in (*first, *last)] == ["embedding", "layers.3"]


@pytest.mark.parametrize(
    ("gpus", "stages", "message"),
    [
        (1, 2, "--pp 2: a model in stages needs several GPUs, and there is 1: leave --pp out"),
        (6, 4, "--pp 4 does not divide 6 GPUs: take one of 2, 3, 6"),
    ],
)
def test_parts_that_the_gpus_cannot_be_divided_into_are_refused(gpus: int, stages: int, message: str) -> None:
    assert why_no_parts(stages, Cluster(gpus=gpus, gpus_per_node=gpus, profile=MACHINE)) == message


def test_more_stages_than_layers_are_refused_with_their_number() -> None:
    with pytest.raises(UsageError, match="cut at 5 places, and 7 stages need 6: it has 4 repeated layers"):
        tpplan.solve_stages(
            Stack,
            text,
            stages=7,
            cluster=Cluster(gpus=7, gpus_per_node=7, profile=MACHINE),
            global_batch=7,
            seq_len=LENGTH,
            options=Options(loss=loss, precision=Precision.FP32),
        )


def test_why_not() -> None:
    with pytest.raises(UsageError, match=r"reads what layers\.0"):
        tpplan.solve_stages(
            Skipping,
            text,
            stages=3,
            cluster=Cluster(gpus=3, gpus_per_node=3, profile=MACHINE),
            global_batch=6,
            seq_len=LENGTH,
            options=Options(loss=loss, precision=Precision.FP32),
        )


def test_stages_together_hold_each_parameter_once() -> None:
    graph = traced(subject_of(Stack))
    cuts = cuts_of(graph, [f"layers.{i}" for i in range(4)])
    names: list[str] = []
    for stage in stages_of(graph, [cuts[0], cuts[2]], [3, 2, 1], 2):
        model = as_stage(Stack(), stage, Precision.FP32, (), given_on_meta)
        names += [name for name, _ in model.named_parameters()]
        assert [name for name in repeated_children(model) if name] == [
            f"layers.{i}" for i in range(4) if any(n.startswith(f"layers.{i}.") for n, _ in model.named_parameters())
        ]
    assert sorted(names) == sorted(name for name, _ in Stack().named_parameters())


class OtherPath(Stack):
    """A model whose code asks what its layers are."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            scale = 2.0 if type(layer).__name__ == "Stub" else 1.0
            x = self.half(layer(x), scale)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def half(self, x: Tensor, scale: float) -> Tensor:
        return x * scale


def test_code_that_takes_another_path_beside_stubs_is_seen() -> None:
    subject = subject_of(OtherPath)
    whole = traced(subject)
    cut = cuts_of(whole, [f"layers.{i}" for i in range(4)])[1]
    _, last = stages_of(whole, [cut], [2, 1], 2)
    graph = traced(replace(subject, stage=last))
    own = range(cut.position, len(whole.nodes))
    assert "does not run on the same values in stage 1" in difference(whole, graph, last, own)
    honest = subject_of(Stack)
    whole = traced(honest)
    cut = cuts_of(whole, [f"layers.{i}" for i in range(4)])[1]
    stages = stages_of(whole, [cut], [2, 1], 2)
    parts = (range(cut.position), range(cut.position, len(whole.nodes)))
    for stage, part in zip(stages, parts, strict=True):
        of_stage = replace(honest, stage=stage, loss=loss if stage.last is None else sum_of)
        assert difference(whole, traced(of_stage), stage, part) == ""


class Marking(Stack):
    """A model whose first layer writes through a view into the mask that later layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = MarkingLayer()


class MarkingLayer(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        mask[:, 0] = True
        return super().forward(x, mask)


class Buffered(Stack):
    """A model whose first layer keeps activations in a buffer of the root that the last layer's output is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                self.kept.copy_(x.detach())
        logits: Tensor = self.head(self.norm(x + self.kept))
        return logits


def test_what_a_buffer_takes_across_is_seen() -> None:
    cut = cuts_of(traced(subject_of(Buffered)), [f"layers.{i}" for i in range(4)])[1]
    assert "the root reads what the root made before it" in cut.why_not


def test_writes_that_another_stage_makes_are_seen() -> None:
    subject = subject_of(Marking)
    whole = traced(subject)
    cut = next(cut for cut in cuts_of(whole, [f"layers.{i}" for i in range(4)]) if cut.unit == "layers.1")
    _, last = stages_of(whole, [cut], [2, 1], 2)
    graph = traced(replace(subject, stage=last))
    assert "writes to what is read" in difference(whole, graph, last, range(cut.position, len(whole.nodes)))


class Centred(Stack):
    """A model with a norm without weights before its layers, which keeps statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.centre(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_buffers_are_of_the_stage_that_runs_their_module() -> None:
    graph = traced(subject_of(Centred))
    cut = cuts_of(graph, [f"layers.{i}" for i in range(4)])[1]
    stages = stages_of(graph, [cut], [2, 1], 2)
    first, last = (as_stage(Centred(), stage, Precision.FP32, (), given_on_meta) for stage in stages)
    assert "centre.running_mean" in dict(first.named_buffers())
    assert not dict(last.named_buffers())


def test_gradients_of_inputs_are_priced_and_reduced() -> None:
    """A model of which an input carries a gradient adds that up over tensor-parallel ranks."""

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, length, WIDTH, requires_grad=True)}

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F_relu(self.up(x)))
            return y

    F_relu = torch.relu  # noqa: N806
    plan = tpplan.solve(
        Mlp,
        inputs,
        cluster=Cluster(gpus=2, gpus_per_node=2, profile=MACHINE),
        global_batch=8,
        seq_len=LENGTH,
        tp=2,
        loss=lambda outputs, _: outputs.sum(),
        precision=Precision.FP32,
        pins={"<root>": "megatron"},
    )
    assert any(own.during == "backward" and own.kind == "all_reduce" for own in plan.collectives)


def saved_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes of the storages that torch's autograd saves in a forward, without those of parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs["tokens"])
    return sum(storage.nbytes() for storage in storages.values())


def test_what_a_stage_keeps_in_flight_counts() -> None:
    """The first of two stages holds what autograd saves of a second micro-batch too, in replay and ILP alike."""
    subject = subject_of(Stack)
    graph = traced(subject)
    cut = cuts_of(graph, [f"layers.{i}" for i in range(4)])[1]
    stage = stages_of(graph, [cut], [2, 1], 2)[0]

    def planned(own: StagePlan, limit: float | None = None) -> Plan:
        options = Options(
            loss=sum_of, precision=Precision.FP32, recompute="none", tp=1, stage=own, memory_limit_bytes=limit
        )
        cluster, batch = Cluster(gpus=1, gpus_per_node=1, profile=MACHINE), Batch(8, 2, LENGTH)
        return solve_request(Request.of(Stack, text, cluster, batch, options, None), options, None, prove=False)

    two, one = planned(stage), planned(replace(stage, in_flight=1))
    kept = two.predicted.peak_memory_bytes - one.predicted.peak_memory_bytes
    saved = saved_bytes(as_stage(Stack(), stage, Precision.FP32, (), given_on_meta), text(2, LENGTH))
    assert saved <= kept <= 1.1 * saved  # a GPU's attention kernels keep a little more than a CPU's
    between = one.predicted.peak_memory_bytes + one.predicted.slack_bytes + kept / 2
    assert planned(replace(stage, in_flight=1), between).predicted.step_time_s == one.predicted.step_time_s
    with pytest.raises(InfeasibleError):
        planned(stage, between)


class WithNumbers(Layer):
    """A layer with numbers in its code, which become constants: an index that is a list, and a tensor."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        picked = x[:, :, [self.index]] * torch.tensor(0.5)
        return super().forward(x, mask) + picked


class Numbered(Stack):
    def __init__(self, last: int = -2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithNumbers(index) for index in (-2, -2, -2, last))


def test_constants_of_stages_match_by_what_they_hold() -> None:
    subject = subject_of(Numbered)
    whole = traced(subject)
    cut = cuts_of(whole, [f"layers.{i}" for i in range(4)])[1]
    _, last = stages_of(whole, [cut], [2, 1], 2)
    own = range(cut.position, len(whole.nodes))
    assert difference(whole, traced(replace(subject, stage=last)), last, own) == ""
    other = traced(replace(subject_of(partial(Numbered, -3)), stage=last))
    assert "of layers.3 does not run on the same values in stage 1" in difference(whole, other, last, own)
