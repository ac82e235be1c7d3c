"""What else could be done: kinds against pinned solves, shadow prices against the problem solved again, sizes."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import pytest
from examples import FOLDER, eager_to_shard, example

import tpplan
from tpplan import commands
from tpplan.commands import size as size_verb
from tpplan.core.errors import TpplanError
from tpplan.core.graph import ModelGraph
from tpplan.core.mesh import meshes
from tpplan.core.units import GIB
from tpplan.costs.prediction.step_time import model_flop
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan
from tpplan.plan.report.differences import memory_differences, time_differences
from tpplan.plan.styles import Style
from tpplan.search.comparisons.alternatives import (
    PlanKind,
    Problem,
    Without,
    options_of,
    shadow_prices,
    styles_of,
    top,
    why_not,
)
from tpplan.search.comparisons.cluster_sizing import counts_up_to, size, smallest
from tpplan.search.models.trace_cache import Reuse
from tpplan.search.points.options import Cluster

MLP = example("mlp")


def problem_of(profile: HardwareProfile, gpus: int = 4, gpus_per_node: int = 4, **options: object) -> Problem:
    defaults = {"loss": MLP.loss, "global_batch": 8, "micro_batch": 2, "seq_len": 32, "precision": "fp32"}
    return Problem(
        build_model=MLP.build_model,
        example_inputs=MLP.example_inputs,
        cluster=Cluster(gpus=gpus, gpus_per_node=gpus_per_node, profile=profile),
        options={**defaults, **options},
        reuse=Reuse(),
    )


@pytest.fixture(scope="module")
def problem() -> Problem:
    """The small MLP on four ranks."""
    return problem_of(eager_to_shard())


@pytest.fixture(scope="module")
def plan(problem: Problem) -> Plan:
    return problem.solve(prove=False)


@pytest.fixture(scope="module")
def graph(problem: Problem, plan: Plan) -> ModelGraph:
    return next(iter(problem.reuse.traces.values())).graph


# Kinds


def by_enumeration(problem: Problem, graph: ModelGraph) -> list[PlanKind]:
    """The cheapest plan of each kind, over every mesh and every set of styles that is forbidden."""
    found: dict[object, PlanKind] = {}
    styles = [Style.COLUMN, Style.ROW, Style.VOCABULARY, Style.REPLICATED, Style.SLICES, Style.SPLIT]
    for mesh in meshes(problem.cluster.gpus, problem.cluster.gpus_per_node):
        for left_out in itertools.chain.from_iterable(itertools.combinations(styles, n) for n in range(len(styles))):
            options = {"tp": mesh.tp, "fsdp": mesh.shard, "allows": Without(frozenset(left_out))}
            try:
                own = problem.solve(prove=False, **options)
            except TpplanError:
                continue
            kind = PlanKind(plan=own, styles=styles_of(graph, own))
            found.setdefault(kind.key, kind)
            if own.predicted.step_time_s < found[kind.key].plan.predicted.step_time_s:
                found[kind.key] = kind
    return sorted(found.values(), key=lambda kind: kind.plan.predicted.step_time_s)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_best_kinds_are_those_that_enumeration_finds(problem: Problem, graph: ModelGraph) -> None:
    expected = by_enumeration(problem, graph)[:6]
    found = top(problem, 6, prove=False)
    times = [kind.plan.predicted.step_time_s for kind in expected]
    assert [kind.plan.predicted.step_time_s for kind in found] == pytest.approx(times, rel=1e-9)


def test_kinds_are_different_and_the_first_is_the_optimum(problem: Problem, plan: Plan) -> None:
    kinds = top(problem, 3, prove=False)
    assert len({kind.key for kind in kinds}) == 3
    times = [kind.plan.predicted.step_time_s for kind in kinds]
    assert times == sorted(times)
    assert times[0] == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_what_is_forbidden_is_not_there(problem: Problem, graph: ModelGraph) -> None:
    own = problem.solve(tp=4, prove=False)
    for style in styles_of(graph, own):
        other = problem.solve(tp=4, allows=Without(frozenset({style})), prove=False)
        assert style not in styles_of(graph, other)
        assert other.predicted.step_time_s >= own.predicted.step_time_s * (1 - 1e-9)


def test_differences_add_up(problem: Problem, plan: Plan) -> None:
    other = problem.solve(tp=1, fsdp=4, prove=False)
    time = sum(theirs - ours for _, ours, theirs in time_differences(plan, other))
    assert time == pytest.approx(other.predicted.step_time_s - plan.predicted.step_time_s, rel=1e-9)
    memory = sum(theirs - ours for _, ours, theirs in memory_differences(plan, other))
    assert memory == pytest.approx(other.predicted.peak_memory_bytes - plan.predicted.peak_memory_bytes, abs=1)


# A style instead


@pytest.mark.long
def test_why_not_is_the_best_plan_of_that_style_on_that_mesh(problem: Problem) -> None:
    own = problem.solve(tp=4, prove=False)
    for style in ("replicate", "columns"):
        other = why_not(problem, own, "layers.*", style)
        assert other.plan is not None
        assert other.plan.mesh == own.mesh
        assert other.plan.predicted.step_time_s >= own.predicted.step_time_s * (1 - 1e-9)


def test_why_not_says_why_there_is_none(problem: Problem) -> None:
    own = problem.solve(tp=1, fsdp=4, prove=False)
    other = why_not(problem, own, "layers.*", "columns")
    assert other.plan is None
    assert "tp 1" in other.problem


def test_options_are_those_that_the_plan_was_made_with(problem: Problem, plan: Plan) -> None:
    options = options_of(plan)
    assert {key: options[key] for key in problem.options.keys() & options.keys()} == {
        key: value for key, value in problem.options.items() if key in options
    }
    again = dataclasses.replace(problem, options={**options, "loss": MLP.loss})
    assert again.solve(prove=False).dumps() == plan.dumps()
    assert not options["compile"]
    assert options_of(problem.solve(prove=False, compile=True))["compile"]


# Shadow prices


@pytest.mark.long
def test_shadow_prices_are_what_a_better_machine_saves() -> None:
    """Every change is for the better, and each is what solving that problem gives."""
    tight = problem_of(eager_to_shard(intra_bytes_per_s=1e7), gpus=2, gpus_per_node=2)
    found = {row.name: row for row in shadow_prices(tight)}
    names = list(found)
    assert names[0] == "as it is"
    base = found[names[0]].plan
    assert base is not None
    for name, row in found.items():
        if row.plan is not None:
            assert row.plan.predicted.step_time_s <= base.predicted.step_time_s * (1 + 1e-9), name
    faster = found["links inside a node 10 % faster"].plan
    assert faster is not None
    assert faster.predicted.step_time_s < base.predicted.step_time_s
    assert found["one more GPU (3)"].plan == base  # three ranks are slower: the third stays idle
    twice = found["twice the GPUs (4)"].plan
    assert twice is not None
    again = tight.solve(prove=False, cluster=dataclasses.replace(tight.cluster, gpus=4))
    assert twice.predicted.step_time_s == again.predicted.step_time_s


def test_memory_has_a_price_where_it_binds() -> None:
    slow = problem_of(eager_to_shard(intra_bytes_per_s=1e6), tp=1)
    free = slow.solve(prove=False)
    tight = dataclasses.replace(
        slow, options={**slow.options, "memory_limit_bytes": 0.9 * free.predicted.peak_memory_bytes}
    )
    rows = list(shadow_prices(tight))
    base, more = rows[0].plan, rows[1].plan
    assert base is not None
    assert more is not None
    assert base.predicted.step_time_s > more.predicted.step_time_s
    assert more.predicted.step_time_s == pytest.approx(free.predicted.step_time_s)
    assert more.predicted.memory_limit_bytes == base.predicted.memory_limit_bytes + GIB


# Sizes


def test_counts_are_powers_of_two_of_a_node_and_of_nodes() -> None:
    assert counts_up_to(64, 8) == (1, 2, 4, 8, 16, 32, 64)
    assert counts_up_to(40, 6) == (1, 2, 4, 6, 12, 24)


def test_each_size_is_the_plan_that_solve_gives_and_the_smallest_does_what_is_asked(problem: Problem) -> None:
    profile = eager_to_shard()
    clusters = [Cluster(gpus=n, gpus_per_node=n, profile=profile) for n in (1, 2, 3, 4)]
    options = {**problem.options, "tp": 1, "all_gpus": True}
    rows = list(size(MLP.build_model, MLP.example_inputs, clusters=clusters, options=options))
    assert [row.plan is None for row in rows] == [False, False, True, False]  # 8 sequences on 3 ranks
    alone = dataclasses.replace(problem, cluster=clusters[1], options=options, reuse=Reuse()).solve(prove=False)
    assert rows[1].plan is not None
    assert rows[1].plan.dumps() == alone.dumps()
    assert rows[1].tokens_per_s == 8 * 32 / alone.predicted.step_time_s
    assert rows[1].gpu_hours_per_1e9_tokens == pytest.approx(2 * 1e9 / rows[1].tokens_per_s / 3600)
    assert smallest(rows) is rows[0]
    target = max(row.tokens_per_s for row in rows)
    (fastest,) = (row for row in rows if row.tokens_per_s == target)
    assert smallest(rows, target) is fastest
    assert fastest is not rows[0]
    assert smallest(rows, 1e30) is None
    fewer = list(size(MLP.build_model, MLP.example_inputs, clusters=clusters, tokens_per_s=target, options=options))
    assert fewer[-1].cluster == fastest.cluster  # no more once the target is met
    assert (
        len(list(size(MLP.build_model, MLP.example_inputs, clusters=clusters, tokens_per_s=1.0, options=options))) == 1
    )


def test_counts_between_powers_of_two_are_tried_and_near_misses_are_said(problem: Problem) -> None:
    """12 sequences, one in a micro-batch: 3 ranks are faster than 2. A target just above what 2
    do is met by 4 first, then by 3; 2 miss it by less than their error bar."""
    profile = eager_to_shard()
    clusters = [Cluster(gpus=n, gpus_per_node=min(n, 4), profile=profile) for n in (1, 2, 4)]
    options = {**problem.options, "tp": 1, "all_gpus": True, "global_batch": 12, "micro_batch": 1}
    run = functools.partial(size, MLP.build_model, MLP.example_inputs, clusters=clusters, options=options)
    two = next(row for row in run() if row.cluster.gpus == 2)
    assert two.relative_error > 1e-6
    target = two.tokens_per_s * (1 + two.relative_error / 2)
    rows = list(run(tokens_per_s=target, refine=True))
    assert [row.cluster.gpus for row in rows] == [1, 2, 4, 3]
    best = smallest(rows, target)
    assert best is not None
    assert best.cluster.gpus == 3
    assert "2 GPUs miss it by" in size_verb._answer(best, rows, target, None)
    assert "2 GPUs miss it by" in size_verb._answer(None, rows[:2], target, None)
    assert "miss" not in size_verb._answer(best, rows, two.tokens_per_s * 1.5, None)


def test_mfu_counts_the_models_own_flop(problem: Problem, plan: Plan) -> None:
    """6 FLOP for each weight of a matrix and row of the batch; 4 in the first, whose input needs no gradient."""
    traced = next(iter(problem.reuse.traces.values()))
    weights = [p.numel() for p in traced.model.parameters() if p.ndim == 2]
    expected = (6 * sum(weights) - 2 * weights[0]) * traced.micro_batch
    assert model_flop(traced.graph, problem.reuse.executor) == expected
    steps = plan.batch.global_batch // traced.micro_batch
    assert plan.predicted.model_flop == expected * steps
    assert eager_to_shard(flop_per_s=1e9).peak_flop_per_s == pytest.approx(1e9, rel=0.1)


# On the command line

MODEL = FOLDER / "mlp.py"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert commands.main([*map(str, arguments), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


@pytest.fixture(scope="module")
def machine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machine") / "toy.json"
    path.write_text(eager_to_shard().dumps(), encoding="utf-8")
    return path


@pytest.mark.long
def test_what_is_printed_fits_80_columns_and_is_what_json_says(
    machine_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    training = ("--global-batch", 8, "--micro-batch", 2, "--seq-len", 32)
    machine = ("--profile", machine_file)
    plan_file = tmp_path / "plan.json"
    verbs: list[tuple[object, ...]] = [
        ("size", MODEL, *machine, *training, "--gpus", "1,2,4"),
        ("solve", MODEL, *machine, *training, "--gpus", 4, "--top", 3, "-o", plan_file, "--top-dir", tmp_path),
        ("explain", plan_file, "layers.*", "--why-not", "replicate", MODEL, *machine),
        ("explain", plan_file, "--shadow-prices", MODEL, *machine),
    ]
    for verb in verbs:
        assert commands.main([*map(str, verb)]) == 0, verb
        out = capsys.readouterr().out
        assert out.isascii()
        assert max(map(len, out.splitlines())) <= 80, verb
    assert Plan.load(tmp_path / "plan-2.json").predicted.step_time_s >= Plan.load(plan_file).predicted.step_time_s
    sizes = run_json(capsys, *verbs[0])
    assert [row["gpus"] for row in sizes["rows"]] == [1, 2, 4]  # type: ignore[attr-defined]
    kinds = run_json(capsys, *verbs[1])["kinds"]
    assert len(kinds) == 3  # type: ignore[arg-type]
    prices = run_json(capsys, *verbs[3])["shadow_prices"]
    assert prices[0]["saved_s"] == 0  # type: ignore[index]


@pytest.mark.long
def test_the_smallest_count_of_a_target_decides_the_exit_code(
    machine_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["size", MODEL, "--profile", machine_file, "--global-batch", 8, "--seq-len", 32, "--gpus", "1,2"]
    assert commands.main([*map(str, arguments), "--target-tokens-per-day", "1"]) == 0
    assert "1 GPUs are the fewest" in " ".join(capsys.readouterr().out.split())
    assert commands.main([*map(str, arguments), "--tokens", "1e30", "--deadline", "1h"]) == 3
    assert "None of the counts tried, up to 2 GPUs" in " ".join(capsys.readouterr().out.split())


def test_a_plan_of_an_unknown_machine_is_explained_without_times(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "synthetic" in plan.cluster.profile
    plan.dump(tmp_path / "plan.json")
    assert commands.main(["explain", str(tmp_path / "plan.json"), "layers.*"]) == 0
    assert "no times of collectives" in capsys.readouterr().out
    assert commands.main(["explain", str(tmp_path / "plan.json"), "layers.*", "--profile", "nowhere"]) == 6
    assert "unknown profile 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("size", MODEL, "--profile", "h100-sxm", "--global-batch", "8", "--seq-len", "32"),
            "expected --target-tokens",
        ),
        (
            ("size", MODEL, "--profile", "h100-sxm", "--global-batch", "8", "--seq-len", "32", "--deadline", "3d"),
            "--deadline needs --tokens",
        ),
        (("explain", "PLAN", "--shadow-prices"), "need model.py"),
        (("explain", "PLAN"), "expected modules by pattern"),
        (("explain", "PLAN", "nowhere"), "no module 'nowhere'"),
        (("explain", "PLAN", "layers.*", "--why-not", "colums", MODEL), "did you mean 'columns'"),
        (("explain", "PLAN", "layers.*", "head", MODEL), "expected one pattern"),
    ],
)
def test_mistakes_are_told(
    arguments: tuple[object, ...], message: str, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.dump(tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json") if word == "PLAN" else str(word) for word in arguments]
    assert commands.main(words) == tpplan.core.errors.UsageError.exit_code  # type: ignore[attr-defined]
    assert message in capsys.readouterr().err
