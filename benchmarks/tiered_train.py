"""Train, save and resume a model whose tables are larger than memory by `pipeline train` itself, under a cgroup:

    python -m benchmarks.tiered_train --gib 6 --limit-gib 1.5                the rows of a step lie anywhere in the tables
    python -m benchmarks.tiered_train --gib 100 --limit-gib 3 --ids 1        few rows are touched
    python -m benchmarks.tiered_train --gib 6 --limit-gib 1.5 --ways memory  which the cgroup kills

The quickstart's rows; the ids of two features are hashed into so many rows that their tables and Adagrad's state take `--gib` GiB;
`--ids` ids a sample of each, sampled evenly over all rows but for the first. Slots are chosen by sharding.tiers=auto. The first command trains `--steps` steps and
saves, the second goes on from that step to twice as many. Prints each run's peak memory, what the steps take on the disk and how large
their files are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.cgroups import memory_cgroup

GIB = 1 << 30
DIM, LARGE = 64, ("cat_24", "cat_25")
ROW_BYTES = 2 * 4 * DIM


def command(arguments: argparse.Namespace, folder: Path, way: str, steps: int) -> list[str]:
    words = [
        sys.executable, "-m", "pipeline", "train", "experiment=quickstart", f"data.path={folder / 'data'}", f"run_dir={folder / way}",
        f"trainer.global_batch_size={arguments.batch}", f"trainer.max_steps={steps}", "trainer.log_every_steps=10",
        f"tables.default.embedding_dim={DIM}", f"model.dense_arch_layer_sizes=[64,{DIM}]",
        "trainer.evaluate_max_batches=1", "optimizer.sparse.name=adagrad", "hardware=cpu", "logger.tensorboard=false",
        f"hardware.ddr_cap_gb={arguments.limit_gib}", f"sharding.tier_folder={folder / 'ssd'}",
    ]  # fmt: skip
    for name in LARGE:
        words += [f"+data.synthetic_multi_hot.{name}={arguments.ids}"] if arguments.ids > 1 else []
    return [*words, "sharding.tiers=auto"] if way == "tiers" else [*words, "hardware.ddr_cap_gb=1000"]


def run(words: list[str], limit: float) -> dict[str, Any]:
    with memory_cgroup(int(limit * GIB)) if limit else nullcontext(("", "no limit")) as (group, kind):
        enter: Callable[[], Any] | None = (
            (lambda: Path(group, "cgroup.procs").write_text(str(os.getpid()))) if group else None
        )
        began = time.monotonic()
        done = subprocess.run(
            words, preexec_fn=enter, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        peaks = [path for path in ("memory.max_usage_in_bytes", "memory.peak") if group and Path(group, path).exists()]
        found = {"returncode": done.returncode, "seconds": round(time.monotonic() - began, 1), "bound_by": kind}
        if peaks:
            found["cgroup_peak_gib"] = round(int(Path(group, peaks[0]).read_text()) / GIB, 3)
    keep = ("tiers ", "step ", "loaded", "resum", "ERROR", "error", "plan ")
    print("\n".join(line for line in done.stdout.splitlines() if any(word in line for word in keep)), flush=True)
    return found


def sizes(folder: Path) -> dict[str, float]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "file_gib": round(sum(path.stat().st_size for path in files) / GIB, 3),
        "disk_gib": round(sum(path.stat().st_blocks * 512 for path in files) / GIB, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=6.0)
    parser.add_argument("--limit-gib", type=float, default=1.5)
    parser.add_argument("--ids", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ways", default="tiers")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the SSD")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as top:
        folder, rows = Path(top), int(arguments.gib * GIB / ROW_BYTES / len(LARGE))
        hashed = [f"+data.feature_ids.{name}={{kind: hash, hash_size: {rows}}}" for name in LARGE]
        for verb, *words in (
            ["generate", f"output={folder}/rows.tsv", "data.synthetic.num_rows=200000"],
            ["prepare", f"source={folder}/rows.tsv", f"data.path={folder}/data", *hashed],
        ):
            subprocess.run(
                [sys.executable, "-m", "pipeline", verb, "data=quickstart", *words],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        for way in arguments.ways.split(","):
            for steps in (arguments.steps, 2 * arguments.steps) if way == "tiers" else (arguments.steps,):
                found = run(command(arguments, folder, way, steps), arguments.limit_gib)
                checkpoints = folder / way / "checkpoints"
                on_disk = {step.name: sizes(step) for step in sorted(checkpoints.glob("step_*"))}
                print(json.dumps({"way": way, "steps": steps, **found, "checkpoints": on_disk}), flush=True)


if __name__ == "__main__":
    main()
