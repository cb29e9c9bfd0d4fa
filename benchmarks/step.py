"""Measure steps a second of this trainer beside TorchRec's own loop, in one run, turn by turn:

    python -m benchmarks.step [--presets quickstart kaggle_64 ...] [--ranks 1 --threads 2] [--output step.json]

Both sides train the same model on the same batches, drawn beforehand, with row-wise Adagrad for the tables and Adam for
the layers. TorchRec's side is the loop of its documentation: default planner and sharders, DistributedModelParallel,
TrainPipelineSparseDist, fp32. Ours is the product's Trainer, its metrics, guards and log lines included, under the
overrides named in each row. --sides "ours fp32" "ours adam" compares the tables' optimizers. Each side has processes of its own, one a rank, for settings of a process (allocator, OpenMP)
are part of what is compared; `torchrec, our settings` is TorchRec's loop with ours, and `small pages` are ours without huge pages. The sides run in turns,
A B C A B C; those whose turn it is not wait. `cpu` is CPU-seconds a step of all ranks: it tells more than the clock on
a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.about import about
from benchmarks.reader import cpu_name
from pipeline.devices.cpu.process import limit_openmp_spin, use_huge_pages

VARIANTS = {
    "ours fp32": [],
    "ours bf16": ["trainer.precision=bf16"],
    "ours bf16 compiled": ["trainer.precision=bf16", "trainer.compile=true"],
}
# Of tables; the layers train by Adam as on the other sides. Run where --sides names them.
OPTIMIZERS = {
    f"ours {name}": [f"optimizer.sparse.name={name}", "optimizer.sparse.lr=0.001"]
    for name in ("adam", "adamw", "partial_rowwise_adam", "adagrad", "sgd")
}
OPTIMIZERS["ours adam l2"] = [*OPTIMIZERS["ours adam"], "tables.default.l2=0.001"]
SMALL_PAGES = {  # likewise
    "ours fp32, small pages": [],
    "ours bf16, small pages": ["trainer.precision=bf16"],
}


TORCHREC, TORCHREC_KEPT = "torchrec", "torchrec, our settings"
SIDES = (TORCHREC, TORCHREC_KEPT, *VARIANTS, *OPTIMIZERS, *SMALL_PAGES)


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


def run_side(rank: int, ranks: int, threads: int, preset_name: str, side: str, store: str, pipe: Connection) -> None:
    """On one rank of one side: build it, then run as many steps as the pipe asks for, until it asks for 0.

    Answers with (seconds a step, CPU-seconds a step of this rank).
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(threads)
    from benchmarks.step_models import PRESETS, draw, our_loop, torchrec_loop
    from pipeline.devices.cpu.process import keep_freed_memory
    from pipeline.runtime.process.distributed import DistributedContext

    if side != TORCHREC:
        keep_freed_memory(ranks)  # as train does
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    context = DistributedContext(rank, ranks, rank, ranks, torch.device("cpu"), "gloo")
    preset = PRESETS[preset_name]
    raw = draw(preset, rank)
    ours = (VARIANTS | OPTIMIZERS | SMALL_PAGES).get(side)
    run = torchrec_loop(preset, raw, context) if ours is None else our_loop(preset, raw, context, ours)
    run(2)  # compiles, builds, warms
    pipe.send(preset.batch_size * ranks)
    while steps := pipe.recv():
        before = time.process_time()
        timed = run(steps)
        pipe.send((timed.seconds_a_step, (time.process_time() - before) / timed.num_steps))
    dist.destroy_process_group()


class Side:
    """One side's processes, a rank each, from their start until the block ends."""

    def __init__(self, name: str, preset: str, ranks: int, threads: int, folder: str) -> None:
        self._stack = ExitStack()
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        store = f"{folder}/{SIDES.index(name)}"
        with patch.dict(os.environ):  # the processes inherit it
            if name in SMALL_PAGES:
                os.environ["THP_MEM_ALLOC_ENABLE"] = "0"
            if name != TORCHREC:
                limit_openmp_spin()  # as train does, before torch is imported
                use_huge_pages()
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=run_side, args=(rank, ranks, threads, preset, name, store, theirs))
                process.daemon = True
                process.start()
                theirs.close()  # else the death of a rank would not end our wait
                self._stack.callback(process.join)
                self._stack.callback(ours.close)  # which ends the rank's wait
                self._pipes.append(ours)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batch_size(self) -> int:
        """Of all ranks; they are ready to run."""
        return [int(pipe.recv()) for pipe in self._pipes][-1]

    def run(self, steps: int) -> tuple[float, float]:
        """(seconds a step on rank 0, CPU-seconds a step of all ranks)."""
        for pipe in self._pipes:
            pipe.send(steps)
        found = [pipe.recv() for pipe in self._pipes]
        return found[0][0], sum(used for _, used in found)

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(0)


def run_preset(name: str, ranks: int, threads: int, rounds: int, steps: int, sides: Sequence[str]) -> list[Figure]:
    timed: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = {}
        for side in sides:  # one after the other: several that build at once would need more memory
            running[side] = stack.enter_context(Side(side, name, ranks, threads, folder))
            batch_size = running[side].batch_size()
        for _ in range(rounds):
            for side in sides:
                timed[side].append(running[side].run(steps))
        for side in sides:
            running[side].end()
    figures = []
    for side, rows in timed.items():
        wall = [seconds for seconds, _ in rows]
        middle, cpu = statistics.median(wall), statistics.median(used for _, used in rows)
        figure = Figure(name, side, 1e3 * middle, 1e3 * min(wall), 1e3 * max(wall), batch_size / middle, 1e3 * cpu)
        figures.append(figure)
        figure.ratio = figures[0].ms_a_step / figure.ms_a_step
        figure.cpu_ratio = figures[0].cpu_ms_a_step / figure.cpu_ms_a_step
    return figures


def show(figure: Figure) -> str:
    return (
        f"{figure.preset:<12}{figure.side:<25}{figure.ms_a_step:>9.1f} ms  ({figure.least:.1f} to {figure.most:.1f})"
        f"{figure.samples_per_s:>12,.0f} samples/s{figure.ratio:>7.2f}x   cpu {figure.cpu_ms_a_step:.1f} ms"
        f"{figure.cpu_ratio:>7.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["quickstart", "kaggle_16", "kaggle_64"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        default=[TORCHREC, TORCHREC_KEPT, *VARIANTS],
        help="the first is what ratios are to",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, {options.ranks} rank(s) x {options.threads} thread(s), torch {torch.__version__}"
    )
    figures = []
    for name in options.presets:
        found = run_preset(name, options.ranks, options.threads, options.rounds, options.steps, options.sides)
        print("\n".join(map(show, found)), flush=True)
        figures += found
    if options.output:
        found = {"about": about(), "figures": [asdict(one) for one in figures]}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
