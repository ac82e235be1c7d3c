"""The page of several plans: their numbers, their steps on one scale, and why some are missing; texts stay texts."""

import re
from dataclasses import replace
from pathlib import Path

from test_plan_page import HOSTILE, VOID, Page, dom_in_chromium, in_chromium
from test_report import make_plan

from tpplan.commands import main
from tpplan.core.units import format_seconds
from tpplan.page.plans_page import Row, plans_page
from tpplan.plan.plan import Plan


def slower(plan: Plan, times: float) -> Plan:
    """The plan with a step of so many times its seconds, part by part."""
    predicted = plan.predicted
    scaled = {part: times * seconds for part, seconds in predicted.time_s.items()}
    return replace(
        plan,
        predicted=replace(predicted, step_time_s=times * predicted.step_time_s, time_s=scaled, step_time_error_s=1.0),
    )


def rows() -> list[Row]:
    plan = make_plan()
    return [
        Row(name="best", plan=plan, is_answer=True),
        Row(name=HOSTILE, plan=slower(plan, 2.0)),
        Row(name="none", plan=None, problem=HOSTILE),
    ]


def test_steps_are_drawn_on_the_scale_of_the_slowest() -> None:
    text = plans_page(rows(), title="plans")
    tracks = re.findall(r'<span class="track">(.*?)\n</span>', text, re.DOTALL)
    widths = [sum(map(float, re.findall(r"width:([\d.]+)%", track))) for track in tracks]
    parts = make_plan().predicted
    whole = 100 * sum(parts.time_s.values()) / parts.step_time_s
    assert [round(width) for width in widths] == [round(whole / 2), round(whole)]


def test_numbers_and_problems_are_there_and_texts_stay_texts() -> None:
    page = Page(plans_page(rows(), title=HOSTILE, sentences=[HOSTILE]))
    assert {tag for tag, _ in page.elements} <= VOID | {
        "html", "head", "title", "style", "body", "h1", "h2", "p", "div", "span", "i", "table", "tr", "th", "td"
    }  # fmt: skip
    assert page.text.count("<script>alert(1)</script>") == 6  # title twice, sentence, name twice, problem
    error = format_seconds(make_plan().predicted.step_time_error_s)
    assert f"{format_seconds(make_plan().predicted.step_time_s)} ± {error}" in page.text


def test_report_of_plans_compares_them(tmp_path: Path) -> None:
    for name, plan in (("a.json", make_plan()), ("b.json", slower(make_plan(), 2.0))):
        plan.dump(tmp_path / name)
    page = tmp_path / "page.html"
    plans = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert main(["report", *plans, "-o", str(page)]) == 0
    assert page.read_text(encoding="utf-8").count("b.json") == 2  # in the table and beside its bar
    assert main(["report", *plans, "model.py", "-o", str(page)]) == 2


@in_chromium
def test_chromium_opens_it_without_errors(tmp_path: Path) -> None:
    page = tmp_path / "plans.html"
    page.write_text(plans_page(rows(), title="plans"), encoding="utf-8")
    assert "A step by part" in dom_in_chromium(page)
