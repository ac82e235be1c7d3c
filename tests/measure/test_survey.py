"""A machine is measured section by section, on every group a mesh can have, and an interruption costs one section."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from tpplan.commands import main
from tpplan.core.errors import PlanError, UsageError
from tpplan.core.mesh import AXES, GroupShape, meshes
from tpplan.machine import lint
from tpplan.machine.profile import Collective, HardwareProfile, load_profile
from tpplan.measure import session
from tpplan.measure.attention import AttentionShape
from tpplan.measure.collectives import group_members, group_shapes, measure_overlap, ranks_per_node
from tpplan.measure.grid import ComputeGrid
from tpplan.measure.session import Survey, measure_machine, survey_of
from tpplan.measure.timer import Progress, silent

REPOSITORY = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
MESSAGES = (1024, 4096)
TOY = ComputeGrid(
    matmul_batches=(1,),
    matmul_sizes=(4, 8),
    copied_bytes=(4096,),
    attention=(AttentionShape(batch=1, heads=2, sequence=16, head_dim=8, causal=True),),
)
BUDGET_S = 0.1


# --- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2), (4, 8)])
def test_every_group_of_every_mesh_is_measured(nodes: int, per_node: int) -> None:
    world = nodes * per_node
    axes = {mesh.group(axis, per_node) for mesh in meshes(world, per_node) for axis in AXES}
    assert {shape for shape in axes if shape.ranks > 1} == set(group_shapes(world, per_node))


def test_groups_of_two_nodes_of_two() -> None:
    assert group_shapes(4, 2) == tuple(GroupShape(ranks=p, ranks_per_node=q) for p, q in ((2, 2), (2, 1), (4, 2)))
    members = [group_members(shape, 4, 2) for shape in group_shapes(4, 2)]
    assert members == [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 6), (4, 8)])
def test_groups_of_a_shape_share_out_all_ranks(nodes: int, per_node: int) -> None:
    world = nodes * per_node
    for shape in group_shapes(world, per_node):
        members = group_members(shape, world, per_node)
        assert sorted(rank for group in members for rank in group) == list(range(world))
        for group in members:
            on_nodes = [rank // per_node for rank in group]
            assert len(group) == shape.ranks
            assert {on_nodes.count(node) for node in on_nodes} == {shape.ranks_per_node}


# --- interrupted ---------------------------------------------------------------------------------------------------


def toy(progress: Progress = silent, grid: ComputeGrid = TOY) -> Survey:
    return survey_of(CPU, grid=grid, progress=progress)


def recorder(sections: list[str], stop_at: str | None = None) -> Progress:
    def record(section: str, done: int, total: int) -> None:
        if section == stop_at:
            raise KeyboardInterrupt
        if section not in sections:
            sections.append(section)

    return record


def test_a_resumed_measurement_measures_only_what_is_missing(tmp_path: Path) -> None:
    partial, said, sections = tmp_path / "mine.json.partial", [], []
    stopped = toy(recorder(sections, stop_at="matmul float32"))
    with pytest.raises(KeyboardInterrupt):
        measure_machine(stopped, name="mine", budget_s=BUDGET_S, partial=partial)
    assert sections == ["memory", "attention float32"]
    kept = json.loads(partial.read_text())["measured"]
    sections.clear()
    profile = measure_machine(toy(recorder(sections)), name="mine", budget_s=BUDGET_S, partial=partial, say=said.append)
    assert sections == ["matmul float32"]
    assert said == [f"going on from {partial}: left are matmul float32"]
    assert profile.to_dict()["launch"] == kept["launch"]
    assert profile.to_dict()["memory_bound_table"] == kept["memory_bound_table"]
    assert HardwareProfile.from_dict(profile.to_dict(), "mine") == profile


Damage = Callable[[dict], object]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a whole measurement leaves beside its output."""
    partial = tmp_path_factory.mktemp("measured") / "mine.json.partial"
    measure_machine(toy(), name="mine", budget_s=BUDGET_S, partial=partial)
    return partial.read_text()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d["where"].update(torch="1.0"), f"torch was 1.0, is {torch.__version__}"),
        (lambda d: d["where"].update(driver="550.1"), "driver was 550.1, is none"),
        (lambda d: d["measured"]["launch"].update(launch_s=-1), "measured.launch.launch_s: expected > 0, got -1"),
        (lambda d: d.pop("where"), "where: missing key"),
    ],
)
def test_what_another_machine_measured_is_not_continued(
    measured: str, tmp_path: Path, damage: Damage, message: str
) -> None:
    partial, said, sections = tmp_path / "mine.json.partial", [], []
    content = json.loads(measured)
    damage(content)
    partial.write_text(json.dumps(content))
    measure_machine(toy(recorder(sections)), name="mine", budget_s=BUDGET_S, partial=partial, say=said.append)
    assert sections == ["memory", "attention float32", "matmul float32"]
    assert len(said) == 1
    assert said[0].startswith("measuring all anew: ")
    assert message in said[0]


def test_another_grid_is_another_measurement(measured: str, tmp_path: Path) -> None:
    partial, said = tmp_path / "mine.json.partial", []
    partial.write_text(measured)
    other = ComputeGrid(
        matmul_batches=(1,), matmul_sizes=(4, 16), copied_bytes=TOY.copied_bytes, attention=TOY.attention
    )
    profile = measure_machine(toy(grid=other), name="mine", budget_s=BUDGET_S, partial=partial, say=said.append)
    assert "grid was" in said[0]
    assert profile.matmuls[0].m == (4, 16)


def test_what_the_budget_did_not_allow_is_in_the_notes() -> None:
    grid = ComputeGrid(
        matmul_batches=(1,), matmul_sizes=tuple(range(1, 8)), copied_bytes=TOY.copied_bytes, attention=TOY.attention
    )
    profile = measure_machine(toy(grid=grid), name="mine", budget_s=BUDGET_S)
    left_out = sorted({*grid.matmul_sizes} - {*profile.matmuls[0].m})
    assert len(left_out) == 3  # four sizes are the fewest
    shown = ", ".join(map(str, left_out))
    assert f"matmul float32: sizes {shown} were left out: the budget was too short" in profile.notes


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures the toy grid; this process keeps its threads."""
    monkeypatch.setattr(session, "default_grid", lambda device_type: TOY)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


@pytest.mark.usefixtures("tiny")
def test_the_command_writes_a_profile_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    code = main(
        ["profile", "-o", str(out), "--budget", "0.1s", "--device", "cpu", "--dtypes", "float32", "float64",
         "--note", "a desk"]
    )  # fmt: skip
    assert code == 0
    profile = load_profile(out)
    assert (profile.name, [table.dtype for table in profile.matmuls]) == ("mine", ["float32", "float64"])
    assert "a desk" in profile.notes
    assert out.read_text() == profile.dumps()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    shown = capsys.readouterr()
    assert "matmul float64, GFLOP/s: m by n = k" in shown.out
    assert shown.err.splitlines()[-1].startswith(f"wrote {out} after ")  # after progress, on a slow machine


@pytest.mark.usefixtures("tiny")
def test_the_command_says_that_what_it_measured_is_mostly_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where no share of noisy points is little enough."""
    monkeypatch.setattr(lint, "MOST_NOISE", -1.0)
    out = tmp_path / "mine.json"
    assert main(["profile", "-o", str(out), "--budget", "0.1s", "--device", "cpu", "--dtypes", "float32"]) == 0
    assert f"{out} is not valid: " in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_an_interruption_leaves_the_old_profile_and_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, command = tmp_path / "mine.json", ["profile", "-o", str(tmp_path / "mine.json"), "--budget", "0.1"]
    out.write_text("old")

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(session, "measure_matmuls", interrupted)
        assert main(command) == 130
    assert out.read_text() == "old"
    with monkeypatch.context() as patched:
        patched.setattr(session, "measure_attention", interrupted)  # it was finished: nobody calls it
        patched.setattr(Path, "replace", raise_full_disk)
        assert main(command) == PlanError.exit_code
    assert out.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"mine.json", "mine.json.partial"}
    assert main(command) == 0
    assert load_profile(out).name == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    assert "mine.json.partial cannot be written" in capsys.readouterr().err.replace(": cannot", " cannot")


def raise_full_disk(self: Path, target: Path) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "expected -o FILE to measure this machine, or check FILE, or show FILE"),
        (["-o", "no/such/folder/mine.json"], 6, "no/such/folder is not a folder"),
        (
            ["-o", "mine.json", "--device", "cpu", "--dtypes", "float31"],
            2,
            "dtype 'float31' cannot be measured; expected one of bfloat16",
        ),
        (["-o", "mine.json", "--device", "cpu", "--dtypes", "float32", "float32"], 2, "float32 more than once"),
    ],
)
def test_mistakes_have_an_exit_code_and_name_what_is_wrong(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert main(["profile", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- real ranks ----------------------------------------------------------------------------------------------------


def as_torchrun_says(rank: int, per_node: int) -> None:
    os.environ.update(GROUP_RANK=str(rank // per_node), LOCAL_WORLD_SIZE=str(per_node))


def on_two_nodes(partial: Path) -> dict[str, object]:
    """Two nodes of two ranks, all of them on this machine; the numbering is checked first."""
    rank = torch.distributed.get_rank()
    os.environ.update(GROUP_RANK="0", LOCAL_WORLD_SIZE="2")
    with pytest.raises(
        UsageError, match=r"ranks are on nodes \[0, 0, 0, 0\]: expected them numbered node by node, 2 on each"
    ):
        ranks_per_node()
    os.environ.update(GROUP_RANK=str(rank // 3), LOCAL_WORLD_SIZE="3" if rank < 3 else "1")
    with pytest.raises(UsageError, match="nodes have 1 or 3 ranks: start as many on each"):
        ranks_per_node()
    del os.environ["GROUP_RANK"]
    with pytest.raises(
        UsageError, match="GROUP_RANK and LOCAL_WORLD_SIZE are not set on ranks 0, 1, 2, 3: start every rank"
    ):
        ranks_per_node()
    as_torchrun_says(rank, 2)
    here = survey_of(CPU, grid=TOY, message_bytes=MESSAGES)
    measured = measure_machine(here, name="two nodes", budget_s=1.0, partial=partial)
    again = measure_machine(here, name="two nodes", budget_s=1.0, partial=partial)
    assert again.collectives == measured.collectives  # nothing was left to measure
    return measured.to_dict()


def test_two_nodes_are_measured_on_all_groups_with_what_overlaps(tmp_path: Path) -> None:
    per_rank = run_ranks(4, on_two_nodes, tmp_path / "two.json.partial")
    profile = HardwareProfile.from_dict(per_rank[0], "rank 0")
    groups = [GroupShape(ranks=p, ranks_per_node=q) for p, q in ((2, 2), (2, 1), (4, 2))]
    assert {(table.kind, table.group) for table in profile.collectives} == {(k, g) for k in Collective for g in groups}
    assert {table.bytes for table in profile.collectives} == {MESSAGES}
    assert profile.gpus_per_node == 2
    assert not profile.collective(Collective.ALL_GATHER, GroupShape(ranks=2, ranks_per_node=1), 4096).extrapolated
    assert profile.overlap is not None
    # The slowest rank's time counts: there is one profile, but for the memory of each rank.
    assert all({**content, "memory": None} == {**per_rank[0], "memory": None} for content in per_rank)


def overlap_on_a_rank() -> tuple[float, float]:
    overlap = measure_overlap(CPU, dtype="float32", budget_s=0.5, sizes=(96, 65536))
    return overlap.matmul_slowdown, overlap.collective_slowdown


def test_an_overlap_is_the_same_on_all_ranks_and_no_speedup() -> None:
    first, second = run_ranks(2, overlap_on_a_rank)
    assert first == second
    assert min(first) >= 0


@pytest.mark.long
def test_torchrun_measures_with_the_default_grid(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tpplan"]
    options = ["profile", "-o", str(out), "--budget", "20s", "--device", "cpu"]
    ran = subprocess.run(
        [*command, *options], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("all_reduce, bus bandwidth") == 1  # of the first rank alone
    profile = load_profile(out)
    assert profile.gpus_per_node == 2
    assert {table.kind for table in profile.collectives} == set(Collective)
