"""Train tables in tiers beside tables in memory and tables that are plain files mapped into memory:

    python -m benchmarks.tiers [--gib 5] [--limit-gib 1.25] [--slots 0.1] [--head 0.5] [--steps 150] [--ids zipf] [--layers 256,128] [--ways memory,tiers,mapped]
    python -m benchmarks.tiers --gib 100 --slots 0.004 --limit-gib 2 --sparse --ways tiers

Eight tables with Adagrad's state make `--gib` GiB. Each way runs in a process of its own, under a cgroup of `--limit-gib` but for
"memory", which is also run under it, to be killed (0: no limit). All rows are stored before the first step, and
slots hold the most frequent ones, so that a miss is a read and a write. The
mapped way is FBGEMM's preallocated_host_buffers over files with MADV_RANDOM, by our kernels. A step is a lookup of `--batch` samples, a
MLP of --layers, and the update. Bytes are the store's own for tiers, and what /proc/self/io says for mapped files.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.cgroups import memory_cgroup

NUM_TABLES, DIM, WARM_UP = 8, 64, 30
ROW_BYTES = 2 * 4 * DIM
GIB = 1 << 30


def zipf(rng: np.random.Generator, rows: int, count: int, exponent: float = 1.05) -> np.ndarray[Any, Any]:
    """Rows by rank: the first is the most frequent."""
    power = 1 - exponent
    ranks = (1 - rng.random(count) * (1 - (rows + 1.0) ** power)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64) - 1, rows - 1)


def batches(kind: str, rows: int, batch: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    offsets = torch.arange(NUM_TABLES * batch + 1)
    while True:
        count = NUM_TABLES * batch
        ids = zipf(rng, rows, count) if kind == "zipf" else rng.integers(0, rows, count)
        yield torch.from_numpy(ids), offsets


def build(way: str, rows: int, slots: float, folder: str, sparse: bool, head: float) -> nn.Module:
    """A lookup module whose rows are all stored, unless it is `sparse`."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

    from pipeline.checkpoint.stored_rows import StoredRows
    from pipeline.sharding.table_storage import TierSettings
    from pipeline.sharding.torchrec.cpu_tables import speed_up_cpu_tables
    from pipeline.sharding.torchrec.table_moments import TablesWithMoments, tables_with_moments

    names = [f"t{number}" for number in range(NUM_TABLES)]
    slots_of, heads = dict.fromkeys(names, slots), dict.fromkeys(names, head)
    settings = TierSettings(slots_of, folder, heads=heads) if way == "tiers" else None
    more = {"preallocated_host_buffers": mapped(rows, folder)} if way == "mapped" else {}
    with tables_with_moments(settings):
        lookup = TablesWithMoments(
            embedding_specs=[(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * NUM_TABLES,
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=0.05,
            eps=1e-8,
            table_names=names,
            embedding_shard_info=[(rows, DIM, 0, 0)] * NUM_TABLES,
            **more,
        )
    torch.manual_seed(1)
    for weights in lookup.split_embedding_weights() if way != "mapped" and not sparse else ():
        at_once = 1 << 16
        for first in range(0, rows, at_once):
            block = torch.empty(min(at_once, rows - first), DIM).uniform_(-0.01, 0.01)
            if isinstance(weights, StoredRows):
                weights.write(first, block)
            else:
                weights.detach()[first : first + len(block)] = block
    for state in lookup.split_optimizer_states() if way == "memory" else ():
        state[0].zero_()  # memory is taken now, not step by step
    assert speed_up_cpu_tables([lookup]) == 1
    return lookup


def mapped(rows: int, folder: str) -> dict[str, torch.Tensor]:
    """Files of weights and states, all of them written."""
    buffers = {}
    for name in ("weights", "momentum1"):
        path, count = f"{folder}/{name}", NUM_TABLES * rows * DIM
        block = np.random.default_rng(0).random(1 << 22, dtype=np.float32) * (0.01 if name == "weights" else 0)
        with open(path, "wb") as file:
            for first in range(0, count, len(block)):
                file.write(block[: count - first].tobytes())
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffers[name] = torch.from_file(path, shared=True, size=count, dtype=torch.float32)
        advise(buffers[name], mmap.MADV_RANDOM)
    return buffers


def advise(tensor: torch.Tensor, advice: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), advice):
        raise OSError(ctypes.get_errno(), "madvise")


def fill_slots(tiered: Any, batch: int) -> None:
    """With the most frequent rows, trained, in no order: a long run has no free slot, and rows that leave lie anywhere."""
    offsets = np.arange(NUM_TABLES * batch + 1)
    order = np.random.default_rng(1).permutation(tiered.tables[0].num_slots)
    for first in range(0, tiered.tables[0].num_slots - batch, batch):
        ids = np.tile(order[first : first + batch], NUM_TABLES)
        tiered.to_slots(ids, offsets, training=True)[1].release()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """In a child: steps after WARM_UP."""
    torch.set_num_threads(1)
    rows = int(arguments.gib * GIB / ROW_BYTES / NUM_TABLES)
    lookup = build(arguments.way, rows, arguments.slots, arguments.folder, arguments.sparse, arguments.head)
    forward: Any = lookup.forward
    torch.manual_seed(0)
    widths = [NUM_TABLES * DIM, *map(int, arguments.layers.split(","))]
    hidden = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.ReLU())]
    layers = nn.Sequential(*hidden, nn.Linear(widths[-1], 1))
    optimizer = torch.optim.Adagrad(layers.parameters(), lr=0.01)
    if forward.tiered and not arguments.sparse:
        fill_slots(forward.tiered, arguments.batch)
    source = batches(arguments.ids, rows, arguments.batch)
    coming = next(source)
    warm = max(WARM_UP, arguments.warm_up)
    began, cpu, before, io, losses = 0.0, 0.0, None, (0, 0), []
    for step in range(warm + arguments.steps):
        if step == warm:
            began, cpu, io = time.perf_counter(), time.process_time(), process_io()
            before = forward.tiered.stats() if forward.tiered else None
        ids, offsets = coming
        coming = next(source)
        if forward.tiered:
            forward.tiered.prefetch_rows(forward.tiered.ids_by_table(coming[0].numpy(), coming[1].numpy()))
        forward.num_steps = step
        optimizer.zero_grad()
        loss = layers(forward(ids, offsets)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    read, written = (now - then for now, then in zip(process_io(), io, strict=True))
    if forward.tiered:
        stores = [table.store for table in forward.tiered.tables]
        print(f"stores: {sum(each.size_bytes for each in stores) / GIB:.1f} GiB", file=sys.stderr)
    found: dict[str, Any] = {
        "steps_per_s": arguments.steps / seconds,
        "cpu_ms_per_step": 1000 * cpu / arguments.steps,
        "sum_of_losses": float(np.sum(losses)),
    }
    if forward.tiered:
        stats = forward.tiered.stats() - before
        read, written = stats.read_bytes, stats.written_bytes
        found |= {
            "stall_percent": 100 * stats.stall_seconds / seconds,
            "hit_percent": 100 * (1 - stats.missed_lookups / stats.lookups),
            "missed_rows_per_step": stats.missed_rows / arguments.steps,
            "reads_per_step": stats.reads / arguments.steps,
            "writes_per_step": stats.writes / arguments.steps,
            "write_amplification": stats.written_bytes / max(1, stats.written_rows * ROW_BYTES),
        }
    found |= {"read_mb_per_step": read / 1e6 / arguments.steps, "written_mb_per_step": written / 1e6 / arguments.steps}
    return {**found, "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


def process_io() -> tuple[int, int]:
    values = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(values["read_bytes"]), int(values["write_bytes"])


def child(arguments: argparse.Namespace, way: str, limit: float, folder: str) -> dict[str, Any]:
    """Run a way in a process of its own, under a cgroup where there is a limit."""
    words = [
        f"--{name.replace('_', '-')}={getattr(arguments, name)}"
        for name in ("gib", "slots", "steps", "batch", "ids", "warm_up", "head", "layers")
    ]
    command = [sys.executable, "-m", "benchmarks.tiers", f"--way={way}", f"--folder={folder}", *words]
    command += ["--sparse"] * arguments.sparse
    with memory_cgroup(int(limit * GIB)) if limit else nullcontext(("", "no limit")) as (group, kind):
        enter: Callable[[], Any] | None = (
            (lambda: Path(group, "cgroup.procs").write_text(str(os.getpid()))) if group else None
        )
        done = subprocess.run(command, preexec_fn=enter, stdout=subprocess.PIPE, text=True, check=False)
        peaks = [path for path in ("memory.max_usage_in_bytes", "memory.peak") if group and Path(group, path).exists()]
        peak = int(Path(group, peaks[0]).read_text()) / GIB if peaks else None
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"killed_by_signal": -done.returncode}
    return {
        "way": way,
        "limit_gib": limit or None,
        "bound_by": kind,
        **found,
        **({"cgroup_peak_gib": peak} if peak else {}),
    }


def predict(arguments: argparse.Namespace, steps_per_s: float) -> None:
    """Print what the planner expects of the rate in memory, the frequencies of the ids and the speed of this SSD."""
    from pipeline.config.tables import ConstraintConfig, InitConfig, TiersConfig
    from pipeline.embeddings.row_frequencies import RowFrequencies
    from pipeline.embeddings.table import Table
    from pipeline.extras.tiers.forecast import forecast, io_ms, stall_percent, tiered_step_ms
    from pipeline.extras.tiers.probe import measure

    rows = int(arguments.gib * GIB / ROW_BYTES / NUM_TABLES)
    frequencies, best = None, arguments.slots
    if arguments.ids == "zipf":
        best = (1 - (arguments.slots * rows + 1) ** -0.05) / (1 - (rows + 1.0) ** -0.05)
        points = np.unique(np.geomspace(1, rows, 200).astype(np.int64))
        shares = (1 - (points + 1.0) ** -0.05) / (1 - (rows + 1.0) ** -0.05)
        frequencies = RowFrequencies([0, *points.tolist()], [0.0, *np.minimum(shares, 1).tolist()])
    tiers = TiersConfig(slots=arguments.slots, head=arguments.head)
    table = Table(
        "t", rows, DIM, ["f"], "sum", "fp32", InitConfig(), ConstraintConfig(), [1.0], frequencies, tiers=tiers
    )
    expected = forecast(table, arguments.batch)
    speed = measure(arguments.folder, 2 * DIM, int(NUM_TABLES * expected.rows_a_step))
    coming = NUM_TABLES * expected.rows_a_step
    moving_ms = io_ms(coming, speed.loads_per_s, speed.stores_per_s)
    stall = stall_percent(1000 / steps_per_s, moving_ms, speed.slowdown, speed.spread)
    rate = 1000 / tiered_step_ms(1000 / steps_per_s, moving_ms, speed.slowdown, speed.spread)
    print(
        f"predicted: hits {100 * expected.hit_rate:.1f} % (the hottest rows alone in all slots: {100 * best:.1f} %), {coming:,.0f} rows a step; this SSD loads {speed.loads_per_s:,.0f} and "
        f"stores {speed.stores_per_s:,.0f} rows a second, and a thread beside it takes {speed.slowdown:.2f} times as long (spread {100 * speed.spread:.0f} %): "
        f"stall {stall:.1f} %, {rate:.1f} steps a second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=5.0)
    parser.add_argument("--limit-gib", type=float, default=1.25)
    parser.add_argument("--slots", type=float, default=0.1)
    parser.add_argument("--head", type=float, default=0.0, help="share of the slots that the first rows keep")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument(
        "--layers", default="256,128", help="widths of the MLP over all rows: what a step does besides lookups"
    )
    parser.add_argument("--ids", choices=["zipf", "uniform"], default="zipf")
    parser.add_argument("--ways", default="memory,tiers,mapped")
    parser.add_argument("--sparse", action="store_true", help="no row is stored before it is trained; for tiers alone")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(train(arguments)))
        return
    results = []
    for way in arguments.ways.split(","):
        limits = [0.0, arguments.limit_gib] if way == "memory" and arguments.limit_gib else [arguments.limit_gib]
        for limit in limits:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                results.append(child(arguments, way, limit, folder))
            print(
                "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in results[-1].items()
                ),
                flush=True,
            )
    in_memory = [each["steps_per_s"] for each in results if each["way"] == "memory" and "steps_per_s" in each]
    if in_memory:
        predict(arguments, in_memory[0])
    rates = {each["way"]: each["steps_per_s"] for each in results if "steps_per_s" in each}
    for way in ("tiers", "mapped"):
        if way in rates and "memory" in rates:
            print(f"{way}: {100 * rates[way] / rates['memory']:.0f} % of the rate in memory")
    if {"tiers", "mapped"} <= rates.keys():
        print(f"tiers: {rates['tiers'] / rates['mapped']:.2f} times the rate of mapped files")
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
