"""List run folders, tag them, and remove runs and files that are not needed."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.checkpoint.retention import is_higher_better
from pipeline.extras.price.cost import describe_cost
from pipeline.extras.runs.compare import choose_split, labels_of
from pipeline.extras.runs.folder import TAGS, Run
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.agent import DAY_S, old_starts, remove_starts
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import DAMAGED, DAMAGED_MANIFEST
from pipeline.runtime.storage.lease import take_lease
from pipeline.runtime.storage.manifest import MANIFEST
from pipeline.training.summary import by_label

SHOWN = ("ne", "auc", "gauc", "mse", "recall_at_10", "mrr")
LOGS, CHECKPOINTS = "logs", "checkpoints"
COLUMNS = ("run", "state", "step", "seed", "split", "label")
COSTS = ("samples/s", "rank-hours", "price", "last", "tags")


def sorted_runs(runs: Sequence[Run], by: str) -> list[Run]:
    """Sort by "time", newest first, or by a metric, best first; runs without the metric are last. A
    plain name (ne) is of each run's main label, label/ne of `label`.

    Raises:
        ConfigError: no run has that metric.
    """
    if by == "time":
        return sorted(runs, key=lambda run: -_last_time(run))
    label, _, metric = by.rpartition("/")
    values = {
        run.path: run.of_label(run.metrics(choose_split([run]))[1], label or run.labels[0]).get(metric, math.nan)
        for run in runs
    }
    if runs and all(math.isnan(value) for value in values.values()):
        known = sorted({name for run in runs for name in run.metrics(choose_split([run]))[1]})
        raise ConfigError(
            f"sort={by}: no run was measured by it; there are time{', ' if known else ''}{', '.join(known)}"
        )
    sign = -1.0 if is_higher_better(by) else 1.0
    return sorted(runs, key=lambda run: (math.isnan(values[run.path]), sign * values[run.path]))


def as_text(runs: Sequence[Run]) -> str:
    """Return a line per run with its metrics, and a line for each further label of a run."""
    has_labels = len(labels_of(runs)) > 1
    measured = {run.path: run.metrics(choose_split([run]))[1] for run in runs}
    of_labels = {run.path: {label: run.of_label(measured[run.path], label) for label in run.labels} for run in runs}
    known = {name for each in of_labels.values() for metrics in each.values() for name in metrics}
    names = [name for name in SHOWN if name in known]
    header = [*COLUMNS[: 6 if has_labels else 5], *names, *COSTS]
    rows = []
    for run in runs:
        speed = run.summary.get("throughput", {}).get("samples_per_s")
        split = choose_split([run]) if measured[run.path] else "-"
        begin = [run.path, run.state, str(run.chosen_step), str(run.seed), split]
        end = [
            f"{speed:,.0f}" if speed else "-", f"{run.rank_hours:.3g}", _price(run), _time(_last_time(run)), ",".join(run.tags)
        ]  # fmt: skip
        for number, (label, metrics) in enumerate(of_labels[run.path].items()):
            shown = [f"{metrics[name]:.4f}" if name in metrics else "-" for name in names]
            of_run = (begin, end) if number == 0 else ([""] * len(begin), [""] * len(end))
            rows.append([*of_run[0], *([label] if has_labels else []), *shown, *of_run[1]])
    widths = [max(len(row[index]) for row in [header, *rows]) for index in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def _price(run: Run) -> str:
    return "-" if run.cost.get("price") is None else f"{run.cost['price']:.4g}"


def describe_run(run: Run) -> list[str]:
    """Return a text that describes a run and everything that was measured."""
    lines = [f"{run.path}  {run.state} at step {run.step}, seed {run.seed}"]
    lines += [f"tags        {', '.join(run.tags)}"] if run.tags else []
    lines += [f"note        {run.note}"] if run.note else []
    for start in run.starts:
        code = f"git {start.commit}" if start.commit else f"version {start.version}"
        lines.append(
            f"start       {start.time} from step {start.from_step} on {start.host}, {start.world_size} rank(s), {code}"
        )
        lines.append(f"            {start.command}")
    for (split, step), metrics in sorted(run.evaluations.items()):
        for label, of_label in by_label(metrics).items():
            values = "  ".join(f"{name} {value:.5g}" for name, value in of_label.items())
            lines.append(f"{split:<11} step {step}: {label}{': ' if label else ''}{values}")
    measured = describe_cost(run.cost) if run.cost else f"{run.rank_hours:.3g} rank-hours"
    lines.append(f"cost        {run.seconds:,.0f} s, {measured}")
    return lines


def as_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row per run: its values, its metrics as <split>.<metric>, and its config as
    config.<key> in text form.
    """
    found = []
    for run in runs:
        row: dict[str, Any] = {
            "run": run.path, "state": run.state, "step": run.step, "chosen_step": run.chosen_step, "seed": run.seed,
            "tags": run.tags, "note": run.note, "rank_hours": run.rank_hours, "price": run.cost.get("price"),
            "samples_per_s": run.summary.get("throughput", {}).get("samples_per_s"),
            "commit": run.starts[-1].commit if run.starts else None,
        }  # fmt: skip
        for split in sorted({split for split, _ in run.evaluations}):
            row |= {f"{split}.{name}": float(value) for name, value in run.metrics(split)[1].items()}
        found.append(row | {f"config.{key}": str(value) for key, value in run.flat_config.items()})
    keys = dict.fromkeys(key for row in found for key in row)
    return [{key: row.get(key) for key in keys} for row in found]


def write_parquet(path: str, rows: list[dict[str, Any]]) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    storage.publish_bytes(path, buffer.getvalue())


def tag(run: Run, tags: Sequence[str], note: str | None = None) -> list[str]:
    """Add tags (a leading - removes one) and set the note. Return the run's tags."""
    kept = [each for each in run.tags if f"-{each}" not in tags]
    kept += [each for each in dict.fromkeys(tags) if not each.startswith("-") and each not in kept]
    content = {"tags": kept, "note": run.note if note is None else note}
    storage.publish_text(storage.join(run.path, TAGS), json.dumps(content, indent=1))
    return kept


def remove(run: Run, force: bool = False) -> None:
    """Delete the folder with its checkpoints.

    Raises:
        ConfigError: the run has a tag and `force` is not set, or its checkpoints are elsewhere.
        RunFolderHeldError: the run is active.
    """
    if run.tags and not force:
        raise ConfigError(f"{run.path} is tagged {', '.join(run.tags)}: add force=true to remove it anyway")
    if (folder := run.config.get("checkpoint", {}).get("folder")) and not force:
        raise ConfigError(
            f"{run.path} keeps its checkpoints in {folder}, which stays: add force=true to remove only the run folder"
        )
    if storage.is_local(run.path):
        take_lease(run.path, float(run.config.get("trainer", {}).get("lease_ttl_s", 120.0))).release()
    storage.remove(run.path)


def clean(run: Run, keep_days: float) -> list[str]:
    """Remove files older than `keep_days` and return their paths.

    The links to each rank's newest files are removed together with the start that they lead to.

    An object store does not record when a step was found damaged, so it is removed only with
    keep_days=0.

    Raises:
        RunFolderHeldError: the run is active.
    """
    folder = run.config.get("checkpoint", {}).get("folder") or storage.join(run.path, CHECKPOINTS)
    damaged = _damaged(folder, keep_days)
    starts: list[str] = []
    if storage.is_local(run.path):
        take_lease(run.path, float(run.config.get("trainer", {}).get("lease_ttl_s", 120.0))).release()
        starts = old_starts(os.path.join(run.path, LOGS), kept=0, days=keep_days)
    for path in damaged:
        storage.remove(path)
    remove_starts(starts)
    return [*damaged, *starts]


def _damaged(folder: str, keep_days: float) -> list[str]:
    names = storage.list_folder(folder)
    if storage.is_local(folder):
        paths = [storage.join(folder, name) for name in names if name.startswith(DAMAGED)]
        # Quarantine renames a folder, which is its last change of status.
        return [path for path in paths if os.stat(path).st_ctime < time.time() - keep_days * DAY_S]
    if keep_days:
        return []
    return [storage.join(folder, name) for name in names if _is_set_aside(storage.join(folder, name))]


def _is_set_aside(step: str) -> bool:
    """Return True if a step in an object store has only the manifest of a damaged step."""
    entries = storage.list_folder(step)
    return MANIFEST not in entries and any(entry.startswith(DAMAGED_MANIFEST) for entry in entries)


def _last_time(run: Run) -> float:
    return float(run.lines[-1]["time"]) if run.lines else 0.0


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M") if seconds else "-"
