"""Steps a second of our trainer beside TorchRec's own loop, in the same processes, turn by turn:

    python -m benchmarks.step [--presets quickstart kaggle_64 ...] [--ranks 1 --threads 2] [--output step.json]

Both sides train the same model on the same batches, drawn beforehand, with row-wise Adagrad for the tables and Adam for
the layers. TorchRec's side is the loop of its documentation: default planner and sharders, DistributedModelParallel,
TrainPipelineSparseDist, fp32. Ours is the product's Trainer, its metrics, guards and log lines included, under the
overrides named in each row. Every rank holds all sides at once and runs them in turns, A B C A B C. `cpu` is CPU-seconds
a step of all ranks: it tells more than the clock on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.reader import cpu_name

VARIANTS = {
    "ours fp32": [],
    "ours bf16": ["trainer.precision=bf16"],
    "ours bf16 compiled": ["trainer.precision=bf16", "trainer.compile=true"],
}


@dataclass
class Figure:
    """Milliseconds a step: median, least and most over the rounds; ratios are TorchRec's median by this one's."""

    preset: str
    side: str
    ms_a_step: float
    least: float
    most: float
    samples_per_s: float
    cpu_ms_a_step: float
    ratio: float = 1.0
    cpu_ratio: float = 1.0


def measure(
    rank: int, ranks: int, threads: int, preset_name: str, rounds: int, steps: int, store: str, out: Any
) -> None:
    """On one rank: build every side, run them in turns, and let rank 0 send its figures."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(threads)
    from benchmarks.step_models import PRESETS, draw, our_loop, torchrec_loop
    from pipeline.distributed import DistributedContext
    from pipeline.training.allocator import keep_freed_memory

    keep_freed_memory()  # as train does, and here for both sides: they share the process
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    context = DistributedContext(rank, ranks, rank, ranks, torch.device("cpu"), "gloo")
    preset = PRESETS[preset_name]
    raw = draw(preset, rank)
    sides = {"torchrec": torchrec_loop(preset, raw, context)}
    sides |= {name: our_loop(preset, raw, context, overrides) for name, overrides in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(2)  # compiles, builds, warms
    for _ in range(rounds):
        for name, run in sides.items():
            dist.barrier()
            before = time.process_time()
            seconds[name].append(run(steps))
            used = torch.tensor((time.process_time() - before) / (steps + 4))
            dist.all_reduce(used)
            cpu[name].append(float(used))
    if rank == 0:
        out.put((preset.batch_size * ranks, seconds, cpu))
    dist.barrier()
    dist.destroy_process_group()


def run_preset(name: str, ranks: int, threads: int, rounds: int, steps: int) -> list[Figure]:
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, threads, name, rounds, steps, f"{folder}/store", out)
        running = multiprocessing.start_processes(measure, arguments, nprocs=ranks, join=False, start_method="spawn")
        while out.empty() and not running.join(timeout=0.5):
            pass
        batch_size, seconds, cpu = out.get()
        while not running.join():
            pass
    figures = []
    for side, times in seconds.items():
        middle = statistics.median(times)
        figures.append(
            Figure(
                name, side, 1e3 * middle, 1e3 * min(times), 1e3 * max(times), batch_size / middle,
                1e3 * statistics.median(cpu[side]),
            )
        )  # fmt: skip
    for figure in figures:
        figure.ratio = figures[0].ms_a_step / figure.ms_a_step
        figure.cpu_ratio = figures[0].cpu_ms_a_step / figure.cpu_ms_a_step
    return figures


def show(figure: Figure) -> str:
    return (
        f"{figure.preset:<12}{figure.side:<20}{figure.ms_a_step:>9.1f} ms  ({figure.least:.1f} to {figure.most:.1f})"
        f"{figure.samples_per_s:>12,.0f} samples/s{figure.ratio:>7.2f}x   cpu {figure.cpu_ms_a_step:.1f} ms"
        f"{figure.cpu_ratio:>7.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["quickstart", "kaggle_16", "kaggle_64"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, {options.ranks} rank(s) x {options.threads} thread(s), torch {torch.__version__}"
    )
    figures = []
    for name in options.presets:
        found = run_preset(name, options.ranks, options.threads, options.rounds, options.steps)
        print("\n".join(map(show, found)), flush=True)
        figures += found
    if options.output:
        about = {"date": datetime.now(UTC).isoformat(), "host": platform.machine(), "cpu": cpu_name(), **vars(options)}
        about["output"] = str(options.output)
        options.output.write_text(json.dumps({"about": about, "figures": [asdict(one) for one in figures]}, indent=1))


if __name__ == "__main__":
    main()
