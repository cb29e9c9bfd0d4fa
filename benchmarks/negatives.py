"""Compare the negatives of a two-tower on generated clicks with a skewed popularity:

    python -m benchmarks.negatives [--seeds 2] [--output docs/measurements/negatives.json]

An item's probability is about 1 / rank, so a few items have most of the rows. Ways differ in the negatives and their
correction; all have the same rows, towers, optimizer and steps. Recall and MRR are of the clicked test rows, among all
items of the test split. Each way takes its best temperature by recall@10 on validation rows of seed 0, and seeds from 1
on are measured.

Steps: the CPU time of a training step, compared with the first way in the same seed. The ways take turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.about import about
from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.prepare.run import prepare

COUNT = 1000
WAYS: dict[str, list[str]] = {
    "in batch, no correction": ["model.log_q_correction=false"],
    "in batch": [],
    "corpus, uniform": ["model.negatives.kind=corpus"],
    "corpus, power 0.75": ["model.negatives.kind=corpus", "model.negatives.power=0.75"],
    "mixed, uniform": ["model.negatives.kind=mixed"],
    "mixed, uniform, no correction": ["model.negatives.kind=mixed", "model.log_q_correction=false"],
    "mixed, uniform, 20 hard": [
        "model.negatives.kind=mixed",
        "model.negatives.hard.count=20",
        "model.negatives.hard.every_steps=10",
    ],
}
TEMPERATURES = ("0.1", "0.2")
METRICS = ("recall_at_10", "recall_at_100", "mrr")
DATA = [
    "data=user_item",
    "data.generator.item_exponent=1.0",
    "data.generator.teacher_scale=3.0",
    "data.generator.num_groups=30",
]


def prepared(folder: Path, options: argparse.Namespace) -> list[str]:
    """Generate and prepare the rows, and return the words of the data."""
    sizes = [f"data.generator.num_rows={options.rows}", f"data.generator.num_items={options.items}"]
    generate(load_config(GenerateJob, [*DATA, *sizes, f"output={folder}/rows.tsv"]))
    prepare(load_config(PrepareJob, [*DATA, f"source={folder}/rows.tsv", f"data.path={folder}/data", "threads=1"]))
    return [f"data.path={folder}/data"]


def trained(words: Iterable[str], run: Path) -> Any:
    from pipeline.training.train import train

    job = [
        "experiment=user_item_two_tower", "hardware=cpu", "world_size=1", "trainer.global_batch_size=512",
        "tables.default.embedding_dim=16", "model.recall_at=[10,100]", "logger.tensorboard=false", "logger.report=false",
        "trainer.log_every_steps=100", "checkpoint.save_every_steps=0", f"run_dir={run}",
    ]  # fmt: skip
    return train(load_config(TrainJob, [*job, f"model.negatives.count={COUNT}", *words]))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the test's metrics and the samples per CPU second, of each way and seed."""
    from pipeline.training.evaluate import evaluate

    words, found = prepared(folder, options), {way: [] for way in WAYS}
    words += [f"trainer.epochs={options.epochs}"]
    chosen: dict[str, str] = {}
    for seed in range(options.seeds + 1):
        for way, own in WAYS.items():
            place = folder / way.replace(" ", "_").replace(",", "") / str(seed)
            each = [*words, *own, f"trainer.seed={seed}"]
            if seed == 0:
                recalls = {
                    text: trained([*each, f"model.temperature={text}"], place / text).validation["recall_at_10"]
                    for text in TEMPERATURES
                }
                chosen[way] = max(recalls, key=lambda text: recalls[text])
                print(way, recalls, flush=True)
                continue
            summary = trained([*each, f"model.temperature={chosen[way]}"], place)
            metrics = evaluate(load_config(EvaluateJob, [f"run={place}", "split=test"])).metrics
            step = {"temperature": float(chosen[way]), "samples_per_cpu_s": summary.throughput["samples_per_cpu_s"]}
            found[way].append({name: metrics[name] for name in METRICS} | step)
            print(way, seed, found[way][-1], flush=True)
    return found


def figures(measured: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a record for each way: means over seeds, the largest deviation, and the step's CPU time by the first way's."""
    first, found = next(iter(measured.values())), []
    for way, seeds in measured.items():
        record: dict[str, Any] = {"negatives": way, "temperature": seeds[0]["temperature"]}
        for metric in METRICS:
            values = [each[metric] for each in seeds]
            record[metric] = f"{statistics.mean(values):.4f}"
            if len(values) > 1:
                record[f"{metric}_deviation"] = f"{statistics.stdev(values):.4f}"
        ratios = [
            other["samples_per_cpu_s"] / one["samples_per_cpu_s"] for one, other in zip(seeds, first, strict=True)
        ]
        found.append({**record, "step_cpu": f"x {statistics.median(ratios):.2f}", "seeds": seeds})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=150_000)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        found = figures(measure(Path(folder), options))
    for figure in found:
        print({key: value for key, value in figure.items() if key != "seeds"})
    if options.output:
        head = {name: getattr(options, name) for name in ("rows", "items", "epochs", "seeds")}
        head |= {"sampled items a step": COUNT, "rows a step": 512}
        options.output.write_text(json.dumps({"about": about(**head), "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
