"""The page of a plan: its numbers are the plan's, it loads nothing, its HTML nests, and texts of a plan stay texts."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report import make_plan

from tpplan.commands import main
from tpplan.core.mesh import Axis, Mesh
from tpplan.core.units import format_seconds
from tpplan.page.bars import bars
from tpplan.page.mesh_drawing import MOST_GPUS, MOST_NODES, drawings, group_of_first
from tpplan.page.plan_page import plan_page
from tpplan.plan.plan import MeshPlan, Plan
from tpplan.plan.report.details import collective_totals
from tpplan.plan.report.words import gib

VOID = {"meta", "link", "br"}
HOSTILE = "</style></title><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x1b[31m"


class Page(HTMLParser):
    """A page's text and elements; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def on_mesh(plan: Plan, mesh: Mesh, *, gpus: int, gpus_per_node: int) -> Plan:
    """The plan with another mesh and cluster; what follows from the mesh is left as it was."""
    degrees = MeshPlan(replicate=mesh.replicate, shard=mesh.shard, tp=mesh.tp)
    return replace(plan, mesh_degrees=degrees, cluster=replace(plan.cluster, gpus=gpus, gpus_per_node=gpus_per_node))


def test_the_page_says_the_numbers_of_the_plan() -> None:
    plan = make_plan()
    text, predicted = Page(plan_page(plan, title="a plan")).text, plan.predicted
    assert f"{format_seconds(predicted.step_time_s)} ± {format_seconds(predicted.step_time_error_s)}" in text
    assert gib(predicted.peak_memory_bytes + predicted.slack_bytes) in text
    for name, seconds in predicted.time_s.items():
        assert not seconds or f"{name} {format_seconds(seconds)}" in text
    for name, num_bytes in predicted.memory_bytes.items():
        assert not num_bytes or f"{name} {gib(num_bytes)}" in text
    assert predicted.peak_module in text
    for axis, during, kind, count, _ in collective_totals(plan.collectives):
        assert f"{axis} {during} {kind.replace('_', '-')} {count}" in text


def test_bars_of_a_step_end_at_the_whole() -> None:
    found = bars({"b": 1.0, "a": 1.0, "none": 0.0, "most": 2.0}, 4.0, str)
    assert [(bar.name, bar.starts_at, bar.percent) for bar in found] == [("most", 0, 50), ("a", 50, 25), ("b", 75, 25)]
    assert [bar.percent for bar in bars({"a": 1.0}, 0.0, str)] == [0.0]


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = Page(plan_page(make_plan(), title="a plan"))
    assert "script" not in {tag for tag, _ in page.elements}
    links = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["data:,"]  # no icon is asked for
    assert not re.search(r"url\(|@import", "".join(page.texts))


def test_hostile_texts_stay_texts() -> None:
    plan = make_plan()
    plain = Page(plan_page(plan, title="a plan"))
    cluster = replace(plan.cluster, profile=HOSTILE)
    predicted = replace(plan.predicted, peak_module=HOSTILE, time_s={HOSTILE: plan.predicted.step_time_s})
    hostile = replace(plan, cluster=cluster, notes=(HOSTILE,), predicted=predicted)
    text = plan_page(hostile, title=HOSTILE)
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert tags == {tag for tag, _ in plain.elements}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count("<script>alert(1)</script>") == 7  # title twice, profile twice, peak module and part, note
    assert "\x1b" not in text


@pytest.mark.parametrize("mesh", [Mesh(replicate=2, shard=2, tp=2), Mesh(shard=4, tp=2), Mesh(tp=8)])
def test_groups_of_rank_0_are_those_of_its_coordinates(mesh: Mesh) -> None:
    plan = on_mesh(make_plan(), mesh, gpus=8, gpus_per_node=4)
    coordinates = [
        {Axis.REPLICATE: i, Axis.SHARD: j, Axis.TP: k}  # row-major, tp innermost
        for i in range(mesh.replicate)
        for j in range(mesh.shard)
        for k in range(mesh.tp)
    ]
    for axis in Axis:
        in_group = [
            rank for rank, at in enumerate(coordinates) if not any(at[other] for other in Axis if other != axis)
        ]
        assert list(group_of_first(plan, axis)) == in_group
    drawn = {drawing.axis: drawing for drawing in drawings(plan)}
    assert set(drawn) == {axis for axis in Axis if mesh.size(axis) > 1}
    for axis, drawing in drawn.items():
        cells = [cell for node in drawing.nodes for cell in node]
        assert [cell.rank for cell in cells] == list(range(8))
        assert [cell.rank for cell in cells if cell.is_in_group] == list(group_of_first(plan, axis))


def test_a_large_cluster_is_drawn_in_part_and_says_so() -> None:
    plan = on_mesh(make_plan(), Mesh(shard=512, tp=2), gpus=2048, gpus_per_node=32)
    drawing = drawings(plan)[0]
    assert [len(node) for node in drawing.nodes] == [MOST_GPUS] * MOST_NODES
    assert drawing.left_out == "drawn: 8 of 64 nodes, 16 of 32 GPUs of each node"


def test_the_verb_writes_the_page(tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "report.html"
    make_plan().dump(plan)
    assert main(["report", str(plan), "-o", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == plan_page(make_plan(), title="plan.json")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_chromium_opens_the_page_without_errors(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(plan_page(make_plan(), title="a plan"), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/c",
    ]
    ran = subprocess.run(
        ["chromium", *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Where the time goes" in ran.stdout
    assert "CONSOLE" not in ran.stderr
