"""Measure what trainer.precision=bf16 does to quality: AUC and NE of both precisions over a few seeds, on the quickstart's data:

    python -m benchmarks.precision [--data datasets/quickstart] [--seeds 3] [--output precision.json]

Each run is `python -m pipeline train experiment=quickstart trainer.precision=... trainer.seed=...` on one rank, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PRECISIONS = ("fp32", "bf16")


def train(data: str, precision: str, seed: int, folder: str) -> dict[str, float]:
    """The validation metrics, with samples_per_s beside them."""
    run = f"{folder}/{precision}.{seed}"
    job = ["experiment=quickstart", f"data.path={data}", f"trainer.precision={precision}", f"trainer.seed={seed}"]
    command = [sys.executable, "-m", "pipeline", "train", *job, f"run_dir={run}", "name=precision"]
    subprocess.run(command, check=True, capture_output=True)
    summary: dict[str, Any] = json.loads(Path(run, "summary.json").read_text())
    return {**summary["validation"], "samples_per_s": summary["throughput"]["samples_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="datasets/quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {precision: [] for precision in PRECISIONS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for precision in PRECISIONS:
                metrics = train(options.data, precision, seed, folder)
                found[precision].append(metrics)
                print(f"seed {seed}  {precision}  AUC {metrics['auc']:.5f}  NE {metrics['ne']:.5f}", flush=True)
    means = {p: {k: statistics.fmean(one[k] for one in runs) for k in ("auc", "ne")} for p, runs in found.items()}
    print(
        f"bf16 - fp32, mean of {options.seeds} seeds: AUC {means['bf16']['auc'] - means['fp32']['auc']:+.5f}, "
        f"NE {means['bf16']['ne'] - means['fp32']['ne']:+.5f}"
    )
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
