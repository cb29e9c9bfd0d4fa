"""Measure GB per second of saving and loading beside torch.distributed.checkpoint alone, and what a resume costs:

    python -m benchmarks.checkpoint [--gib 1] [--rounds 3] [--folder DIR] [--output checkpoint.json]
    python -m benchmarks.checkpoint --resume [--data datasets/quickstart]

Two ranks (gloo) hold tables of `--gib` GiB together. A round takes each way once, plain DCP before and after ours
(A B A), so that a busy machine shows in the spread; the figures are medians over the rounds. `--resume` runs the
quickstart's train verb from the start and from a checkpoint, and compares the seconds up to the first training step.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

from pipeline.checkpoint import step_writer
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.runtime.process.distributed import DistributedContext

RANKS, TABLES, DIM = 2, 8, 64


@dataclass
class Figure:
    """Seconds over the rounds, and GB/s of all ranks together at the median."""

    name: str
    median_s: float
    least_s: float
    most_s: float
    gb_per_s: float
    ratio_to_dcp: float = 0.0


class Tables(nn.Module):
    """Row-sharded tables, as TorchRec's state_dict gives them."""

    def __init__(self, rank: int, num_bytes: int) -> None:
        super().__init__()
        rows = num_bytes // (4 * DIM * TABLES * RANKS)
        self.shards = [torch.full((rows, DIM), float(rank + table)) for table in range(TABLES)]
        self.sharded = {
            f"table_{table}": init_from_local_shards(
                [Shard.from_tensor_and_offsets(shard, [rank * rows, 0], rank)], [rows * RANKS, DIM]
            )
            for table, shard in enumerate(self.shards)
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self.sharded)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None: ...  # type: ignore[override]


def timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def one_round(folder: Path, model: Tables, context: DistributedContext) -> dict[str, list[float]]:
    """Seconds of each way; plain DCP twice."""
    plain, ours = folder / "plain", folder / "ours"
    state = {"model": model.state_dict()}
    synchronous = Checkpointer(str(ours), model, None, context)
    beside = Checkpointer(str(folder / "beside"), model, None, context, asynchronous=True)
    found: dict[str, list[float]] = {"DCP save": [], "DCP load": []}

    def dcp_alone() -> None:
        found["DCP save"].append(timed(lambda: dcp.save(state, checkpoint_id=str(plain))))
        found["DCP load"].append(timed(lambda: dcp.load(state, checkpoint_id=str(plain))))
        dist.barrier()
        if context.is_main:
            shutil.rmtree(plain)
        dist.barrier()

    dcp_alone()
    found["save"] = [timed(lambda: synchronous.save(1))]
    found["load, verified"] = [timed(synchronous.restore_latest)]
    dcp_alone()
    read_back = step_writer.file_problem
    step_writer.file_problem = lambda path, entry: ""  # type: ignore[assignment]
    try:
        found["save, not read back"] = [timed(lambda: synchronous.save(2))]
    finally:
        step_writer.file_problem = read_back
    found["verify"] = [timed(synchronous.newest)]
    beside.save(1)  # its buffers are made by the first save
    beside.wait()
    began = time.perf_counter()
    found["asynchronous save, blocking"] = [timed(lambda: beside.save(2))]
    beside.wait()
    dist.barrier()
    found["asynchronous save, to the commit"] = [time.perf_counter() - began]
    return found


def work(rank: int, folder: str, num_bytes: int, rounds: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    context = DistributedContext(rank, RANKS, rank, RANKS, torch.device("cpu"), "gloo")
    model, seconds = Tables(rank, num_bytes), dict[str, list[float]]()
    for number in range(rounds + 1):
        place = Path(folder) / str(number)
        found = one_round(place, model, context)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
        for name, values in found.items() if number else []:  # the first round warms up
            seconds.setdefault(name, []).extend(values)
    if rank == 0:
        Path(store + ".json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def throughput(folder: str, gib: float, rounds: int) -> list[Figure]:
    num_bytes = int(gib * 2**30)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        multiprocessing.spawn(work, (name, num_bytes, rounds, f"{name}/store"), nprocs=RANKS)  # type: ignore[attr-defined]
        seconds = json.loads(Path(f"{name}/store.json").read_text())
    figures = []
    for key, values in seconds.items():
        median = statistics.median(values)
        peer = statistics.median(seconds["DCP load" if "load" in key or key == "verify" else "DCP save"])
        figures.append(Figure(key, median, min(values), max(values), num_bytes / 1e9 / median, peer / median))
    return figures


def seconds_to_first_step(words: list[str]) -> float:
    """Of the train verb, from its start to the end of its first training step, as its log says."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "pipeline.train", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = 0.0
    for line in process.stderr:
        if not found and re.search(r"step (1|21)/2", line):
            found = time.perf_counter() - began
    if process.wait() or not found:
        raise SystemExit(f"python -m pipeline.train {' '.join(words)} ended with {process.returncode}")
    return found


def resume(data: str, rounds: int) -> dict[str, float]:
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as run:
            words = ["experiment=quickstart", "hardware=cpu", f"data.path={data}", f"run_dir={run}/run", "trainer.log_every_steps=1"]  # fmt: skip
            cold.append(seconds_to_first_step([*words, "trainer.max_steps=20"]))
            warm.append(seconds_to_first_step([*words, "trainer.max_steps=21"]))
    return {
        "cold_start_s": statistics.median(cold),
        "resume_s": statistics.median(warm),
        "resume_costs_more_s": statistics.median(warm) - statistics.median(cold),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of tables, of both ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--data", default="datasets/quickstart")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"options": {key: str(value) for key, value in vars(options).items()}}
    if options.resume:
        report["resume"] = resume(options.data, options.rounds)
        print("  ".join(f"{key} {value:.1f}" for key, value in report["resume"].items()))
    else:
        figures = throughput(options.folder or tempfile.gettempdir(), options.gib, options.rounds)
        report["throughput"] = [asdict(figure) for figure in figures]
        for one in figures:
            print(
                f"{one.name:34} {one.median_s:6.2f} s  ({one.least_s:.2f} .. {one.most_s:.2f})  {one.gb_per_s:5.2f} GB/s  "
                f"{one.ratio_to_dcp:5.2f} x plain DCP"
            )
    if options.output:
        options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
