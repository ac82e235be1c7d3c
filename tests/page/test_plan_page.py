"""The page of a plan: its numbers are the plan's, it loads nothing, its HTML nests, and texts of a plan stay texts."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report import make_plan

from tpplan.commands import main
from tpplan.core.mesh import AXES, Axis, Mesh
from tpplan.core.units import format_seconds
from tpplan.page.bars import bars
from tpplan.page.curve_drawing import curve_drawing
from tpplan.page.memory_drawing import HEIGHT, memory_drawing
from tpplan.page.mesh_drawing import MOST_GPUS, MOST_NODES, drawings, group_of_first
from tpplan.page.plan_page import plan_page
from tpplan.page.step_drawing import HIDDEN, WIDTH, Shape, step_drawing
from tpplan.plan.parts import COMPUTE, DATA_PARALLEL, PARAMETERS, SAVED, TENSOR_PARALLEL
from tpplan.plan.plan import MeshPlan, Pass, Plan
from tpplan.plan.report.details import collective_totals
from tpplan.plan.report.words import gib
from tpplan.plan.step_anatomy import Anatomy, Curve, Moment, Outcome, Segment, Stream, Timeline

in_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

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


def segment(stream: Stream, part: str, module: str, start_s: float, end_s: float, during: Pass) -> Segment:
    return Segment(stream=stream, part=part, module=module, during=during, start_s=start_s, seconds=end_s - start_s)


#: one earlier micro-batch of 10 s, then 2 s of forward in two layers, and 6 s of backward with a gather beside it
STEP = Timeline(
    earlier=1,
    earlier_s={COMPUTE: 10.0},
    segments=(
        segment(Stream.COMPUTE, COMPUTE, "layers.0.up", 10.0, 11.0, Pass.FORWARD),
        segment(Stream.COMPUTE, COMPUTE, "layers.1.up", 11.0, 11.5, Pass.FORWARD),
        segment(Stream.TENSOR, TENSOR_PARALLEL, "layers.1.down", 11.5, 12.0, Pass.FORWARD),
        segment(Stream.DATA, "", "layers.1", 12.0, 13.0, Pass.BACKWARD),
        segment(Stream.COMPUTE, COMPUTE, "layers.1.down", 12.0, 17.0, Pass.BACKWARD),
        segment(Stream.DATA, DATA_PARALLEL, "layers.1", 17.0, 18.0, Pass.BACKWARD),
    ),
)
MOMENTS = tuple(
    Moment(memory_bytes={PARAMETERS: 4e9, SAVED: saved}, during=during, module=HOSTILE)
    for saved, during in ((0.0, Pass.FORWARD), (5e9, Pass.FORWARD), (7e9, Pass.BACKWARD), (1e9, Pass.BACKWARD))
)
CURVE = Curve(
    name="GPUs",
    now=4,
    outcomes=(
        Outcome(value=2, problem=HOSTILE),
        Outcome(value=4, step_time_s=2.0, samples_per_s=4.0, mesh="replicate 4 x shard 1 x tp 1"),
        Outcome(value=8, step_time_s=1.0, samples_per_s=8.0, mesh="replicate 8 x shard 1 x tp 1"),
    ),
)
ANATOMY = Anatomy(timeline=STEP, moments=MOMENTS, curves=(CURVE,))


def rectangles(shape: Shape) -> list[tuple[float, float]]:
    """(left, right) of each rectangle of a lane's shape, in seconds of STEP's 8 s from 10 s on."""
    found = re.findall(r"M([\d.]+) 0h([\d.]+)v10h-([\d.]+)z", shape.path)
    assert "".join(f"M{left} 0h{width}v10h-{back}z" for left, width, back in found) == shape.path
    return [(10 + 8 * float(left) / WIDTH, 10 + 8 * (float(left) + float(width)) / WIDTH) for left, width, _ in found]


def test_lanes_hold_the_segments_at_their_times() -> None:
    whole = step_drawing(STEP, make_plan()).windows[0]
    drawn = {(stream, shape.title): rectangles(shape) for stream, shapes in whole.lanes for shape in shapes}
    assert drawn == {
        ("compute", f"{COMPUTE}: 6.5 s"): [(10, 11), (11, 11.5), (12, 17)],
        ("tensor-parallel", f"{TENSOR_PARALLEL}: 500 ms"): [(11.5, 12)],
        ("data-parallel", f"{HIDDEN}: 1 s"): [(12, 13)],
        ("data-parallel", f"{DATA_PARALLEL}: 1 s"): [(17, 18)],
    }
    assert [(span.name, span.left, span.width) for span in whole.spans] == [("forward", 0, 25), ("backward", 25, 75)]


def test_the_layer_in_the_middle_is_drawn_in_both_passes() -> None:
    plan = replace(make_plan(), blocks={"layers.*": "0-1"})
    _, forward, backward = step_drawing(STEP, plan).windows
    assert [forward.title, backward.title] == ["layers.1 in forward", "layers.1 in backward"]
    assert [text for text, _ in forward.ticks] == ["11 s", "11.2 s", "11.5 s", "11.8 s", "12 s"]
    assert [span.name for span in forward.spans] == ["up", "down"]


def test_sentences_say_what_hides_and_what_waits() -> None:
    said = " ".join(step_drawing(STEP, make_plan()).sentences)
    assert "1 micro-batch before it, 10 s, not drawn" in said
    assert "Kernels run for 6.5 s (81.2%)" in said
    assert "Data-parallel collectives take 2 s: 1 s runs beside kernels; 1 s is waited for." in said


def areas_by_column(shape: Shape, columns: int) -> list[float]:
    """The height of a closed path of upright and level lines, in each of the equal columns of its width."""
    x, y, found = 0.0, float(HEIGHT), [0.0] * columns
    start = re.match(r"M0 (\d+)", shape.path)
    assert start
    assert shape.path.endswith("H0z")
    for axis, text in re.findall(r"([HV])([\d.]+)", shape.path[start.end() :]):
        if axis == "V":
            y = float(text)
            continue
        for column in range(columns):
            low, high = column * WIDTH / columns, (column + 1) * WIDTH / columns
            to = float(text)
            covered = max(0.0, min(high, max(x, to)) - max(low, min(x, to))) / (high - low)
            found[column] += (HEIGHT - y) * covered * (1 if to > x else -1)
        x = float(text)
    return found


def test_areas_are_the_bytes_of_each_moment() -> None:
    drawing = memory_drawing(MOMENTS, 0.0, 0.0)
    top = 1.06 * 11e9
    for shape, part in zip(drawing.areas, (PARAMETERS, SAVED), strict=True):
        expected = [HEIGHT * moment.memory_bytes[part] / top for moment in MOMENTS]
        assert areas_by_column(shape, len(MOMENTS)) == pytest.approx(expected, abs=0.2)
    assert drawing.peak == pytest.approx((62.5, 100 / 1.06))
    assert drawing.limit is None


def test_a_limit_close_to_the_peak_is_drawn_beside_its_slack() -> None:
    drawing = memory_drawing(MOMENTS, 13e9, 1e9)
    assert drawing.limit == pytest.approx(100 / 1.06)
    assert memory_drawing(MOMENTS, 80e9, 1e9).limit is None


def test_a_curve_breaks_where_there_is_no_plan() -> None:
    drawing = curve_drawing(CURVE, make_plan())
    assert [point.height for point in drawing.points] == [None, pytest.approx(50 / 1.1), pytest.approx(100 / 1.1)]
    assert [point.is_now for point in drawing.points] == [False, True, False]
    assert drawing.path.count("M") == 1
    assert drawing.path.count("L") == 1


def test_bars_of_a_step_end_at_the_whole() -> None:
    found = bars({"b": 1.0, "a": 1.0, "none": 0.0, "most": 2.0}, 4.0, str)
    assert [(bar.name, bar.starts_at, bar.percent) for bar in found] == [("most", 0, 50), ("a", 50, 25), ("b", 75, 25)]
    assert [bar.percent for bar in bars({"a": 1.0}, 0.0, str)] == [0.0]


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = Page(plan_page(make_plan(), title="a plan", anatomy=ANATOMY))
    assert "script" not in {tag for tag, _ in page.elements}
    links = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["data:,"]  # no icon is asked for
    assert not re.search(r"url\(|@import", "".join(page.texts))


def test_without_the_model_the_page_says_how_to_draw_the_step() -> None:
    text = Page(plan_page(make_plan(), title="a plan")).text
    assert text.count("tpplan report plan.json model.py draws it") == 2
    assert "What would change the plan" not in text


def test_hostile_texts_stay_texts() -> None:
    plan = make_plan()
    plain = Page(plan_page(plan, title="a plan", anatomy=ANATOMY))
    cluster = replace(plan.cluster, profile=HOSTILE)
    predicted = replace(plan.predicted, peak_module=HOSTILE, time_s={HOSTILE: plan.predicted.step_time_s})
    hostile = replace(plan, cluster=cluster, notes=(HOSTILE,), predicted=predicted)
    text = plan_page(hostile, title=HOSTILE, anatomy=replace(ANATOMY, problem=HOSTILE))
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert tags == {tag for tag, _ in plain.elements}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert (
        page.text.count("<script>alert(1)</script>") == 10
    )  # title twice, profile twice, peak module and part, note; of the anatomy peak, outcome, problem
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
    for axis in AXES:
        in_group = [
            rank for rank, at in enumerate(coordinates) if not any(at[other] for other in AXES if other != axis)
        ]
        assert list(group_of_first(plan, axis)) == in_group
    drawn = {drawing.axis: drawing for drawing in drawings(plan)}
    assert set(drawn) == {axis for axis in AXES if mesh.size(axis) > 1}
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


def dom_in_chromium(page: Path) -> str:
    """The text of a page's DOM after its load in headless Chromium, which must have nothing to say of it."""
    profile = f"--user-data-dir={page.parent}/c"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", profile]
    ran = subprocess.run(
        ["chromium", *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "CONSOLE" not in ran.stderr
    return ran.stdout


@in_chromium
def test_chromium_opens_the_page_without_errors(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(plan_page(make_plan(), title="a plan", anatomy=ANATOMY), encoding="utf-8")
    assert "Where the time goes" in dom_in_chromium(page)


#: a page that shows another in frames as wide as phones and a desktop, and says how wide it comes out there
FRAMES = """
<!doctype html><title>frames</title><script>
for (const width of [360, 390, 1280]) {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.width = width; frame.height = 900; frame.style.border = 0;
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    frame.name = root.scrollWidth + " pixels in " + root.clientWidth;
  };
  frame.srcdoc = TEXT;
}
</script>
"""


@in_chromium
def test_nothing_is_wider_than_a_phone(tmp_path: Path) -> None:
    text, frames = plan_page(make_plan(), title="a plan", anatomy=ANATOMY), tmp_path / "frames.html"
    quoted = json.dumps(text).replace("</", "<\\/")
    frames.write_text(FRAMES.replace("<script>", "<body><script>").replace("TEXT", quoted), encoding="utf-8")
    found = re.findall(r"(\d+) pixels in (\d+)", dom_in_chromium(frames))
    assert len(found) == 3
    assert [needed for needed, there in found] == [there for needed, there in found]
