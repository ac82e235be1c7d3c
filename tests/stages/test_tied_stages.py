"""Parameters that several stages read: equal copies, one gradient, counted once."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_process import gradients, relative_errors, whole
from ranks import run_ranks
from stage_models import LENGTH, SIZES, Stack, Tied, loss, text
from stage_runs import (
    MACHINE,
    TOLERANCE,
    assert_loads,
    assert_solved_as_one_process,
    given,
    in_one_stage,
    loss_of,
    on_ranks,
    one_process,
    solved,
)
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import PlanError, PlanMismatchError, UsageError
from tpplan.core.layout import R, S
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Precision
from tpplan.plan.proof_hash import why_unproven
from tpplan.plan.report.stages import stage_lines
from tpplan.search.points.options import Options

NAME = "embedding.weight"


def assert_as_one_process(build: Any, plan: PipelinePlan, names: set[str]) -> None:
    """Gradients of one process, of the parameters `names` on all stages that read them."""
    _, expected = run_ranks(1, one_process, build)[0]
    holding: dict[str, int] = dict.fromkeys(names, 0)
    for _, _, found in run_ranks(plan.num_gpus, on_ranks, build, plan, timeout_s=120):
        errors = relative_errors(found, {name: expected[name] for name in found})
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.1e}"
        for name in names & found.keys():
            holding[name] += 1
    assert set(holding.values()) == {2 * plan.ranks_per_stage}


@pytest.mark.parametrize(
    ("stages", "gpus", "options"),
    [
        (2, 2, {}),
        (2, 8, {"tp": 2, "fsdp": 2}),
        (2, 4, {"virtual": 2, "fsdp": 2, "tp": 1, "whole_gradients": True, "recompute": "full"}),
        (2, 4, {"fsdp": 1, "tp": 1}),
        (2, 8, {"tp": 2, "fsdp": 2, "fsdp_over_tp": True}),
        (6, 6, {}),
    ],
    ids=str,
)
def test_own_model(stages: int, gpus: int, options: dict[str, Any]) -> None:
    plan = solved(Tied, stages=stages, gpus=gpus, **options)
    last = len(plan.stages) - 1
    own = [one.stage.ties for one in plan.stages if one.stage is not None]
    assert own[0] == own[-1] != ()
    assert not any(own[1:-1])
    assert f"tied          {NAME} is in stages 0 and {last}, which add up their gradients once a step" in stage_lines(
        plan
    )
    assert_as_one_process(Tied, plan, {NAME})


class Projecting(Stack):
    """A model whose root multiplies with the embedding's weight, which is in no module of the last stage."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_parameter_of_an_absent_module_alone(virtual: int, tp: int) -> None:
    plan = solved(Projecting, stages=2, gpus=2 * tp, virtual=virtual, tp=tp)
    assert_as_one_process(Projecting, plan, {NAME})


def on_meta_in_part(plan: PipelinePlan) -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Tied()
    with pytest.raises(PlanMismatchError, match=f"{NAME}, .* values on rank 0, and is on the meta device on rank 1"):
        tpplan.apply_plan(model, plan)


def test_values_on_some_ranks_alone_are_refused() -> None:
    run_ranks(2, on_meta_in_part, solved(Tied, stages=2, gpus=2), timeout_s=60)


class SparseAndFrozen(Tied):
    """A model whose lookup has a sparse gradient where its head's is dense; its second norm's scale is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32, sparse=True)
        self.head.weight = self.embedding.weight
        self.layers[3].norm.weight = self.layers[0].norm.weight
        self.layers[0].norm.weight.requires_grad_(False)


def test_a_sparse_and_a_frozen_parameter() -> None:
    plan = solved(SparseAndFrozen, stages=2, gpus=2)
    own = plan.stages[0].stage
    assert own is not None
    assert {one.name for one in own.ties} == {NAME, "layers.0.norm.weight"}
    assert_as_one_process(SparseAndFrozen, plan, {NAME})


@pytest.mark.parametrize("style", ["columns", "rows", "replicated"])
def test_stages_have_the_parameter_in_one_layout(style: str) -> None:
    """What the last stage chooses holds for the first."""
    plan = solved(Tied, stages=2, gpus=4, tp=2, pins={"head": style})
    placements = [own.parameter_plans()[NAME].placement for own in plan.stages]
    assert placements[0] == placements[1]
    assert placements[0] == {"columns": S(0), "rows": S(1), "replicated": R}[style]
    assert_as_one_process(Tied, plan, {NAME})


def _transformers(name: str) -> nn.Module:
    import transformers

    named = {"GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 64, "use_cache": False,
                      "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}  # fmt: skip
    sizes = named.get(name, {**SIZES, "tie_word_embeddings": True, "head_dim": 8})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(
        getattr(transformers, f"{name}Config")(**sizes)
    )
    return model


@pytest.mark.parametrize(
    ("name", "weight"), [("GPT2", "transformer.wte.weight"), ("Gemma", "model.embed_tokens.weight")]
)
def test_transformers(name: str, weight: str) -> None:
    pytest.importorskip("transformers")
    build = partial(_transformers, name)
    assert_as_one_process(build, solved(build, stages=2, gpus=4, tp=2), {weight})


def trained(plan: PipelinePlan | None, is_on_meta: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, over all replicas, and norms of AdamW steps of two batches each with clipping, and the parameters after
    them."""
    torch.manual_seed(0 if plan is None else dist.get_rank())  # ranks begin with other values, but the first's
    model: nn.Module = Tied()
    if plan is not None:
        if is_on_meta:
            with torch.device("meta"):
                model = Tied()
        model = tpplan.apply_plan(model, plan)
    tpplan.init_weights(model, Tied, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(10):
        for batch in range(2):
            torch.manual_seed(2 * step + batch)
            inputs = text(8, LENGTH)
            if plan is not None:
                share = plan.batch_for(dist.get_rank())
                value = model.step(share.micro_batches(inputs), loss)  # type: ignore[operator]
            else:
                value = loss(model(inputs["tokens"]), inputs)
                value.backward()
            if plan is not None:
                dist.all_reduce(value, dist.ReduceOp.AVG)
            seen.append(value.item())
        seen.append(tpplan.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("tp", "fsdp", "is_on_meta"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_training_with_clipping_over_two_batches(tp: int, fsdp: int, is_on_meta: bool) -> None:
    """The norm counts the parameter once; a second batch's gradient is added to what the first has left; copies stay
    equal to the last bit."""
    plan = solved(Tied, stages=2, gpus=2 * tp * fsdp, tp=tp, fsdp=fsdp)
    expected, parameters = run_ranks(1, trained, None)[0]
    results = run_ranks(plan.num_gpus, trained, plan, is_on_meta, timeout_s=120)
    for seen, own in results:
        assert seen == pytest.approx(expected, rel=1e-3)
        for name, value in own.items():
            assert torch.allclose(value, parameters[name], atol=2e-3), name
    assert torch.equal(results[0][1][NAME], results[-1][1][NAME])


@pytest.mark.parametrize("virtual", [1, 2])
def test_checkpoints_of_stages_load_in_one_and_back(tmp_path: Path, virtual: int) -> None:
    plan = solved(Tied, stages=2, gpus=2 * virtual, virtual=virtual, tp=1, fsdp=virtual)
    others = (
        in_one_stage(Tied),
        solved(Tied, stages=3, gpus=3),
        solved(Tied, stages=2, gpus=4, tp=2),
        solved(Tied, stages=2, gpus=4, virtual=2, tp=1, fsdp=2),
    )
    assert_loads(Tied, plan, others, tmp_path)


class Cycle(Stack):
    """A model of which every layer has one scale."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.norm.weight = self.layers[0].norm.weight


def test_a_parameter_of_all_layers_is_in_all_stages() -> None:
    plan = solved(Cycle, stages=4, gpus=4)
    own = [one.stage.ties for one in plan.stages if one.stage is not None]
    assert [[(one.name, one.stages) for one in tied] for tied in own] == [[("layers.0.norm.weight", (0, 1, 2, 3))]] * 4
    _, expected = run_ranks(1, one_process, Cycle)[0]
    for _, _, found in run_ranks(4, on_ranks, Cycle, plan, timeout_s=120):
        assert "layers.0.norm.weight" in found
        errors = relative_errors(found, {name: expected[name] for name in found})
        assert max(errors.values()) < TOLERANCE
    with pytest.raises(UsageError, match=r"read in stages 0, 1, 2, 3, and some of them are on the same GPUs"):
        solved(Cycle, stages=2, gpus=2, virtual=2)


def test_plans_whose_copies_lie_otherwise_are_refused() -> None:
    plan = solved(Tied, stages=2, gpus=4, tp=2, pins={"head": "columns"})
    first = plan.stages[0]
    other = replace(first, parameters={**first.parameters, NAME: replace(first.parameters[NAME], placement=S(1))})
    with pytest.raises(PlanError, match=f"{NAME} lies otherwise than in the other stages that have it"):
        PipelinePlan.from_dict(json.loads(replace(plan, stages=(other, plan.stages[1])).dumps()))
    assert first.stage is not None
    alone = replace(first, stage=replace(first.stage, tied=None))
    with pytest.raises(PlanError, match=f"the other stages do not say that they have {NAME}"):
        PipelinePlan.from_dict(json.loads(replace(plan, stages=(alone, plan.stages[1])).dumps()))


def test_the_exchange_is_part_of_the_step() -> None:
    plan, untied = solved(Tied, stages=2, gpus=2, prove=False), solved(Stack, stages=2, gpus=2, prove=False)
    assert plan.predicted.send_s > untied.predicted.send_s


def in_half(plan: PipelinePlan) -> tuple[torch.dtype, bool]:
    model = tpplan.apply_plan(Tied(), plan)
    model.step(plan.batch_for(dist.get_rank()).micro_batches(given(Tied)), loss_of(Tied))  # type: ignore[operator]
    found = gradients(model)
    return dict(model.named_parameters())[NAME].dtype, NAME in found


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16])
def test_copies_keep_the_dtype_of_the_optimizer(precision: Precision) -> None:
    """A stub's module computes in bfloat16, the parameter that it keeps stays as it was."""
    plan = solved(Tied, stages=2, gpus=2, precision=precision)
    expected = torch.float32 if precision is Precision.BF16_MIXED else torch.bfloat16
    assert run_ranks(2, in_half, plan, timeout_s=120) == [(expected, True)] * 2


def _encoder_decoder(name: str) -> nn.Module:
    import transformers

    shared = {"vocab_size": 64, "use_cache": False, "decoder_start_token_id": 0}
    if name == "T5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    else:
        sides = {f"{side}_{size}": n for side in ("encoder", "decoder")
                 for size, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
        sizes = {**sides, "d_model": 32, "dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**shared, **sizes)
    model: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model


def two_texts(batch: int, length: int) -> dict[str, Tensor]:
    drawn, other = (torch.randint(3, 64, (batch, length + 1)) for _ in range(2))
    return {"input_ids": drawn[:, :-1], "decoder_input_ids": other[:, :-1], "targets": other[:, 1:]}


def stepped(build: Any, plan: PipelinePlan | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(1)
    inputs = two_texts(4, LENGTH)
    if plan is None:
        loss(model(**tpplan.forward_inputs(model, inputs)), inputs).backward()
        return gradients(model)
    model = tpplan.apply_plan(model, plan)
    model.step(plan.batch_for(dist.get_rank()).micro_batches(inputs), loss)
    return gradients(model)


@pytest.mark.parametrize(("name", "weight"), [("T5", "shared.weight"), ("Bart", "model.shared.weight")])
def test_an_encoder_and_a_decoder(name: str, weight: str) -> None:
    """Cut between them; what all layers of the decoder read is sent by the encoder's last one. Bart's decoder asks for
    values of its mask, where it is a stub too."""
    pytest.importorskip("transformers")
    build = partial(_encoder_decoder, name)
    plan = tpplan.solve_stages(
        build,
        two_texts,
        stages=2,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=MACHINE),
        global_batch=4,
        seq_len=LENGTH,
        micro_batch=1,
        options=Options(loss=loss, precision=Precision.FP32, recompute="none"),
    )
    assert not any(map(why_unproven, plan.stages))
    expected = run_ranks(1, stepped, build, None)[0]
    for found in run_ranks(2, stepped, build, plan, timeout_s=120):
        assert weight in found
        errors = relative_errors(found, {name: expected[name] for name in found})
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.1e}"


class Reading(Stack):
    """A model whose root reads weights of its layers, after each and in the end."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) * layer.norm.weight
        size = sum(layer.norm.weight.square().mean() for layer in self.layers)
        logits: Tensor = self.head(self.norm(x)) * size
        return logits


@pytest.mark.parametrize("how", [{"stages": 2, "gpus": 2}, {"stages": 4, "gpus": 4}], ids=str)
def test_weights_of_layers_of_other_stages_that_the_root_reads(how: dict[str, Any]) -> None:
    assert_solved_as_one_process(Reading, **how)
