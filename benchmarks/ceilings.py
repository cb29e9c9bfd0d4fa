"""Measure how fast this machine does each operation of a training step, and add these times up:

    python -m benchmarks.ceilings [--presets quickstart kaggle_64] [--threads 2] [--output ceilings.json]

`reference` is the time of a step if each of its operations took as long as the fastest method that we know takes, one
operation after the other:

- each product of the layers (forward, and the two of backward) at its own shape, and the dot products of DLRM's rows, by
  torch, by oneDNN and by our kernels. In bf16 the methods of fp32 count too: a CPU without bf16 instructions is faster so.
- the tables' bytes: each looked-up row read, its gradient read, each distinct row and its optimizer state read and written
  once, at the rate of rows gathered at random from a table that no cache holds (into a block that is there already);
- Adam over the layers: weights and both moments read and written once, at the rate of copying as much.

It is not a limit. Kernels that join operations, and rows that a cache holds, can be faster.
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
from pipeline.devices.cpu.products import dots, dots_backward, multiplies_rows

STATE_BYTES = 4  # row-wise Adagrad, a row
FLOAT_BYTES = 4
ADAM_NUMBERS = 3  # of each weight of the layers: itself and its two moments


@dataclass
class Machine:
    copy_gb_per_s: float  # read and written bytes together
    gather_gb_per_s: dict[int, float]  # by embedding dimension
    adam_gb_per_s: dict[str, float]  # by preset: copying as much as Adam reads and writes there
    dense_ms: dict[str, dict[str, float]]  # by preset: products and dots, in fp32 and bf16


@dataclass
class Reference:
    preset: str
    dense_gflop: float
    table_mb: float
    dense_ms_fp32: float
    dense_ms_bf16: float
    table_ms: float
    adam_mb: float
    adam_ms: float

    def total_ms(self, dense_ms: float) -> float:
        return dense_ms + self.table_ms + self.adam_ms


def best_seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """The least of many: what other programs take away does not count."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_machine(presets: list[str]) -> Machine:
    gathered = {}
    for dim in sorted({PRESETS[name].dim for name in presets}):
        table = torch.ones((512 << 20) // FLOAT_BYTES // dim, dim)
        ids = torch.randint(0, len(table), (100_000,))
        rows = torch.empty(len(ids), dim)
        seconds = best_seconds(lambda t=table, i=ids, r=rows: torch.index_select(t, 0, i, out=r))
        gathered[dim] = rows.nbytes / seconds / 1e9
    adam = {name: copy_rate(int(adam_bytes(PRESETS[name])) // 2) for name in presets}
    dense = {name: dense_ms(PRESETS[name]) for name in presets}
    return Machine(copy_rate(256 << 20, repeats=5), gathered, adam, dense)


def dense_ms(preset: Preset) -> dict[str, float]:
    """Milliseconds of a step's products by their fastest methods. bf16 is never longer: it may take fp32's methods."""
    fp32 = bf16 = 0.0
    for index, (inputs, outputs) in enumerate(layers(preset)):
        batch = preset.batch_size
        shapes = [(batch, inputs, outputs), (inputs, batch, outputs)]  # forward, the weight's gradient
        shapes += [(batch, outputs, inputs)] if index else []  # the first layer has no gradient to hand on
        for shape in shapes:
            plain, half = (product_ms(*shape, dtype) for dtype in (torch.float32, torch.bfloat16))
            fp32, bf16 = fp32 + plain, bf16 + min(plain, half)
    if not preset.dcn:
        plain, half = (dots_ms(preset, dtype) for dtype in (torch.float32, torch.bfloat16))
        fp32, bf16 = fp32 + plain, bf16 + min(plain, half)
    return {"fp32": fp32, "bf16": bf16}


def product_ms(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    turned = right.t().contiguous()
    methods: list[Callable[[], object]] = [lambda: left @ right, lambda: left @ turned.t()]
    if torch.backends.mkldnn.is_available():
        methods.append(lambda: torch.ops.mkldnn._linear_pointwise(left, turned, None, "none", [], ""))
    return 1e3 * min(map(best_seconds, methods))


def dots_ms(preset: Preset, dtype: torch.dtype) -> float:
    """Of each sample's rows with each other, and of their gradient."""
    rows = torch.randn(preset.batch_size, len(preset.num_embeddings) + 1, preset.dim).to(dtype)
    products = rows @ rows.mT
    by_torch = best_seconds(lambda: rows @ rows.mT) + 2 * best_seconds(lambda: products @ rows)
    by_kernels = []
    if multiplies_rows(rows, dtype):
        gradient = torch.ones_like(dots(rows, 0))
        by_kernels = [best_seconds(lambda: dots(rows, 0)), best_seconds(lambda: dots_backward(gradient, rows, 0))]
    return 1e3 * min(by_torch, sum(by_kernels) or by_torch)


def copy_rate(num_bytes: int, repeats: int = 15) -> float:
    """GB/s, read and written together."""
    source = torch.ones(num_bytes // FLOAT_BYTES)
    target = torch.ones_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), repeats) / 1e9


def layers(preset: Preset) -> list[tuple[int, int]]:
    """Rows and columns of all weights but the tables."""
    num_rows = len(preset.num_embeddings) + 1
    crosses: list[tuple[int, int]] = []
    if preset.dcn:
        into_top = num_rows * preset.dim
        crosses = 3 * 2 * [(into_top, 512)]
    else:
        into_top = preset.dim + num_rows * (num_rows - 1) // 2
    return [*pairwise([NUM_DENSE, *preset.dense_layers]), *crosses, *pairwise([into_top, *preset.over_layers])]


def dense_flop(preset: Preset) -> float:
    """Of a step: products alone, forward and the two of backward (the first layer has no gradient to hand on)."""
    num_rows = len(preset.num_embeddings) + 1
    dots = 0 if preset.dcn else num_rows * num_rows * preset.dim
    per_sample = 3 * (sum(a * b for a, b in layers(preset)) + dots) - NUM_DENSE * preset.dense_layers[0]
    return 2.0 * per_sample * preset.batch_size


def adam_bytes(preset: Preset) -> float:
    """Of a step: each weight of the layers and its two moments, read and written."""
    return 2.0 * ADAM_NUMBERS * FLOAT_BYTES * sum(a * b for a, b in layers(preset))


def table_bytes(preset: Preset) -> float:
    """Of a step, on one rank, counted on batches drawn as the benchmark draws them."""
    raw = draw(preset, 0)[0]
    sizes = [count * preset.batch_size for count in preset.pooling]
    row, total = preset.dim * FLOAT_BYTES, 0.0
    for ids in raw.ids.split(sizes):
        distinct = len(ids.unique())
        total += len(ids) * row + 2 * preset.batch_size * row + 2 * distinct * (row + STATE_BYTES)
    return total


def reference_of(name: str, machine: Machine) -> Reference:
    preset = PRESETS[name]
    moved, adam, dense = table_bytes(preset), adam_bytes(preset), machine.dense_ms[name]
    return Reference(
        name,
        dense_flop(preset) / 1e9,
        moved / 1e6,
        dense["fp32"],
        dense["bf16"],
        moved / machine.gather_gb_per_s[preset.dim] / 1e6,
        adam / 1e6,
        adam / machine.adam_gb_per_s[name] / 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["quickstart", "kaggle_16", "kaggle_64"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = measure_machine(options.presets)
    print(f"{cpu_name()}, {options.threads} thread(s), torch {torch.__version__}")
    gathers = ", ".join(f"{rate:.1f} GB/s at dim {dim}" for dim, rate in machine.gather_gb_per_s.items())
    print(f"memory           copy {machine.copy_gb_per_s:.1f} GB/s, rows at random {gathers}")
    references = [reference_of(name, machine) for name in options.presets]
    for one in references:
        print(
            f"{one.preset:<12}{one.dense_gflop:>7.2f} GFLOP {one.dense_ms_fp32:>7.1f} ms fp32 {one.dense_ms_bf16:>6.1f} bf16"
            f"{one.table_mb:>8.1f} MB of tables {one.table_ms:>6.1f} ms{one.adam_mb:>8.1f} MB of Adam {one.adam_ms:>5.1f} ms"
            f"   reference {one.total_ms(one.dense_ms_fp32):>6.1f} ms fp32{one.total_ms(one.dense_ms_bf16):>7.1f} bf16"
        )
    if options.output:
        about = {"date": datetime.now(UTC).isoformat(), "cpu": cpu_name(), "threads": options.threads}
        found = {"about": about, "machine": asdict(machine), "references": [asdict(one) for one in references]}
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
