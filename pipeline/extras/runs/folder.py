"""Read a run folder: config, summary, metrics, evaluations, plan, starts and tags, if they exist
(without torch).

A run folder may be on a disk or be a copy in an object store (s3://...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cached_property
from typing import Any

from pipeline.config.saved_jobs import flatten, plain_values
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.extras.price.cost import cost_of_run
from pipeline.extras.runs.evaluation_stats import list_stats
from pipeline.runtime.errors import ConfigError, DataError, PlanError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.lease import held_by
from pipeline.training.summary import by_label

CONFIG, METRICS, SUMMARY, PLAN, STARTS, TAGS, TABLES, IMPORTANCE = (
    "config.yaml",
    "metrics.jsonl",
    "summary.json",
    "plan.json",
    "starts.jsonl",
    "tags.json",
    "tables.json",
    "importance.json",
)
SOURCE = "source"  # a folder: what the last start was started from
PLUGINS, FACTS = "source/plugins", "source/facts.json"
EVALUATION = re.compile(r"evaluation\.(\w+)\.step_(\d+)\.json")
DEEPEST = 4  # levels of folders below the listed one


@dataclass(frozen=True)
class Start:
    """A start of a run, as training recorded it. time: UTC in ISO 8601. from_step: the step from
    which it continued.
    """

    time: str
    from_step: int
    command: str
    host: str
    world_size: int
    version: str
    commit: str  # ends in -dirty if files differed from it; empty outside a checkout


@dataclass(frozen=True)
class Run:
    """A run folder. Each property is read once, on first use.

    has_ended: the caller, which still holds the lease of the run, has written the summary.
    """

    path: str
    has_ended: bool = False

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the saved config as plain values, so that runs of other releases or with plugins
        can be read.
        """
        return plain_values(storage.read_text(storage.join(self.path, CONFIG)))

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """Return the config as a mapping of dotted keys to values."""
        return dict(flatten(self.config))

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl in order, without incomplete lines. If the run has
        several labels, the main label's metrics are there by their plain names too.
        """
        return [with_main(line) for line in self._json_lines(METRICS) if {"kind", "step", "time"} <= line.keys()]

    @cached_property
    def dataset(self) -> Dataset | None:
        """Return the data set that the run was trained on, if it still exists."""
        try:
            return load_dataset(str(self.config.get("data", {}).get("path", "")))
        except DataError:
            return None

    @cached_property
    def labels(self) -> list[str]:
        """Return the labels that the run learns, the main label first."""
        measured = [*self.lines, *self.evaluations.values()]
        found = dict.fromkeys(label for metrics in measured for label in by_label(metrics) if label)
        name = str(self.summary.get("label") or self.config.get("data", {}).get("columns", {}).get("label", ""))
        if self.dataset and name not in {label.name for label in self.dataset.all_labels}:
            name = self.dataset.label
        return list(found) or [name]

    def name_of(self, metric: str, label: str) -> str:
        """Return the name of a label's metric in `lines`; "" if the run does not learn the label."""
        several = f"{label}/{metric}" if len(self.labels) > 1 else metric
        return several if label in self.labels else ""

    def of_label(self, metrics: dict[str, float], label: str) -> dict[str, float]:
        """Return the label's metrics by their plain names; empty if the run does not learn the label."""
        of_labels = by_label(metrics)
        return of_labels.get("", of_labels.get(label, {})) if label in self.labels else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Return the summary; empty until the run has ended."""
        return self._json(SUMMARY)

    @cached_property
    def starts(self) -> list[Start]:
        """Return the starts of the current training, oldest first; empty if an earlier release
        wrote the run.
        """
        keys = [field.name for field in fields(Start)]
        lines = [line for line in self._json_lines(STARTS) if set(keys) <= line.keys()]
        first = max((number for number, line in enumerate(lines) if not line["from_step"]), default=0)
        return [Start(**{key: line[key] for key in keys}) for line in lines[first:]]

    @cached_property
    def tags(self) -> list[str]:
        return [str(tag) for tag in self._json(TAGS).get("tags", [])]

    @cached_property
    def note(self) -> str:
        return str(self._json(TAGS).get("note", ""))

    @cached_property
    def evaluations(self) -> dict[tuple[str, int], dict[str, float]]:
        """Return (split, step) -> metrics of complete splits, measured by training or by
        `evaluate`. If both measured a step, the values of `evaluate` are used.
        """
        found = {("validation", line["step"]): _numbers(line) for line in self.lines if line["kind"] == "validation"}
        for name in storage.list_folder(self.path):
            if match := EVALUATION.fullmatch(name):
                found[match[1], int(match[2])] = _numbers(self._json(name))
        return found

    @cached_property
    def stats(self) -> dict[tuple[str, int], str]:
        """Return (split, step) -> the file with the evaluation's statistics."""
        return list_stats(self.path)

    @cached_property
    def tables(self) -> dict[str, dict[str, Any]]:
        """Return table -> rows, dim, updated, norm (table_stats.py); empty if the run has not
        ended.
        """
        return dict(self._json(TABLES).get("tables", {}))

    @cached_property
    def _tables_of_features(self) -> dict[str, str]:
        groups = self.config.get("tables", {})
        return {
            feature: name
            for name, values in groups.items()
            if isinstance(values, dict)
            for feature in values.get("feature_names") or []
        }

    def table_of(self, feature: str) -> dict[str, Any]:
        """Return the values of `tables` for the table of a feature; empty if it is unknown."""
        return self.tables.get(self._tables_of_features.get(feature, feature), {})

    @cached_property
    def importances(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Return label -> feature -> (increase of NE if the feature's values are shuffled, standard
        error), from evaluate importance_rows=...; empty if it was not measured.
        """
        found = self._json(IMPORTANCE)
        if "features" not in found:
            return {}
        of_labels = {found.get("label", self.labels[0]): found, **found.get("others", {})}
        return {
            label: {name: (each["ne_increase"], each["error"]) for name, each in values["features"].items()}
            for label, values in of_labels.items()
        }

    @property
    def importance(self) -> dict[str, tuple[float, float]]:
        """Return `importances` of the first label that was measured."""
        return next(iter(self.importances.values()), {})

    @property
    def importance_of(self) -> tuple[str, int, int]:
        """Return the split, step and number of rows with which `importance` was measured."""
        found = self._json(IMPORTANCE)
        return str(found.get("split", "")), int(found.get("step", 0)), int(found.get("rows", 0))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return what the bits of the last start depend on in addition to the config; empty if it is unknown."""
        return self._json(FACTS)

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def seed(self) -> int:
        return int(self.config.get("trainer", {}).get("seed", 0))

    @property
    def samples_a_step(self) -> int:
        return int(self.config.get("trainer", {}).get("global_batch_size", 1))

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)

    @property
    def chosen_step(self) -> int:
        """Return the step that represents the run: the best step if the run keeps it, otherwise the
        last step.
        """
        best = self.summary.get("best_step")
        return self.step if best is None else int(best)

    @cached_property
    def state(self) -> str:
        """Return "running", "finished", or "stopped" (neither of the two)."""
        if not self.has_ended and held_by(self.path, float(self.config.get("trainer", {}).get("lease_ttl_s", 120.0))):
            return "running"
        return "finished" if self.summary and self.summary.get("step") == self.step else "stopped"

    @property
    def seconds(self) -> float:
        """Return the sum of seconds from each start to its last line. If no starts are recorded,
        count from the first line to the last.
        """
        times = [float(line["time"]) for line in self.lines]
        begins = [datetime.fromisoformat(start.time).timestamp() for start in self.starts] or times[:1]
        ends = [*begins[1:], float("inf")]
        spans = (
            (begin, [time for time in times if begin <= time < end]) for begin, end in zip(begins, ends, strict=True)
        )
        return sum(max(within) - begin for begin, within in spans if within)

    @property
    def rank_hours(self) -> float:
        """Return the cost of the run: hours times number of ranks (GPU hours if each rank has a GPU)."""
        ranks = max((start.world_size for start in self.starts), default=int(self.config.get("world_size", 1)))
        return self.seconds / 3600 * ranks

    @cached_property
    def cost(self) -> dict[str, Any]:
        """Return the measured cost (extras/price); empty if it was not measured."""
        return cost_of_run(self.path)

    def metrics(self, split: str) -> tuple[int, dict[str, float]]:
        """Return (step, metrics) of the chosen step, or else of the last measured step; (0, {}) if
        no step was measured.
        """
        steps = [step for found, step in self.evaluations if found == split]
        if not steps:
            return 0, {}
        step = self.chosen_step if self.chosen_step in steps else max(steps)
        return step, self.evaluations[split, step]

    def _json_lines(self, name: str) -> list[dict[str, Any]]:
        """Read lines of JSON, without incomplete lines."""
        path, found = storage.join(self.path, name), []
        for line in storage.read_text(path).splitlines() if storage.is_file(path) else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [line for line in found if isinstance(line, dict)]

    def _json(self, name: str) -> dict[str, Any]:
        """Read JSON; empty if the file is missing or cannot be read."""
        path = storage.join(self.path, name)
        try:
            values = json.loads(storage.read_text(path)) if storage.is_file(path) else {}
        except ValueError:
            return {}
        return values if isinstance(values, dict) else {}


def open_run(path: str) -> Run:
    """Open a run folder. Raises ConfigError if the folder is not a run folder."""
    path = path.rstrip("/")
    if not storage.is_file(storage.join(path, CONFIG)):
        raise ConfigError(
            f"{path} is not a run folder: it has no {CONFIG}; `python -m pipeline runs list FOLDER` finds run folders"
        )
    return Run(path)


def find_runs(root: str) -> list[Run]:
    """Return the run folders at or below `root`, sorted by path.

    Raises ConfigError if the folder does not exist.
    """
    if not storage.is_folder(root):
        raise ConfigError(f"{root} is not a folder: give the folder of your runs, as in `runs list runs`")
    return [Run(path) for path in sorted(_run_folders(root.rstrip("/"), DEEPEST))]


def _run_folders(folder: str, deeper: int) -> Iterator[str]:
    """Yield run folders, without searching inside a run."""
    names = storage.list_folder(folder)
    if CONFIG in names:
        if METRICS in names or SUMMARY in names:
            yield folder
        return
    for name in names if deeper else []:
        below = storage.join(folder, name)
        if not name.startswith(".") and storage.is_folder(below):
            yield from _run_folders(below, deeper - 1)


def describe_plan(run: Run) -> str:
    """Describe the run's plan in one line; empty if there is no readable plan."""
    from pipeline.planner.explain import summarize
    from pipeline.planner.plan_record import read_view

    path = storage.join(run.path, PLAN)
    try:
        return summarize(read_view(path).description) if storage.is_file(path) else ""
    except PlanError:
        return ""


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the values that are numbers."""
    return with_main(
        {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) and name not in ("step", "time")
        }
    )


def with_main(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values. If names are such as label/ne (several labels), add the main label's
    metrics with their plain names.
    """
    of_labels = by_label(values)
    return values if "" in of_labels else values | next(iter(of_labels.values()))
