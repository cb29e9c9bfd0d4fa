"""Measure GB per second of saving and loading beside torch.distributed.checkpoint alone, and what a resume costs:

    python -m benchmarks.checkpoint [--gib 1] [--rounds 3] [--folder DIR] [--output checkpoint.json]
    python -m benchmarks.checkpoint --resume [--data datasets/quickstart]

Two ranks (gloo), or --ranks, hold tables of `--gib` GiB together. A round takes each way once, plain DCP and dd before and after
ours (A B A), so that a busy machine shows in the spread; the figures are medians over the rounds. dd copies the files of a step
from memory with an fsync at the end, and reads them; "from disk" is after the system has forgotten them. `--resume` runs the
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

from benchmarks.timings import Timing, timing
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.extras.ssd_serving.lookup import forget_pages
from pipeline.runtime.process.distributed import DistributedContext

TABLES, DIM = 8, 64
DCP, DD = "plain DCP", "dd"


class Tables(nn.Module):
    """Row-sharded tables, as TorchRec's state_dict gives them."""

    def __init__(self, rank: int, ranks: int, num_bytes: int) -> None:
        super().__init__()
        rows = num_bytes // (4 * DIM * TABLES * ranks)
        self.shards = [torch.rand(rows, DIM) for _ in range(TABLES)]  # some disks write zeros more quickly
        self.sharded = {
            f"table_{table}": init_from_local_shards(
                [Shard.from_tensor_and_offsets(shard, [rank * rows, 0], rank)], [rows * ranks, DIM]
            )
            for table, shard in enumerate(self.shards)
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self.sharded)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None: ...


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

    def dd(names: list[str], key: str) -> None:
        """On one rank: the files of step 1, one after the other."""
        files = sorted(str(path) for path in (ours / "step_00000001").glob("*.distcp"))

        def copy() -> None:
            for number, file in enumerate(files if context.is_main else []):
                target = [word.format(folder / f"copy_{number}") for word in names]
                subprocess.run(["dd", f"if={file}", "bs=8M", "status=none", *target], check=True)

        found.setdefault(key, []).append(timed(copy))
        for path in folder.glob("copy_*") if context.is_main else []:
            path.unlink()
        forget(files)

    def forget(files: list[str]) -> None:
        for file in files:
            forget_pages(file)
        dist.barrier()

    dcp_alone()
    found["save"] = [timed(lambda: synchronous.save(1))]
    found["load, verified"] = [timed(synchronous.restore_latest)]
    dd(["of={}", "conv=fsync"], "dd, with fsync")
    found["load, verified, from disk"] = [timed(synchronous.restore_latest)]
    synchronous.restore_latest()  # into memory again
    dd(["of={}", "conv=fsync"], "dd, with fsync")
    dd(["of=/dev/null"], "dd to nowhere, from disk")
    dcp_alone()
    synchronous._writer._is_local = False  # as where files go to an object store
    found["save, not read back"] = [timed(lambda: synchronous.save(2))]
    found["verify"] = [timed(synchronous.newest)]
    beside.save(1)  # its buffers are made by the first save
    beside.wait()
    began = time.perf_counter()
    found["asynchronous save, blocking"] = [timed(lambda: beside.save(2))]
    beside.wait()
    dist.barrier()
    found["asynchronous save, to the commit"] = [time.perf_counter() - began]
    return found


def work(rank: int, ranks: int, folder: str, num_bytes: int, rounds: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    context = DistributedContext(rank, ranks, rank, ranks, torch.device("cpu"), "gloo")
    model, seconds = Tables(rank, ranks, num_bytes), dict[str, list[float]]()
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


def throughput(folder: str, gib: float, rounds: int, ranks: int) -> list[Timing]:
    num_bytes = int(gib * 2**30)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        arguments = (ranks, name, num_bytes, rounds, f"{name}/store")
        multiprocessing.spawn(work, arguments, nprocs=ranks)
        seconds = json.loads(Path(f"{name}/store.json").read_text())
    found = {key: timing(key, values, num_bytes) for key, values in seconds.items()}
    for key, one in found.items():
        reads = "load" in key or key == "verify" or "nowhere" in key
        one.ratios[DCP] = one.median_s / found["DCP load" if reads else "DCP save"].median_s
        if not reads or "from disk" in key:  # what lies in memory is no disk's work
            plain = found["dd to nowhere, from disk" if "from disk" in key else "dd, with fsync"]
            one.ratios[DD] = one.median_s / plain.median_s
    return list(found.values())


def seconds_to_first_step(words: list[str]) -> float:
    """Of the train verb, from its start to the end of its first training step, as its log says."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "pipeline", "train", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = 0.0
    for line in process.stderr:
        if not found and re.search(r"step (1|21)/2", line):
            found = time.perf_counter() - began
    if process.wait() or not found:
        raise SystemExit(f"python -m pipeline train {' '.join(words)} ended with {process.returncode}")
    return found


def resume(data: str, rounds: int) -> dict[str, float]:
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as run:
            words = [
                "experiment=quickstart",
                "hardware=cpu",
                f"data.path={data}",
                f"run_dir={run}/run",
                "trainer.log_every_steps=1",
            ]
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
    parser.add_argument("--ranks", type=int, default=2)
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
        found = throughput(options.folder or tempfile.gettempdir(), options.gib, options.rounds, options.ranks)
        report["throughput"] = [asdict(one) for one in found]
        for one in found:
            print(
                f"{one.name:34} {one.median_s:6.2f} s  ({one.least_s:.2f} .. {one.most_s:.2f})  "
                f"{one.bytes_per_s / 1e9:5.2f} GB/s  {1 / one.ratios[DCP]:5.2f} x plain DCP"
                + (f"  {one.ratios[DD]:5.2f} of dd's time" if DD in one.ratios else "")
            )
    if options.output:
        options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
