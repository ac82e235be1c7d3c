"""What training code does with an applied model: its optimizers, evaluation, autocast, compiling, generation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from examples import eager_to_shard
from one_process import assert_same, gradients, whole
from ranks import run_ranks
from test_models import BATCH, DIM, HEADS, LENGTH, VOCAB, solve_for_two, text
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
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.apply.apply import apply_plan
from tpplan.core.errors import PlanMismatchError
from tpplan.core.graph import Boundary, ModelGraph
from tpplan.core.layout import S
from tpplan.core.mesh import Mesh
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import Plan, ProofStatus

# ---- optimizers


def optimize(style: Style, mesh: Mesh) -> None:
    for options in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}):
        reference, model = build(is_tied=True), build(is_tied=True)
        apply_plan(model, style(model, mesh))
        assert all(isinstance(p, DTensor) and p.device_mesh.mesh_dim_names[-1] == "tp" for p in model.parameters())
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, **options) for m in (reference, model)]
        for step in range(2):
            losses = [loss_of(reference, *batch(step)), loss_of(model, *my_part(mesh, step))]
            for value, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                value.backward()
            assert not any(placement.is_partial() for p in model.parameters() for placement in p.grad.placements)
            assert_same(gradients(model), gradients(reference), tolerance=1e-5 if step == 0 else 1e-3)
            norms = [whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (reference, model)]
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=0)
            for optimizer in optimizers:
                optimizer.step()


def test_clipping_and_every_adamw_work_as_they_are() -> None:
    mesh = Mesh(shard=2, tp=2)
    run_ranks(mesh.num_gpus, optimize, vocabulary_parallel, mesh)


# ---- evaluation and autocast


def evaluate(style: Style, mesh: Mesh) -> None:
    reference, model = build(), build()
    apply_plan(model, style(model, mesh))
    ids, targets = my_part(mesh)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(loss_of(model.eval(), ids, targets), loss_of(reference, ids, targets))
    loss_of(model.train(), ids, targets).backward()  # and training goes on
    with torch.inference_mode():
        torch.testing.assert_close(loss_of(model.eval(), ids, targets), loss_of(reference, ids, targets))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = loss_of(model, ids, targets), loss_of(reference, ids, targets)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    found.backward()
    expected.backward()


@pytest.mark.filterwarnings("ignore:.*crosses, and the plan was priced for:UserWarning")
@pytest.mark.parametrize(
    ("style", "mesh"),
    [
        pytest.param(vocabulary_parallel, Mesh(tp=2), marks=pytest.mark.long),
        (sequence_parallel, Mesh(shard=2, tp=2)),
        pytest.param(data_parallel, Mesh(shard=2), marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_evaluation_and_autocast_equal_one_process(style: Style, mesh: Mesh) -> None:
    run_ranks(mesh.num_gpus, evaluate, style, mesh)


def autocast_gradients() -> None:
    """bfloat16 sums differ in their last bit, and no more."""
    mesh = Mesh(tp=2)
    reference, model = build(), build()
    apply_plan(model, tensor_parallel(model, mesh))
    for each in (reference, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss_of(each, *batch())
        value.backward()
    assert_same(gradients(model), gradients(reference), tolerance=2e-2)


@pytest.mark.filterwarnings("ignore:.*crosses, and the plan was priced for:UserWarning")
def test_gradients_under_autocast_equal_one_process() -> None:
    run_ranks(2, autocast_gradients)


class PostNorm(nn.Module):
    """torch's encoder as its fused inference kernels take it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def evaluate_encoder(plan: Plan) -> None:
    torch.manual_seed(0)
    reference = PostNorm()
    torch.manual_seed(0)
    model = tpplan.apply_plan(PostNorm(), plan)
    tokens = text(BATCH, LENGTH)["tokens"]
    with torch.no_grad():
        expected, found = reference.train()(tokens), model.eval()(tokens)
        fused = reference.eval()(tokens)
    torch.testing.assert_close(whole(found), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-4)
    assert torch.backends.mha.get_fastpath_enabled()


def test_torchs_encoder_takes_no_fused_kernel_on_slices() -> None:
    plan = solve_for_two(PostNorm, text)
    assert plan.parameters["encoder.layers.*.linear1.weight"].placement == S(0)
    run_ranks(2, evaluate_encoder, plan)


# ---- compiling: minutes, so the default suite leaves it out


def compile_and_train(style: Style, mesh: Mesh, by_block: bool) -> None:
    reference = build()
    loss_of(reference, *batch()).backward()
    model = build()
    plan = style(model, mesh)
    plan = replace(plan, fsdp=replace(plan.fsdp, units=("layers.0", "layers.1", "<root>")))
    apply_plan(model, plan, compile=by_block)
    assert all((layer._compiled_call_impl is not None) is by_block for layer in model.layers)
    forward = model if by_block else torch.compile(model)
    for _ in range(2):
        model.zero_grad()
        loss_of(forward, *my_part(mesh)).backward()
        assert_same(gradients(model), gradients(reference))
    with torch.no_grad():
        value = loss_of(forward, *my_part(mesh))
    torch.testing.assert_close(value, loss_of(reference, *my_part(mesh)).detach())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "mesh", "by_block"),
    [
        (sequence_parallel, Mesh(tp=2), True),
        (data_parallel, Mesh(shard=2), False),
        (sequence_parallel, Mesh(shard=2, tp=2), True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_torch_compile_changes_nothing(style: Style, mesh: Mesh, by_block: bool) -> None:
    run_ranks(mesh.num_gpus, compile_and_train, style, mesh, by_block, timeout_s=280)


# ---- generation


def hugging_face() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=2 * DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
    return model


def tokens_and_targets(size: int, seq_len: int) -> dict[str, Tensor]:
    given = text(size, seq_len)
    return {"input_ids": given["tokens"], "targets": given["targets"]}


def whole_sequences(graph: ModelGraph) -> Callable[[str, Strategy], bool]:
    """Forbids slices of the batch and of the sequence of x [B, T, D]: one token more of one text cannot be cut."""
    crossing = {node.name for node in graph.nodes if isinstance(node, Boundary)}
    return lambda decision, strategy: decision not in crossing or strategy.results[0] not in (S(0), S(1))


def whole_batches(graph: ModelGraph) -> Callable[[str, Strategy], bool]:
    """Forbids slices of the batch of x [B, T, D]."""
    crossing = {node.name for node in graph.nodes if isinstance(node, Boundary)}
    return lambda decision, strategy: decision not in crossing or strategy.results[0] != S(0)


def generate(plan: Plan) -> None:
    models = []
    for on in (None, plan):
        torch.manual_seed(0)
        model = hugging_face()
        models.append(model if on is None else tpplan.apply_plan(model, on))
    prompt = tokens_and_targets(BATCH, 5)["input_ids"]
    for options in ({"use_cache": True}, {"use_cache": False}, {"use_cache": True, "num_beams": 2}):
        expected, found = (m.eval().generate(prompt, max_new_tokens=6, do_sample=False, **options) for m in models)
        assert torch.equal(found, expected)
    sampled = []
    for m in models:
        torch.manual_seed(7)
        sampled.append(m.generate(prompt, max_new_tokens=6, do_sample=True, use_cache=True))
    assert torch.equal(*sampled)


def planned_text(**options: Any) -> Plan:
    return tpplan.solve(
        hugging_face,
        tokens_and_targets,
        loss=lambda outputs, inputs: tpplan.cross_entropy(outputs["logits"], inputs["targets"]),
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=BATCH,
        micro_batch=BATCH,
        seq_len=LENGTH,
        tp=2,
        precision="fp32",
        **options,
    )


PINS = {"model.layers.*.self_attn": "megatron", "model.layers.*.mlp": "megatron", "lm_head": "replicated"}


@pytest.mark.long
@pytest.mark.slow
def test_a_hugging_face_model_generates_under_a_plan_that_cuts_no_text() -> None:
    pytest.importorskip("transformers")
    plan = planned_text(pins=PINS, allows=whole_sequences)
    assert plan.proof.status is ProofStatus.PROVEN
    run_ranks(2, generate, plan)


def generate_slices(plan: Plan) -> None:
    model = tpplan.apply_plan(hugging_face(), plan).eval()
    prompt = tokens_and_targets(BATCH, 5)["input_ids"][:, :4]
    for use_cache in (True, False):  # a token of its own, or five
        with pytest.raises(
            PlanMismatchError, match=r"module model\.\S+, input .*dim 1 of shape .* does not divide by tp = 2"
        ):
            model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=use_cache)


@pytest.mark.long
@pytest.mark.slow
def test_generating_under_slices_of_the_sequence_is_refused_by_name() -> None:
    pytest.importorskip("transformers")
    norms = {"model.layers.*.input_layernorm": "sequence", "model.layers.*.post_attention_layernorm": "sequence"}
    run_ranks(2, generate_slices, planned_text(pins=PINS | norms, allows=whole_batches))
