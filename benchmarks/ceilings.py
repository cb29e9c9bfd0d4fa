"""Measure what this machine can do, and compute what one training step needs at least:

    python -m benchmarks.ceilings [--presets quickstart kaggle_64] [--threads 2] [--output ceilings.json]

The machine: matrix products in fp32 and bf16 of a DLRM's shapes, copying, and rows gathered at random from a table that
no cache holds. A step: floating-point operations of the dense part (forward, and twice that backward) and bytes of the
tables (each looked-up row read, its gradient read, each distinct row and its optimizer state read and written once).
`limit` is their time one after the other at those rates: nothing here is slower than it, and what overlaps, caches hold
or lower precision saves would go below it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.reader import cpu_name
from benchmarks.step_models import NUM_DENSE, PRESETS, Preset, draw
from pipeline.runtime.kernels.products import gradient_of_inputs

STATE_BYTES = 4  # row-wise Adagrad, a row
FLOAT_BYTES = 4


@dataclass
class Machine:
    fp32_gflops: float  # as our layers multiply
    torch_fp32_gflops: float  # as torch does by itself
    bf16_gflops: float
    copy_gb_per_s: float  # read and written bytes together
    gather_gb_per_s: dict[int, float]  # by embedding dimension


@dataclass
class Limit:
    preset: str
    dense_gflop: float
    table_mb: float
    dense_ms_fp32: float
    dense_ms_bf16: float
    table_ms: float


def best_seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """Of many: what others on the machine take away is no ceiling."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_machine(dims: list[int]) -> Machine:
    gflops = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(2048, 512).to(dtype), torch.randn(512, 512).to(dtype)
        gflops[dtype] = 2 * 2048 * 512 * 512 / best_seconds(lambda a=left, b=right: gradient_of_inputs(a, b)) / 1e9
    left, right = torch.randn(2048, 512), torch.randn(512, 512)
    by_torch = 2 * 2048 * 512 * 512 / best_seconds(lambda: left @ right) / 1e9
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), 5) / 1e9
    gathered = {}
    for dim in dims:
        table = torch.ones((512 << 20) // FLOAT_BYTES // dim, dim)
        ids = torch.randint(0, len(table), (100_000,))
        gathered[dim] = (
            ids.numel() * dim * FLOAT_BYTES / best_seconds(lambda t=table, i=ids: t.index_select(0, i)) / 1e9
        )
    return Machine(gflops[torch.float32], by_torch, gflops[torch.bfloat16], copied, gathered)


def dense_flop(preset: Preset) -> float:
    """Of a step: products alone, forward and the two of backward (the first layer has no gradient to hand on)."""
    sizes = [NUM_DENSE, *preset.dense_layers]
    bottom = [(a, b) for a, b in pairwise(sizes)]
    num_rows = len(preset.num_embeddings) + 1
    if preset.dcn:
        width = num_rows * preset.dim
        middle, into_top = 3 * 2 * [(width, 512)], width
    else:
        middle, into_top = [(num_rows * num_rows, preset.dim)], preset.dim + num_rows * (num_rows - 1) // 2
    sizes = [into_top, *preset.over_layers]
    top = [(a, b) for a, b in pairwise(sizes)]
    per_sample = 3 * sum(a * b for a, b in [*bottom, *middle, *top]) - NUM_DENSE * preset.dense_layers[0]
    return 2.0 * per_sample * preset.batch_size


def table_bytes(preset: Preset) -> float:
    """Of a step, on one rank, counted on batches drawn as the benchmark draws them."""
    raw = draw(preset, 0)[0]
    sizes = [count * preset.batch_size for count in preset.pooling]
    row, total = preset.dim * FLOAT_BYTES, 0.0
    for ids in raw.ids.split(sizes):
        distinct = len(ids.unique())
        total += len(ids) * row + 2 * preset.batch_size * row + 2 * distinct * (row + STATE_BYTES)
    return total


def limit_of(name: str, machine: Machine) -> Limit:
    preset = PRESETS[name]
    flop, moved = dense_flop(preset), table_bytes(preset)
    return Limit(
        name, flop / 1e9, moved / 1e6, flop / machine.fp32_gflops / 1e6, flop / machine.bf16_gflops / 1e6,
        moved / machine.gather_gb_per_s[preset.dim] / 1e6,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["quickstart", "kaggle_16", "kaggle_64"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = measure_machine(sorted({PRESETS[name].dim for name in options.presets}))
    print(f"{cpu_name()}, {options.threads} thread(s), torch {torch.__version__}")
    print(
        f"matrix products  {machine.fp32_gflops:,.0f} GFLOP/s fp32 (torch's own {machine.torch_fp32_gflops:,.0f}), "
        f"{machine.bf16_gflops:,.0f} bf16"
    )
    gathers = ", ".join(f"{rate:.1f} GB/s at dim {dim}" for dim, rate in machine.gather_gb_per_s.items())
    print(f"memory           copy {machine.copy_gb_per_s:.1f} GB/s, rows at random {gathers}")
    limits = [limit_of(name, machine) for name in options.presets]
    for one in limits:
        print(
            f"{one.preset:<12}{one.dense_gflop:>7.2f} GFLOP {one.dense_ms_fp32:>7.1f} ms fp32 {one.dense_ms_bf16:>6.1f} bf16"
            f"{one.table_mb:>8.1f} MB of tables {one.table_ms:>6.1f} ms   limit {one.dense_ms_fp32 + one.table_ms:>6.1f} ms fp32"
            f"{one.dense_ms_bf16 + one.table_ms:>7.1f} bf16"
        )
    if options.output:
        about = {"date": datetime.now(UTC).isoformat(), "cpu": cpu_name(), "threads": options.threads}
        found = {"about": about, "machine": asdict(machine), "limits": [asdict(one) for one in limits]}
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
