"""What `tpplan profile check` and `show` say of a profile, and the page and pictures they make."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from profiles import full_profile, synthetic_profile
from tpplan.commands import main
from tpplan.core.errors import ProfileError
from tpplan.core.mesh import GroupShape
from tpplan.machine.lint import noisy_share, warnings
from tpplan.machine.profile import Collective, HardwareProfile, load_profile, shipped_profiles
from tpplan.machine.report import render, to_html
from tpplan.machine.svg_chart import HEIGHT, WIDTH, line_chart, nice_step
from tpplan.machine.views import NOISY_MARK, Chart, Series, bus_bandwidth, charts, views

SVG = "{http://www.w3.org/2000/svg}"
SHIPPED = shipped_profiles()
FULL = HardwareProfile.from_dict(full_profile(), "full")
BARE = HardwareProfile.from_dict(synthetic_profile(max_nodes=1), "bare")


def noisy_profile() -> HardwareProfile:
    """FULL, with a noisy matmul: batch 1, m 64, n 128, k 256."""
    content = full_profile()
    table = content["matmuls"][0]
    index = (0 * len(table["n"]) + table["n"].index(128)) * len(table["k"]) + table["k"].index(256)
    relative = [0.4 if i == index else 0.1 for i in range(len(table["time_s"]))]
    table["spread"] = {"relative": relative, "noisy_above": 0.2, "noisy": [index]}
    return HardwareProfile.from_dict(content, "noisy")


# --- check ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "check", name]) == 0
    printed = capsys.readouterr().out.splitlines()
    profile = load_profile(name)
    assert printed[-1].startswith(f"{name}: valid, ")
    assert profile.fingerprint[:12] in printed[-1]
    assert printed[:-1] == [f"warning: {warning}" for warning in warnings(profile)]


def test_a_wrong_file_ends_with_the_exit_code_of_a_profile_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    content = full_profile()
    content["attention_tables"][0]["time_s"][3] = -1
    path.write_text(json.dumps(content))
    for verb in ("check", "show"):
        assert main(["profile", verb, str(path)]) == ProfileError.exit_code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"tpplan: error: {path}: attention_tables[0].time_s[3]: expected > 0, got -1\n"


def test_what_is_missing_is_a_warning_with_the_path_of_its_key() -> None:
    paths = [warning.partition(":")[0] for warning in warnings(BARE)]
    missing = ["software", "date", "memory_bound_table", *["attention_tables"] * 3, "launch.issue_s"]
    assert paths == [*missing, "misaligned_matmuls", "optimizer_issues", "collectives", "overlap"]
    assert "collectives: no all_reduce, all_gather, reduce_scatter, all_to_all across nodes" in " ".join(warnings(BARE))
    # Only bfloat16 has tables of attention; one point of them is marked as noisy.
    assert [warning.partition(":")[0] for warning in warnings(FULL)] == [
        "attention_tables",
        "attention_tables",
        "optimizer_issues",
        "attention_tables[0] (bfloat16 causal forward)",
        "attention_tables[1] (bfloat16 causal backward)",
    ]


def test_a_profile_that_is_mostly_noise_is_not_called_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every point that was repeated is made noisy; of FULL itself, one table has one that is."""
    assert 0 < noisy_share(noisy_profile()) < 0.5
    content = all_noisy()
    path = tmp_path / "noise.json"
    path.write_text(json.dumps(content))
    assert main(["profile", "check", str(path)]) == ProfileError.exit_code
    assert "100% of its points are noisy" in capsys.readouterr().err
    assert main(["profile", "check", str(path), "--json"]) == ProfileError.exit_code
    assert json.loads(capsys.readouterr().out)["invalid"].startswith("100% of its points are noisy")


def all_noisy() -> dict[str, Any]:
    """FULL, with noise at every point that was repeated."""
    content = noisy_profile().to_dict()
    for part in content.values():
        for table in part if isinstance(part, list) else [part]:
            if isinstance(table, dict) and table.get("spread"):
                points = range(len(table["spread"]["relative"]))
                table["spread"] = {"relative": [0.5 for _ in points], "noisy_above": 0.2, "noisy": list(points)}
    return content


def test_profiles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in shipped_profiles())


def test_noisy_points_inferred_numbers_and_idle_sources_are_named() -> None:
    content = noisy_profile().to_dict()
    content["bandwidth"] |= {"inferred": "a guess"}
    content["sources"] += [{"id": "idle", "licence": "none", "source": "nobody cites it"}]
    found = warnings(HardwareProfile.from_dict(content, "edited"))
    assert "bandwidth: inferred: a guess" in found
    assert "sources[1]: no table cites idle" in found
    assert (
        "matmuls[0] (bfloat16): 1 of 343 points are noisy (repeats spread over more than 20% of their median), most of"
        " all batch 1 m 64 n 128 k 256: 40%" in found
    )


def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "check", "cpu-gloo", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    profile = load_profile("cpu-gloo")
    assert data == {
        "name": "cpu-gloo",
        "fingerprint": profile.fingerprint,
        "warnings": list(warnings(profile)),
        "invalid": "",
    }


# --- show ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_is_shown_with_all_its_tables(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["profile", "show", name, "--html", str(page)]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"wrote {page}\n"
    assert "\x1b" not in captured.out
    assert max(map(len, captured.out.splitlines())) <= 160
    profile, text = load_profile(name), page.read_text()
    for view in views(profile):
        assert view.title in captured.out
        assert len({len(view.columns), *map(len, view.rows)}) == 1
    kinds = {table.kind for table in profile.collectives}
    assert all(f"{kind}, bus bandwidth in GB/s" in captured.out for kind in kinds)
    assert (
        text.count("<svg")
        == len(charts(profile))
        == 2 * len(profile.matmuls)
        + len({table.dtype for table in profile.attention_tables or ()})
        + (profile.memory_bound_table is not None)
        + len(kinds)
    )


def test_rates_are_work_over_time_where_it_was_measured() -> None:
    by_title = {view.title: view for view in views(noisy_profile())}
    squares = by_title["matmul bfloat16, TFLOP/s: m by n = k"]
    # 5 us and 2 * 4096^3 FLOP at 400 TFLOP/s.
    assert squares.rows[-1][0] == "4096"
    assert float(squares.rows[-1][-1]) == pytest.approx(2 * 4096**3 / (5e-6 + 2 * 4096**3 / 4e14) / 1e12, rel=0.005)
    attention = by_title["attention bfloat16 causal backward, TFLOP/s: by sequence"]
    flop = 10 * 16 * 2048**2 * 128 / 2
    assert attention.rows[-1][0] == "16, 128"
    assert attention.rows[-1][-1] == f"{flop / (5e-6 + flop / 4e14) / 1e12:.0f}{NOISY_MARK}"  # its point 11 is noisy
    assert attention.note.endswith("repeats lie far apart (more than 20%)")
    memory = by_title["memory-bound kernels, by bytes read and written"]
    assert memory.rows[-1] == ("1 GiB", "500 us", "2.15 TB/s", "5%")


def test_bus_bandwidth_is_what_nccl_tests_calls_it() -> None:
    h100 = load_profile("h100-sxm")

    def bus(kind: Collective, ranks: int, num_bytes: int) -> tuple[float, float]:
        table = next(
            t for t in h100.collectives if (t.kind, t.group) == (kind, GroupShape(ranks=ranks, ranks_per_node=8))
        )
        return bus_bandwidth(table, num_bytes), num_bytes / table.time(num_bytes).seconds

    # Its factors of the algorithm bandwidth: 2 (p - 1)/p; (p - 1)/p; and (p - 1)/p of size n/p for all_to_all.
    for kind, factor in (
        ("all_reduce", 14 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 64),
    ):
        found, per_s = bus(Collective(kind), 8, 2**30)
        assert found == pytest.approx(factor * per_s)
    assert bus(Collective.ALL_GATHER, 80, 2**30)[0] == pytest.approx(79 / 80 * bus(Collective.ALL_GATHER, 80, 2**30)[1])


def test_a_cell_is_blank_where_nothing_was_measured() -> None:
    view = next(view for view in views(load_profile("h100-sxm")) if view.title.startswith("all_to_all"))
    (ten,) = (row for row in view.rows if row[0] == "10 (1)")
    assert ten[2] == "" == ten[-1]
    assert any(ten[2:])


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "cpu-gloo", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [table["title"] for table in data["tables"]] == [view.title for view in views(load_profile("cpu-gloo"))]
    assert data["warnings"] == list(warnings(load_profile("cpu-gloo")))


def test_a_page_that_cannot_be_written_is_an_error_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "show", "cpu-gloo", "--html", str(tmp_path / "no" / "page.html")]) == 6
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no is not a folder" in captured.err


def test_facts_hold_everything_that_is_one_number() -> None:
    text = render(FULL, width=160)
    overlap = "while both run, a matmul takes 1.15 times as long, a collective 1.30 times"
    fitted = "step_factor = 1.07 on 40 runs, +/- 5%"
    for shown in ("issue      8 us", overlap, fitted, "nccl 2.28.3", "date       2026-03-01"):
        assert shown in text


# --- the page ------------------------------------------------------------------------------------------------------


def test_a_page_needs_nothing_but_itself_and_escapes_what_it_shows() -> None:
    content = full_profile()
    content["notes"] = ["<script>alert(1)</script> & more"]
    page = to_html(HardwareProfile.from_dict(content, "full"))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert not re.search(r"\b(src|href|url|import)\b\s*[=(]", page)
    # Only the name of SVG's namespace looks like an address.
    assert set(re.findall(r"https?://[^\s\"<)]+", page)) <= {"http://www.w3.org/2000/svg"}


def elements(svg: str, tag: str) -> Iterator[ElementTree.Element]:
    yield from ElementTree.fromstring(svg).iter(f"{SVG}{tag}")


def test_every_chart_is_svg_whose_points_lie_inside() -> None:
    for profile in (FULL, load_profile("h100-sxm"), load_profile("cpu-gloo")):
        for chart in charts(profile):
            svg = line_chart(chart)
            circles = list(elements(svg, "circle"))
            assert len(circles) == sum(len(series.points) for series in chart.series)
            assert all(0 < float(c.attrib["cx"]) < WIDTH and 0 < float(c.attrib["cy"]) < HEIGHT for c in circles)
            assert len({line.attrib.get("stroke", "") + line.attrib.get("stroke-dasharray", "")
                        for line in elements(svg, "polyline")}) == len(chart.series)  # fmt: skip


@pytest.mark.parametrize("is_log_y", [False, True])
def test_a_larger_value_stands_higher_and_a_larger_size_farther_right(is_log_y: bool) -> None:
    points = ((1024.0, 1.0), (4096.0, 10.0), (65536.0, 100.0))
    chart = Chart(
        title="a < b", x_label="bytes", y_label="GB/s", series=(Series(name="2 & 2", points=points),), x_is_bytes=True,
        is_log_y=is_log_y,
    )  # fmt: skip
    svg = line_chart(chart)
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in elements(svg, "circle")]
    xs, ys = zip(*places, strict=True)
    assert xs[1] - xs[0] == pytest.approx((xs[2] - xs[0]) / 3, abs=0.2)  # 4 of 64 times, in logarithms
    assert ys[0] > ys[1] > ys[2]
    if is_log_y:
        assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    texts = [text.text for text in elements(svg, "text")]
    assert {"a < b", "2 & 2", "1 KiB", "64 KiB", "bytes", "GB/s"} <= set(texts)


def test_one_point_makes_a_chart() -> None:
    for is_log_y in (False, True):
        chart = Chart(
            title="one", x_label="x", y_label="y", series=(Series(name="one", points=((8.0, 3.0),)),), is_log_y=is_log_y
        )
        assert len(list(elements(line_chart(chart), "circle"))) == 1


def test_steps_are_round() -> None:
    assert [nice_step(least) for least in (0.7, 1, 1.1, 3, 6, 160, 0.003)] == pytest.approx(
        [1, 1, 2, 5, 10, 200, 0.005]
    )


def test_solve_warns_in_one_line_of_a_profile_that_is_mostly_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning stands on stderr alone; a profile with one noisy point gives none."""
    model = str(Path(__file__).resolve().parents[2] / "scripts" / "examples" / "mlp.py")
    words = ["--gpus", "1", "--global-batch", "4", "--seq-len", "4", "--precision", "fp32", "--no-prove"]
    for content, warned in ((noisy_profile().to_dict(), 0), (all_noisy(), 1)):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(content))
        assert main(["solve", model, *words, "--profile", str(path)]) == 0
        told = capsys.readouterr()
        warnings_told = [line for line in told.err.splitlines() if "warning" in line]
        assert len(warnings_told) == warned
        assert all("of its points are noisy, so plans by it are guesses" in line for line in warnings_told)
        assert "guesses" not in told.out
