"""Print a plan: each table's choice with its reason, and each rank's memory and time as bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from io import StringIO
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from pipeline.planner.plan_record import PlanDescription, RankLoad, TableChoice
from pipeline.runtime.byte_counts import show_bytes

WIDTH = 140
UNFOLDED = 400  # width of a grid whose columns are not folded
TABLE_HEADINGS = ("table", "rows", "dim", "size + state", "sharding", "kernel", "ranks")
MAX_TABLES = 40
MAX_RANKS = 16
BAR_WIDTH = 24


def summarize(record: PlanDescription) -> str:
    """Return one line for a log: the choices, the fullest rank, the estimated cost."""
    kinds = ", ".join(
        f"{count} {kind}" for kind, count in Counter(choice.sharding_type for choice in record.tables).most_common()
    )
    tier, room = _main_tier(record)
    fullest = max(_taken(record, load) for load in record.ranks)
    return (
        f"plan by {record.planner} for {len(record.ranks)} rank(s) of {record.hardware}: {kinds or 'no tables'}; fullest rank "
        f"{show_bytes(fullest)} of {show_bytes(room)} {tier} for tables; slowest rank {record.objective.max_rank_ms:.3g} ms per step"
    )


def explain(record: PlanDescription) -> str:
    """Return text about the MAX_TABLES largest tables, the ranks (only the extremes if many), and the cost."""
    shown = sorted(record.tables, key=lambda choice: (-choice.weight_bytes - choice.state_bytes, choice.name))
    hidden = shown[MAX_TABLES:]
    lines = [_table_grid(record, shown[:MAX_TABLES])]
    if hidden:
        size = sum(choice.weight_bytes + choice.state_bytes for choice in hidden)
        lines.append(f"and {len(hidden)} smaller tables with {show_bytes(size)} in total")
    return "\n".join([*lines, "", *_rank_lines(record), "", *_cost_lines(record)])


def table_cells(choice: TableChoice, num_ranks: int) -> list[str]:
    """Return the cells of one table's line, in the order of TABLE_HEADINGS."""
    return [
        choice.name,
        f"{choice.num_embeddings:,}",
        str(choice.embedding_dim),
        show_bytes(choice.weight_bytes + choice.state_bytes),
        choice.sharding_type,
        choice.compute_kernel,
        show_ranks(choice.ranks, num_ranks),
    ]


def _table_grid(record: PlanDescription, choices: list[TableChoice]) -> str:
    rows = [[*table_cells(choice, len(record.ranks)), choice.reason] for choice in choices]
    headings = (*TABLE_HEADINGS, "why")
    return print_grid(headings, rows, right=headings[1:4], folded=headings[-1:])


def print_grid(
    headings: Sequence[str], rows: list[list[str]], right: Sequence[str] = (), folded: Sequence[str] = ()
) -> str:
    """Print columns as wide as their text. The text of `folded` columns may take several lines."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        grid.add_column(heading, justify=justify, no_wrap=heading not in folded, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    text = StringIO()
    Console(file=text, width=WIDTH if folded else UNFOLDED, color_system=None, markup=False).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip()


def show_ranks(ranks: list[int], world_size: int) -> str:
    """Format ranks as `3`, `0-7`, `0,4`, or `all`."""
    distinct = sorted(set(ranks))
    if len(distinct) == world_size and world_size > 1:
        return "all"
    if len(distinct) > 1 and distinct == list(range(distinct[0], distinct[-1] + 1)):
        return f"{distinct[0]}-{distinct[-1]}"
    return ",".join(map(str, distinct))


def _rank_lines(record: PlanDescription) -> list[str]:
    tier, room = _main_tier(record)
    slowest = record.objective.max_rank_ms or 1.0
    loads = record.ranks
    if len(loads) > MAX_RANKS:
        fullest = sorted(loads, key=lambda load: (-_taken(record, load), load.rank))
        slow = sorted(loads, key=lambda load: (-load.cost_ms, load.rank))
        loads = list(dict.fromkeys([fullest[0], fullest[-1], slow[0], slow[-1]]))
    lines = [f"{'rank':>5}  {tier + ' by tables, of ' + show_bytes(room):<{BAR_WIDTH + 12}}  estimated ms per step"]
    for load in loads:
        taken = _taken(record, load)
        lines.append(
            f"{load.rank:>5}  {_bar(taken / max(room, 1))} {show_bytes(taken):>11}  {_bar(load.cost_ms / slowest)} {load.cost_ms:.3g}"
        )
    if len(loads) < len(record.ranks):
        lines.append(f"       the fullest, emptiest, slowest and fastest of {len(record.ranks)} ranks")
    if tier == "HBM" and any(load.ddr_bytes for load in record.ranks):
        most = max(load.ddr_bytes for load in record.ranks)
        lines.append(
            f"       host memory: at most {show_bytes(most)} per rank, of {show_bytes(record.usable_ddr_bytes)}"
        )
    if any(load.ssd_bytes for load in record.ranks):
        most = max(load.ssd_bytes for load in record.ranks)
        lines.append(f"       SSD: at most {show_bytes(most)} per rank, of {show_bytes(record.usable_ssd_bytes)}")
    return lines


def _cost_lines(record: PlanDescription) -> list[str]:
    objective, torchrec = record.objective, record.torchrec_objective
    bound = "" if objective.gap is None else f", at most {100 * objective.gap:.1f} % above the best possible"
    lines = [
        f"slowest rank {objective.max_rank_ms:.4g} ms, critical path "
        f"{objective.critical_path_ms:.4g} ms per step (estimates of the embedding part; "
        f"minimized: {objective.minimised}{bound})"
    ]
    if torchrec is not None:
        lines.append(
            f"TorchRec's planner: slowest rank {torchrec.max_rank_ms:.4g} ms, "
            f"critical path {torchrec.critical_path_ms:.4g} ms"
        )
    return lines


def _main_tier(record: PlanDescription) -> tuple[str, int]:
    return ("HBM", record.usable_hbm_bytes) if record.usable_hbm_bytes else ("host memory", record.usable_ddr_bytes)


def _taken(record: PlanDescription, load: RankLoad) -> int:
    return load.hbm_bytes if record.usable_hbm_bytes else load.ddr_bytes


def _bar(share: float) -> str:
    filled = min(BAR_WIDTH, round(BAR_WIDTH * share))
    return "#" * filled + "." * (BAR_WIDTH - filled)
