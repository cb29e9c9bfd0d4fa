"""Measure the indexes of items beside exact search: recall@k, p50 and p99 of a lone user's request, and memory.

    python -m benchmarks.retrieval --items 1000000 --dim 64

The vectors lie in clusters, as those of trained towers do, and have length 1. Each index is loaded and searched in a process
of its own, one user after the other; what it takes of memory is what its process grew by while it was loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from pipeline.config.serving import RetrievalConfig
from pipeline.extras.retrieval.index import NO_ITEM, Positions, Vectors, index_class

KINDS = ("exact", "flat", "hnsw")
ITEMS_A_CLUSTER, SPREAD = 200, 0.7


def make_vectors(num: int, num_items: int, dim: int, seed: int) -> Vectors:
    """Of length 1, around the same centres whatever the seed."""
    centres = np.random.default_rng(0).standard_normal((max(1, num_items // ITEMS_A_CLUSTER), dim), dtype=np.float32)
    random = np.random.default_rng(seed)
    vectors = centres[random.integers(0, len(centres), num)]
    vectors += SPREAD * random.standard_normal((num, dim), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def recall(found: Positions, exact: Positions) -> float:
    """The share of the exact answers that were found."""
    hits = [len(np.intersect1d(a[a != NO_ITEM], b)) for a, b in zip(found, exact, strict=True)]
    return sum(hits) / exact.size


def build(folder: Path, num_items: int, dim: int, config: RetrievalConfig) -> dict[str, float]:
    """Write items.vectors, and each index to its file. CPU seconds by kind."""
    vectors = make_vectors(num_items, num_items, dim, seed=1)
    vectors.tofile(folder / "items.vectors")
    seconds = {}
    for kind in KINDS:
        before = time.process_time()
        index = index_class(kind).build(vectors, config)
        if index.has_file:
            index.write(str(folder / f"{kind}.index"))
        seconds[kind] = time.process_time() - before
    return seconds


def search(folder: Path, kind: str, num_items: int, dim: int, k: int, num_users: int, search: int) -> None:
    """In a process of its own: print what it measured as JSON, and write the positions that it found."""
    users = make_vectors(num_users, num_items, dim, seed=2)
    chosen = index_class(kind)
    chosen.build(users[:2], RetrievalConfig(index=kind))  # imports what it needs
    before = _anonymous_bytes()
    path = folder / (f"{kind}.index" if chosen.has_file else "items.vectors")
    index = chosen.load(str(path), num_items, dim, search)
    grown = _anonymous_bytes() - before
    found, times = [], []
    for user in users:
        started = time.perf_counter()
        found.append(index.search(user[None], k)[1])
        times.append(time.perf_counter() - started)
    np.save(folder / f"{kind}.npy", np.concatenate(found))
    p50, p99 = np.percentile(times, [50, 99]) * 1000
    print(json.dumps({"p50_ms": p50, "p99_ms": p99, "memory_bytes": grown}))


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status says nothing of RssAnon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--users", type=int, default=500)
    parser.add_argument("--search", type=int, default=RetrievalConfig().search)
    parser.add_argument("--folder", help="where an earlier call left its indexes, or this one is to leave them")
    parser.add_argument("--kind", choices=KINDS, help="measure this one alone, from --folder")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if args.kind:
        search(Path(args.folder), args.kind, args.items, args.dim, args.k, args.users, args.search)
        return
    with tempfile.TemporaryDirectory() as temporary:
        _measure_all(Path(args.folder or temporary), args)


def _measure_all(folder: Path, args: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    size = args.items * args.dim * 4
    print(
        f"{args.items:,} items of {args.dim} columns ({size / 2**20:,.0f} MiB), {args.users} users one by one, k={args.k}"
    )
    seconds: dict[str, float] = {}
    if not (folder / "hnsw.index").exists():
        seconds = build(folder, args.items, args.dim, RetrievalConfig(search=args.search))
    exact_p50 = 0.0
    for kind in KINDS:
        words = [
            f"--kind={kind}",
            f"--folder={folder}",
            *(f"--{name}={getattr(args, name)}" for name in ("items", "dim", "k", "users", "search")),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.retrieval", *words], capture_output=True, text=True, check=True
        )
        measured = json.loads(done.stdout.splitlines()[-1])
        exact_p50 = exact_p50 or measured["p50_ms"]
        share = recall(np.load(folder / f"{kind}.npy"), np.load(folder / "exact.npy"))
        built = f"   built in {seconds[kind]:,.0f} CPU s" if kind in seconds else ""
        print(
            f"{kind:<6} recall@{args.k} {share:.4f}   p50 {measured['p50_ms']:8.2f} ms  p99 {measured['p99_ms']:8.2f} ms  "
            f"({exact_p50 / measured['p50_ms']:.1f}x as quick as exact at p50)   {measured['memory_bytes'] / 2**20:,.0f} MiB{built}",
            flush=True,
        )


if __name__ == "__main__":
    main()
