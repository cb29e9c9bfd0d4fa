"""Compare two plans: which tables moved, the changes of each rank, and the objectives (no torch
import).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.planner.explain import print_grid, show_ranks
from pipeline.planner.plan_record import (
    MAX_LINES,
    PHASES,
    Objective,
    PlanDescription,
    RankLoad,
    TableChoice,
    differing_libraries,
    differing_lines,
)
from pipeline.runtime.byte_counts import show_bytes

MAX_TABLES = 40
MAX_RANKS = 16


def compare(a: PlanDescription, b: PlanDescription) -> str:
    """Return the comparison as text. Differences are b minus a."""
    return "\n\n".join("\n".join(part) for part in (_made_for(a, b), _tables(a, b), _ranks(a, b), _objectives(a, b)))


def _made_for(a: PlanDescription, b: PlanDescription) -> list[str]:
    lines = [
        f"{letter}  {len(plan.tables)} tables on {len(plan.ranks)} rank(s) of {plan.hardware}, by {plan.planner}"
        for letter, plan in (("A", a), ("B", b))
    ]
    differing = differing_lines(a.fingerprint, b.fingerprint, ("A", "B"))
    if not differing:
        lines.append("both are for the same tables, hardware, optimizer and batch size")
    else:
        lines.append("they are made for different jobs:")
        lines += [f"  {line}" for line in differing[:MAX_LINES]]
        if more := len(differing) - MAX_LINES:
            lines += [f"  and {more} more"] if more > 0 else []
    if libraries := differing_libraries(b.fingerprint, a.fingerprint):
        lines.append(f"B was made with {', '.join(libraries).replace('(here', '(A')}")
    return lines


def _tables(a: PlanDescription, b: PlanDescription) -> list[str]:
    """List the tables that moved, the largest changes of cost first."""
    left, right = ({choice.name: choice for choice in plan.tables} for plan in (a, b))
    moved = [name for name in left.keys() & right.keys() if _placement(left[name]) != _placement(right[name])]
    moved.sort(key=lambda name: (-abs(right[name].cost_ms - left[name].cost_ms), name))
    lines = [f"{len(moved)} of {len(left.keys() & right.keys())} tables moved"]
    if moved:
        otherwise = sum(_placement(left[name])[:2] != _placement(right[name])[:2] for name in moved)
        lines[0] += f", {otherwise} of them with another sharding, {len(moved) - otherwise} only on other ranks"
        lines[0] += " (amounts: A, then B minus A)"
        rows = [_table_row(left[name], right[name], len(a.ranks), len(b.ranks)) for name in moved[:MAX_TABLES]]
        headings = ("table", "A", "B", "ranks A", "ranks B", "HBM", "host memory", "cost, ms")
        lines.append(print_grid(headings, rows, right=headings[5:]))
        if len(moved) > MAX_TABLES:
            lines.append(f"and {len(moved) - MAX_TABLES} more, whose cost changes less")
    for letter, names in (("A", left.keys() - right.keys()), ("B", right.keys() - left.keys())):
        if names:
            shown = ", ".join(sorted(names)[:MAX_LINES])
            lines.append(
                f"only in {letter}: {shown}" + (f" and {len(names) - MAX_LINES} more" if len(names) > MAX_LINES else "")
            )
    return lines


def _placement(choice: TableChoice) -> tuple[str, str, list[int]]:
    return choice.sharding_type, choice.compute_kernel, choice.ranks


def _table_row(a: TableChoice, b: TableChoice, ranks_a: int, ranks_b: int) -> list[str]:
    return [
        a.name,
        f"{a.sharding_type} {a.compute_kernel}",
        f"{b.sharding_type} {b.compute_kernel}",
        show_ranks(a.ranks, ranks_a),
        show_ranks(b.ranks, ranks_b),
        _bytes_delta(a.hbm_bytes, b.hbm_bytes),
        _bytes_delta(a.ddr_bytes, b.ddr_bytes),
        f"{a.cost_ms:.4g} {b.cost_ms - a.cost_ms:+.4g}",
    ]


def _ranks(a: PlanDescription, b: PlanDescription) -> list[str]:
    """Compare each rank that both plans have. If there are many ranks, list only the ranks with the
    largest changes of time or memory.
    """
    pairs = list(zip(a.ranks, b.ranks, strict=False))
    if len(a.ranks) != len(b.ranks):
        return [f"ranks: {len(a.ranks)} in A, {len(b.ranks)} in B; they are not compared one by one"]
    changed = sorted((pair for pair in pairs if pair[0] != pair[1]), key=_change, reverse=True)
    if not changed:
        return ["every rank has the same load"]
    shown = sorted(changed[:MAX_RANKS], key=lambda pair: pair[0].rank)
    headings = (
        "rank",
        "HBM",
        "host memory",
        "ms a step",
        *(phase.removesuffix("_ms").replace("_", " ") for phase in PHASES),
    )
    lines = [print_grid(headings, [_rank_row(*pair) for pair in shown], right=headings)]
    if len(changed) > MAX_RANKS:
        lines.append(f"and {len(changed) - MAX_RANKS} more ranks, which change less")
    return lines


def _change(pair: tuple[RankLoad, RankLoad]) -> tuple[float, int]:
    a, b = pair
    return abs(b.cost_ms - a.cost_ms), abs(b.hbm_bytes - a.hbm_bytes) + abs(b.ddr_bytes - a.ddr_bytes)


def _rank_row(a: RankLoad, b: RankLoad) -> list[str]:
    phases = (f"{getattr(b, phase) - getattr(a, phase):+.3g}" for phase in PHASES)
    return [
        str(a.rank),
        _bytes_delta(a.hbm_bytes, b.hbm_bytes),
        _bytes_delta(a.ddr_bytes, b.ddr_bytes),
        f"{a.cost_ms:.4g} {b.cost_ms - a.cost_ms:+.3g}",
        *phases,
    ]


def _bytes_delta(a: int, b: int) -> str:
    if a == b:
        return show_bytes(a) if a else "-"
    return f"{show_bytes(a)} {'+' if b > a else '-'}{show_bytes(abs(b - a))}"


def _objectives(a: PlanDescription, b: PlanDescription) -> list[str]:
    return [
        _objective_line("slowest rank", a.objective.max_rank_ms, b.objective.max_rank_ms),
        _objective_line("critical path", a.objective.critical_path_ms, b.objective.critical_path_ms),
        *_gap_lines(a.objective, b.objective),
    ]


def _objective_line(name: str, a: float, b: float) -> str:
    percent = f" ({100 * (b / a - 1):+.2f} %)" if a else ""
    return f"{name + ', ms':18} {a:.4g} -> {b:.4g}: {b - a:+.4g}{percent}"


def _gap_lines(a: Objective, b: Objective) -> Iterator[str]:
    for letter, objective in (("A", a), ("B", b)):
        if objective.gap is not None:
            yield f"{letter} is at most {100 * objective.gap:.2f} % above the best {objective.minimised}"
