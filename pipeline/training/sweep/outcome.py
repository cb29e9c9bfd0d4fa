"""Say what a sweep found: the trials ranked, what each knob explains, the finalists over their seeds, and the command of the winner."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from pipeline.runtime.pages.charts import Bar, Line, bar_chart, line_chart
from pipeline.runtime.pages.html import cards, document, figure, legend, scrolled, table
from pipeline.training.runs.compare import Comparison, compare
from pipeline.training.runs.folder import open_run
from pipeline.training.sweep.run import SweepResult
from pipeline.training.sweep.space import as_overrides
from pipeline.training.sweep.study import Trial

MOST_SHOWN = 10
LOG_FROM = 10.0  # times the smallest value of a knob: charts of wider ones have a logarithmic scale
NUM_BINS = 4  # of a range, for what a knob explains


def importance(trials: Sequence[Trial]) -> dict[str, float]:
    """Knob -> the share of the metric's variance between trials that its value alone explains (the correlation ratio, eta squared).

    Ranges are cut into NUM_BINS with equally many trials. Of the rung that most trials have reached; chance alone explains about
    (bins - 1) / (trials - 1), which is taken off. Empty where fewer than two bins would have two trials.
    """
    rung = min((trial.rung for trial in trials if trial.values), default=0)
    trials = [trial for trial in trials if math.isfinite(trial.values.get(rung, math.inf))]
    found = {}
    for key in dict.fromkeys(key for trial in trials for key in trial.point):
        having = [trial for trial in trials if key in trial.point]
        if len(having) >= 2 * NUM_BINS:
            found[key] = _explained([trial.point[key] for trial in having], [trial.values[rung] for trial in having])
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _explained(values: Sequence[object], metric: Sequence[float]) -> float:
    is_range = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    if is_range and len(set(values)) > NUM_BINS:
        edges = np.quantile(np.asarray(values, float), np.linspace(0, 1, NUM_BINS + 1)[1:-1])
        labels = np.searchsorted(edges, np.asarray(values, float), side="right")
    else:
        kinds = list(dict.fromkeys(map(repr, values)))
        labels = np.array([kinds.index(repr(value)) for value in values])
    numbers = np.asarray(metric)
    total = float(((numbers - numbers.mean()) ** 2).sum())
    if not total:
        return 0.0
    groups = [numbers[labels == label] for label in np.unique(labels)]
    between = sum(len(group) * float((group.mean() - numbers.mean()) ** 2) for group in groups)
    by_chance = (len(groups) - 1) / (len(numbers) - 1)
    return max(0.0, (between / total - by_chance) / (1 - by_chance))


def finalists(result: SweepResult, confidence: float = 0.98) -> Comparison | None:
    """The best trials over their seeds; None where there is only one seed, or one finalist."""
    if len(result.finalists) < 2:
        return None
    return compare([open_run(folder) for folders in result.finalists for folder in folders], "validation", confidence)


def winner_words(result: SweepResult) -> list[str]:
    return [*result.words, *as_overrides(result.ranked[0].point)]


def winner_command(result: SweepResult) -> str:
    words = [*winner_words(result), f"run_dir={result.run_dir}/winner"]
    return f"python -m pipeline train {' '.join(map(shlex.quote, words))}"


def _in_lines(result: SweepResult) -> str:
    """The winner's command, a word a line."""
    words = [*winner_words(result), f"run_dir={result.run_dir}/winner"]
    return " \\\n    ".join(["python -m pipeline train", *map(shlex.quote, words)]) + "\n"


def describe(result: SweepResult) -> str:
    ranked, keys = result.ranked, list(dict.fromkeys(key for trial in result.trials for key in trial.point))
    rows = [["", "trial", result.metric, "state", *keys]]
    for place, trial in enumerate(ranked[:MOST_SHOWN], start=1):
        rows.append(
            [
                str(place),
                f"{trial.number:04d}",
                f"{result.sign * trial.value:.5f}",
                trial.state,
                *(_cell(trial, key) for key in keys),
            ]
        )
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if more := len(ranked) - MOST_SHOWN:
        lines += [f"and {more} more"] if more > 0 else []
    states = {state: sum(trial.state == state for trial in result.trials) for state in ("complete", "pruned", "failed")}
    share = 100 * result.steps_trained / max(result.steps_of_all, 1)
    lines.append(
        f"trials      {len(result.trials)}: " + ", ".join(f"{count} {state}" for state, count in states.items() if count)
        + f"; {result.steps_trained:,} of {result.steps_of_all:,} steps trained ({share:.0f} %)"
    )  # fmt: skip
    if explained := importance(result.trials):
        lines.append(
            "importance  "
            + ", ".join(f"{key} {100 * share:.0f} %" for key, share in explained.items())
            + " of the spread"
        )
    if compared := finalists(result):
        lines += ["finalists   over their seeds:", *(f"  {line}" for line in compared.as_text().splitlines())]
    lines.append(f"page        {result.run_dir}/sweep.html")
    lines.append(f"next        {winner_command(result)}")
    return "\n".join(lines)


def _is_wide(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether values of a knob, the first of each pair, spread so far that a logarithmic scale tells them apart."""
    low, high = min(x for x, _ in pairs), max(x for x, _ in pairs)
    return low > 0 and high / low >= LOG_FROM


def _finalists_section(result: SweepResult) -> Iterator[str]:
    compared = finalists(result)
    if compared is not None:
        yield "<h2>The finalists over their seeds</h2>"
        yield scrolled(compared.as_text(), "the finalists compared")


def _cell(trial: Trial, key: str) -> str:
    value = trial.point.get(key, "-")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def render_page(result: SweepResult, title: str) -> str:
    """Trials over time, each knob against the metric, and the table."""
    ranked, keys = result.ranked, list(dict.fromkeys(key for trial in result.trials for key in trial.point))
    in_order = sorted(ranked, key=lambda trial: trial.number)
    points = [(float(trial.number), result.sign * trial.value) for trial in in_order]
    best = np.minimum.accumulate([trial.value for trial in in_order]) * result.sign
    drawn = [figure("Trials, and the best so far", line_chart(
        "metric of each trial", result.metric,
        [Line("trial", "train", points, marks=True, joined=False),
         Line("best so far", "validation", [(x, float(y)) for (x, _), y in zip(points, best, strict=True)])], "trial",
    ))]  # fmt: skip
    for key in keys:
        pairs = [
            (float(trial.point[key]), result.sign * trial.value)
            for trial in in_order
            if isinstance(trial.point.get(key), (int, float)) and math.isfinite(trial.value)
        ]
        if pairs:
            line = Line(key, "validation", sorted(pairs), marks=True, joined=False)
            drawn.append(
                figure(
                    key, line_chart(f"{result.metric} over {key}", result.metric, [line], key, log_x=_is_wide(pairs))
                )
            )
    rows = [
        [str(place), f"{trial.number:04d}", f"{result.sign * trial.value:.5f}", str(trial.rung + 1), trial.state, *(_cell(trial, key) for key in keys)]
        for place, trial in enumerate(ranked, start=1)
    ]  # fmt: skip
    explained = [Bar(key, share) for key, share in importance(result.trials).items()]
    body = [
        f"<h1>Sweep {escape(title)}</h1>",
        cards([
            (f"{result.sign * ranked[0].value:.4f}", f"{result.metric} of the best, trial {ranked[0].number:04d}"),
            (str(len(result.trials)), "trials"),
            (f"{result.steps_trained / max(result.steps_of_all, 1):.0%}", "of the steps of training all to the end"),
        ]),
        legend((("train", "each trial, at the last rung that it reached"), ("validation", "the best so far"))),
        f'<div class="charts">{"".join(drawn)}</div>',
        *(["<h2>What each knob explains</h2>",
           figure("Share of the spread between trials", bar_chart("what each knob explains", explained, form=".0%"))] if explained else []),
        *_finalists_section(result),
        "<h2>The winner</h2>", scrolled(_in_lines(result), "the command that trains the winner"),
        "<h2>Trials</h2>", table(("", "trial", result.metric, "rungs", "state", *keys), rows, (0, 2, 3), "trials"),
    ]  # fmt: skip
    return document(f"Sweep {title}", body)
