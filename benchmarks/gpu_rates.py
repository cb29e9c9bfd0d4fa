"""Measure the rates of a GPU that the planner takes from data sheets: copies, products, launches, and FBGEMM's lookups.

    python -m benchmarks.gpu_rates --output docs/measurements/gpu_rates.json

The time of a lookup includes the host's, as in a training step: one call at a time, by CUDA events, median of ten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

GPU = torch.device("cuda", 0)
BATCH_SIZE, NUM_BATCHES, CACHED_SHARE = 8192, 6, 0.2
# place, rows, widths, ids a sample, tables, types of rows
LOOKUPS = [
    ("DEVICE", 4_000_000, (16, 64, 128, 256), (1, 20), (1, 8), ("fp32", "fp16")),
    ("MANAGED", 4_000_000, (64, 128), (1, 20), (1,), ("fp32",)),
    ("MANAGED_CACHING", 4_000_000, (64, 128), (1, 20), (1,), ("fp32",)),
]


def milliseconds(call: Callable[[], object], times: int = 10) -> float:
    """Return the median time of a call on the GPU, after three calls that are not timed."""
    found = []
    for _ in range(times + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found[3:])


def microseconds_to_issue(call: Callable[[], object], times: int = 3000) -> float:
    """Return the host's time of a call, which does not wait for the GPU."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        call()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / times * 1e6


def rates() -> dict[str, float]:
    """GB/s, TFLOPS and microseconds by name."""
    found = {}
    source = torch.rand(1 << 29, device=GPU)
    target = torch.empty_like(source)
    found["copy on the GPU, GB/s read and written"] = (
        2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6
    )
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.rand(8192, 8192, device=GPU, dtype=dtype)
        ms = milliseconds(lambda square=square: square @ square)
        found[f"product of 8192 x 8192 in {str(dtype).removeprefix('torch.')}, TFLOPS"] = 2 * 8192**3 / ms / 1e9
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 28, dtype=torch.uint8, device=GPU)
    to_gpu = milliseconds(lambda: device.copy_(host, non_blocking=True))
    found["pinned host memory to the GPU, GB/s"] = host.nbytes / to_gpu / 1e6
    to_host = milliseconds(lambda: host.copy_(device, non_blocking=True))
    found["GPU to pinned host memory, GB/s"] = host.nbytes / to_host / 1e6
    small, weight = torch.rand(64, 64, device=GPU), torch.rand(64, 64, device=GPU, requires_grad=True)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: small + 1,
        "view": lambda: small.view(4096),
        "linear with gradients": lambda: torch.nn.functional.linear(small, weight),
    }
    for name, call in calls.items():
        found[f"host's time of {name}, us"] = microseconds_to_issue(call)
    return found


def lookups() -> Iterator[dict[str, Any]]:
    for place, rows, *others in LOOKUPS:
        for width, per_sample, num_tables, kind in product(*others):
            yield from _lookup(place, rows, width, per_sample, num_tables, kind)
            torch.cuda.empty_cache()


def _lookup(place: str, rows: int, width: int, per_sample: int, num_tables: int, kind: str) -> Iterator[dict[str, Any]]:
    """Time lookups, and lookups with an update by row-wise Adagrad, for ids by a power law and for uniform ids."""
    lookup = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation[place], ComputeDevice.CUDA)] * num_tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        device=GPU,
        cache_load_factor=CACHED_SHARE,
        weights_precision=SparseType.FP16 if kind == "fp16" else SparseType.FP32,
    )
    for weight in lookup.split_embedding_weights():
        weight.data.fill_(0.01)
    count = num_tables * BATCH_SIZE * per_sample
    offsets = torch.arange(0, count + 1, per_sample, device=GPU)
    gradient = torch.rand(BATCH_SIZE, num_tables * width, device=GPU)
    for ids, exponent in (("power law", 4), ("uniform", 1)):
        drawn = [
            (torch.rand(count, device=GPU, dtype=torch.float64) ** exponent * rows).long() for _ in range(NUM_BATCHES)
        ]
        turn = iter(range(10**9))

        def forward(drawn: list[torch.Tensor] = drawn, turn: Iterator[int] = turn) -> torch.Tensor:
            pooled: torch.Tensor = lookup(drawn[next(turn) % NUM_BATCHES], offsets)
            return pooled

        forward_ms = milliseconds(forward)
        both_ms = milliseconds(lambda forward=forward: forward().backward(gradient))
        size = 2 if kind == "fp16" else 4
        yield {
            "place": place,
            "rows": rows,
            "width": width,
            "type": kind,
            "tables": num_tables,
            "ids_per_sample": per_sample,
            "ids": ids,
            "lookup_us": 1e3 * forward_ms,
            "lookup_and_update_us": 1e3 * both_ms,
            "lookup_gb_per_s": (count * width * size + 4 * BATCH_SIZE * num_tables * width) / forward_ms / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    about = {
        "command": "python -m benchmarks.gpu_rates",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "rates": {name: round(value, 2) for name, value in rates().items()},
    }
    options.output.write_text(json.dumps({"about": about, "figures": list(lookups())}, indent=1))


if __name__ == "__main__":
    main()
