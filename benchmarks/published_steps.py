"""Compare steps predicted from data sheets alone with throughputs that others have published:

    python -m benchmarks.published_steps [--only 'MLPerf'] [--seconds 20]

The runs, their sources and what each is planned as are in benchmarks/published_steps.yaml. No constant of the prediction is fitted
to them: what a data sheet does not say is pipeline/extras/step_time/data_sheet.py's, from the literature.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import PlanJob
from pipeline.config.tables import TableConfig
from pipeline.extras.step_time.forecast import PlanForecast
from pipeline.extras.step_time.plan_forecast import forecast_of, plan_job
from pipeline.training.plan_job import prepare

RUNS = Path(__file__).with_suffix(".yaml")
SHOWN_PARTS = 3


@dataclass(frozen=True)
class PublishedRun:
    """words: overrides of the plan verb; rows: of each table, empty where the experiment says them."""

    name: str
    samples_per_s: float
    source: str
    words: list[str]
    rows: list[int]
    note: str = ""

    def job(self, folder: str, seconds: float) -> PlanJob:
        words = [*self.words, f"planner.plan_file={folder}/plan.json", f"planner.timeout_s={seconds:g}"]
        if not self.rows:
            return load_config(PlanJob, words)
        job = load_config(PlanJob, ["data=criteo_1tb", "tables=mlperf_dlrmv2", *words])
        tables = {f"cat_{index}": TableConfig(num_embeddings=rows) for index, rows in enumerate(self.rows)}
        return replace(job, tables={"default": job.tables["default"], **tables})


@dataclass(frozen=True)
class Comparison:
    run: PublishedRun
    forecast: PlanForecast

    @property
    def ratio(self) -> float:
        return self.forecast.samples_per_s / self.run.samples_per_s


def read_runs(path: Path = RUNS) -> list[PublishedRun]:
    values = yaml.safe_load(path.read_text())
    return [
        PublishedRun(
            run["name"],
            run.get("samples_per_s") or run["samples"] / run["seconds"],
            "/".join([values["sources"][run["source"]], *([run["path"]] if "path" in run else [])]),
            list(_flat(run["words"])),
            values["rows"][run["rows"]] if "rows" in run else [],
            run.get("note", ""),
        )
        for run in values["runs"]
    ]


def _flat(words: Iterable[Any]) -> Iterator[str]:
    for word in words:
        if isinstance(word, list):
            yield from _flat(word)
        else:
            yield word


def compare(run: PublishedRun, seconds: float) -> Comparison:
    with tempfile.TemporaryDirectory() as folder:
        job = run.job(folder, seconds)
        return Comparison(run, forecast_of(job, plan_job(job, prepare)))


def describe(found: Comparison) -> str:
    """A row of the table in docs/do/planning.md."""
    forecast, run = found.forecast, found.run
    parts = sorted(forecast.parts.items(), key=lambda part: -part[1])[:SHOWN_PARTS]
    shown = ", ".join(f"{name} {ms:.2f}" for name, ms in parts)
    published_ms = 1e3 * forecast.batch_size * forecast.world_size / run.samples_per_s
    return (
        f"| {run.name} | {run.samples_per_s / 1e6:,.3g}M | {forecast.samples_per_s / 1e6:,.3g}M | "
        f"{100 * (found.ratio - 1):+.0f} % | {published_ms:.2f} | {forecast.step_ms:.2f} | {shown} |"
    )


def summary(found: list[Comparison]) -> str:
    logs = [math.log(each.ratio) for each in found]
    error = math.exp(sum(map(abs, logs)) / len(logs)) - 1
    worst = max(found, key=lambda each: abs(math.log(each.ratio)))
    return (
        f"geometric mean error {100 * error:.0f} %, bias {100 * (math.exp(sum(logs) / len(logs)) - 1):+.0f} %, worst "
        f"{worst.ratio:.2f} times the published rate ({worst.run.name}), of {len(found)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds for each plan")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print(
        "| run | published | predicted | error | step ms, published | predicted | of it, ms |",
        "|---|" + "---|" * 6,
        sep="\n",
    )
    found = []
    for run in read_runs():
        if options.only in run.name:
            found.append(compare(run, options.seconds))
            print(describe(found[-1]), flush=True)
    print(summary(found))
    for source in dict.fromkeys(each.run.source for each in found):
        print(source, *(f"- {each.run.name}" for each in found if each.run.source == source), sep="\n")


if __name__ == "__main__":
    main()
