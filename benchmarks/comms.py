"""Count the bytes that a step puts into collectives, and measure what fewer of them do to time and quality:

    python -m benchmarks.comms [--sharding table_wise] [--pairs fp32:fp32 int8:fp16 ...] [--output comms.json]
    python -m benchmarks.comms --quality        AUC and NE of 100,000 generated rows, too: minutes

A pair is the precision of pooled embeddings forward and of their gradients backward. The quickstart's model on two gloo
ranks; bytes are those of one rank, at two ranks half of an all-to-all stays on it. The factor against fp32 stands beside
the one that the precision promises: 2 for fp16 and bf16, 3.2 for int8 (each 32 values have a scale and a bias), and fp16's
for int8 where a reduce-scatter adds up on the wire. Ids and the dense layers' all-reduce stay as they are. Pairs run in
turns, A B C A B C; on one machine the wire is its memory, so time says what the conversion costs, not what a network gains.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from pipeline.config.training import COMM_PRECISIONS, CommsConfig
from pipeline.embeddings.limits import precisions

RANKS = 2
COUNTED_STEPS = 3
QUALITY_ROWS = 125_000  # of which 100,000 train
BYTES_A_VALUE = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": (32 + 8) / 32}
COLLECTIVE = {"table_wise": "all_to_all", "column_wise": "all_to_all", "row_wise": "reduce_scatter"}


@dataclass
class Figure:
    """Bytes are a step's of one rank; factors are fp32's bytes by this pair's."""

    pair: str
    ids_bytes: float
    forward_bytes: float
    backward_bytes: float
    dense_bytes: float
    ms_a_step: float
    least: float
    most: float
    cpu_ms_a_step: float
    forward_factor: float = 1.0
    backward_factor: float = 1.0
    promised_forward: float = 1.0
    promised_backward: float = 1.0
    auc: float | None = None
    ne: float | None = None


def words_of(pair: str) -> list[str]:
    forward, backward = pair.split(":")
    # By gloo whatever the precision: ranks of one host would exchange fp32 through memory.
    return [
        f"comms.forward_precision={forward}",
        f"comms.backward_precision={backward}",
        "comms.shared_memory=false",
    ]


def promised(pair: str, sharding: str) -> tuple[float, float]:
    """By how much the bytes of a table's collective shrink, forward and backward."""
    forward, backward = precisions(CommsConfig(*pair.split(":")))[COLLECTIVE[sharding]]
    return 4 / BYTES_A_VALUE[forward], 4 / BYTES_A_VALUE[backward]


def measure(rank: int, sharding: str, pairs: list[str], rounds: int, steps: int, store: str, out: Any) -> None:
    """On one rank: build every pair, count, run them in turns; rank 0 sends its figures."""
    context = join(rank, store)
    from benchmarks.step_models import PRESETS, draw, our_side

    preset = PRESETS["quickstart"]
    raw = draw(preset, rank)
    limits = [f"tables.default.sharding={{sharding_types:[{sharding}]}}"]
    figures, runs = [], []
    for pair in pairs:
        assembly, run = our_side(preset, raw, context, [*limits, *words_of(pair)])
        figures.append(count(pair, assembly, run))
        runs.append(run)
    times: list[list[tuple[float, float]]] = [[] for _ in pairs]
    for _ in range(rounds):
        for run, mine in zip(runs, times, strict=True):
            dist.barrier()
            before = time.process_time()
            timed = run(steps)
            mine.append((1e3 * timed.seconds_a_step, 1e3 * (time.process_time() - before) / timed.num_steps))
    for figure, mine in zip(figures, times, strict=True):
        clock = [one for one, _ in mine]
        figure.ms_a_step, figure.least, figure.most = statistics.median(clock), min(clock), max(clock)
        figure.cpu_ms_a_step = statistics.median(cpu for _, cpu in mine)
    if rank == 0:
        out.put([asdict(figure) for figure in figures])
    dist.barrier()
    dist.destroy_process_group()


def join(rank: int, store: str) -> Any:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    from pipeline.devices.cpu.process import keep_freed_memory
    from pipeline.runtime.process.distributed import DistributedContext

    keep_freed_memory(RANKS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    return DistributedContext(rank, RANKS, rank, RANKS, torch.device("cpu"), "gloo")


def count(pair: str, assembly: Any, run: Callable[[int], Any]) -> Figure:
    """Of COUNTED_STEPS and the first one; float64 and single numbers are metrics and memory, not the step's."""
    from benchmarks.wiretap import count_buckets, wiretap

    buckets = count_buckets(assembly.model._dmp_wrapped_module)
    with wiretap() as sent:
        run(COUNTED_STEPS)
    steps = COUNTED_STEPS + 1
    tables = {kind: total for kind, total in sent.items() if not kind.is_ids and kind.dtype != torch.float64}
    return Figure(
        pair,
        ids_bytes=sum(total for kind, total in sent.items() if kind.is_ids) / steps,
        forward_bytes=sum(total for kind, total in tables.items() if not kind.in_backward) / steps,
        backward_bytes=sum(total for kind, total in tables.items() if kind.in_backward) / steps,
        dense_bytes=sum(buckets) / steps,
        ms_a_step=0.0,
        least=0.0,
        most=0.0,
        cpu_ms_a_step=0.0,
    )


def on_ranks(function: Callable[..., None], *arguments: Any) -> Any:
    """Run function(rank, *arguments, store, out) on all ranks; what rank 0 puts out."""
    out = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        every = (*arguments, f"{folder}/store", out)
        running = multiprocessing.start_processes(function, every, nprocs=RANKS, join=False, start_method="spawn")
        while out.empty() and not running.join(timeout=0.5):
            pass
        result = out.get()
        while not running.join():
            pass
    return result


def compare(sharding: str, pairs: list[str], rounds: int, steps: int) -> list[Figure]:
    figures = [Figure(**one) for one in on_ranks(measure, sharding, pairs, rounds, steps)]
    exact = next(one for one in figures if one.pair == "fp32:fp32")
    for figure in figures:
        figure.forward_factor = exact.forward_bytes / figure.forward_bytes
        figure.backward_factor = exact.backward_bytes / figure.backward_bytes
        figure.promised_forward, figure.promised_backward = promised(figure.pair, sharding)
    return figures


def train_on(rank: int, words: list[str], store: str, out: Any) -> None:
    join(rank, store)
    from pipeline.cli.command_line import load_config
    from pipeline.config.jobs.train import TrainJob
    from pipeline.training.train import train

    summary = train(load_config(TrainJob, [*words, f"world_size={RANKS}"]))
    if rank == 0:
        out.put((summary.validation["auc"], summary.validation["ne"]))
    dist.barrier()
    dist.destroy_process_group()


def add_quality(figures: list[Figure], sharding: str) -> None:
    from benchmarks.startup import make_data

    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder), QUALITY_ROWS)
        for figure in figures:
            words = ["experiment=quickstart", f"data.path={data}", f"run_dir={folder}/{figure.pair.replace(':', '-')}"]
            words += [
                "hardware=cpu",
                f"tables.default.sharding={{sharding_types:[{sharding}]}}",
                *words_of(figure.pair),
            ]
            figure.auc, figure.ne = on_ranks(train_on, words)


def show(figures: list[Figure]) -> str:
    exact = next(one for one in figures if one.pair == "fp32:fp32")
    lines = [
        f"{'forward:backward':<17}{'forward KiB':>12}{'factor':>8}{'promised':>9}{'backward KiB':>14}{'factor':>8}"
        f"{'promised':>9}{'ms a step':>11}{'cpu ms':>8}{'AUC':>9}{'NE':>9}"
    ]
    for one in figures:
        quality = f"{one.auc - (exact.auc or 0):>+9.5f}{one.ne - (exact.ne or 0):>+9.5f}" if one.auc and one.ne else ""
        lines.append(
            f"{one.pair:<17}{one.forward_bytes / 1024:>12,.1f}{one.forward_factor:>8.2f}{one.promised_forward:>9.2f}"
            f"{one.backward_bytes / 1024:>14,.1f}{one.backward_factor:>8.2f}{one.promised_backward:>9.2f}"
            f"{one.ms_a_step:>11.1f}{one.cpu_ms_a_step:>8.1f}{quality}"
        )
    lines.append(
        f"beside them {exact.ids_bytes / 1024:,.1f} KiB of ids, {exact.dense_bytes / 1024:,.1f} KiB of dense layers"
    )
    if exact.auc is not None:
        lines.append(f"AUC and NE are differences to fp32:fp32, which has {exact.auc:.5f} and {exact.ne:.5f}")
    return "\n".join(lines)


def main() -> None:
    every = [f"{forward}:{backward}" for forward, backward in itertools.product(COMM_PRECISIONS, repeat=2)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharding", choices=COLLECTIVE, default="table_wise")
    parser.add_argument("--pairs", nargs="+", choices=every, default=every, metavar="FORWARD:BACKWARD")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    pairs = list(dict.fromkeys(["fp32:fp32", *options.pairs]))
    figures = compare(options.sharding, pairs, options.rounds, options.steps)
    if options.quality:
        add_quality(figures, options.sharding)
    print(show(figures))
    if options.output:
        about = {
            "sharding": options.sharding,
            "rounds": options.rounds,
            "steps": options.steps,
            "cores": os.cpu_count(),
        }
        options.output.write_text(json.dumps({"about": about, "figures": [asdict(one) for one in figures]}, indent=1))


if __name__ == "__main__":
    main()
