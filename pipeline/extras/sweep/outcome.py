"""Report a sweep: ranked trials, importance of knobs, finalists, the winner's command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from pipeline.extras.pages.charts import Bar, Line, bar_chart, line_chart
from pipeline.extras.runs.compare import Comparison, compare
from pipeline.extras.runs.folder import open_run
from pipeline.extras.sweep.run import SweepResult, cost_of_trial, value_of
from pipeline.extras.sweep.study import as_overrides
from pipeline.runtime.pages.html import cards, document, figure, legend, scrolled, table

if TYPE_CHECKING:
    import optuna

MAX_SHOWN = 10
# times the smallest value of a knob; charts of wider knobs have a logarithmic scale
LOG_FROM = 10.0
EDGE = 0.1  # share of a knob's range, of its logarithm for a logarithmic knob, that is an end
MIN_TRIALS = 8  # for the importance of knobs


def importance(study: optuna.Study) -> dict[str, float]:
    """Return Optuna's importance (PED-ANOVA) at the first rung, for each knob that all trials have."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    trials = [trial for trial in study.get_trials(deepcopy=False) if trial.intermediate_values]
    first = min((min(trial.intermediate_values) for trial in trials), default=0)
    trials = [trial for trial in trials if math.isfinite(trial.intermediate_values.get(first, math.nan))]
    if len(trials) < MIN_TRIALS:
        return {}
    view = optuna.create_study(direction=study.direction)
    for trial in trials:
        value, spaces = trial.intermediate_values[first], trial.distributions
        view.add_trial(optuna.trial.create_trial(params=trial.params, distributions=spaces, value=value))
    return get_param_importances(view, evaluator=PedAnovaImportanceEvaluator())


def finalists(result: SweepResult, confidence: float = 0.98) -> Comparison | None:
    """Compare the best trials over their seeds. None if there is only one seed or one finalist."""
    if len(result.finalists) < 2:
        return None
    return compare([open_run(folder) for folders in result.finalists for folder in folders], "validation", confidence)


def on_edges(result: SweepResult) -> list[str]:
    """Return a remark for each knob whose best value is at an end of its range: values outside may be better."""
    best, found = result.ranked[0], []
    for key, space in best.distributions.items():
        low, high = getattr(space, "low", None), getattr(space, "high", None)
        if low is None or high is None or low == high:
            continue
        value, scale = best.params[key], math.log if getattr(space, "log", False) else float
        place = (scale(value) - scale(low)) / (scale(high) - scale(low))
        if min(place, 1 - place) < EDGE:
            end = "low" if place < EDGE else "high"
            found.append(
                f"{key}={value:.4g} of the best trial is at the {end} end of {low:g} to {high:g}: widen "
                f"sweep.params.{key}.{end}"
            )
    return found


def winner_command(result: SweepResult, between: str = " ") -> str:
    words = [*result.words, *as_overrides(result.ranked[0].params), f"run_dir={result.run_dir}/winner"]
    return between.join(["python -m pipeline train", *map(shlex.quote, words)])


def _price(result: SweepResult) -> tuple[str, dict[int, float]]:
    """Return what a point costs, and trial -> its cost: the price if it is known, otherwise rank-hours."""
    costs = {trial.number: cost_of_trial(result.run_dir, trial.number) for trial in result.trials}
    key = "price" if any(cost.get("price") is not None for cost in costs.values()) else "rank_hours"
    return key.replace("_", "-"), {number: cost[key] for number, cost in costs.items() if cost.get(key) is not None}


def _rows(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Return the columns after the trial's metric, and for each trial its place, number, metric and
    them: its cost, rungs, state and values."""
    cost, costs = _price(result)
    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.params))

    def cell(trial: optuna.trial.FrozenTrial, key: str) -> str:
        value = trial.params.get(key, "-")
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return [cost, "rungs", "state", *keys], [
        [str(place), f"{trial.number:04d}", f"{value_of(trial):.5f}",
         f"{costs[trial.number]:.3g}" if trial.number in costs else "-", str(len(trial.intermediate_values)),
         trial.state.name.lower(), *(cell(trial, key) for key in keys)]
        for place, trial in enumerate(result.ranked, start=1)
    ]  # fmt: skip


def describe(result: SweepResult) -> str:
    keys, ranked = _rows(result)
    rows = [["", "trial", result.metric, *keys], *ranked[:MAX_SHOWN]]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(ranked) > MAX_SHOWN:
        lines.append(f"and {len(ranked) - MAX_SHOWN} more")
    names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    counts = {name: sum(trial.state.name == state for trial in result.trials) for state, name in names.items()}
    lines.append(
        f"trials      {len(result.trials)}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        + f"; {result.steps_trained:,} of {result.steps_of_all:,} steps trained ({_share_of_steps(result):.0%})"
    )
    if result.cost:
        price = f", price {result.cost['price']:.4g}" if result.cost["price"] else ""
        lines.append(
            f"cost        {result.cost['hours']:.3g} hours of training, {result.cost['rank_hours']:.3g} rank-hours{price}"
        )
    lines += [f"ended by    {result.ended_by}; raise it and run the same command again"] if result.ended_by else []
    lines += [f"worth a look {remark}" for remark in on_edges(result)]
    if explained := importance(result.study):
        lines.append("importance  " + ", ".join(f"{key} {share:.0%}" for key, share in explained.items()))
    if compared := finalists(result):
        lines += ["finalists   over their seeds:", *(f"  {line}" for line in compared.as_text().splitlines())]
    return "\n".join([*lines, f"page        {result.run_dir}/sweep.html", f"next        {winner_command(result)}"])


def _share_of_steps(result: SweepResult) -> float:
    return result.steps_trained / max(result.steps_of_all, 1)


def _charts(result: SweepResult, keys: Sequence[str]) -> list[str]:
    in_order = sorted(result.ranked, key=lambda trial: trial.number)
    points = [(float(trial.number), value_of(trial)) for trial in in_order]
    best = np.maximum if result.study.direction.name == "MAXIMIZE" else np.minimum
    so_far = best.accumulate([value for _, value in points])
    lines = [
        Line("trial", "train", points, marks=True, joined=False),
        Line("best so far", "validation", [(x, float(y)) for (x, _), y in zip(points, so_far, strict=True)]),
    ]
    chart = line_chart("metric of each trial", result.metric, lines, "trial")
    drawn = [figure("Trials, and the best so far", chart)]
    cost, costs = _price(result)
    for key in keys:
        values = {trial.number: costs.get(trial.number) if key == cost else trial.params.get(key) for trial in in_order}
        pairs = sorted(
            (float(value), value_of(trial))
            for trial in in_order
            if isinstance(value := values[trial.number], (int, float)) and math.isfinite(value_of(trial))
        )
        if pairs:
            is_wide = pairs[0][0] > 0 and pairs[-1][0] / pairs[0][0] >= LOG_FROM
            line = Line(key, "validation", pairs, marks=True, joined=False)
            title = f"{result.metric} over {key}"
            drawn.append(figure(key, line_chart(title, result.metric, [line], key, log_x=is_wide)))
    return drawn


def render_page(result: SweepResult, title: str) -> str:
    """Draw the trials over time and each knob against the metric, and list the trials."""
    keys, rows = _rows(result)
    bars = [Bar(key, share) for key, share in importance(result.study).items()]
    compared = finalists(result)
    body = [
        f"<h1>Sweep {escape(title)}</h1>",
        cards([
            (rows[0][2], f"{result.metric} of the best, trial {rows[0][1]}"),
            (str(len(result.trials)), "trials"),
            (f"{_share_of_steps(result):.0%}", "of the steps of training all trials to the end"),
        ]),
        legend((("train", "each trial at its last rung"), ("validation", "the best so far"))),
        f'<div class="charts">{"".join(_charts(result, keys))}</div>',
        *(["<h2>Which knobs matter</h2>",
           figure("Importance (PED-ANOVA)", bar_chart("importance of each knob", bars, form=".0%"))] if bars else []),
        *(["<h2>The finalists over their seeds</h2>", scrolled(compared.as_text(), "the finalists compared")] if compared else []),
        *(f"<p>Worth a look: {escape(remark)}.</p>" for remark in on_edges(result)),
        "<h2>The winner</h2>", scrolled(winner_command(result, " \\\n    ") + "\n", "the command that trains the winner"),
        "<h2>Trials</h2>", table(("", "trial", result.metric, *keys), rows, (0, 2, 3, 4), "trials"),
    ]  # fmt: skip
    return document(f"Sweep {title}", body)
