"""A plan as torchtitan's parallelize function: called as torchtitan 0.3 calls it, on a model that has no memory yet, it
trains as one process does; a run that is not the planned one is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import example
from ranks import run_ranks
from test_export import BUILDERS, MEGATRON, NORMS, batch, built, exported, frozen, planned
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tpplan.core.errors import ExportError
from tpplan.exporters import export
from tpplan.plan.plan import Plan

WHOLE_NORMS = dict.fromkeys(NORMS, "replicated")
WHOLE_HEAD = MEGATRON | {"lm_head": "replicated"}
CASES = {
    "tensor parallel": ("llama", 2, {"tp": 2, "pins": WHOLE_HEAD | WHOLE_NORMS}),
    "FSDP": ("llama", 2, {"tp": 1, "fsdp": 2}),
    "both": ("llama", 4, {"tp": 2, "fsdp": 2, "pins": WHOLE_HEAD | NORMS}),
}


def as_torchtitan(name: str, plan: Plan) -> str:
    module = example(name)
    return export(plan, module.build_model, module.example_inputs, loss=module.loss, to="torchtitan")


def load(text: str) -> Any:
    namespace: dict[str, Any] = {"__name__": "parallelize"}
    exec(compile(text, "parallelize.py", "exec"), namespace)
    return namespace["parallelize_for_torchtitan"]


def settings(plan: Plan, **changes: Any) -> dict[str, Any]:
    """What torchtitan's trainer passes, as far as it is read."""
    mesh = plan.mesh
    degrees = {"dp_replicate": mesh.replicate, "dp_shard": mesh.shard, "tp": mesh.tp, "cp": 1, "pp": 1, "ep": 1}
    own = {
        "parallel_dims": SimpleNamespace(**degrees),
        "training": SimpleNamespace(mixed_precision_param="float32", enable_cpu_offload=False),
        "parallelism": None,
        "compile_config": SimpleNamespace(enable=False, components=["model", "loss"]),
        "ac_config": None,
        "dump_folder": "",
    }
    return own | changes


def trained(model: nn.Module, inputs: dict[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
    """Gradients of torchtitan's loss: the sum over a rank's tokens, divided by those of all ranks."""
    logits = model(inputs["tokens"]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, inputs["targets"].flatten(), reduction="sum") / num_tokens
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}
    return {"loss": loss.detach(), **whole}


def on_rank(name: str, plan: Plan, text: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = example(name).build_model()
    model = load(text)(model, **settings(plan))
    model.to_empty(device="cpu")
    whole = built(name)
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            value = values[label].detach()
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
        for label, buffer in model.named_buffers():
            buffer.copy_(dict(whole.named_buffers())[label])
    ranks = plan.mesh.data_parallel
    share = {key: value.chunk(ranks)[plan.mesh.data_rank(dist.get_rank())] for key, value in batch(name).items()}
    found = trained(model, share, batch(name)["targets"].numel())
    dist.all_reduce(found["loss"])
    found["loss"] /= plan.mesh.tp
    return found


@pytest.mark.parametrize("case", CASES)
def test_torchtitan_trains_as_one_process_does(case: str) -> None:
    name, gpus, options = CASES[case]
    plan = planned(name, gpus, frozen(options))
    expected = trained(built(name), batch(name), batch(name)["targets"].numel())
    for found in run_ranks(gpus, on_rank, name, plan, as_torchtitan(name, plan)):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-4, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ac_config": SimpleNamespace()}, "the plan says what is recomputed"),
        ({"compile_config": SimpleNamespace(enable=True, components=["model"])}, "compile"),
        ({"training": SimpleNamespace(mixed_precision_param="bfloat16", enable_cpu_offload=False)}, '"float32"'),
        ({"training": SimpleNamespace(mixed_precision_param="float32", enable_cpu_offload=True)}, "cpu_offload"),
        (
            {"parallel_dims": SimpleNamespace(dp_replicate=1, dp_shard=4, tp=1, cp=1, pp=1, ep=1)},
            "this plan is for .*'dp_shard': 2, .* the run has .*'dp_shard': 4",
        ),
    ],
)
def test_a_run_that_was_not_planned_is_refused(changes: dict[str, Any], reason: str) -> None:
    plan = planned("llama", 2, frozen(CASES["FSDP"][2]))
    parallelize = load(as_torchtitan("llama", plan))
    with pytest.raises(ValueError, match=reason):
        parallelize(built("llama"), **settings(plan, **changes))


def test_hooks_that_torchtitan_would_drop_are_refused() -> None:
    plan = planned("llama", 2, frozen({"tp": 2, "pins": WHOLE_HEAD | NORMS}))
    assert "sum_gradients(model)" in exported("llama", plan)
    with pytest.raises(ExportError, match="torchtitan would drop the hooks"):
        as_torchtitan("llama", plan)


def test_classes_in_slices_are_refused() -> None:
    plan = planned("llama", 2, frozen({"tp": 2, "pins": MEGATRON | WHOLE_NORMS | {"lm_head": "columns"}}))
    assert "loss_parallel()" in exported("llama", plan)
    with pytest.raises(ExportError, match="split by classes"):
        as_torchtitan("llama", plan)


def test_tied_weights_are_refused() -> None:
    module = example("llama")
    plan = planned("tied", 2, frozen({"tp": 2, "pins": {"embed": "vocabulary"}}))
    with pytest.raises(ExportError, match=r"is also .*: torchtitan gives the model memory"):
        export(plan, BUILDERS["tied"], module.example_inputs, loss=module.loss, to="torchtitan")
