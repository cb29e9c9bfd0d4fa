"""Draw SVG charts of lines and points, small enough for a phone, with a text for every mark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 272, 150  # of the plot; with its margins it fits a phone
LEFT, TOP, BOTTOM, RIGHT = 54, 24, 38, 12
# of a bar chart: the start of bars, their distance, the length of a name, and the width of a letter
BAR_NAMES, BAR_STEP, BAR_LETTERS, BAR_LETTER = 138, 20, 18, 6.8
# values with a smaller relative distance are drawn as one, because the axis could not distinguish
# them
NEAR = 1e-5
MAX_POINTS = 300  # of a line; more points cannot be distinguished
COLOURS = tuple(f"run_{number}" for number in range(1, 7))
DASHES = ("", "7 4", "2 3", "10 3 2 3")  # of strokes, as SVG takes them; the first is a solid line
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart. colour: the name of a CSS colour. marks: draw a dot at each point. joined:
    draw a line. dash: one of DASHES.
    """

    name: str
    colour: str
    points: list[Point]
    marks: bool = False
    joined: bool = True
    dash: str = ""


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    error: float = 0.0


def line_chart(
    label: str,
    unit: str,
    lines: Sequence[Line],
    x_name: str = "step",
    log: bool = False,
    diagonal: bool = False,
    bounds: tuple[float, float] | None = None,
    log_x: bool = False,
) -> str:
    """Draw a chart of lines. Points that are not finite are left out.

    log, log_x: use a logarithmic scale. diagonal: also draw the line y = x.
    """
    drawn = [replace(line, points=thinned(_finite(line.points, log))) for line in lines]
    points = [point for line in drawn for point in line.points]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right = min(xs), max(xs)
    is_one = left == right and not diagonal  # draw it in the middle
    if is_one:
        left, right, log_x = left - 1.0, right + 1.0, False
    low, high = bounds or _bounds(min(ys), max(ys), log)
    if diagonal:
        left = low = 0.0
        right = high = round_up(max(*xs, *ys))

    def at(x: float, y: float) -> Point:
        if log:
            share = (math.log10(y) - math.log10(low)) / (math.log10(high) - math.log10(low))
        else:
            share = (y - low) / (high - low)
        along = math.log(x / left) / math.log(right / left) if log_x else (x - left) / (right - left)
        return LEFT + WIDTH * along, TOP + HEIGHT * (1 - min(1.0, max(0.0, share)))

    parts = [
        *_value_axis(_ticks(low, high, log), unit, lambda y: at(left, y)[1]),
        *_step_axis([xs[0]] if is_one else [left, right], x_name),
    ]
    if diagonal:
        (x1, y1), (x2, y2) = at(left, low), at(right, high)
        parts.append(f'<line class="limit" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for line in drawn:
        parts += _line(line, at, x_name)
    return svg(label, LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM, parts)


def style(number: int) -> tuple[str, str]:
    """Return the colour and the dash of line `number` of a chart. The first 24 lines differ."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MAX_POINTS points. Each is the mean of neighbouring points; the last point is kept."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = len(points) / MAX_POINTS
    groups = [points[int(index * size) : int((index + 1) * size)] for index in range(MAX_POINTS)]
    return [
        *((group[-1][0], sum(y for _, y in group) / len(group)) for group in groups[:-1]),
        points[-1],
    ]


def _finite(points: Sequence[Point], positive: bool) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not positive)]


def _bounds(low: float, high: float, log: bool) -> tuple[float, float]:
    """Return bounds at ticks around the values.

    On a logarithmic scale the bounds are powers of ten. A bound is 0 if the values are close to 0.
    """
    if log:
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)
    if 0 <= low < 0.35 * high:
        return 0.0, round_up(high)
    if high == low or high - low < NEAR * max(abs(high), abs(low)):
        low, high = low - 0.05 * (abs(low) or 1.0), high + 0.05 * (abs(high) or 1.0)
    step = _tick_step(low, high)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _tick_step(low: float, high: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that three to six steps fit."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 4 * 0.999)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        powers = range(round(math.log10(low)), round(math.log10(high)) + 1)
        return [10.0**power for power in powers][:: max(1, len(powers) // 5)]
    if low == 0:
        return [high * tick / 4 for tick in range(5)]
    step = _tick_step(low, high)
    return [low + step * tick for tick in range(round((high - low) / step) + 1)]


def _value_axis(ticks: Sequence[float], unit: str, y_of: Callable[[float], float]) -> list[str]:
    parts = []
    texts = next(
        (
            found
            for digits in range(4, 8)
            if len(set(found := [_tick_text(tick, digits) for tick in ticks])) == len(ticks)
        ),
        [_tick_text(tick, 8) for tick in ticks],
    )
    for tick, shown in zip(ticks, texts, strict=True):
        y = y_of(tick)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 5, y + 4, shown, "end", "faint"))
    return [*parts, text(LEFT, TOP - 10, unit, "start", "faint")]


def _tick_text(tick: float, digits: int) -> str:
    return f"{tick:,.0f}" if abs(tick) >= 1000 else f"{tick:.{digits}g}"


def _step_axis(steps: Sequence[float], name: str) -> list[str]:
    """Label the axis at both ends, or at the only step."""
    y, middle = TOP + HEIGHT + 16, LEFT + WIDTH / 2
    ends = [
        text(LEFT, y, _end_text(steps[0]), "start", "faint"),
        text(LEFT + WIDTH, y, _end_text(steps[-1]), "end", "faint"),
    ]
    ends = ends if len(steps) > 1 else [text(middle, y, _end_text(steps[0]), "middle", "faint")]
    return [*ends, text(middle, y + 14, name, "middle", "faint")]


def _end_text(value: float) -> str:
    """Return a step completely, and a measured number such as a price with three digits."""
    return f"{value:,.6g}" if float(value).is_integer() else f"{value:,.3g}"


def _line(line: Line, at: Callable[[float, float], Point], x_name: str) -> list[str]:
    places = [at(x, y) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    title = (
        f"<title>{escape(line.name)}: {line.points[-1][1]:.5g} at {x_name} {line.points[-1][0]:g}</title>"
        if places
        else ""
    )
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    drawn = f'<polyline class="line" style="stroke:var(--{line.colour})"{dash} points="{path}">{title}</polyline>'
    parts = [drawn] if line.joined else []
    # dots of a dashed line are hollow, because close dots hide the dashes
    fill = f"fill:var(--page);stroke:var(--{line.colour})" if line.dash else f"fill:var(--{line.colour})"
    if line.marks or len(places) == 1:
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="{fill}">'
            f"<title>{escape(line.name)}: {point[1]:.5g} at {x_name} {point[0]:.6g}</title></circle>"
            for (x, y), point in zip(places, line.points, strict=True)
        ]
    return parts


def svg(label: str, width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg role="img" aria-label="{escape(label)}" {size}>{"".join(parts)}</svg>'


def bar_chart(
    label: str, bars: Sequence[Bar], colour: str = "validation", form: str = ".4f", whole_names: bool = False
) -> str:
    """Draw horizontal bars from 0, in the given order, one below the other, with whiskers for
    errors.

    form: the format string of the numbers. whole_names: make the chart wider instead of cutting names.
    """
    if not bars:
        return ""
    high = max(max(bar.value + bar.error for bar in bars), 1e-12)
    room, left, names = LEFT + WIDTH + RIGHT - BAR_NAMES - 58, float(BAR_NAMES), [bar.name for bar in bars]
    if whole_names:
        left = max(left, 12 + BAR_LETTER * max(map(len, names)))
    else:
        names = _last_parts(names)
    parts = []
    for index, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y, width = 4 + index * BAR_STEP, room * max(bar.value, 0.0) / high
        parts.append(text(left - 6, y + 12, name, "end", title=bar.name))
        parts.append(rect(left, y, max(width, 0.5), 15, colour, f"{bar.name}: {bar.value:.4g} ± {bar.error:.2g}"))
        end = left + room * min(max(bar.value + bar.error, 0.0) / high, 1.0)
        if bar.error:
            begin = left + room * max(bar.value - bar.error, 0.0) / high
            parts.append(f'<line class="whisker" x1="{begin:.1f}" x2="{end:.1f}" y1="{y + 7.5}" y2="{y + 7.5}"/>')
        parts.append(text(end + 5, y + 12, format(bar.value, form), "start", "faint"))
    return svg(label, left + room + 58, 4 + BAR_STEP * len(bars), parts)


def _last_parts(names: Sequence[str]) -> list[str]:
    """Return the last parts of dotted keys, so that they fit: sparse.lr of optimizer.sparse.lr."""
    shown = list(names)
    while any(len(name) > BAR_LETTERS and "." in name for name in shown):
        shown = [name.partition(".")[2] or name for name in shown]
    return [name if len(name) <= BAR_LETTERS else "…" + name[1 - BAR_LETTERS :] for name in shown]


def rect(x: float, y: float, width: float, height: float, colour: str, title: str, opacity: float = 1.0) -> str:
    shade = "" if opacity >= 1 else f' fill-opacity="{opacity:.2f}"'
    box = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {box} style="fill:var(--{colour})"{shade}><title>{escape(title)}</title></rect>'


def text(x: float, y: float, content: str, anchor: str, kind: str = "", title: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    hover = f"<title>{escape(title)}</title>" if title and title != content else ""
    return f'<text{of_kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}{hover}</text>'


def round_up(value: float) -> float:
    """Round up to 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6 or 8 times a power of ten, because quarters of
    these are short numbers.
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        factor * power for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if value <= factor * power * (1 + 1e-9)
    )


def shorten(content: str, most: int) -> str:
    return content if len(content) <= most else content[: most - 1] + "…"
