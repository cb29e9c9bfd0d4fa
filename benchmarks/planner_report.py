"""Write the rows of the planner benchmark to a JSON-lines file and back, as text, and as Markdown for docs/do/planning.md."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

MINIMISES = {"search": "critical_path_ms", "search_max_rank": "max_rank_ms"}  # our planners
OBJECTIVES = ("max_rank_ms", "critical_path_ms")
LARGE_GAP = 0.05
ROUNDING = 1 + 1e-9
BUSY = 1.5  # times its CPU seconds: a planner that took so long shared the machine, or waited for a lock


@dataclass
class Outcome:
    """`gap` and `lower_bound_ms` are of the objective that the planner minimised; None where nothing is proven.

    `complete`: the planner ended by itself. `timeout_s` is what it might have taken, `load` the machine's before it began.
    """

    suite: str
    ranks: int
    tightness: float | None
    planner: str
    seconds: float = math.nan
    cpu_seconds: float = math.nan
    feasible: bool = False
    max_rank_ms: float | None = None
    critical_path_ms: float | None = None
    lower_bound_ms: float | None = None
    gap: float | None = None
    plan_hash: str = ""
    repeatable: bool | None = None
    complete: bool = True
    timeout_s: float | None = None
    load: float = math.nan
    day: str = ""
    machine: str = ""
    error: str = ""

    @property
    def instance(self) -> tuple[str, int, float | None]:
        return (self.suite, self.ranks, self.tightness)


def append_row(path: Path, outcome: Outcome) -> None:
    with path.open("a") as rows:
        rows.write(json.dumps(asdict(outcome)) + "\n")


def read_rows(path: Path) -> list[Outcome]:
    """Empty where there is no file. Raises ValueError for a line that is no row of this benchmark."""
    if not path.exists():
        return []
    known = {field.name for field in fields(Outcome)}
    outcomes = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row = json.loads(line)
        if not isinstance(row, dict) or set(row) - known or not {"suite", "ranks", "tightness", "planner"} <= set(row):
            raise ValueError(
                f"{path}, line {number} is no row of this benchmark; give another --output, or mend the line"
            )
        outcomes.append(Outcome(**row))
    return outcomes


def show(outcomes: list[Outcome]) -> str:
    """One line a planner; the best of each objective is marked."""
    feasible = [outcome for outcome in outcomes if outcome.feasible]
    best = {
        field: min((getattr(outcome, field) for outcome in feasible), default=math.nan)
        for field in ("max_rank_ms", "critical_path_ms")
    }
    lines = []
    for outcome in outcomes:
        where = f"{outcome.suite:15} {outcome.ranks:4} {outcome.tightness or 'none':>5} {outcome.planner:15}"
        if not outcome.feasible:
            lines.append(f"{where} {'no plan':>33} {outcome.seconds:8.2f} s  {outcome.error[:80]}")
            continue
        values = " ".join(
            f"{getattr(outcome, field):10.4g}{'*' if getattr(outcome, field) <= best[field] * ROUNDING else ' '}"
            for field in best
        )
        gap = "" if outcome.gap is None else f"{100 * outcome.gap:.2f} %"
        same = "!" if outcome.repeatable is False else ""
        cut = "" if outcome.complete else "  cut"
        lines.append(f"{where} {values} {gap:>9} {outcome.seconds:8.2f} s  {outcome.plan_hash}{same}{cut}")
    return "\n".join(lines)


def by_instance(outcomes: Iterable[Outcome]) -> dict[tuple[str, int, float | None], list[Outcome]]:
    instances: dict[tuple[str, int, float | None], list[Outcome]] = {}
    for outcome in outcomes:
        instances.setdefault(outcome.instance, []).append(outcome)
    return instances


def summarize(outcomes: list[Outcome]) -> str:
    """Of each planner: the share of instances it solves, of those that any solves, and its mean ratio to the best."""
    lines = [f"{'planner':15} {'solved':>9} {'max_rank':>10} {'critical_path':>14}   mean ratio to the best of its row"]
    for name, solved, tried, ratios in _shares(outcomes):
        lines.append(f"{name:15} {f'{solved}/{tried}':>9} {ratios[0]:10.3f} {ratios[1]:14.3f}")
    return "\n".join(lines)


def _shares(outcomes: list[Outcome]) -> Iterable[tuple[str, int, int, list[float]]]:
    solvable = [group for group in by_instance(outcomes).values() if any(outcome.feasible for outcome in group)]
    for name in dict.fromkeys(outcome.planner for outcome in outcomes):
        mine = [(outcome, group) for group in solvable for outcome in group if outcome.planner == name]
        solved = [(outcome, group) for outcome, group in mine if outcome.feasible]
        ratios = [_mean_ratio(solved, field) for field in OBJECTIVES]
        yield name, len(solved), len(mine), ratios


def _mean_ratio(solved: Iterable[tuple[Outcome, list[Outcome]]], field: str) -> float:
    ratios = [
        getattr(outcome, field) / max(1e-12, min(getattr(other, field) for other in group if other.feasible))
        for outcome, group in solved
    ]
    return statistics.fmean(ratios) if ratios else math.nan


def report(outcomes: list[Outcome]) -> str:
    """Markdown: a table a planner of ours and its objective, losses and large gaps below, and how the others fare."""
    parts = []
    for ours, field in MINIMISES.items():
        rows = [group for group in by_instance(outcomes).values() if any(outcome.planner == ours for outcome in group)]
        if rows:
            parts += [_table(rows, ours, field), _remarks(rows, ours, field)]
    return "\n\n".join([*parts, _others(outcomes), _conditions(outcomes)])


def _table(rows: list[list[Outcome]], ours: str, field: str) -> str:
    names = dict.fromkeys(outcome.planner for group in rows for outcome in group)
    others = [name for name in names if name not in MINIMISES]
    head = ["suite", "ranks", "tight", f"`{ours}`", "bound", "gap", "CPU s", *(f"`{name}`" for name in others)]
    lines = [f"{field.removesuffix('_ms')}, ms:", "", _line(head), _line(["---"] * len(head))]
    for group in rows:
        by_name = {outcome.planner: outcome for outcome in group}
        mine = by_name[ours]
        bound = "" if mine.lower_bound_ms is None else f"{mine.lower_bound_ms:.4g}"
        gap = "" if mine.gap is None else f"{100 * mine.gap:.1f} %"
        cells = [mine.suite, str(mine.ranks), f"{mine.tightness or 'none'}", _cell(mine, field), bound, gap]
        cells.append(f"{mine.cpu_seconds:.0f}")
        cells += [_cell(by_name.get(name), field, mine) for name in others]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(outcome: Outcome | None, field: str, ours: Outcome | None = None) -> str:
    """A planner that beats ours is bold; `…` stands behind one that its time cut short."""
    if outcome is None:
        return ""
    if not outcome.feasible:
        return "no plan"
    text = f"{getattr(outcome, field):.4g}{'' if outcome.complete else '…'}"
    return f"**{text}**" if ours is not None and _beats(outcome, ours, field) else text


def _beats(other: Outcome, ours: Outcome, field: str) -> bool:
    return other.feasible and (not ours.feasible or getattr(other, field) * ROUNDING < getattr(ours, field))


def _remarks(rows: list[list[Outcome]], ours: str, field: str) -> str:
    lines = []
    for group in rows:
        mine = next(outcome for outcome in group if outcome.planner == ours)
        where = f"{mine.suite} on {mine.ranks}, {mine.tightness or 'none'}"
        better = [outcome.planner for outcome in group if outcome is not mine and _beats(outcome, mine, field)]
        if better:
            lines.append(f"- loss: {where}: better by {', '.join(better)}")
        if mine.gap is not None and mine.gap > LARGE_GAP:
            lines.append(f"- over {100 * LARGE_GAP:g} %: {where}: {100 * mine.gap:.1f} %, {_reason(mine)}")
    return "\n".join(lines) or f"No planner beats `{ours}`, and no gap is over {100 * LARGE_GAP:g} %."


def _reason(outcome: Outcome) -> str:
    if not outcome.complete:
        return "its time was up"
    if outcome.tightness is not None:
        return "the bound knows no places, and with so little memory few choices can be placed"
    return "the bound lets each phase be even over all ranks at once; local search had come to rest"


def _others(outcomes: list[Outcome]) -> str:
    lines = [_line(["planner", "solved", "max_rank", "critical_path"]), _line(["---"] * 4)]
    for name, solved, tried, ratios in _shares(outcomes):
        cells = [f"`{name}`", f"{solved}/{tried}", *(f"{ratio:.3f}" for ratio in ratios)]
        lines.append(_line(cells))
    return "Instances solved of those that any planner solves, mean ratio to the best of the row:\n\n" + "\n".join(
        lines
    )


def _conditions(outcomes: list[Outcome]) -> str:
    days = sorted({outcome.day for outcome in outcomes if outcome.day})
    machines = sorted({outcome.machine for outcome in outcomes if outcome.machine})
    loads = [outcome.load for outcome in outcomes if math.isfinite(outcome.load)]
    limits = sorted({(o.planner, o.timeout_s) for o in outcomes if o.timeout_s is not None})
    busy = sum(outcome.seconds > BUSY * outcome.cpu_seconds for outcome in outcomes)
    when = "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    text = f"{when}, {'; '.join(machines)}; {len(outcomes)} rows, {busy} of them on a busy machine"
    if loads:
        text += f" (load {min(loads):.1f} to {max(loads):.1f})"
    return text + "; seconds given: " + ", ".join(f"{name} {limit:g}" for name, limit in limits) + "."
