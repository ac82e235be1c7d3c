"""All that a plan says is decided together: against enumeration, and against what every practitioner knows."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from assignments import untied
from examples import machine
from torch import Tensor, nn

import tpplan
from tpplan import solvers
from tpplan.core.errors import InfeasibleError
from tpplan.core.graph import ModelGraph
from tpplan.core.layout import R
from tpplan.core.mesh import Mesh
from tpplan.costs.prediction.activation_lifetimes import Lifetimes
from tpplan.costs.prediction.memory_replay import memory
from tpplan.costs.runs.execute import Executor
from tpplan.costs.step.cost_table import price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.train_config import Setting
from tpplan.layouts.build_space import build_space
from tpplan.layouts.layer_treatments import TREATMENTS
from tpplan.layouts.rules import Strategy
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan, Precision, Recompute
from tpplan.search.diagnose import least_peak
from tpplan.solvers.problem import Status, total
from tpplan.trace.trace import trace

WIDTH = 8


class Layer(nn.Module):
    """Two products, so that selective recomputation holds what full does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Layers(nn.Module):
    """Like layers and a mean."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def traced(num_layers: int, batch: int) -> ModelGraph:
    with torch.device("meta"):
        return trace(Layers(num_layers), {"x": torch.zeros(batch, 16, WIDTH)})


def random_machine(rng: random.Random) -> HardwareProfile:
    """Kernels, links and latencies over three orders of magnitude, so that each decision is close somewhere."""

    def about(value: float) -> float:
        return value * 10 ** rng.uniform(-1.5, 1.5)

    rates = {name: about(1e9) for name in ("flop_per_s", "hbm_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s")}
    return machine(**rates, launch_s=about(1e-7), latency_s=about(1e-6), gpus_per_node=2, max_nodes=2)


def formulate(graph: ModelGraph, profile: HardwareProfile, mesh: Mesh, **settings: object) -> Formulation:
    num_layers = len([source for source in graph.parameters if source.label.endswith("up.weight")])
    setting = Setting(
        profile=profile,
        gpus_per_node=2,
        precision=Precision.FP32,
        optimizer="adamw",
        units=tuple(f"layers.{i}" for i in range(num_layers)),
        **{"recompute": None, "reshard_after_forward": None, **settings},  # type: ignore[arg-type]
    )
    space = build_space(graph, mesh.tp, cut=few_layouts if mesh.tp > 1 else None)
    priced = price_space(space, profile, 2, EXECUTOR)
    return Formulation(priced=priced, mesh=mesh, setting=setting)


def few_layouts(name: str, strategy: Strategy) -> bool:
    """Forbids most strategies, so that the others can be enumerated, but not to leave all whole."""
    is_whole = {*strategy.operands, *strategy.results} <= {R}
    return not is_whole and random.Random(f"{name} {strategy}").random() > SHARE_OF_LAYOUTS


SHARE_OF_LAYOUTS = 0.25
EXECUTOR = Executor()
GRAPHS = {(layers, batch): traced(layers, batch) for layers, batch in ((2, 1), (3, 1), (2, 2), (2, 4))}


def every_treatment(formulation: Formulation) -> Iterator[Formulation]:
    """One formulation for each way to treat each layer: nothing is left to decide but layouts."""
    units = formulation.setting.units
    kin = {unit.name: kind.unit.name for kind in formulation.kinds for unit in kind.units}
    for treatments in itertools.product(TREATMENTS, repeat=len(units)):
        if list(map(TREATMENTS.index, treatments)) == sorted(map(TREATMENTS.index, treatments)):
            own = dict(zip(units, treatments, strict=True))
            setting = dataclasses.replace(formulation.setting, treatments=own, kin=kin)
            yield dataclasses.replace(formulation, setting=setting)


def enumerated(formulation: Formulation) -> float | None:
    """The least time over layouts and treatments, by enumeration of both."""
    found = (solvers.solve(own.problem, solver="brute-force").objective for own in every_treatment(formulation))
    return min((objective for objective in found if objective is not None), default=None)


def limits(formulation: Formulation, rng: random.Random) -> list[float]:
    """Ample memory, and a limit between the least peak and the fastest plan's."""
    problem = formulation.problem
    fastest = solvers.solve(problem).choice
    least = least_peak(problem, solvers.solve)
    assert fastest is not None
    assert least is not None
    low, high = least[0], max(total(row.terms, fastest) for row in problem.resources)
    return [high, low + rng.random() * (high - low), low]


def check_instance(seed: int) -> None:
    """A random machine: at ample, binding and least memory the ILP finds what enumeration finds, and the expanded plan
    costs what the ILP says."""
    rng = random.Random(seed)
    num_layers, tp = rng.choice([(2, 1), (3, 1), (2, 2)])
    mesh = Mesh(replicate=rng.choice([1, 2]), shard=rng.choice([1, 2, 4]), tp=tp)
    graph, steps = GRAPHS[num_layers, 1], rng.choice([1, 3])
    free = formulate(graph, random_machine(rng), mesh, memory_limit_bytes=1e15, accumulation_steps=steps)
    fastest = solvers.solve(free.problem).choice
    assert fastest is not None
    for limit in limits(free, rng):
        setting = dataclasses.replace(free.setting, memory_limit_bytes=limit)
        limited = dataclasses.replace(free, setting=setting)
        assert limited.fits(fastest, tolerance=1e-9) == limited.problem.is_feasible(fastest, tolerance=1e-9)
        found = solvers.solve(limited.problem)
        assert found.status is Status.OPTIMAL
        assert found.objective == pytest.approx(enumerated(limited), rel=1e-7)
        assert found.choice is not None
        untied(limited, found.choice)
    setting = dataclasses.replace(free.setting, memory_limit_bytes=limit * 0.99)
    assert solvers.solve(dataclasses.replace(free, setting=setting).problem).status is Status.INFEASIBLE


@pytest.mark.parametrize("seed", range(3))
def test_ilp_decides_as_enumeration_does(seed: int) -> None:
    check_instance(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 103))
def test_ilp_decides_as_enumeration_does_everywhere(seed: int) -> None:
    check_instance(seed)


def check_peaks(layers: int, mesh: Mesh, steps: int) -> None:
    """However layers are treated, the constraint is not below the peak of the plan's step gone through."""
    free = formulate(GRAPHS[layers, 1], machine(), mesh, memory_limit_bytes=1e15, accumulation_steps=steps)
    for own in every_treatment(free):
        choice = solvers.solve(own.problem).choice
        assert choice is not None
        assignment, alone = untied(own, choice)
        everything = dict.fromkeys(assignment.strategies, 0)
        needed = max(total(row.terms, everything) for row in alone.problem.resources)
        assert memory(Lifetimes(assignment, alone.priced.executor)).num_bytes <= needed


def test_the_memory_constraint_is_not_below_the_peak_however_layers_are_treated() -> None:
    check_peaks(2, Mesh(replicate=1, shard=2, tp=1), steps=3)


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize("shard", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_memory_constraint_is_not_below_the_peak_on_any_mesh(
    layers: int, replicate: int, shard: int, tp: int
) -> None:
    for steps in (1, 3):
        check_peaks(layers, Mesh(replicate=replicate, shard=shard, tp=tp), steps=steps)


# ---- the search over meshes, numbers of GPUs and micro-batches

GLOBAL_BATCH = 4


def solve(profile: HardwareProfile, gpus: int, *, num_layers: int = 2, **options: object) -> Plan:
    return tpplan.solve(
        lambda: Layers(num_layers),
        lambda batch, seq_len: {"x": torch.zeros(batch, seq_len, WIDTH)},
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=2, profile=profile),
        global_batch=GLOBAL_BATCH,
        seq_len=16,
        precision="fp32",
        allows=lambda graph: lambda name, strategy: not few_layouts(name, strategy),
        **{"prove": False, "micro_batch": "auto", **options},  # type: ignore[arg-type]
    )


def every_point(gpus: int) -> Iterator[tuple[Mesh, int, int]]:
    """Mesh, micro-batch and accumulation steps, by trying every number."""
    numbers = range(1, gpus + 1)
    for replicate, shard, tp in itertools.product(numbers, numbers, (1, 2)):
        for micro_batch, steps in itertools.product(range(1, GLOBAL_BATCH + 1), repeat=2):
            uses = replicate * shard * tp
            if uses in (1, 2, 4) and uses <= gpus and micro_batch * steps * replicate * shard == GLOBAL_BATCH:
                yield Mesh(replicate=replicate, shard=shard, tp=tp), micro_batch, steps


def enumerated_everywhere(profile: HardwareProfile, gpus: int, limit: float) -> float | None:
    found = []
    for mesh, micro_batch, steps in every_point(gpus):
        graph = GRAPHS[2, micro_batch]
        settings = {"memory_limit_bytes": limit, "accumulation_steps": steps}
        found.append(enumerated(formulate(graph, profile, mesh, **settings)))
    return min((objective for objective in found if objective is not None), default=None)


def check_search(seed: int) -> None:
    """A random machine of up to 4 GPUs, with ample memory and with 20 to 90 % of what the fastest plan takes."""
    rng = random.Random(seed)
    profile, gpus = random_machine(rng), rng.choice([2, 4])
    ample = solve(profile, gpus)
    for limit in (1e15, ample.predicted.peak_memory_bytes * rng.uniform(0.2, 0.9)):
        expected = enumerated_everywhere(profile, gpus, limit)
        if expected is None:
            with pytest.raises(InfeasibleError):
                solve(profile, gpus, memory_limit_bytes=limit)
            continue
        plan = solve(profile, gpus, memory_limit_bytes=limit)
        assert plan.solver.status is Status.OPTIMAL
        assert plan.solver.objective_s == pytest.approx(expected, rel=1e-6)
        assert plan.predicted.peak_memory_bytes <= limit * (1 + 1e-6)


@pytest.mark.long
def test_search_decides_as_enumeration_does() -> None:
    check_search(0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 13))
def test_search_decides_as_enumeration_does_everywhere(seed: int) -> None:
    check_search(seed)


# ---- known answers


def test_twice_the_gpus_and_faster_links_never_make_it_slower() -> None:
    slow_links = {"intra_bytes_per_s": 1e7, "inter_bytes_per_s": 1e6, "flop_per_s": 1e9, "launch_s": 1e-9}
    times = [solve(machine(**slow_links), gpus, micro_batch=1).predicted.step_time_s for gpus in (1, 2, 4)]
    assert times == sorted(times, reverse=True)
    for name in ("intra_bytes_per_s", "inter_bytes_per_s"):
        faster = solve(machine(**slow_links | {name: 1e11}), 4, micro_batch=1).predicted.step_time_s
        assert faster <= times[-1]


def test_fewer_gpus_are_used_where_links_are_too_slow() -> None:
    hopeless = machine(intra_bytes_per_s=1e2, inter_bytes_per_s=1e2, latency_s=10.0)
    plan = solve(hopeless, 4)
    assert plan.mesh.num_gpus == 1
    assert plan.cluster.gpus == 4
    assert solve(hopeless, 4, all_gpus=True).mesh.num_gpus == 4


def test_as_memory_falls_layers_are_resharded_and_recomputed() -> None:
    """With ample memory nothing is; with the least, everything; between, time only grows."""
    profile = machine(flop_per_s=1e9, hbm_bytes_per_s=1e10, launch_s=1e-9, intra_bytes_per_s=1e7, latency_s=1e-9)
    options = {"tp": 1, "fsdp": 2, "micro_batch": 1, "num_layers": 4, "all_gpus": True}
    plans = [solve(profile, 2, **options)]
    with pytest.raises(InfeasibleError) as caught:
        solve(profile, 2, memory_limit_bytes=1.0, **options)
    least = caught.value.needed_bytes
    for share in (0.3, 0.2, 0.1, 0.0):
        plans.append(solve(profile, 2, memory_limit_bytes=least * (1 + share), **options))
    assert not plans[0].recompute
    assert not any(plans[0].resharded_units().values())
    assert all(plans[-1].resharded_units().values())
    assert set(plans[-1].recomputed_modules().values()) == {Recompute.FULL}
    assert len({(str(plan.recompute), str(plan.fsdp)) for plan in plans}) > 3
    times = [plan.predicted.step_time_s for plan in plans]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in itertools.pairwise(times))


def test_what_would_fit_comes_cheapest_first() -> None:
    profile = machine()
    options = {"tp": 1, "fsdp": 1, "recompute": "none", "micro_batch": 4, "all_gpus": True, "num_layers": 4}
    ample = solve(profile, 1, **options)
    with pytest.raises(InfeasibleError) as nothing:
        solve(profile, 1, memory_limit_bytes=1.0, **options)
    limit = nothing.value.needed_bytes - 0.1 * ample.predicted.memory_bytes["saved activations"]
    with pytest.raises(InfeasibleError, match=r"recomputation would do .*micro-batch 1 would do") as caught:
        solve(profile, 1, memory_limit_bytes=limit, **options)
    error = caught.value
    assert error.limit_bytes == limit < error.needed_bytes
    assert sum(error.parts.values()) == pytest.approx(error.needed_bytes)
    costs = [remedy.gpu_seconds for remedy in error.remedies]
    assert costs == sorted(costs)
    assert all(remedy.peak_bytes <= limit * (1 + 1e-6) for remedy in error.remedies)
    solve(profile, 1, memory_limit_bytes=limit, **options | {"recompute": None})
