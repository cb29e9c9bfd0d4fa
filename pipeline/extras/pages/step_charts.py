"""Draw a predicted step for the plan's page: a Gantt chart of its three clocks, and the curve of samples/s by ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pipeline.extras.pages.charts import Line, line_chart, rect, svg, text
from pipeline.extras.step_time.clocks import CLOCKS, COMMS, COMPUTE, HOST
from pipeline.extras.step_time.forecast import PlanForecast, describe_forecast, where_it_stops
from pipeline.runtime.pages.html import figure, legend, table

LEFT, WIDTH, TOP, ROW, BOTTOM = 110, 760, 24, 30, 34
COLOURS = {HOST: "host", COMPUTE: "compute", COMMS: "comms"}
LETTER = 6.2  # width of a small letter


def step_sections(forecast: PlanForecast, scaling: Sequence[PlanForecast] = ()) -> Iterator[str]:
    yield "<h2>The step, predicted</h2>"
    yield "<p>" + "<br>".join(_line(line) for line in describe_forecast(forecast)) + "</p>"
    yield figure("What each clock does in one step; pointed at, a bar says its milliseconds", gantt(forecast))
    rows = [
        [name, f"{ms:.4g}", f"{100 * ms / forecast.step_ms:.1f} %"] for name, ms in forecast.parts.items() if ms > 0
    ]
    yield table(("part", "ms", "of the step"), rows, (1, 2), label="parts of the predicted step")
    if len(scaling) > 1:
        yield "<h2>More ranks</h2>"
        yield f"<p>{escape(where_it_stops(scaling))}.</p>"
        title = "Predicted samples/s by ranks, and what as many times the first would be; both axes are logarithmic"
        marks = legend([("compute", "predicted"), ("faint", "in proportion to the ranks")])
        yield figure(title, marks + scaling_chart(scaling))
        yield table(
            ("ranks", "step, ms", "samples/s", "efficiency", "most of it"),
            _sizes(scaling),
            (0, 1, 2, 3),
            label="more ranks",
        )


def _line(line: str) -> str:
    """Render a line of terminal output with its first word in bold."""
    head, _, rest = line.partition("  ")
    return f"<b>{escape(head)}</b> {escape(rest.strip())}" if rest else escape(line)


def _sizes(scaling: Sequence[PlanForecast]) -> list[list[str]]:
    first = scaling[0]
    return [
        [
            f"{row.world_size:,}",
            f"{row.step_ms:.4g}",
            f"{row.samples_per_s:,.0f}",
            f"{100 * row.samples_per_s / first.samples_per_s * first.world_size / row.world_size:.0f} %",
            f"{row.limit} {100 * row.parts[row.limit] / row.step_ms:.0f} %",
        ]
        for row in scaling
    ]


def gantt(forecast: PlanForecast) -> str:
    """Draw a Gantt chart with a row for each clock that has work."""
    used = [clock for clock in CLOCKS if any(span.clock == clock for span in forecast.spans)]
    scale = WIDTH / max(forecast.step_ms, 1e-9)
    bottom = TOP + ROW * len(used)
    parts = []
    for tick in range(5):
        x = LEFT + WIDTH * tick / 4
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(text(x, bottom + 16, f"{forecast.step_ms * tick / 4:.3g} ms", "middle", "faint"))
    for row, clock in enumerate(used):
        y = TOP + ROW * row
        parts.append(text(LEFT - 8, y + 18, clock, "end"))
        for span in (span for span in forecast.spans if span.clock == clock and span.ms > 0):
            x, width = LEFT + scale * span.start_ms, scale * span.ms
            title = f"{span.name}: {span.ms:.4g} ms from {span.start_ms:.4g} ms"
            parts.append(rect(x, y + 3, max(width - 1, 0.5), ROW - 6, COLOURS[clock], title))
            if width > LETTER * len(span.name) + 6:
                parts.append(text(x + width / 2, y + 19, span.name, "middle", "on-bar"))
    label = f"timeline of one step: {', '.join(used)}"
    return svg(label, LEFT + WIDTH + 40, bottom + BOTTOM, parts)


def scaling_chart(rows: Sequence[PlanForecast]) -> str:
    first = rows[0]
    points = [(float(row.world_size), row.samples_per_s / 1e6) for row in rows]
    even = [(float(row.world_size), first.samples_per_s / 1e6 * row.world_size / first.world_size) for row in rows]
    lines = [Line("predicted", "compute", points, marks=True), Line("in proportion", "faint", even)]
    return line_chart("samples/s by ranks", "million samples/s", lines, x_name="ranks", log=True, log_x=True)
