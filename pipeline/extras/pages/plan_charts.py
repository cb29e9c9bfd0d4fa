"""Draw SVG charts: a stacked column for each rank, and a map of tables and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeline.extras.pages.charts import rect, round_up, shorten, svg, text

HEIGHT = 220  # of the plot
LEFT, TOP, BOTTOM, RIGHT = 58, 36, 40, 12
MAX_LABELLED = 16  # columns with their total on top
MAP_LEFT, MAP_TOP, MAP_WIDTH, MAP_RIGHT, MAP_ROW = 170, 6, 600, 350, 18
LIMIT_OFF_SCALE = 4  # a limit higher than this many times the highest column is written, not drawn


@dataclass(frozen=True)
class Column:
    """The column of one rank: a value for each series, from bottom to top, and the text of each mark."""

    values: list[float]
    titles: list[str]


@dataclass(frozen=True)
class Cell:
    """A cell of the map: a row's part on a rank. `weight` in 0..1 is the strength of the cell's colour."""

    colour: str
    weight: float
    title: str


@dataclass(frozen=True)
class MapRow:
    """A row of the map. `cells` are sorted by rank. Ranks without a cell stay empty."""

    name: str
    note: str
    cells: dict[int, Cell]


def column_chart(
    label: str, unit: str, series: Sequence[str], columns: list[Column], limit: tuple[float, str] | None = None
) -> str:
    """Draw columns. `series` are CSS colours. The chart is as wide as its ranks need, at
    most 900.
    """
    totals = [sum(column.values) for column in columns]
    highest = max(totals, default=0.0)
    drawn_limit = limit if limit and limit[0] <= LIMIT_OFF_SCALE * highest else None
    top = round_up(max(highest, drawn_limit[0] if drawn_limit else 0.0) or 1.0)
    plot_width = max(300, min(900, 60 * len(columns)))
    step = plot_width / max(len(columns), 1)
    width = min(48.0, 0.8 * step)
    marks = []
    for index, column in enumerate(columns):
        x, y = LEFT + index * step + (step - width) / 2, float(TOP + HEIGHT)
        for name, value, title in zip(series, column.values, column.titles, strict=True):
            height = HEIGHT * value / top
            y -= height
            if height > 0:
                marks.append(rect(x, y, width, height, name, title))
        if len(columns) <= MAX_LABELLED:
            marks.append(text(x + width / 2, y - 4, f"{totals[index]:.3g}", "middle"))
    parts = [*_value_axis(top, unit, plot_width), *marks, *_rank_axis(len(columns), step, TOP + HEIGHT + 16)]
    if limit and drawn_limit:
        y = TOP + HEIGHT * (1 - limit[0] / top)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{LEFT + plot_width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT + plot_width, y - 5, limit[1], "end", "limit-text"))
    elif limit:
        parts.append(text(LEFT + plot_width, 13, f"{limit[1]}: far above this scale", "end", "limit-text"))
    return svg(label, LEFT + plot_width + RIGHT, TOP + HEIGHT + BOTTOM, parts)


def rank_map(label: str, rows: list[MapRow], num_ranks: int, ranks_per_host: int) -> str:
    """Draw a line for each row and a column for each rank.

    Equal neighbouring cells are drawn as one mark. Lines separate hosts.
    """
    step = MAP_WIDTH / num_ranks
    width, bottom = min(step, 90.0), MAP_TOP + MAP_ROW * len(rows)
    parts = []
    for index, row in enumerate(rows):
        y = MAP_TOP + MAP_ROW * index
        parts.append(text(MAP_LEFT - 8, y + 13, shorten(row.name, 22), "end", title=row.name))
        parts.append(text(MAP_LEFT + width * num_ranks + 8, y + 13, shorten(row.note, 52), "start", "faint", row.note))
        for ranks, cell in _runs(row.cells):
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {ranks[0]}-{ranks[-1]}"
            x, wide = MAP_LEFT + width * ranks[0], width * len(ranks)
            title = f"{row.name}, {where}: {cell.title}"
            gap = min(1.0, width / 8)
            parts.append(
                rect(x + gap / 2, y + 2, wide - gap, MAP_ROW - 4, cell.colour, title, 0.25 + 0.75 * cell.weight)
            )
    for rank in range(0, num_ranks + 1, ranks_per_host):
        x = MAP_LEFT + width * rank
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{MAP_TOP}" y2="{bottom}"/>')
    parts += _rank_axis(num_ranks, width, bottom + 16, MAP_LEFT)
    return svg(label, MAP_LEFT + width * num_ranks + MAP_RIGHT, bottom + BOTTOM, parts)


def _runs(cells: dict[int, Cell]) -> list[tuple[list[int], Cell]]:
    """Group adjacent ranks with equal cells."""
    numbered = enumerate(sorted(cells))
    groups = groupby(numbered, key=lambda pair: (pair[1] - pair[0], cells[pair[1]]))
    return [([rank for _, rank in group], cell) for (_, cell), group in groups]


def _value_axis(top: float, unit: str, plot_width: float) -> list[str]:
    parts = []
    for tick in range(5):
        value = top * tick / 4
        y = TOP + HEIGHT * (1 - tick / 4)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + plot_width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 6, y + 4, f"{value:.3g}", "end", "faint"))
    return [*parts, text(LEFT - 6, TOP - 14, unit, "end", "faint")]


def _rank_axis(num_ranks: int, step: float, y: float, left: float = LEFT) -> list[str]:
    """Write as many rank numbers as fit, in steps of a power of two."""
    every = 1
    while every * step < 26:
        every *= 2
    numbers = [text(left + step * (rank + 0.5), y, str(rank), "middle", "faint") for rank in range(0, num_ranks, every)]
    return [*numbers, text(left + step * num_ranks / 2, y + 16, "rank", "middle", "faint")]
