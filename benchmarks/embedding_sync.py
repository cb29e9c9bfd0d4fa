"""Measure what rarely synchronised tables save between hosts, and what it costs in quality: 2 hosts of 2 ranks, generated clicks.

    python -m benchmarks.embedding_sync [--rows 500000] [--seeds 1] [--output embedding_sync.json]

Each way trains one epoch of experiment=quickstart, all tables table_wise, in batches of 1024. Bytes are those that a rank
sends to ranks of another host in a step: lookups and their gradients (counted as they are sent), averages of tables (a
ring's). Dense layers' all-reduce is the same for all and left out. AUC and NE are the validation split's: with each host's
own tables, and with their mean.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
WAYS = ("every_step", "every_1_steps", "every_10_steps", "every_100_steps", "never")
BATCH = 1024


@dataclass
class Figure:
    """KiB a rank and step, to other hosts. `own` and `mean` tell whose tables were evaluated."""

    way: str
    seed: int
    lookups_kib: float
    averages_kib: float
    steps: int
    own_auc: float
    own_ne: float
    mean_auc: float
    mean_ne: float

    @property
    def total_kib(self) -> float:
        return self.lookups_kib + self.averages_kib


@contextmanager
def sent_to_other_hosts(rank: int) -> Iterator[list[int]]:
    """Bytes of ids, pooled embeddings and their gradients, while gradients are on: an evaluation's are not counted."""
    total = [0]
    originals = {
        name: getattr(dist, name) for name in ("all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")
    }

    def is_training() -> bool:
        return torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1

    def others(group: Any) -> list[bool]:
        ranks = dist.get_process_group_ranks(group or dist.GroupMember.WORLD)
        return [one // RANKS_PER_HOST != rank // RANKS_PER_HOST for one in ranks]

    def exchanged(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        **more: Any,
    ) -> Any:
        elsewhere = others(group)
        splits = input_split_sizes or [len(input) // len(elsewhere)] * len(elsewhere)
        if is_training():
            row = input[:1].numel() * input.element_size()
            total[0] += sum(count * row for count, away in zip(splits, elsewhere, strict=True) if away)
        return originals["all_to_all_single"](output, input, output_split_sizes, input_split_sizes, group=group, **more)

    def scattered(name: str) -> Any:
        def call(output: Any, input: Any, *arguments: Any, group: Any = None, **more: Any) -> Any:
            elsewhere = others(group)
            pieces = len(elsewhere) if name == "reduce_scatter_tensor" else 1
            if is_training():
                total[0] += input.numel() * input.element_size() // pieces * sum(elsewhere)
            return originals[name](output, input, *arguments, group=group, **more)

        return call

    dist.all_to_all_single = exchanged
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, scattered(name))
    try:
        yield total
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def run_all(rank: int, data: str, folder: str, seeds: int, out: Any) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank % RANKS_PER_HOST))
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_HOST)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for seed in range(seeds):
        for way in WAYS:
            figure = run_one(rank, way, seed, data, f"{folder}/{way}.{seed}")
            if rank == 0:
                out.put(asdict(figure))
    if rank == 0:
        out.put(None)
    dist.barrier()
    dist.destroy_process_group()


def run_one(rank: int, way: str, seed: int, data: str, run_dir: str) -> Figure:
    from pipeline.cli.command_line import load_config
    from pipeline.config.jobs.evaluate import EvaluateJob
    from pipeline.config.jobs.train import TrainJob
    from pipeline.training.evaluate import evaluate
    from pipeline.training.train import train

    words = [
        "experiment=quickstart",
        "hardware=cpu",
        f"data.path={data}",
        f"run_dir={run_dir}",
        f"world_size={RANKS}",
        f"trainer.global_batch_size={BATCH}",
        f"trainer.seed={seed}",
        f"parallel.embedding_sync={way}",
        "tables.default.sharding={sharding_types:[table_wise]}",
    ]
    with sent_to_other_hosts(rank) as sent:
        summary = train(load_config(TrainJob, words))
    mean = evaluate(load_config(EvaluateJob, [f"run={run_dir}", "split=validation", f"world_size={RANKS}"])).metrics
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    averaged = sum(line.get("embedding_sync_bytes", 0.0) for line in lines if line["kind"] == "train")
    total = torch.tensor(float(sent[0]))
    dist.all_reduce(total)
    own = summary.validation
    return Figure(
        way,
        seed,
        float(total) / RANKS / summary.step / 1024,
        averaged / summary.step / 1024,
        summary.step,
        own["auc"],
        own["ne"],
        mean["auc"],
        mean["ne"],
    )


def show(figures: list[Figure]) -> str:
    lines = ["| tables | lookups KiB | averages KiB | of every_step | AUC own | NE own | AUC mean | NE mean |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for one in figures:
        plain = next(base for base in figures if base.way == "every_step" and base.seed == one.seed)
        lines.append(
            f"| {one.way} | {one.lookups_kib:,.0f} | {one.averages_kib:,.0f} | {one.total_kib / plain.total_kib:.2f} | "
            f"{one.own_auc:.4f} | {one.own_ne:.4f} | {one.mean_auc:.4f} | {one.mean_ne:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    from benchmarks.startup import make_data

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder), options.rows)
        out: Any = multiprocessing.get_context("spawn").Queue()
        arguments = (data, folder, options.seeds, out)
        running = multiprocessing.start_processes(run_all, arguments, nprocs=RANKS, join=False, start_method="spawn")
        while True:
            while out.empty() and not running.join(timeout=0.5):
                pass
            if (found := out.get()) is None:
                break
            figures.append(Figure(**found))
            print(show([*figures]).splitlines()[-1], flush=True)
        while not running.join():
            pass
    print(show(figures))
    if options.output:
        options.output.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
