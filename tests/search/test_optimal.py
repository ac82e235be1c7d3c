"""What is called optimal: no plan that would be proven is faster. Known cases, on transformers' Llama and in small."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import eager_to_shard
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.core.errors import SolverError
from tpplan.core.graph import Direction, ModelGraph
from tpplan.core.layout import R_STAR, R, S
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.search import branch_and_bound, counterexamples
from tpplan.search.models.model_spec import ModelSpec
from tpplan.search.models.user_model import load_model_file
from tpplan.search.points.mesh_points import Point
from tpplan.search.points.options import Allows
from tpplan.search.points.point_solver import Candidate, Solvers
from tpplan.solvers.problem import Status

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "num_hidden_layers": 2,
}  # fmt: skip
#: the width of Llama 3 8B
WIDE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "head_dim": 128,
}  # fmt: skip


def llama(folder: Path, **config: Any) -> ModelSpec:
    """A Llama of transformers."""
    pytest.importorskip("transformers")
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_file(f"hf:{folder / 'config.json'}")


def solve(spec: ModelSpec, cluster: tpplan.Cluster, **options: Any) -> Plan:
    return tpplan.solve(
        spec.build_model,
        spec.example_inputs,
        loss=spec.loss,
        unused_outputs=spec.unused_outputs,
        cluster=cluster,
        **options,
    )


def ulysses(graph: ModelGraph) -> Allows:
    """Attention's input is on slices of the sequence, what its projections give on heads."""
    boundaries = {boundary.name: boundary for boundary in graph.boundaries}

    def allowed(name: str, strategy: Strategy) -> bool:
        boundary = boundaries.get(name)
        if boundary is None:
            return True
        if boundary.module.endswith("self_attn") and boundary.path == "hidden_states":
            return strategy.results == (S(1),)
        is_projected = boundary.module.endswith(("q_proj", "k_proj", "v_proj"))
        return strategy.results == (S(2),) or not (is_projected and boundary.direction is Direction.OUTPUT)

    return allowed


def train(spec: ModelSpec, plan: Plan | None) -> list[dict[str, Tensor]]:
    """Loss and gradients at several batches and lengths, the planned ones first."""
    torch.manual_seed(0)
    model: nn.Module = spec.build_model()
    model = model if plan is None else tpplan.apply_plan(model, plan)
    found = []
    for batch, length in ((2, 16), (2, 8), (4, 24)):
        ids = torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items() if g is not None}
        found.append({"loss": loss.detach(), **{name: gradient.clone() for name, gradient in whole.items()}})
    return found


def test_all_to_all_around_transformers_attention_is_proven_and_right(tmp_path: Path) -> None:
    """At the planned length, and at others that divide. No counterexample is in attention's code; of layouts that cost
    the same for the embedding some have one in the masks' code."""
    spec = llama(tmp_path, **TINY)
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    plan = solve(
        spec, cluster, global_batch=2, micro_batch=2, seq_len=16, tp=2, precision="fp32", allows=ulysses, all_gpus=True
    )
    assert plan.proof.status is ProofStatus.PROVEN
    assert not [cut for cut in plan.proof.cuts if "self_attn" in cut or "masking_utils.py" not in cut]
    expected = train(spec, None)
    for of_rank in run_ranks(2, train, spec, plan):
        for found, wanted in zip(of_rank, expected, strict=True):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


def test_long_sequences_keep_the_residual_on_slices(tmp_path: Path) -> None:
    """A view with a slice's length once forbade slices at every attention's input: 42.5 s for 40.2, at 32 layers."""
    spec = llama(tmp_path, **WIDE, num_hidden_layers=2)
    cluster = tpplan.Cluster(gpus=64, gpus_per_node=8, profile="h100-sxm")
    options = {"global_batch": 32, "seq_len": 131072, "tp": 8, "fsdp": 8}
    plan, unproven = (solve(spec, cluster, prove=prove, **options) for prove in (True, False))
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.solver.status is Status.OPTIMAL
    assert plan.solver.objective_s == pytest.approx(unproven.solver.objective_s, rel=1e-6)


class Counted(nn.Module):
    """Two projections up, of which the code counts the elements that it sees: right where either is cut, and another
    function where both are. Code may be told a shape as in one process, but no number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN // 2, bias=False)
        self.left_down, self.right_down = nn.Linear(HIDDEN, DIM, bias=False), nn.Linear(HIDDEN // 2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), self.right(x)
        factor = 3.0 if a.numel() + b.numel() > x.shape[1] * HIDDEN * 3 // 4 else 1.0
        return (self.left_down(a.relu()) + self.right_down(b.relu())) * factor


class CountedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.counted(x)).square().mean()


#: of an odd length and a batch of one, only widths can be cut
DIM, HIDDEN, ODD = 32, 128, 15


def columns_only(graph: ModelGraph) -> Allows:
    """The projections are whole, or cut by columns and seen so."""
    projected = {b.name: b for b in graph.boundaries if b.module.endswith(("left", "right"))}

    def allowed(name: str, strategy: Strategy) -> bool:
        if name not in projected:
            return True
        if projected[name].direction is Direction.INPUT:
            return strategy.results[0] in (R, R_STAR)
        return strategy.operands == strategy.results

    return allowed


def solve_counted(
    allows: Callable[[ModelGraph], Allows] = columns_only, *, build: type[nn.Module] = CountedModel, **options: Any
) -> Plan:
    return tpplan.solve(
        build,
        lambda batch, length: {"x": torch.randn(batch, length, DIM)},
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=1,
        seq_len=ODD,
        tp=2,
        precision="fp32",
        allows=allows,
        **options,
    )


def cut_projections(plan: Plan) -> set[str]:
    return {name.split(".")[1] for name, own in plan.parameter_plans().items() if own.placement.dim is not None} & {
        "left",
        "right",
    }


def test_what_is_wrong_together_is_forbidden_together() -> None:
    """Each way alone is right: the wider one is cut. To forbid either alone leaves both whole."""
    plan = solve_counted()
    assert plan.proof.status is ProofStatus.PROVEN
    assert any("the number 3.0 became 1.0" in cut for cut in plan.proof.cuts)
    assert cut_projections(solve_counted(prove=False)) == {"left", "right"}
    assert cut_projections(plan) == {"left"}
    assert plan.solver.status is Status.OPTIMAL
    assert plan.solver.gap == 0
    whole = solve_counted(lambda graph: lambda name, strategy: all(x.dim is None for x in strategy.results))
    assert plan.solver.objective_s < whole.solver.objective_s


class CountedElsewhere(Counted):
    """The same code in another class."""


class CountedTwice(CountedModel):
    def __init__(self) -> None:
        super().__init__()
        self.again = CountedElsewhere()

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.counted(x) + self.again(x)).square().mean()


def test_counterexamples_in_several_classes_are_found_in_one_round() -> None:
    """Each alone is that of `test_what_is_wrong_together_is_forbidden_together`."""
    plan = solve_counted(build=CountedTwice)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.proof.rounds == 2  # the second proves
    assert [cut.partition(":")[0].count("again") for cut in plan.proof.cuts] == [0, 2]
    assert cut_projections(plan) == {"left"}
    assert plan.solver.status is Status.OPTIMAL
    assert plan.solver.gap == 0


def test_what_is_cut_to_end_sooner_is_in_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without patience all that the code sees stays whole; the bound is that of what was found above."""
    optimal = solve_counted()
    monkeypatch.setattr(counterexamples, "PATIENCE", 1)
    plan = solve_counted()
    assert plan.proof.status is ProofStatus.PROVEN
    assert cut_projections(plan) == set()
    assert plan.solver.status is Status.FEASIBLE
    assert plan.solver.bound_s == pytest.approx(optimal.solver.objective_s)
    assert plan.solver.gap == pytest.approx(1 - plan.solver.bound_s / plan.solver.objective_s)
    assert plan.solver.gap > 0.01


@pytest.mark.long
def test_positions_from_a_length_forbid_slices_where_it_is_read_alone(tmp_path: Path) -> None:
    """An arange over the embedding's length once forbade slices at every layer's output, too: 3.85 s for 3.73."""
    spec = llama(tmp_path, **WIDE, num_hidden_layers=3)
    cluster = tpplan.Cluster(gpus=16, gpus_per_node=8, profile="h100-sxm")
    options = {"global_batch": 64, "seq_len": 4096, "tp": 8, "all_gpus": True}
    plan, pinned = (solve(spec, cluster, pins=pins, **options) for pins in ({}, {"model.layers.*.mlp": "megatron"}))
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.solver.status is Status.OPTIMAL
    assert plan.solver.objective_s <= pinned.solver.objective_s * (1 + 1e-6)


def test_out_of_time_the_bound_without_what_was_cut_is_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proven plan is kept."""
    explore = branch_and_bound.explore

    def once(solvers: Solvers, points: list[Point], known: Any) -> Candidate:
        (solver,) = solvers.by_ep.values()
        if not solver.cuts.guesses and solver.cuts.messages:
            known.bounds = {point: solver.floor(point) for point in points}
            raise SolverError("out of time")
        return explore(solvers, points, known)

    monkeypatch.setattr(counterexamples, "PATIENCE", 1)
    monkeypatch.setattr(branch_and_bound, "explore", once)
    plan = solve_counted()
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.solver.status is Status.FEASIBLE
    assert 0 < plan.solver.bound_s < plan.solver.objective_s
