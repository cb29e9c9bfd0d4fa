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
from pipeline.planner.explain import print_grid
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.shell_words import word

# keys and sections that may differ within a variant
SAME_VARIANT = ("name", "run_dir", "from_run", "trainer.seed")
SAME_VARIANT_SECTIONS = ("paths.", "logger.")
SPLITS = ("test", "validation")  # in order of preference
# two trainings of one config may differ by this much with several ranks, by the order of sums
ROUNDING = 5e-6
MAX_WIDTH = 28  # characters of a value on a terminal
NONE = "-"
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
    def paths(self) -> str:
        return ", ".join(run.path for run in self.runs)


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

    @property
    def ranked_by(self) -> MetricRow:
        """Return the metric that ranks the variants: the first one that most of them have. The main
        label's NE is the first of a click model.
        """
        rows = [row for row in self.metrics if metric_of(row.name) != "calibration"] or self.metrics
        return min(rows, key=lambda row: sum(map(math.isnan, row.means)))

    @property
    def ranking(self) -> list[tuple[Variant, str, str]]:
        """Return each variant with its value of `ranked_by` and its difference from the baseline, best first."""
        row = self.ranked_by
        sign = -1.0 if is_higher_better(row.name) else 1.0
        found = list(zip(self.variants, row.means, row.differences, strict=True))
        found.sort(key=lambda each: (math.isnan(each[1]), sign * each[1]))
        return [
            (variant, _number(mean), describe(row.name, difference) if difference else self._why_none(variant))
            for variant, mean, difference in found
        ]

    def _why_none(self, variant: Variant) -> str:
        return "" if variant is not self.variants[0] or not self._has_intervals else "baseline"

    @property
    def _has_intervals(self) -> bool:
        return any(difference for row in self.metrics for difference in row.differences)

    @property
    def against(self) -> str:
        """Return the heading of differences."""
        return f"against {self.variants[0].letter}, ± {100 * self.confidence:g} %"

    def metric_rows(self) -> list[list[str]]:
        """Return the metrics that do not rank. AUC and calibration have a second row with
        differences; a log loss has none, because it is NE times a number that all runs share.
        """
        rows = []
        for row in self.metrics:
            if row is not self.ranked_by:
                rows.append([row.name, *map(_number, row.means)])
                if any(row.differences) and metric_of(row.name) != "logloss":
                    rows.append(["  " + self.against, *(signed(each) if each else "" for each in row.differences)])
        return rows

    def shared_config(self) -> dict[str, list[str]]:
        """Return the differing keys that all variants have."""
        return {key: values for key, values in self.config.items() if NONE not in values}

    def own_config(self) -> list[str]:
        """Return a line for each variant with the keys that not every variant has, for example of its model."""
        own = {key: values for key, values in self.config.items() if NONE in values}
        lines = []
        for index, variant in enumerate(self.variants):
            keys = [f"{key}={values[index]}" for key, values in own.items() if values[index] != NONE]
            lines += [f"only {variant.letter}: {', '.join(keys)}"] if keys else []
        return lines

    def common_facts(self) -> str:
        """Return the facts that are equal for all variants."""
        common = [f"{key}: {values[0]}" for key, values in self.others.items() if len(set(values)) == 1]
        return f"the same for all: {'; '.join(common)}" if common and len(self.variants) > 1 else ""

    def differing_facts(self) -> dict[str, list[str]]:
        return {key: values for key, values in self.others.items() if len(set(values)) > 1 or len(self.variants) == 1}

    def as_text(self) -> str:
        letters = [variant.letter for variant in self.variants]
        rows = [
            [str(place), variant.letter, value, difference, variant.paths]
            for place, (variant, value, difference) in enumerate(self.ranking, 1)
        ]
        headings = ("", f"{self.split} split", self.ranked_by.name, self.against, "runs")
        parts = [print_grid(headings, rows, right=headings[2:3])]
        if metrics := self.metric_rows():
            parts.append(print_grid(("metric", *letters), metrics, right=letters))
        if shared := self.shared_config():
            parts.append(print_grid(("config", *letters), _cut(shared)))
        parts += self.own_config()
        if facts := self.differing_facts():
            parts.append(print_grid(("also", *letters), _cut(facts)))
        return "\n\n".join([*parts, *filter(None, [self.common_facts()]), *(f"note: {note}" for note in self.notes)])

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
        key: [config.get(key, NONE) for config in configs]
        for key in keys
        if len({config.get(key, NONE) for config in configs}) > 1
    }


def describe(metric: str, found: Difference) -> str:
    """Return a few words: 0.0012 ± 0.0004 better."""
    if max(abs(found.value), found.half_width) < ROUNDING:
        return "the same up to rounding"
    if not found.is_significant:
        return f"no difference seen ({signed(found)})"
    word = "better" if (found.value > 0) == is_higher_better(metric) else "worse"
    return f"{signed(found).lstrip('+-')} {word}"


def signed(found: Difference) -> str:
    """Return a difference with half of its interval: +0.0012 ± 0.0004."""
    places = _places(found.half_width)
    return f"{found.value:+.{places}f} ± {found.half_width:.{places}f}"


def _places(half_width: float) -> int:
    """Return the number of decimal places that shows two digits of the half width."""
    return min(8, max(1, 1 - math.floor(math.log10(half_width)))) if half_width > 0 else 4


def _others(variants: Sequence[Variant]) -> dict[str, list[str]]:
    """Return facts other than quality. A fact is of the variant's first run, or is the sum or mean
    over its runs.
    """

    def mean(runs: list[Run], key: str) -> str:
        values = [run.summary["throughput"][key] for run in runs if key in run.summary.get("throughput", {})]
        value = sum(values) / len(values) if values else math.nan
        return NONE if math.isnan(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    def price(runs: list[Run]) -> str:
        values = [run.cost["price"] for run in runs if run.cost.get("price") is not None]
        return f"{sum(values):.4g}" if values else "-"

    def first(variant: Variant, value: Any) -> str:
        return str(value) if value else "-"

    rows: dict[str, list[str]] = {
        "seeds": [", ".join(str(run.seed) for run in each.runs) for each in variants],
        "steps": [", ".join(dict.fromkeys(f"{run.chosen_step:,}" for run in each.runs)) for each in variants],
        "samples": [f"{each.runs[0].chosen_step * each.runs[0].samples_a_step:,}" for each in variants],
        "samples/s": [mean(each.runs, "samples_per_s") for each in variants],
        "input stall, %": [mean(each.runs, "input_stall_percent") for each in variants],
        "memory a rank, GiB": [mean(each.runs, "peak_memory_gb") for each in variants],
        "rank-hours": [f"{sum(run.rank_hours for run in each.runs):.3g}" for each in variants],
        "price": [price(each.runs) for each in variants],
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


def _cut(rows: dict[str, list[str]]) -> list[list[str]]:
    """Return rows for a terminal. The page has complete values."""
    return [
        [key, *(value if len(value) <= MAX_WIDTH else f"{value[: MAX_WIDTH - 1]}…" for value in values)]
        for key, values in rows.items()
    ]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.5g}" if abs(value) < 1000 else f"{value:,.0f}"
