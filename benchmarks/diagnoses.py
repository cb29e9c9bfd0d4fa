"""Plant faults in data, config or model, train, and compare what `diagnose` finds with what was planted:

    python -m benchmarks.diagnoses [--only KEY ...] [--part 0/2] --folder DIR [--output docs/measurements/diagnoses.json]

Each run has some thousand rows with known effects of users and items. Healthy runs must have no finding (key nothing).
A run whose folder is complete is not trained again: run the same command again to continue, or after a change of a rule.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from benchmarks.about import about
from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.prepare.run import prepare
from pipeline.extras.diagnose.rules import find_problems
from pipeline.extras.runs.folder import open_run
from pipeline.training.evaluate import evaluate
from pipeline.training.summary import SUMMARY
from pipeline.training.train import train
from tests.support.ranks import RankPool

NUM_ROWS = 24_000
Columns = dict[str, Any]


def made(seed: int = 0, num_rows: int = NUM_ROWS) -> Columns:
    """Rows in order of time: a click depends on the user, the item, the hour and the price."""
    draw = np.random.default_rng(seed)
    user, item = (np.floor(size * draw.random(num_rows) ** 2).astype(int) for size in (300, 200))
    hour, price = draw.integers(0, 24, num_rows), draw.lognormal(1, 0.6, num_rows)
    effects = [draw.normal(0, 1, size) for size in (300, 200, 24)]
    score = effects[0][user] + effects[1][item] + 0.4 * effects[2][hour] - 0.5 * (np.log(price) - 1) - 1.2
    click = (draw.random(num_rows) < 1 / (1 + np.exp(-score))).astype(int)
    time_s = 1_700_000_000 + np.sort(draw.integers(0, 30 * 86_400, num_rows))
    names = {"user": "u", "item": "i", "hour": "h"}
    values = {"user": user, "item": item, "hour": hour}
    sparse = {name: np.char.add(prefix, values[name].astype(str)) for name, prefix in names.items()}
    return {
        "click": click,
        "ts": time_s,
        "price": np.round(price, 3),
        "score": np.round(draw.normal(0, 1, num_rows), 3),
        **sparse,
    }


def with_column(name: str, values: Callable[[Columns, np.random.Generator], Any]) -> Callable[[Columns], Columns]:
    return lambda rows: rows | {name: values(rows, np.random.default_rng(7))}


def taken(rows: Columns, index: Any) -> Columns:
    return {name: values[index] for name, values in rows.items()}


@dataclass(frozen=True)
class Fault:
    """rows: changes the rows. data, job: words. feature: more columns, by kind. importance: also measured."""

    key: str  # the finding that is wanted first; "" for a healthy run
    planted: str
    rows: Callable[[Columns], Columns] = lambda rows: rows
    data: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    importance: bool = False
    seed: int = 0
    more: dict[str, Any] = field(default_factory=dict)


def _part(rows: Columns, name: str, begin: float, end: float, value: Any) -> Columns:
    """Set a column to `value` in a part of the rows; validation is .8 to .9, test the last tenth."""
    count = len(rows["click"])
    changed = rows[name].astype(object)
    changed[int(begin * count) : int(end * count)] = value
    return rows | {name: changed}


def _shifted(rows: Columns) -> Columns:
    """Most positives of the last fifth become negatives."""
    late = np.arange(len(rows["click"])) > 0.8 * len(rows["click"])
    drop = late & (np.random.default_rng(1).random(len(late)) < 0.6)
    return rows | {"click": np.where(drop, 0, rows["click"])}


def _no_late_clicks(rows: Columns) -> Columns:
    late = np.arange(len(rows["click"])) >= 0.79 * len(rows["click"])
    return rows | {"click": np.where(late, 0, rows["click"])}


OVER = (
    "trainer.epochs=12",
    "tables.default.embedding_dim=32",
    "optimizer.sparse.lr=0.3",
    "optimizer.dense.lr=0.01",
    "model.dropout=0",
)
FAULTS = (
    Fault("diverged", "both learning rates far too high", job=("optimizer.sparse.lr=5", "optimizer.dense.lr=0.5")),
    Fault("diverged", "the rate of the layers far too high", job=("optimizer.dense.lr=1",)),
    Fault("underfitting", "both learning rates far too low", job=("optimizer.sparse.lr=0.000001", "optimizer.dense.lr=0.000001")),
    Fault("underfitting", "four steps", job=("trainer.max_steps=4",)),
    Fault("overfitting", "12 epochs at high rates", job=OVER),
    Fault("not_trained", "the rate of the tables decays to 0 in a step", job=("schedule.sparse.kind=poly", "schedule.sparse.decay_steps=1")),
    Fault("not_trained", "the rate of the layers decays to 0 in a step", job=("schedule.dense.kind=poly", "schedule.dense.decay_steps=1")),
    Fault("leak", "a number known after the label", with_column("spend", lambda r, d: np.round(r["click"] * d.lognormal(1, 1, len(r["click"])), 2)), dense=("spend",)),
    Fault("leak", "an id known after the label", with_column("page", lambda r, d: np.where(d.random(len(r["click"])) < 0.02, "p0", np.char.add("p", (r["click"] * 20 + d.integers(1, 20, len(r["click"]))).astype(str)))), sparse=("page",)),
    Fault("leak", "a noisy copy of the label", with_column("echo", lambda r, d: np.round(r["click"] + d.normal(0, 0.3, len(r["click"])), 3)), dense=("echo",)),
    Fault("second_label", "a second label as a category", with_column("coupon", lambda r, d: np.where(r["click"] * (d.random(len(r["click"])) < 0.3) > 0, "yes", "no")), sparse=("coupon",)),
    Fault("second_label", "a second label as a number", with_column("bought", lambda r, d: r["click"] * (d.random(len(r["click"])) < 0.5)), dense=("bought",)),
    Fault("no_signal", "shuffled labels", lambda r: r | {"click": np.random.default_rng(3).permutation(r["click"])}),
    Fault("no_signal", "labels joined to the next rows", lambda r: r | {"click": np.roll(r["click"], 1)}),
    Fault("constant", "a model without an input", job=("plugins=[tests.extras.diagnose.deaf]", "model=deaf")),
    Fault("dead_feature", "a model that does not read the numbers", job=("plugins=[tests.extras.diagnose.deaf]", "model=half_deaf"), importance=True),
    Fault("repeated_over_splits", "each row twice, split at random", lambda r: taken(r, np.repeat(np.arange(NUM_ROWS // 2), 2)), data=("data.split.kind=random",)),
    Fault("repeated_in_training", "each training row three times", lambda r: taken(r, np.concatenate([np.repeat(np.arange(NUM_ROWS // 3), 3), np.arange(NUM_ROWS // 3, NUM_ROWS // 3 + NUM_ROWS // 4)]))),
    Fault("time_leak", "a random split of rows with times", data=("data.split.kind=random", "data.columns.timestamp=ts")),
    Fault("label_shift", "fewer clicks in later rows", _shifted),
    Fault("missing_in_split", "a category missing in validation", lambda r: _part(r, "item", 0.8, 0.9, "")),
    Fault("missing_in_split", "a number missing in test", lambda r: _part(r, "price", 0.9, 1.0, "")),
    Fault("missing_in_split", "a category missing in training", lambda r: _part(r, "user", 0.0, 0.8, "")),
    Fault("unseen_ids", "a session id as a feature", with_column("session", lambda r, d: np.char.add("s", (np.arange(len(r["click"])) // 5).astype(str))), sparse=("session",)),
    Fault("unscaled", "a number in the millions, not scaled", with_column("income", lambda r, d: np.round(d.lognormal(14, 1, len(r["click"])))), dense=("income",), data=("data.dense_transform=none",)),
    Fault("collisions", "hashes that are too few", data=("data.ids.min_frequency=1", "data.ids.kind=hash", "data.ids.hash_size=40")),
    Fault("few_rows", "a validation split of a hundred rows", data=("data.split.validation_fraction=0.004",)),
    Fault("one_class", "no clicks in validation", _no_late_clicks),
)  # fmt: skip
MODELS = ("deepfm", "dlrm", "dcnv2", "fm", "logistic_regression", "wide_deep", "autoint", "masknet", "finalmlp")
QUICKSTART = (
    "quickstart",
    "quickstart_deepfm",
    "quickstart_dlrm_dcn",
    "quickstart_fm",
    "quickstart_lr",
    "quickstart_wide_deep",
)
HEALTHY = tuple(
    [Fault("", f"{model}, seed {seed}", job=(f"model={model}",), seed=seed) for seed in (0, 1) for model in MODELS[:7]]
    + [Fault("", f"experiment {name}", more={"experiment": name}) for name in QUICKSTART]
)
# The thresholds were chosen with the rows of FAULTS in view. These rows are new.
AGAIN = tuple(replace(fault, planted=f"{fault.planted}, new rows", seed=9) for fault in FAULTS)
JOB = (
    "model=deepfm", "name=planted", "hardware=cpu", "trainer.global_batch_size=128", "trainer.epochs=1", "tables.default.embedding_dim=8",
    "optimizer.sparse.lr=0.05", "optimizer.dense.lr=0.003", "trainer.log_every_steps=25", "logger.tensorboard=false", "logger.report=false", "checkpoint=at_end",
)  # fmt: skip


def _train(rank: int, words: list[str], importance: bool) -> None:
    job: TrainJob = load_config(TrainJob, words)
    train(job)
    if importance:
        evaluate(load_config(EvaluateJob, [f"run={job.run_dir}", "split=validation", "importance_rows=2000"]))


def prepared(fault: Fault, folder: Path) -> list[str]:
    """Write and prepare the data. Return the words of the data and the model."""
    if name := fault.more.get("experiment"):
        words = [f"experiment={name}", "data.synthetic.num_rows=60000", f"data.path={folder.parent / 'quickstart'}"]
        raw = folder.parent / "quickstart.tsv"
        if not raw.exists():
            words_of_data = ["data=quickstart", *words[1:]]
            generate(load_config(GenerateJob, [*words_of_data, f"output={raw}"]))
            prepare(load_config(PrepareJob, [*words_of_data, f"source={raw}", "threads=1"]))
        return [
            *words,
            "trainer.global_batch_size=256",
            "hardware=cpu",
            "logger.report=false",
            "logger.tensorboard=false",
            "checkpoint=at_end",
        ]
    rows = fault.rows(made(fault.seed))
    lines = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    (folder / "rows.csv").write_text("\n".join([*lines, ""]))
    words = [
        "data=default", "data.name=planted", "data.format=csv", "data.columns.label=click", "data.dense_transform=standardize",
        f"data.columns.dense=[{','.join(('price', 'score', *fault.dense))}]",
        f"data.columns.sparse=[{','.join(('user', 'item', 'hour', *fault.sparse))}]",
        "data.ids.min_frequency=2", "data.rows_per_row_group=2048", f"data.path={folder / 'ds'}", *fault.data,
    ]  # fmt: skip
    prepare(load_config(PrepareJob, [*words, f"source={folder / 'rows.csv'}", "threads=1"]))
    return [*words, *JOB]


def find(fault: Fault, folder: Path, pool: RankPool) -> list[tuple[str, str]]:
    """Train the run if `folder` has none, and return (key, text) of each finding."""
    run = folder / "run"
    if not (run / ("importance.json" if fault.importance else SUMMARY)).exists():
        rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pool.run(1, _train, [*prepared(fault, folder), *fault.job, f"run_dir={run}"], fault.importance)
    return [(each.key, each.text) for each in find_problems(open_run(str(run)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--part", default="0/1", help="K/N: every Nth run, from run K")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pool, figures, started = RankPool(), [], time.monotonic()
    part, num_parts = map(int, arguments.part.split("/"))
    try:
        for number, fault in enumerate((*FAULTS, *HEALTHY, *AGAIN)):
            if number % num_parts != part or (arguments.only and (fault.key or "nothing") not in arguments.only):
                continue
            found = find(fault, arguments.folder / f"{number:02d}", pool)
            first, text = found[0] if found else ("", "")
            figures.append({
                "planted": fault.planted if fault.key else f"nothing: {fault.planted}", "expected": fault.key or "nothing",
                "found": ", ".join(key for key, _ in found) or "nothing", "correct": "yes" if first == fault.key and (found or not fault.key) else "no",
                "says": text.partition(" Next:")[0],
            })  # fmt: skip
            print(f"{time.monotonic() - started:5.0f} s", json.dumps(figures[-1]), flush=True)
    finally:
        pool.close()
    totals = {}
    for kind in ("planted_faults", "healthy_runs"):
        chosen = [each["correct"] for each in figures if (each["expected"] == "nothing") == (kind == "healthy_runs")]
        totals[kind] = f"{chosen.count('yes')} of {len(chosen)} correct"
    print(totals)
    if arguments.output:
        arguments.output.write_text(json.dumps({"about": about(**totals), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    from benchmarks.diagnoses import main  # a rank imports what it runs by the name of this module

    main()
