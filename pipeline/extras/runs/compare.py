"""Compare runs from their folders: how their configs differ, and whether one is better, with how
much confidence.

Runs whose configs differ only in their seed are one variant, trained several times. The first run's
variant is the baseline of all other variants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_uppercase
from typing import Any

from pipeline.checkpoint.retention import is_higher_better, metric_of
from pipeline.extras.runs.evaluation_stats import EvaluationStats, read_stats
from pipeline.extras.runs.folder import Run, describe_plan
from pipeline.extras.runs.intervals import Difference, Floats, difference, resampled_measures, same_rows
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.shell_words import word

# keys and sections that may differ within a variant
SAME_VARIANT = ("name", "run_dir", "from_run", "trainer.seed")
SAME_VARIANT_SECTIONS = ("paths.", "logger.")
SPLITS = ("test", "validation")  # in order of preference
# two trainings of one config may differ by this much with several ranks, by the order of sums
ROUNDING = 5e-6
MIN_WIDTH = 22
LEFT_OUT = ("num_samples", "num_groups", "num_one_class_groups", "label_rate")


@dataclass(frozen=True)
class Variant:
    """A variant, which the text calls by its `letter`. Its runs differ only in their seeds."""

    letter: str
    runs: list[Run]

    @property
    def by_seed(self) -> dict[int, str]:
        """Return seed -> run. If two runs have the same seed, the second run gets another number."""
        found: dict[int, str] = {}
        for run in self.runs:
            seed = run.seed if run.seed not in found else -1 - len(found)
            found[seed] = run.path
        return found

    @property
    def label(self) -> str:
        return f"{self.letter}  {', '.join(run.path for run in self.runs)}"


@dataclass(frozen=True)
class MetricRow:
    """One metric of every variant: means over runs, and differences from the baseline if the rows
    are known.
    """

    name: str
    means: list[float]  # NaN if no run was measured by it
    differences: list[Difference | None] = field(default_factory=list)  # the baseline's is None


@dataclass(frozen=True)
class Comparison:
    """The result. `config`: key -> the values of the variants, for keys whose values differ.
    `others`: facts of each variant that are not metrics.
    """

    split: str
    variants: list[Variant]
    config: dict[str, list[str]]
    metrics: list[MetricRow]
    others: dict[str, list[str]]
    notes: list[str]
    confidence: float

    def as_text(self) -> str:
        lines = [variant.label for variant in self.variants]
        lines += _section("config", self.config, self.variants)
        lines.append(f"\n{f'{self.split} split':<24}" + "".join(f"{variant.letter:>12}" for variant in self.variants))
        for row in self.metrics:
            lines.append(f"  {row.name:<22}" + "".join(f"{_number(mean):>12}" for mean in row.means))
            lines += [
                f"  {'':<22}{describe(row.name, variant.letter, found)}"
                for variant, found in zip(self.variants, row.differences, strict=True)
                if found is not None
            ]
        lines += _section("also", self.others, self.variants)
        return "\n".join([*lines, *(f"\nnote: {note}" for note in self.notes)])

    def as_rows(self) -> list[dict[str, Any]]:
        """Return a row for each variant and metric."""
        return [
            {
                "variant": variant.letter,
                "runs": [run.path for run in variant.runs],
                "split": self.split,
                "metric": row.name,
                "mean": row.means[index],
                "difference": found.value if found else None,
                "half_width": found.half_width if found else None,
                "confidence": self.confidence if found else None,
                "is_significant": found.is_significant if found else None,
                "is_called": found.is_called if found else None,
                "seeds_known": found.seeds_known if found else None,
            }
            for row in self.metrics
            for index, (variant, found) in enumerate(zip(self.variants, row.differences, strict=True))
        ]


def compare(runs: Sequence[Run], split: str | None = None, confidence: float = 0.98) -> Comparison:
    """Return the comparison of the runs. Raises ConfigError for fewer than two runs, a run that is
    named twice, and a split on which no run was measured.
    """
    if len(runs) < 2:
        raise ConfigError("compare needs at least two runs: python -m pipeline runs compare RUN RUN")
    if len({run.path for run in runs}) < len(runs):
        raise ConfigError(f"a run is named twice among {', '.join(run.path for run in runs)}: name each once")
    variants, split = group(runs), split or choose_split(runs)
    found = {run.path: run.metrics(split) for run in runs}
    if not any(metrics for _, metrics in found.values()):
        raise ConfigError(
            f"none of these runs was measured on the {split} split: python -m pipeline evaluate run=... split={split}"
        )
    stats, notes = read_all_stats(runs, split, {path: step for path, (step, _) in found.items()})
    labels, rows = labels_of(runs), []
    for label in labels:
        of_label = {run.path: run.of_label(found[run.path][1], label) for run in runs}
        known = {path: each.of_label(label) for path, each in stats.items() if of_label[path]}
        paired = {path: each for path, each in known.items() if each is not None}
        if not same_rows([each.blocks for each in paired.values()]):
            whose = f" for {label}" if len(labels) > 1 else ""
            notes.append(
                f"no intervals{whose}: the runs were measured on other rows of the {split} split, so they cannot be paired"
            )
            paired = {}
        for row in _rows_of(variants, of_label, paired, confidence):
            rows.append(replace(row, name=f"{label}/{row.name}") if len(labels) > 1 else row)
    return Comparison(
        split, variants, differing_config(variants), rows, _others(variants),
        notes + _notes(variants, found, any(any(row.differences) for row in rows)), confidence,
    )  # fmt: skip


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Return the labels that any of the runs learns, in the order of the runs and main labels first."""
    return list(dict.fromkeys(label for run in runs for label in run.labels))


def _rows_of(
    variants: Sequence[Variant],
    metrics: dict[str, dict[str, float]],
    stats: dict[str, EvaluationStats],
    confidence: float,
) -> Iterator[MetricRow]:
    """Yield a row for each metric of one label. metrics, stats: path -> what is known of the label."""
    resampled: dict[str, dict[str, Floats]] = {}
    if stats:
        blocks = {path: each.blocks for path, each in stats.items()}
        resampled = resampled_measures(blocks, {path: each.auc for path, each in stats.items()})
    is_known = [all(run.path in stats for run in each.runs) for each in variants]
    for name in dict.fromkeys(name for each in metrics.values() for name in each if name not in LEFT_OUT):
        values = [{run.path: metrics[run.path].get(name, math.nan) for run in each.runs} for each in variants]
        measured = {path: value for each in values for path, value in each.items()}
        differences = [
            difference(variants[0].by_seed, each.by_seed, measured, resampled[name], confidence)
            if each is not variants[0] and name in resampled and is_known[0] and is_known[number]
            else None
            for number, each in enumerate(variants)
        ]
        yield MetricRow(name, [sum(each.values()) / len(each) for each in values], differences)


def group(runs: Sequence[Run]) -> list[Variant]:
    """Group the runs into variants, in the order of the runs."""
    variants: dict[str, list[Run]] = {}
    for run in runs:
        variants.setdefault(repr(sorted(_identity(run).items())), []).append(run)
    letters = [*ascii_uppercase, *(f"V{number}" for number in range(27, 27 + len(variants)))]
    return [Variant(letter, each) for letter, each in zip(letters, variants.values(), strict=False)]


def _identity(run: Run) -> dict[str, str]:
    return {
        key: str(value)
        for key, value in run.flat_config.items()
        if key not in SAME_VARIANT and not key.startswith(SAME_VARIANT_SECTIONS)
    }


def choose_split(runs: Sequence[Run]) -> str:
    """Return the first of SPLITS on which all runs were measured; if there is none, the split on
    which most runs were measured.
    """
    counts = {split: sum(bool(run.metrics(split)[1]) for run in runs) for split in SPLITS}
    return max(SPLITS, key=lambda split: (counts[split], -SPLITS.index(split)))


def read_all_stats(
    runs: Sequence[Run], split: str, steps: dict[str, int]
) -> tuple[dict[str, EvaluationStats], list[str]]:
    """Return path -> statistics of the run's evaluation, and "". If any run has no statistics,
    return an empty mapping, and the reason.
    """
    missing = [run.path for run in runs if (split, steps[run.path]) not in run.stats]
    if missing:
        how = f"python -m pipeline evaluate {word('run', missing[0])} split={split} step={steps[missing[0]]}"
        return {}, [f"no intervals: {missing[0]} has no statistics of the rows that it was measured on; {how}"]
    return {run.path: read_stats(run.stats[split, steps[run.path]]) for run in runs}, []


def differing_config(variants: Sequence[Variant]) -> dict[str, list[str]]:
    """Return key -> the values of the variants, for keys whose values differ."""
    configs = [_identity(variant.runs[0]) for variant in variants]
    keys = sorted({key for config in configs for key in config})
    return {
        key: [config.get(key, "-") for config in configs]
        for key in keys
        if len({config.get(key, "-") for config in configs}) > 1
    }


def describe(metric: str, letter: str, found: Difference) -> str:
    """Return a sentence: B is better by 0.0012 ± 0.0004 (98 %)."""
    if max(abs(found.value), found.half_width) < ROUNDING:
        return f"{letter}: the same up to rounding"
    amount = f"{abs(found.value):.{_places(found.half_width)}f} ± {found.half_width:.{_places(found.half_width)}f}"
    chance = f"({100 * found.confidence:g} %)"
    if not found.is_significant:
        return f"{letter}: no difference seen, {'+' if found.value >= 0 else '-'}{amount} {chance}"
    better = (found.value > 0) == is_higher_better(metric)
    word = (
        ("higher" if found.value > 0 else "lower")
        if metric_of(metric) == "calibration"
        else "better"
        if better
        else "worse"
    )
    if not found.seeds_known:
        return (
            f"{letter}'s one model is {word} on these rows by {amount} {chance}; one seed says nothing about its config"
        )
    return f"{letter} is {word} by {amount} {chance}"


def _places(half_width: float) -> int:
    """Return the number of decimal places that shows two digits of the half width."""
    return min(8, max(1, 1 - math.floor(math.log10(half_width)))) if half_width > 0 else 4


def _others(variants: Sequence[Variant]) -> dict[str, list[str]]:
    """Return facts other than quality. A fact is of the variant's first run, or is the sum or mean
    over its runs.
    """

    def mean(runs: list[Run], key: str) -> str:
        values = [run.summary["throughput"][key] for run in runs if key in run.summary.get("throughput", {})]
        return f"{sum(values) / len(values):,.4g}" if values else "-"

    def first(variant: Variant, value: Any) -> str:
        return str(value) if value else "-"

    rows: dict[str, list[str]] = {
        "seeds": [", ".join(str(run.seed) for run in each.runs) for each in variants],
        "steps": [", ".join(dict.fromkeys(str(run.chosen_step) for run in each.runs)) for each in variants],
        "samples/s": [mean(each.runs, "samples_per_s") for each in variants],
        "input stall, %": [mean(each.runs, "input_stall_percent") for each in variants],
        "memory a rank, GiB": [mean(each.runs, "peak_memory_gb") for each in variants],
        "rank-hours": [f"{sum(run.rank_hours for run in each.runs):.3g}" for each in variants],
        "data set": [first(each, each.runs[0].config.get("data", {}).get("path")) for each in variants],
        "git": [first(each, each.runs[0].starts and each.runs[0].starts[-1].commit) for each in variants],
        "plan": [first(each, describe_plan(each.runs[0]).partition(": ")[2].partition(";")[0]) for each in variants],
    }
    return {key: values for key, values in rows.items() if set(values) != {"-"}}


def _notes(
    variants: Sequence[Variant], found: dict[str, tuple[int, dict[str, float]]], has_intervals: bool
) -> list[str]:
    notes = []
    if len(variants) == 1:
        values = [metrics.get("ne", math.nan) for _, metrics in found.values()]
        spread = f"; their NE differs by {max(values) - min(values):.5f}" if all(map(math.isfinite, values)) else ""
        notes.append(f"these runs differ only in their seed, so they do not compare variants{spread}")
    elif has_intervals and any(
        each is not variants[0] and len(each.runs) + len(variants[0].runs) == 2 for each in variants
    ):
        notes.append(
            "one seed of each: the intervals are about these models on other rows. Another seed moves a model's metrics "
            "too, often by more; train each with the same three seeds (trainer.seed=1 run_dir=...) and name all the runs"
        )
    for run in (run for variant in variants for run in variant.runs):
        if run.state != "finished":
            notes.append(f"{run.path} is {run.state}, at step {run.step}")
    return notes


def _section(title: str, rows: dict[str, list[str]], variants: Sequence[Variant]) -> list[str]:
    if not rows:
        return []
    width = max(len(key) for key in rows)
    columns = [max(MIN_WIDTH, *map(len, cells)) for cells in zip(*rows.values(), strict=True)]
    header = f"\n{title:<{width + 2}}" + _cells([each.letter for each in variants], columns)
    return [header, *(f"  {key:<{width}}" + _cells(values, columns) for key, values in rows.items())]


def _cells(values: list[str], widths: list[int]) -> str:
    return "".join(f"  {value:<{width}}" for value, width in zip(values, widths, strict=True)).rstrip()


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.5g}" if abs(value) < 1000 else f"{value:,.0f}"
