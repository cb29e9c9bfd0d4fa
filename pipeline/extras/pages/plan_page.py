"""Show a plan as an HTML page that opens from disk: memory and time of each rank, and each table's
ranks with the reason.

It has only inline SVG and CSS, no script and no external resources. If there are many tables, the
largest have a line each, and the remaining tables one line per kind of sharding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pipeline import devices
from pipeline.extras.pages.plan_charts import Cell, Column, MapRow, column_chart, rank_map
from pipeline.extras.pages.step_charts import step_sections
from pipeline.extras.step_time.forecast import PlanForecast
from pipeline.planner.explain import TABLE_HEADINGS, show_ranks, table_cells
from pipeline.planner.plan_record import PHASES, PlanDescription, PlanRecord, RankLoad, TableChoice, describe_hosts
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.pages.html import cards, document, figure, folded, legend, table
from pipeline.runtime.storage import storage

FEW_RANKS = 8  # whose charts of memory and time are next to each other
MAX_MAPPED = 40  # tables with a line in the map, and a row in the table that is not folded
IN_HBM = ("dense", "fused")  # kernels that keep the complete table in HBM
SERIES = {"weights": "tables", "state": "optimizer state", "buffers": "buffers and caches"}
PHASE_NAMES = {phase: phase.removesuffix("_ms").replace("_", " ") for phase in PHASES}
Shardings = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class TableShare:
    """The part of a table that is on one rank."""

    weight_bytes: float
    state_bytes: float
    num_rows: int
    num_columns: int

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.state_bytes


def page_path(plan_file: str) -> str:
    return plan_file.removesuffix(".json") + ".html"


def write_plan_page(
    plan_file: str,
    title: str,
    record: PlanRecord,
    made: str,
    forecasts: Sequence[PlanForecast] = (),
    notes: Sequence[str] = (),
) -> str:
    """Write the page next to the plan file, and return its path.

    made: when and by which command the plan was made; forecasts: predictions of the step, the first
    one for the plan's own number of ranks; notes: lines to print below the forecast.
    """
    from pipeline.planner.plan_codec import encode_plan  # loads torch

    step = [*step_sections(forecasts[0], forecasts), *(f"<p>{escape(note)}</p>" for note in notes)] if forecasts else []
    path = page_path(plan_file)
    storage.publish_text(path, render_page(title, record, encode_plan(record.plan), made, step))
    return path


def render_page(
    title: str, plan: PlanDescription, shardings: Shardings, made: str = "", step: Sequence[str] = ()
) -> str:
    """Return the page. shardings: module -> table -> ParameterSharding, as in a plan file. step:
    the sections about the predicted step.
    """
    shares = _table_shares(plan, shardings)
    # Next to each other if their charts are small.
    beside = (
        ('<div class="pair"><section>', "</section><section>", "</section></div>")
        if len(plan.ranks) <= FEW_RANKS
        else ("",) * 3
    )
    sections = (
        _heading(title, plan), step, beside[:1], _memory(plan, shares), beside[1:2], _time(plan), beside[2:], _map(plan, shares),
        _choices(plan), _tiers(plan), _rank_numbers(plan), _made_for(plan), _foot(plan, made),
    )  # fmt: skip
    body = [part for section in sections for part in section]
    return document(f"Plan: {title}", body, Path(__file__).with_name("plan.css").read_text())


def _table_shares(plan: PlanDescription, shardings: Shardings) -> dict[str, dict[int, TableShare]]:
    """Return table -> rank -> the part on this rank. Several column shards on one rank are added up."""
    planned = {name: sharding for tables in shardings.values() for name, sharding in tables.items()}
    shares: dict[str, dict[int, TableShare]] = {}
    for choice in plan.tables:
        whole = {"sizes": [choice.num_embeddings, choice.embedding_dim]}
        shards = planned[choice.name].get("sharding_spec") or [whole] * len(choice.ranks)
        held = shares.setdefault(choice.name, {})
        for rank, shard in zip(choice.ranks, shards, strict=True):
            num_rows, num_columns = shard["sizes"]
            part = num_rows * num_columns / max(1, choice.num_embeddings * choice.embedding_dim)
            before = held.get(rank, TableShare(0, 0, 0, 0))
            held[rank] = TableShare(
                before.weight_bytes + part * choice.weight_bytes * choice.share_in_memory,
                before.state_bytes + part * choice.state_bytes * choice.share_in_memory,
                num_rows,
                before.num_columns + num_columns,
            )
    return shares


def _heading(title: str, plan: PlanDescription) -> Iterator[str]:
    objective, topology = plan.objective, plan.fingerprint["topology"]
    kinds = Counter(choice.sharding_type for choice in plan.tables).most_common()
    size = sum(choice.weight_bytes + choice.state_bytes for choice in plan.tables)
    yield f"<h1>{escape(title)}</h1>"
    yield (
        f"<p>{len(plan.tables)} tables, {show_bytes(size)} with optimizer state, on {len(plan.ranks)} rank(s) of "
        f"{escape(plan.hardware)}, {describe_hosts(topology)}: "
        f"{', '.join(f'{count} {kind}' for kind, count in kinds)}. Found by {escape(plan.planner)}.</p>"
    )
    tier, taken, room = _fullest(plan)
    figures = [
        (f"{objective.critical_path_ms:.4g} ms", f"expected of a step's embedding part{_beside_torchrec(plan)}"),
        (show_bytes(taken), f"{tier} that tables take on the fullest rank, of {show_bytes(room)}"),
    ]
    if objective.gap is not None and objective.lower_bound_ms is not None:
        text = f"at most above the best possible plan, whose {objective.minimised} is {objective.lower_bound_ms:.4g} ms or more"
        figures.append((f"{100 * objective.gap:.2f} %", text))
    yield cards(figures)
    slowest = f"The slowest rank takes {objective.max_rank_ms:.4g} ms for all its phases"
    if plan.torchrec_objective is not None:
        slowest += f", in TorchRec's own plan {plan.torchrec_objective.max_rank_ms:.4g} ms"
    yield (
        f'<p class="faint">{slowest}. Milliseconds are estimates of the critical path, the slowest rank of each phase, summed, '
        f"for the embedding part of one training step; the planner minimised {objective.minimised}.</p>"
    )


def _beside_torchrec(plan: PlanDescription) -> str:
    other = plan.torchrec_objective
    if other is None:
        return ""
    share = 1 - plan.objective.critical_path_ms / other.critical_path_ms if other.critical_path_ms else 0.0
    how = (
        f", {100 * abs(share):.0f} % {'less' if share > 0 else 'more'} than" if abs(share) >= 0.005 else ", as much as"
    )
    return f"{how} TorchRec's own plan, {other.critical_path_ms:.4g} ms"


def _fullest(plan: PlanDescription) -> tuple[str, int, int]:
    if plan.usable_hbm_bytes:
        return "HBM", max(load.hbm_bytes for load in plan.ranks), plan.usable_hbm_bytes
    return "host memory", max(load.ddr_bytes for load in plan.ranks), plan.usable_ddr_bytes


def _memory(plan: PlanDescription, shares: dict[str, dict[int, TableShare]]) -> Iterator[str]:
    yield "<h2>Memory of each rank</h2>"
    yield (
        "<p>What the tables take. They may take the capacity less the reserve (planner.reserved_memory_fraction) and the dense "
        "part of the model: a dashed line where it is on the chart.</p>"
    )
    yield legend(SERIES.items())
    has_hbm = devices.named(plan.fingerprint["topology"]["compute_device"]).has_own_memory
    in_hbm = {choice.name for choice in plan.tables if has_hbm and choice.compute_kernel in IN_HBM}
    tiers = [("HBM", "hbm_bytes", plan.usable_hbm_bytes, in_hbm)] if has_hbm else []
    on_ssd = {choice.name for choice in plan.tables if choice.compute_kernel == "key_value"}
    if not has_hbm or any(load.ddr_bytes for load in plan.ranks):
        in_host = {choice.name for choice in plan.tables} - in_hbm - on_ssd
        tiers.append(("host memory", "ddr_bytes", plan.usable_ddr_bytes, in_host))
    if on_ssd:
        tiers.append(("SSD", "ssd_bytes", plan.usable_ssd_bytes, on_ssd))
    yield '<div class="charts">'
    for tier, field, room, tables in tiers:
        taken = {load.rank: getattr(load, field) for load in plan.ranks}
        yield figure(f"{tier} of each rank", _memory_chart(tier, taken, room, [shares[name] for name in tables]))
    yield "</div>"


def _memory_chart(tier: str, taken: dict[int, int], room: int, shares: list[dict[int, TableShare]]) -> str:
    scale, unit = next(
        ((size, unit) for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)) if max(taken.values()) >= size / 10),
        (1 << 10, "KiB"),
    )
    columns = []
    for rank, total in taken.items():
        shares_of_table = [held[rank] for held in shares if rank in held]
        weights, state = (
            sum(share.weight_bytes for share in shares_of_table),
            sum(share.state_bytes for share in shares_of_table),
        )
        parts = [weights, state, max(0.0, total - weights - state)]
        titles = [
            f"rank {rank}, {tier}: {show_bytes(part)} of {name}"
            for part, name in zip(parts, SERIES.values(), strict=True)
        ]
        columns.append(Column([part / scale for part in parts], titles))
    fullest = max(taken, key=lambda rank: taken[rank])
    label = f"{tier}: rank {fullest} is the fullest, {show_bytes(taken[fullest])} of {show_bytes(room)} for tables"
    return column_chart(label, unit, list(SERIES), columns, (room / scale, f"{show_bytes(room)} for tables"))


def _time(plan: PlanDescription) -> Iterator[str]:
    slowest = max(plan.ranks, key=lambda load: load.cost_ms)
    yield "<h2>Time of each rank</h2>"
    yield (
        "<p>Estimated milliseconds of a step by phase, in their order. Every phase ends where all ranks wait for the "
        "slowest: the slowest ranks of the five phases make the critical path. Input dist hands the ids to the ranks "
        "that hold their rows; comms exchange the looked-up embeddings, and in backward their gradients. What a collective "
        "takes to start is in its phase, on every rank.</p>"
    )
    yield legend(PHASE_NAMES.items())
    columns = [
        Column(
            [getattr(load, phase) for phase in PHASES],
            [f"rank {load.rank}, {name}: {getattr(load, phase):.4g} ms" for phase, name in PHASE_NAMES.items()],
        )
        for load in plan.ranks
    ]
    label = f"rank {slowest.rank} is the slowest, {slowest.cost_ms:.4g} ms a step"
    yield '<div class="charts">'
    yield figure("Time of each rank, by phase", column_chart(label, "ms", PHASES, columns))
    rows = [_phase_row(phase, plan.ranks) for phase in PHASES]
    rows.append(["critical path", "", f"{plan.objective.critical_path_ms:.4g}", ""])
    yield table(("phase", "slowest rank", "its ms", "mean of all ranks"), rows, numbers=(1, 2, 3))
    yield "</div>"


def _phase_row(phase: str, loads: list[RankLoad]) -> list[str]:
    slowest = max(loads, key=lambda load: getattr(load, phase))
    mean = sum(getattr(load, phase) for load in loads) / len(loads)
    return [PHASE_NAMES[phase], str(slowest.rank), f"{getattr(slowest, phase):.4g}", f"{mean:.4g}"]


def _map(plan: PlanDescription, shares: dict[str, dict[int, TableShare]]) -> Iterator[str]:
    tables = _by_size(plan.tables)
    own, others = (tables, []) if len(tables) <= MAX_MAPPED else (tables[:MAX_MAPPED], tables[MAX_MAPPED:])
    rows = [_table_row(choice, shares[choice.name], len(plan.ranks)) for choice in own]
    kinds: dict[tuple[str, str], list[TableChoice]] = defaultdict(list)
    for choice in others:
        kinds[choice.sharding_type, choice.compute_kernel].append(choice)
    rows += [_kind_row(kind, choices, shares) for kind, choices in kinds.items()]
    per_host = plan.fingerprint["topology"]["local_world_size"]
    yield "<h2>Tables and ranks</h2>"
    text = "A line is a table, largest first; a mark is the part of it that a rank holds. Point at a mark for its size."
    if others:
        text += (
            f" The {len(others)} smaller tables are drawn together, a line for each way of sharding: the stronger a "
            "mark, the more bytes of them the rank holds."
        )
    yield f"<p>{text}{' Upright lines part hosts.' if per_host < len(plan.ranks) else ''}</p>"
    used = dict.fromkeys(choice.sharding_type for choice in tables)
    yield legend((kind, f"{kind}: {MEANINGS[kind]}") for kind in used)
    label = f"{len(tables)} tables by {len(plan.ranks)} ranks"
    yield figure(
        "",
        f'<div class="scroll" role="region" tabindex="0" aria-label="map">{rank_map(label, rows, len(plan.ranks), per_host)}</div>',
    )


MEANINGS = {
    "data_parallel": "a copy on every rank",
    "table_wise": "whole on one rank",
    "column_wise": "cut by columns",
    "row_wise": "cut by rows over all ranks",
    "table_row_wise": "cut by rows over one host",
    "table_column_wise": "cut by columns within a host",
    "grid_shard": "cut by columns, each by rows over a host",
}


def _by_size(choices: list[TableChoice]) -> list[TableChoice]:
    return sorted(choices, key=lambda choice: (-choice.weight_bytes - choice.state_bytes, choice.name))


def _table_row(choice: TableChoice, held: dict[int, TableShare], num_ranks: int) -> MapRow:
    cells = {
        rank: Cell(
            choice.sharding_type,
            1.0,
            f"{choice.sharding_type} {choice.compute_kernel}, {share.num_rows:,} x {share.num_columns}, {show_bytes(share.num_bytes)}",
        )
        for rank, share in held.items()
    }
    size = show_bytes(choice.weight_bytes + choice.state_bytes)
    ranks = show_ranks(choice.ranks, num_ranks)
    where = "all ranks" if ranks == "all" else f"rank {ranks}"
    return MapRow(choice.name, f"{where}: {size}, {choice.sharding_type} {choice.compute_kernel}", cells)


def _kind_row(kind: tuple[str, str], choices: list[TableChoice], shares: dict[str, dict[int, TableShare]]) -> MapRow:
    held: dict[int, list[float]] = defaultdict(list)
    for choice in choices:
        for rank, share in shares[choice.name].items():
            held[rank].append(share.num_bytes)
    most = max(sum(sizes) for sizes in held.values()) or 1.0
    cells = {
        rank: Cell(kind[0], sum(sizes) / most, f"parts of {len(sizes)} tables, {show_bytes(sum(sizes))}")
        for rank, sizes in held.items()
    }
    size = sum(choice.weight_bytes + choice.state_bytes for choice in choices)
    return MapRow(f"{len(choices)} smaller tables", f"{show_bytes(size)}, {kind[0]} {kind[1]}", cells)


def _tiers(plan: PlanDescription) -> Iterator[str]:
    held = [(choice, choice.tiers) for choice in _by_size(plan.tables) if choice.tiers is not None]
    if not held:
        return
    yield "<h2>Tables on an SSD</h2>"
    yield (
        "<p>A step brings the rows that no slot holds in from the SSD, and as many leave. What it reads and writes beside the "
        "step before costs no time while it takes no longer than that.</p>"
    )
    headings = ("table", "rows", "in memory", "on the SSD at most", "lookups served", "rows a step", "read a step")
    rows = [
        [
            choice.name,
            f"{choice.num_embeddings:,}",
            f"{tiers.slots:,}",
            show_bytes(choice.weight_bytes + choice.state_bytes),
            f"{100 * tiers.hit_rate:.1f} %",
            f"{tiers.rows_a_step:,.0f}",
            show_bytes(tiers.read_bytes),
        ]
        for choice, tiers in held
    ]
    total = sum(tiers.rows_a_step for _, tiers in held), sum(tiers.read_bytes for _, tiers in held)
    rows.append(["all", "", "", "", "", f"{total[0]:,.0f}", show_bytes(total[1])])
    yield table(headings, rows, numbers=range(1, len(headings)))


def _choices(plan: PlanDescription) -> Iterator[str]:
    headings = (*TABLE_HEADINGS, "cost, ms", "why")
    rows = [
        [*table_cells(choice, len(plan.ranks)), f"{choice.cost_ms:.4g}", choice.reason]
        for choice in _by_size(plan.tables)
    ]
    numbers = (1, 2, 3, 7)
    yield "<h2>Each table's choice, and why</h2>"
    yield (
        '<p class="faint">Cost is summed over the ranks that hold a part of the table, without what collectives take to '
        "start, which all tables of one sharding share.</p>"
    )
    yield table(headings, rows[:MAX_MAPPED], numbers)
    if remaining := rows[MAX_MAPPED:]:
        yield folded(f"{len(remaining)} smaller tables", table(headings, remaining, numbers))


def _rank_numbers(plan: PlanDescription) -> Iterator[str]:
    headings = ("rank", "HBM", "host memory", "SSD", *(f"{name}, ms" for name in PHASE_NAMES.values()), "sum, ms")
    rows = [
        [
            str(load.rank),
            show_bytes(load.hbm_bytes),
            show_bytes(load.ddr_bytes),
            show_bytes(load.ssd_bytes),
            *(f"{getattr(load, phase):.4g}" for phase in PHASES),
            f"{load.cost_ms:.4g}",
        ]
        for load in plan.ranks
    ]
    yield folded("Numbers of each rank", table(headings, rows, range(len(headings))))


def _made_for(plan: PlanDescription) -> Iterator[str]:
    fingerprint = plan.fingerprint
    sections = {name: fingerprint[name] for name in ("topology", "sparse_optimizer", "libraries")}
    rows = [[f"{name}.{key}", str(value)] for name, values in sections.items() for key, value in values.items()]
    rows.append(["batch_size (a rank)", str(fingerprint["batch_size"])])
    yield folded("What the plan was made for", table(("", ""), rows, label="what the plan was made for"))


def _foot(plan: PlanDescription, made: str) -> Iterator[str]:
    """Return a footer: when and by which command the page was made, and the libraries' versions of
    the plan.
    """
    libraries = ", ".join(f"{name} {version}" for name, version in plan.fingerprint["libraries"].items())
    yield f'<footer class="faint"><p>{escape(f"Made {made}. " if made else "")}Planned with {escape(libraries)}.</p></footer>'
