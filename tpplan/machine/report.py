"""A profile for people: as text for a terminal, as data, and as one self-contained HTML page."""

import io
from collections.abc import Iterator
from html import escape

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tpplan.core.escapes import escaped_data
from tpplan.machine.lint import warnings
from tpplan.machine.profile import HardwareProfile
from tpplan.machine.svg_chart import line_chart
from tpplan.machine.views import View, charts, facts, views

#: columns of a report that is not printed to a terminal
DEFAULT_WIDTH = 120
_INDENT = 2

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1360px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; } h3 { font-size: 1em; margin: 1.6em 0 .3em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .12em .7em; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
td:first-child, th:first-child { text-align: left; } th { color: #666; font-weight: normal; }
.facts td { text-align: left; white-space: normal; } .facts td:first-child { color: #666; white-space: nowrap; }
.note { color: #666; font-size: .9em; } .scroll { overflow-x: auto; }
.charts { display: flex; flex-wrap: wrap; gap: 1em; }
svg text { font: 11px system-ui, sans-serif; fill: #333; } svg .title { font-size: 13px; font-weight: 600; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .axis { stroke: #888; } svg .grid { stroke: #e4e4e4; } svg .line { fill: none; stroke-width: 1.6; }
"""


def render(profile: HardwareProfile, *, width: int = DEFAULT_WIDTH, color: bool = False) -> str:
    """All tables and warnings as text of at most `width` columns, with terminal colours where asked."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="auto" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as capture:
        console.print(Group(*_report(escaped_data(profile))))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def as_data(profile: HardwareProfile) -> dict[str, object]:
    """The report as JSON data: facts by name, tables as shown, warnings."""
    return {
        "facts": [[name, text] for name, text in facts(profile)],
        "notes": list(profile.notes),
        "tables": [
            {"title": view.title, "columns": view.columns, "rows": view.rows, "note": view.note}
            for view in views(profile)
        ],
        "warnings": list(warnings(profile)),
    }


def to_html(profile: HardwareProfile) -> str:
    """One HTML page with charts, tables, notes, sources and warnings; it loads nothing from the network."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(profile.name)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(profile.name)}</h1>",
        _html_rows(facts(profile)),
        *_html_list("Warnings", warnings(profile)),
        "<h2>Charts</h2>",
        '<div class="charts">',
        *(line_chart(chart) for chart in charts(profile)),
        "</div>",
        "<h2>Tables</h2>",
        *(_html_view(view) for view in views(profile)),
        *_html_list("Notes", profile.notes),
        "<h2>Sources</h2>",
        _html_rows(tuple((source.id, f"{source.source} ({source.licence})") for source in profile.sources)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


# --- text ----------------------------------------------------------------------------------------------------------


def _report(profile: HardwareProfile) -> Iterator[RenderableType]:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts(profile):
        table.add_row(Text(name), Text(text))
    yield table
    for view in views(profile):
        yield Text()
        yield Text(view.title, style="bold")
        yield Padding(_table(view), (0, 0, 0, _INDENT))
        if view.note:
            yield Padding(Text(view.note, style="dim"), (0, 0, 0, _INDENT))
    for title, lines in (("notes", profile.notes), ("warnings", warnings(profile))):
        if lines:
            yield Text()
            yield Text(title, style="bold")
            yield from (Padding(Text(line), (0, 0, 0, _INDENT)) for line in lines)


def _table(view: View) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for i, title in enumerate(view.columns):
        table.add_column(title, justify="right" if i else "left", overflow="fold")
    for row in view.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


# --- HTML ----------------------------------------------------------------------------------------------------------


def _html_view(view: View) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in view.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in view.rows)
    note = f'<p class="note">{escape(view.note)}</p>' if view.note else ""
    return f'<h3>{escape(view.title)}</h3>\n<div class="scroll"><table><tr>{head}</tr>\n{rows}\n</table></div>{note}'


def _html_rows(rows: tuple[tuple[str, str], ...]) -> str:
    cells = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f'<table class="facts">\n{cells}\n</table>'


def _html_list(title: str, lines: tuple[str, ...]) -> Iterator[str]:
    if lines:
        items = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
        yield f"<h2>{title}</h2>\n<ul>\n{items}\n</ul>"
