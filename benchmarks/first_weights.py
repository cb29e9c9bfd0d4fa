"""Measure how fast tables get their first weights, by each kind, beside blocks of torch's generator:

    python -m benchmarks.first_weights [--gib 1] [--dim 64] [--rounds 3] [--threads 2] [--output first_weights.json]

One table of `--gib` GiB, in fresh memory, whose pages the kernel clears one by one meanwhile, as in a start, and again in the same
memory. By CPU-seconds of one thread, and by the clock on `--threads` threads. The blocks, of 4,096 rows, are what releases before this one did, and what an init_fn of other
code still gets; a round takes each way once, the median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.collection import Normal, Uniform, Zeros
from pipeline.sharding.torchrec.table_init import initialize_tables

WAYS = {
    "uniform, blocks": lambda weight: torch.nn.init.uniform_(weight, -0.1, 0.1),
    "normal, blocks": lambda weight: torch.nn.init.normal_(weight, std=0.1),
    "uniform": Uniform(0.1),
    "normal": Normal(0.1),
    "zeros": Zeros(),
}


@dataclass
class Rate:
    """GiB a CPU-second of one thread, into fresh memory and again, and a second of all threads into fresh memory."""

    way: str
    fresh: float
    again: float
    all_threads: float


def seconds(way: str, rows: int, dim: int, threads: int) -> tuple[float, float, float]:
    """Into fresh memory by the process's CPU clock, again by it, and into fresh memory by the wall's."""
    config = EmbeddingBagConfig(
        name="table", num_embeddings=rows, embedding_dim=dim, feature_names=["f"], init_fn=Zeros()
    )
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta")).to_empty(device="cpu")
    config.init_fn = WAYS[way]
    torch.set_num_threads(threads)
    cpu, clock = time.process_time(), time.perf_counter()
    initialize_tables(collection, seed=0)
    fresh, by_clock, cpu = time.process_time() - cpu, time.perf_counter() - clock, time.process_time()
    initialize_tables(collection, seed=0)
    return fresh, time.process_time() - cpu, by_clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output")
    options = parser.parse_args()
    rows = int(options.gib * 2**30 / 4 / options.dim)
    for way in WAYS:
        seconds(way, 5000, options.dim, 1)
    times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, taken in times.items():
            fresh, again, _ = seconds(way, rows, options.dim, 1)
            taken.append((fresh, again, seconds(way, rows, options.dim, options.threads)[2]))
    rates = []
    print(
        f"{options.gib:g} GiB, dim {options.dim}: GiB a second; one thread (CPU): fresh memory, again; {options.threads} threads (clock)"
    )
    for way, taken in times.items():
        rates.append(Rate(way, *(options.gib / statistics.median(each) for each in zip(*taken, strict=True))))
        print(f"{way:18} {rates[-1].fresh:8.2f} {rates[-1].again:8.2f} {rates[-1].all_threads:8.2f}")
    for kind in ("uniform", "normal"):
        blocks, own = (next(rate for rate in rates if rate.way == name) for name in (f"{kind}, blocks", kind))
        print(
            f"{kind}: {own.fresh / blocks.fresh:.1f}x of the blocks by CPU-seconds in fresh memory, {own.again / blocks.again:.1f}x again"
        )
    if options.output:
        Path(options.output).write_text(json.dumps([asdict(rate) for rate in rates], indent=1))


if __name__ == "__main__":
    main()
