"""Plans that an expert would write: they are what their names say, and none is faster than the best plan."""

from collections.abc import Mapping

import pytest
import torch
from examples import eager_to_shard
from tiny_llama import TinyLlama, V, layer_parameters
from torch import Tensor, nn

import tpplan
from tpplan.commands.compare import _ALL
from tpplan.core.errors import UsageError
from tpplan.core.layout import R_STAR, R, S
from tpplan.plan.plan import Plan
from tpplan.plan.report.differences import module_differences, setting_differences
from tpplan.search.comparisons.alternatives import Problem
from tpplan.search.comparisons.expert_plans import RECIPES, expert_plan
from tpplan.search.models.trace_cache import Reuse
from tpplan.search.points.options import Cluster

GPUS, PER_NODE = 4, 2
#: one word of these is unknown, and one pattern is no module's: a pin says neither
OWN_PLAN = {"layers.*.mlp.up": "colwise", "layers.*.mlp.gate": "colwise", "layers.*.mlp.down": "rowwise"}
UNSAID = {"nowhere": "colwise", "layers.*.attention.q": "some_other_style"}


class WithOwnPlan(TinyLlama):
    """A model that says itself how it would be cut."""

    tp_plan: Mapping[str, str] = {**OWN_PLAN, **UNSAID}


def inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
    ids = torch.randint(V, (batch, seq_len), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "targets": ids.roll(-1, 1)}


def problem_of(model: type[nn.Module]) -> Problem:
    return Problem(
        build_model=model,
        example_inputs=inputs,
        cluster=Cluster(gpus=GPUS, gpus_per_node=PER_NODE, profile=eager_to_shard()),
        options={
            "loss": lambda outputs, given: tpplan.cross_entropy(outputs, given["targets"]),
            "global_batch": 4,
            "micro_batch": 1,
            "seq_len": 16,
            "precision": "fp32",
            "recompute": "none",
            "all_gpus": True,
        },
        reuse=Reuse(),
    )


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(WithOwnPlan)


@pytest.fixture(scope="module")
def best(problem: Problem) -> Plan:
    return problem.solve(prove=False)


@pytest.fixture(scope="module")
def plans(problem: Problem, best: Plan) -> dict[str, Plan]:
    found = {name: expert_plan(problem, name, best, prove=False) for name in RECIPES}
    assert all(own.plan is not None for own in found.values()), found
    return {name: own.plan for name, own in found.items() if own.plan is not None}


def test_none_is_faster_than_the_best(plans: dict[str, Plan], best: Plan) -> None:
    fastest = min(own.predicted.step_time_s for own in plans.values())
    assert best.predicted.step_time_s <= fastest * (1 + 1e-9)


def test_meshes_are_those_of_the_names(plans: dict[str, Plan]) -> None:
    """Of 4 GPUs on nodes of 2, tp within a node is 2."""
    degrees = {name: own.mesh_degrees for name, own in plans.items()}
    assert {name: (own.replicate, own.shard, own.tp) for name, own in degrees.items()} == {
        "ddp": (4, 1, 1),
        "fsdp": (1, 4, 1),
        "megatron": (2, 1, 2),
        "megatron+sp": (2, 1, 2),
        "torchtitan": (1, 2, 2),
        "hf": (1, 2, 2),
    }


@pytest.mark.parametrize(("name", "reads"), [("megatron", R), ("megatron+sp", R_STAR), ("torchtitan", R_STAR)])
def test_megatron_s_layers_are_cut_as_by_hand(plans: dict[str, Plan], name: str, reads: object) -> None:
    """The oracle is a plan of this model that is written by hand and trained on ranks elsewhere (tiny_llama.py)."""
    own = plans[name].parameter_plans()
    expected = {label: placement for label, (placement, _) in layer_parameters().items()}
    assert {label: str(own[label].placement) for label in expected} == expected
    assert {read for label in own if "norm" in label for read in own[label].reads.values()} == {reads}
    assert (own["embedding.weight"].placement, own["head.weight"].placement) == (S(0), S(0))


def test_the_model_s_own_plan_is_taken_as_far_as_pins_say_it(plans: dict[str, Plan]) -> None:
    own = plans["hf"]
    cut = {label for label, parameter in own.parameters.items() if parameter.placement != R}
    assert cut == {
        "layers.*.mlp.gate.weight",
        "layers.*.mlp.gate.bias",
        "layers.*.mlp.up.weight",
        "layers.*.mlp.down.weight",
    }


@pytest.mark.long
def test_a_hand_made_plan_is_proven_as_any_other(problem: Problem, best: Plan) -> None:
    own = expert_plan(problem, "hf", best, prove=True).plan
    assert own is not None
    assert own.proof.status == "proven"


def test_what_is_not_there_is_said(problem: Problem, best: Plan) -> None:
    plain = problem_of(TinyLlama)
    other = expert_plan(plain, "hf", plain.solve(prove=False), prove=False)
    assert (other.plan, other.problem) == (
        None,
        "the model has no tp_plan of its own, a dict {pattern of modules: style}",
    )
    with pytest.raises(UsageError, match="unknown plan 'magic'"):
        expert_plan(problem, "magic", best, prove=False)
    assert {*_ALL.split(",")} == {*RECIPES}


def test_differences_are_those_of_the_pins(plans: dict[str, Plan]) -> None:
    """Sequence parallelism changes norms, and where tensors are gathered; the mesh is the same."""
    ours, theirs = plans["megatron"], plans["megatron+sp"]
    rows = {what: (a, b) for what, a, b in module_differences(ours, theirs)}
    ours_says, theirs_says = rows["layers.*.{norm1,norm2}"]
    assert (ours_says.partition(",")[0], theirs_says) == ("replicated", "on slices")
    assert "mesh" not in {what for what, _, _ in setting_differences(ours, theirs)}
    assert module_differences(ours, ours) == []
    assert ("mesh", str(ours.mesh), str(plans["ddp"].mesh)) in setting_differences(ours, plans["ddp"])
