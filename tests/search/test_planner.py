"""The planner's own promises: the ILP's optimum is the optimum, prices are the expanded plan's, results repeat."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from assignments import untied
from examples import eager_to_shard, example, machine, solve_example
from torch import Tensor, nn

import tpplan
from tpplan import solvers
from tpplan.core.errors import InfeasibleError, ModelError, UsageError
from tpplan.core.graph import Direction, ModelGraph
from tpplan.core.layout import ROWS, S
from tpplan.core.mesh import GroupShape, Mesh
from tpplan.costs.runs.execute import Executor
from tpplan.costs.step.cost_table import price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.memory_rows import Peaks
from tpplan.costs.step.train_config import Setting
from tpplan.layouts.build_space import build_space
from tpplan.layouts.layer_treatments import Treatment
from tpplan.machine.profile import Collective, HardwareProfile, load_profile
from tpplan.plan.parts import DATA_PARALLEL
from tpplan.plan.plan import Plan, Precision, Recompute
from tpplan.prove.counterexample import Counterexample
from tpplan.search import branch_and_bound, counterexamples
from tpplan.solvers.problem import Status, total
from tpplan.trace.trace import trace


class Pair(nn.Module):
    """Columns, then rows: D -> F -> D, with a bias and an activation between."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.up_proj = nn.Linear(8, 16)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.activation = {"relu": torch.relu, "softmax": lambda x: torch.softmax(x, -1)}[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D] -> scalar."""
        return self.down_proj(self.activation(self.up_proj(x))).square().mean()


class Embedded(nn.Module):
    """A lookup and a head: V -> D -> V."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> scalar."""
        return self.head(self.embedding(tokens)).logsumexp(-1).mean()


SMALL_MODELS = {
    "relu pair": (lambda: Pair("relu"), {"x": torch.zeros(4, 8)}),
    "softmax pair": (lambda: Pair("softmax"), {"x": torch.zeros(4, 8)}),
    "embedding": (Embedded, {"tokens": torch.zeros(4, dtype=torch.long)}),
}


def traced(name: str) -> ModelGraph:
    build, inputs = SMALL_MODELS[name]
    with torch.device("meta"):
        model = build()
    return trace(model, inputs)


def formulate(graph: ModelGraph, profile: HardwareProfile, mesh: Mesh, limit: float = 1e12) -> Formulation:
    priced = price_space(build_space(graph, mesh.tp), profile, 4, Executor())
    setting = Setting(
        profile=profile,
        gpus_per_node=4,
        precision=Precision.FP32,
        optimizer="adamw",
        memory_limit_bytes=limit,
        accumulation_steps=2,
        units=(),
    )
    return Formulation(priced=priced, mesh=mesh, setting=setting)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=4), Mesh(tp=2, shard=2)], ids=str)
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_ilp_finds_the_optimum_that_enumeration_finds(name: str, mesh: Mesh) -> None:
    """On real formulations, with ample memory and at every limit between the least peak and the fastest plan's."""
    profile = machine(flop_per_s=1e8, hbm_bytes_per_s=1e9, launch_s=1e-9, intra_bytes_per_s=1e9, latency_s=1e-7)
    graph = traced(name)
    problem = formulate(graph, profile, mesh).problem
    fastest = solvers.solve(problem)
    assert fastest.choice is not None
    peak = max(total(row.terms, fastest.choice) for row in problem.resources)
    for share in (1.0, 0.9, 0.8, 0.6, 0.3):
        limited = formulate(graph, profile, mesh, peak * share).problem
        exact = solvers.solve(limited, solver="brute-force")
        for solver in ("highs", "cbc"):
            found = solvers.solve(limited, solver=solver)
            assert found.status is exact.status, (share, solver)
            if exact.objective is not None:
                assert found.objective == pytest.approx(exact.objective, rel=1e-9)
                assert found.gap == pytest.approx(0.0, abs=1e-9)


def test_an_assignment_costs_what_the_tied_problem_says() -> None:
    """untied() asserts it; here it is shown to notice a layer that is counted once too often."""
    llama = example("llama")
    with torch.device("meta"):
        model = llama.build_model()
    graph = trace(model, llama.example_inputs(1, 32), loss=llama.loss)
    formulation = formulate(graph, eager_to_shard(), Mesh(tp=4))
    choice = solvers.solve(formulation.problem).choice
    assert choice is not None
    untied(formulation, choice)
    members = formulation.space.members
    counted_twice = replace(formulation.space, members={**members, "linear": (*members["linear"], "linear")})
    broken = replace(formulation, priced=replace(formulation.priced, space=counted_twice))
    with pytest.raises(AssertionError, match="the tied problem prices"):
        untied(broken, choice)


def test_the_last_layer_may_keep_less_than_its_siblings() -> None:
    """What a sum reads need not be saved, and what the next layer reads must: like layers, unlike surroundings."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    with torch.device("meta"):
        graph = trace(Stack(), {"x": torch.zeros(4, 64)})
    assert [block.pattern for block in graph.blocks] == ["layers.*"]
    formulation = formulate(graph, eager_to_shard(), Mesh(tp=1))
    choice = solvers.solve(formulation.problem).choice
    assert choice is not None
    untied(formulation, choice)
    saved = [term for term in formulation.problem.resources[0].terms if term.name == "saved activations"]
    # The inputs of the second and third layer; the model's own input is the user's, and x.sum() keeps nothing.
    assert total(saved, choice) == 2 * 4 * 64 * 4


def test_a_view_may_cross_a_boundary_where_its_storage_does_not() -> None:
    """What is kept of a storage is a rank's part of it, however few dims the storage's first value has."""

    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 32)
            self.head = nn.Linear(32, 32)

        def forward(self, tokens: Tensor) -> Tensor:
            rows = torch.arange(tokens.shape[1]).unsqueeze(0)
            return self.head(self.table(tokens) + self.table(rows)).square().mean()

    with torch.device("meta"):
        graph = trace(Reshaped(), {"tokens": torch.zeros(1, 16, dtype=torch.long)})
    formulation = formulate(graph, eager_to_shard(), Mesh(tp=2))
    choice = solvers.solve(formulation.problem).choice
    assert choice is not None
    untied(formulation, choice)


def test_the_same_inputs_give_the_same_file() -> None:
    plans = [solve_example("mlp", eager_to_shard(), gpus=4).dumps() for _ in range(2)]
    assert plans[0] == plans[1]


def test_ties_are_broken_by_least_work() -> None:
    """Where a step waits for FSDP, compute behind it is free: the price stays, and none is wasted."""
    slow = machine(flop_per_s=1e11, hbm_bytes_per_s=1e11, launch_s=1e-9, inter_bytes_per_s=1e7, latency_s=1e-9)
    llama = example("llama")
    with torch.device("meta"):
        graph = trace(llama.build_model(), llama.example_inputs(1, 64), loss=llama.loss)
    formulation = formulate(graph, slow, Mesh(tp=2, shard=4))
    units = tuple(f"layers.{i}" for i in range(4))
    formulation = replace(formulation, setting=replace(formulation.setting, units=units))
    cheapest = solvers.solve(formulation.problem)
    assert cheapest.choice is not None
    assert cheapest.objective is not None
    tie_break = formulation.tie_break(cheapest.choice)
    settled = solvers.solve(tie_break)
    assert settled.choice is not None
    assert formulation.problem.price(settled.choice) == pytest.approx(cheapest.objective, rel=1e-8)
    assert tie_break.price(settled.choice) <= tie_break.price(cheapest.choice)
    had, has = (set(formulation.treatments(choice).values()) for choice in (cheapest.choice, settled.choice))
    assert has <= had | {Treatment(recompute=Recompute.NONE, reshard=True)}
    # Most of the step is exposed communication: that is when ties are many.
    free = [t for t in formulation.problem.objective if t.name == "exposed data-parallel collectives"]
    assert sum(term.value(settled.choice) for term in free) > 0.5 * cheapest.objective


def test_the_certificate_covers_every_mesh() -> None:
    plan = solve_example("mlp", eager_to_shard(), gpus=4, global_batch=16)
    assert plan.solver.status is Status.OPTIMAL
    assert plan.solver.meshes_tried + sum(plan.solver.skipped.values()) == 6  # replicate x shard x tp = 4
    assert plan.solver.gap == 0.0
    pinned = [
        solve_example(
            "mlp", eager_to_shard(), gpus=4, global_batch=16, tp=tp, fsdp=fsdp, prove=False
        ).predicted.step_time_s
        for tp, fsdp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
    ]
    assert plan.predicted.step_time_s == pytest.approx(min(pinned), rel=1e-9)


def test_nothing_fits_says_how_much_is_missing_and_what_would_fit() -> None:
    options = {"gpus": 2, "tp": 1, "global_batch": 64, "micro_batch": 1}
    ample = solve_example("mlp", eager_to_shard(), **options)
    limit = ample.predicted.peak_memory_bytes * 0.6
    with pytest.raises(InfeasibleError, match=r"no plan fits .* on 2 GPUs: the smallest needs .* too much") as caught:
        solve_example("mlp", eager_to_shard(), memory_limit_bytes=limit, **options)
    message = str(caught.value)
    assert "optimizer states" in message
    enough = int(message.split(" GPUs would do")[0].split()[-1])
    fitting = solve_example("mlp", eager_to_shard(), memory_limit_bytes=limit, **(options | {"gpus": enough}))
    assert fitting.predicted.peak_memory_bytes <= limit
    with pytest.raises(InfeasibleError):
        solve_example("mlp", eager_to_shard(), memory_limit_bytes=limit, **(options | {"gpus": enough // 2}))


@pytest.mark.parametrize(
    ("inputs", "asked", "problem"),
    [
        (lambda batch, length: (torch.zeros(batch, length, 8),), {}, "expected seq_len, the length"),
        (lambda batch: (torch.zeros(batch, 8),), {"seq_len": 4}, "takes no length: leave it out"),
    ],
)
def test_a_length_is_given_where_samples_have_one(inputs: Any, asked: dict[str, int], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        tpplan.solve(
            lambda: nn.Linear(8, 8),
            inputs,
            cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
            global_batch=2,
            **asked,
        )


def test_a_plan_that_needs_more_than_the_ilp_counts_is_solved_again_with_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of the ILP count too little here: the plan fits all the same, and is not called optimal."""
    rows = Peaks.rows
    monkeypatch.setattr(Peaks, "rows", lambda self: (replace(row, limit=row.limit * 1.3) for row in rows(self)))
    options = {"gpus": 4, "global_batch": 16, "micro_batch": 4, "prove": False}
    replicating = machine(intra_bytes_per_s=1e8, latency_s=1e-4)
    limit = solve_example("mlp", replicating, **options).predicted.peak_memory_bytes * 0.95
    plan = solve_example("mlp", replicating, memory_limit_bytes=limit, **options)
    assert plan.predicted.peak_memory_bytes <= limit
    assert plan.solver.bound_s <= plan.solver.objective_s
    assert plan.solver.status is Status.FEASIBLE
    assert plan.solver.gap > 0
    assert plan.solver.unsearched is not None
    assert "plans that fill memory, as the ILP counts too little of it there" in plan.solver.unsearched[0]


def test_memory_is_within_the_limit_and_time_never_improves_as_it_falls() -> None:
    options = {"gpus": 4, "global_batch": 16, "micro_batch": 4, "prove": False}
    replicating = machine(intra_bytes_per_s=1e8, latency_s=1e-4)
    plan = solve_example("mlp", replicating, **options)
    times = [plan.predicted.step_time_s]
    for _ in range(4):
        limit = plan.predicted.peak_memory_bytes * 0.9
        try:
            plan = solve_example("mlp", replicating, memory_limit_bytes=limit, **options)
        except InfeasibleError:
            break
        assert plan.predicted.peak_memory_bytes <= limit
        times.append(plan.predicted.step_time_s)
    assert len(times) > 1
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp = 3 does not divide 4"),
        ({"global_batch": 3, "micro_batch": 2}, "global batch 3 does not divide"),
        ({"micro_batch": 0}, "at least 1"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'"),
        ({"solver": "high"}, "high"),
    ],
)
def test_contradictory_requests_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        solve_example("mlp", eager_to_shard(), gpus=4, **options)


def test_models_that_cannot_be_planned_say_why() -> None:
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    options = {"cluster": cluster, "global_batch": 2, "seq_len": 1}

    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.weight.sum() > 0 else -x

    class Renews(Pair):
        def forward(self, x: Tensor) -> Tensor:
            self.up_proj = nn.Linear(8, 16)
            return super().forward(x)

    with pytest.raises(ModelError, match=r"could not be traced.*depend on weights"):
        tpplan.solve(lambda: Branches(1, 1), lambda batch, seq_len: (torch.zeros(batch, 1),), **options)
    with pytest.raises(ModelError, match=r"puts a new Linear at 'up_proj'.*Call the model once"):
        tpplan.solve(lambda: Renews("relu"), lambda batch, seq_len: (torch.zeros(batch, 8),), **options)
    with pytest.raises(ModelError, match=r"parameter 0.weight has no shape before the first call"):
        tpplan.solve(
            lambda: nn.Sequential(nn.LazyLinear(2)), lambda batch, seq_len: (torch.zeros(batch, 2),), **options
        )
    with pytest.raises(ModelError, match="Identity has no parameters"):
        tpplan.solve(nn.Identity, lambda batch, seq_len: (torch.zeros(batch),), **options)
    with pytest.raises(ModelError, match=r"expected a torch\.nn\.Module"):
        tpplan.solve(lambda: 3, lambda batch, seq_len: (torch.zeros(batch),), **options)  # type: ignore[arg-type,return-value]


def test_weights_that_are_made_on_no_meta_device_are_planned_and_stay_tied() -> None:
    def build() -> nn.Module:
        model = Pair("relu")
        model.scale = nn.Parameter(torch.normal(0, 1, size=(16,)))  # heeds no torch.device()
        model.up_proj.bias = model.scale
        return model

    inputs, options = SMALL_MODELS["relu pair"][1], {"global_batch": 4, "micro_batch": 4, "seq_len": 1, "tp": 2}
    cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    plan = tpplan.solve(build, lambda batch, seq_len: inputs, cluster=cluster, precision="fp32", **options)
    assert plan.parameters["scale"].aliases == ("up_proj.bias",) or plan.parameters["up_proj.bias"].aliases == (
        "scale",
    )
    assert plan.parameters["up_proj.weight"].placement == S(0)


def test_ids_that_were_written_to_before_they_are_looked_up_are_looked_up_in_slices() -> None:
    class Masked(Embedded):
        def forward(self, tokens: Tensor) -> Tensor:
            tokens = tokens.clone()
            tokens[tokens > 9] = 0
            return super().forward(tokens)

    with torch.device("meta"):
        model = Masked()
    graph = trace(model, SMALL_MODELS["embedding"][1])
    (entry,) = (b for b in graph.boundaries if (b.module, b.direction) == ("embedding", Direction.INPUT))
    assert (ROWS,) in {strategy.results for strategy in build_space(graph, 2).strategies[entry.name]}


def test_unused_outputs_may_stay_sharded_and_others_may_not() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4096, bias=False)

        def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
            logits = self.head(x)
            return {"loss": tpplan.cross_entropy(logits, targets), "logits": logits}

    def inputs(batch: int, seq_len: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(batch, seq_len, 64), "targets": torch.zeros(batch, seq_len, dtype=torch.long)}

    def plan(**options: object) -> Plan:
        cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
        return tpplan.solve(
            TwoOutputs,
            inputs,
            cluster=cluster,
            global_batch=1,
            seq_len=8,
            tp=2,
            precision="fp32",
            **options,  # type: ignore[arg-type]
        )

    assert plan().outputs == {}
    assert plan(unused_outputs=("logits",)).outputs == {"output.logits": S(2)}


def test_a_loss_of_its_own_meets_whole_outputs() -> None:
    """Plain tensors and a DTensor do not mix: where the loss multiplies by a mask, the logits are handed over whole."""
    gpt = example("gpt")

    def weighted(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        logits = outputs * (inputs["targets"] > 0)[..., None]
        return tpplan.cross_entropy(logits, inputs["targets"])

    cluster = tpplan.Cluster(gpus=4, gpus_per_node=4, profile=eager_to_shard())
    options = {"cluster": cluster, "global_batch": 1, "seq_len": 32, "tp": 4, "precision": "fp32"}
    assert tpplan.solve(gpt.build_model, gpt.example_inputs, loss=gpt.loss, **options).outputs != {}
    assert tpplan.solve(gpt.build_model, gpt.example_inputs, loss=weighted, **options).outputs == {}


def test_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counterexamples cannot go on for ever."""
    monkeypatch.setattr(branch_and_bound, "MAX_ROUNDS", 1)
    monkeypatch.setattr(
        counterexamples, "check_structure", lambda *_, **__: Counterexample(message="made up", blamed=())
    )
    monkeypatch.setattr(
        branch_and_bound, "forbid", lambda solver, found, *_: solver.cuts.messages.append(found.message)
    )
    with pytest.raises(tpplan.core.errors.SolverError, match="made up"):  # type: ignore[attr-defined]
        solve_example("mlp", eager_to_shard(), gpus=2, tp=2)


def test_a_cpu_hides_no_collective_behind_compute() -> None:
    """FSDP's collectives run beside compute on streams of their own, which a CPU has none of."""
    gpu = machine(flop_per_s=1e8, launch_s=1e-9)
    cpu = replace(gpu, device_type="cpu")
    hidden, waited_for = (
        solve_example("llama", profile, gpus=4, tp=1, fsdp=4, global_batch=4, micro_batch=1, prove=False)
        for profile in (gpu, cpu)
    )
    assert waited_for.collectives == hidden.collectives
    issued_s = sum(
        c.count * cpu.collective(Collective(c.kind), GroupShape(ranks=4, ranks_per_node=4), c.num_bytes).seconds
        for c in waited_for.collectives
    )
    assert waited_for.predicted.time_s[DATA_PARALLEL] == pytest.approx(issued_s, rel=1e-9)
    assert hidden.predicted.time_s[DATA_PARALLEL] < issued_s / 2


def test_fsdp_copies_what_it_gathers_and_reduces() -> None:
    """float32 on four ranks, for a weight of n bytes in a layer: two gathers, each n/4 read and written on the way in
    and n on the way out, and a reduction's way in; replicated: two copies of n, a reduction's way in, a single rank's
    copy. The root is gathered once. What does not divide among the ranks is filled up."""
    profile = machine(hbm_bytes_per_s=1e9)
    copied = {}
    for degree in (4, 1):
        plan = solve_example("mlp", profile, gpus=4, tp=1, fsdp=degree, micro_batch=2, prove=False)
        copied[degree] = plan.predicted.time_s["copies of FSDP"] * 1e9
        assert plan.batch.accumulation_steps == 1

    def filled(ranks: int, *, in_layers: bool) -> int:
        shapes = (p.shape for name, p in plan.parameter_plans().items() if name.startswith("layers.") == in_layers)
        return 4 * sum(-(-rows // ranks) * ranks * prod(others) for rows, *others in shapes)

    layers, root = filled(4, in_layers=True), filled(4, in_layers=False)
    assert copied[4] == pytest.approx(layers * (2 * (2 / 4 + 2) + 2) + root * ((2 / 4 + 2) + 2))
    layers, root = filled(1, in_layers=True), filled(1, in_layers=False)
    assert copied[1] == pytest.approx(layers * (2 * 2 + 2 + 2) + root * (2 + 2 + 2))


class Tempered(nn.Module):
    """A linear map and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.temperature.exp()).square().mean()


def solve_tempered(**options: object) -> Plan:
    return tpplan.solve(
        Tempered,
        lambda batch, seq_len: {"x": torch.zeros(batch, seq_len, 8)},
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=2,
        seq_len=4,
        **{"micro_batch": 1, **options},  # type: ignore[arg-type]
    )


def test_parameters_without_dims_are_planned_beside_fsdp() -> None:
    for options in ({"precision": "fp32", "tp": 1}, {"precision": "bf16-mixed", "tp": 2}):
        plan = solve_tempered(**options)
        assert plan.proof.status == "proven"
        assert set(plan.scalars_beside_fsdp()) == {"temperature"}


class OfTwoDtypes(Tempered):
    """A layer in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.wide(x.double()).float())


class Sparse(Tempered):
    """A table with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(1, device=x.device)))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (OfTwoDtypes, r"in <root> \S+ is float32 and wide.weight is float64"),
        (Sparse, "table looks up with sparse=True"),
    ],
)
def test_what_fsdp_cannot_hold_is_refused_by_name_and_other_meshes_taken(build: type[nn.Module], why: str) -> None:
    def solve(**options: object) -> Plan:
        cluster = tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
        given = {"global_batch": 4, "micro_batch": 2, "seq_len": 1, "precision": "fp32", **options}
        return tpplan.solve(build, lambda rows, _: {"x": torch.randn(rows, 8)}, cluster=cluster, **given)

    assert solve().mesh.tp == 2
    for options in ({"tp": 1, "all_gpus": True}, {"fsdp": 2}):
        with pytest.raises(UsageError, match=why):
            solve(**options)
    # In bfloat16 the layer in float64 gives a float32 that the next one does not take.
    mixed = "linear gets float32 and bfloat16" if build is OfTwoDtypes else why
    with pytest.raises((UsageError, ModelError), match=mixed):
        solve(tp=2, precision="bf16-mixed")


def test_out_of_time_the_incumbent_is_feasible_with_its_gap() -> None:
    """One rank of tp has nothing to decide; of the other points only bounds are left, which the certificate heeds."""
    llama = example("llama")

    def solved(time_limit_s: float | None) -> Plan:
        return tpplan.solve(
            llama.build_model,
            llama.example_inputs,
            loss=llama.loss,
            cluster=tpplan.Cluster(gpus=8, gpus_per_node=8, profile="h100-sxm"),
            global_batch=16,
            seq_len=64,
            time_limit_s=time_limit_s,
            micro_batch=1,
        )

    optimum, hurried = solved(None), solved(1e-9)
    assert optimum.solver.status is Status.OPTIMAL
    assert hurried.solver.status is Status.FEASIBLE
    assert hurried.solver.bound_s < optimum.solver.objective_s <= hurried.solver.objective_s
    assert hurried.solver.gap > 0


def test_out_of_memory_on_a_profile_of_one_node_is_told_as_such() -> None:
    """The profile has no collectives across nodes, on which more GPUs would stand."""
    machine = load_profile("cpu-gloo")
    with pytest.raises(InfeasibleError, match=r"no plan fits .* Whether more than 4 GPUs would do is not known"):
        solve_example(
            "mlp",
            machine,
            gpus=4,
            global_batch=8,
            micro_batch=1,
            memory_limit_bytes=machine.slack_bytes + 700_000.0,
            precision="fp32",
        )
