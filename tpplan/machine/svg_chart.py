"""A line chart as SVG text, for a self-contained page.

x is logarithmic; y is linear from 0, or logarithmic. Colours are from Okabe and Ito's palette for colour-blind readers;
the dashes change after every eight lines.
"""

import math
from collections.abc import Sequence
from html import escape

from tpplan.machine.views import Chart, short_bytes

WIDTH, HEIGHT = 640, 340
#: margins of the plotting area, in pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 168, 30, 46
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
_LEGEND_LINE = 15
_MOST_X_TICKS = 8
_Y_TICKS = 5


def line_chart(chart: Chart) -> str:
    """The chart as one <svg> element. Needs at least one point."""
    points = [point for series in chart.series for point in series.points]
    x_scale = _Scale([x for x, _ in points], LEFT, WIDTH - RIGHT, is_log=True)
    ys = [y for _, y in points]
    y_scale = _Scale(ys if chart.is_log_y else [0.0, *ys], HEIGHT - BOTTOM, TOP, is_log=chart.is_log_y)
    height = max(HEIGHT, TOP + _LEGEND_LINE * (len(chart.series) + 1))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' role="img" aria-label="{escape(chart.title)}">',
            f'<text x="{LEFT}" y="16" class="title">{escape(chart.title)}</text>',
            *_x_axis(chart, x_scale),
            *_y_axis(chart, y_scale),
            *(line for i, _ in enumerate(chart.series) for line in _series(chart, i, x_scale, y_scale)),
            "</svg>",
        )
    )


class _Scale:
    """Maps values to pixels, and chooses ticks."""

    def __init__(self, values: Sequence[float], low: float, high: float, *, is_log: bool) -> None:
        self.is_log = is_log
        self.first, self.last = min(values), max(values)
        if not is_log:
            step = nice_step(self.last / _Y_TICKS)
            self.ticks = [step * i for i in range(math.ceil(self.last / step) + 1)]
            self.last = self.ticks[-1]
        else:
            decades = range(math.floor(math.log10(self.first)), math.ceil(math.log10(self.last)) + 1)
            self.ticks = [10.0**i for i in decades]
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        if self.is_log:
            span = math.log(self.last / self.first) or 1.0
            part = math.log(value / self.first) / span
        else:
            part = (value - self.first) / ((self.last - self.first) or 1.0)
        return round(self.low + part * (self.high - self.low), 1)


def nice_step(least: float) -> float:
    """The smallest number of the form 1, 2 or 5 times a power of ten that is not below `least` > 0."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _x_axis(chart: Chart, scale: _Scale) -> list[str]:
    bottom = HEIGHT - BOTTOM
    values = sorted({x for series in chart.series for x, _ in series.points})
    lines = [f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" class="axis"/>']
    for value in _with_room_for_labels(values, scale):
        text = short_bytes(value) if chart.x_is_bytes else f"{value:g}"
        lines.append(f'<line x1="{scale(value)}" y1="{TOP}" x2="{scale(value)}" y2="{bottom}" class="grid"/>')
        lines.append(f'<text x="{scale(value)}" y="{bottom + 15}" class="middle">{escape(text)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*lines, f'<text x="{middle}" y="{bottom + 34}" class="middle">{escape(chart.x_label)}</text>']


def _with_room_for_labels(values: Sequence[float], scale: _Scale) -> list[float]:
    """The values whose labels do not overlap, including the first and the last."""
    least = (WIDTH - LEFT - RIGHT) / _MOST_X_TICKS
    chosen = [values[0]]
    for value in values[1:-1]:
        if scale(value) - scale(chosen[-1]) >= least and scale(values[-1]) - scale(value) >= least:
            chosen.append(value)
    return [*chosen, *values[-1:]] if len(values) > 1 else chosen


def _y_axis(chart: Chart, scale: _Scale) -> list[str]:
    lines = [f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{HEIGHT - BOTTOM}" class="axis"/>']
    for value in scale.ticks:
        y = scale(value)
        if TOP - 1 <= y <= HEIGHT - BOTTOM + 1:
            lines.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" class="grid"/>')
            lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" class="end">{value:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    return [*lines, f'<text x="14" y="{middle}" class="middle" {turned}>{escape(chart.y_label)}</text>']


def _series(chart: Chart, number: int, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    series = chart.series[number]
    colour = COLOURS[number % len(COLOURS)]
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    style = f'stroke="{colour}"' + (f' stroke-dasharray="{dash}"' if dash else "")
    places = [(x_scale(x), y_scale(y)) for x, y in series.points]
    y = TOP + _LEGEND_LINE * number + 8
    x = WIDTH - RIGHT + 12
    return [
        f'<polyline points="{" ".join(f"{x},{y}" for x, y in places)}" class="line" {style}/>',
        *(f'<circle cx="{x}" cy="{y}" r="2.2" fill="{colour}"/>' for x, y in places),
        f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" class="line" {style}/>',
        f'<text x="{x + 28}" y="{y}">{escape(series.name)}</text>',
    ]
