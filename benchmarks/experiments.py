"""Train shipped experiments on generated data with several seeds, and say how near they come to the best possible AUC:

    python -m benchmarks.experiments [--experiments NAME ...] [--seeds 5] --folder DIR [--output docs/measurements/experiments.json]

Every run is `python -m pipeline train experiment=NAME trainer.seed=SEED` and `evaluate split=test`, in a process of its own.
A run whose folder has an evaluation is not trained again: run the same command again to continue, or with more seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.about import about
from pipeline.data.dataset import load_dataset

# Generated data set -> its experiments.
EXPERIMENTS = {
    "quickstart": [
        "quickstart", "quickstart_dlrm_dcn", "quickstart_deepfm", "quickstart_wide_deep", "quickstart_fm", "quickstart_lr",
        "quickstart_three_epochs", "dcnv2_three_epochs", "deepfm_three_epochs",
    ],
    "histories": ["histories_din", "histories_dien", "histories_bst", "histories_hstu", "histories_encoders"],
    "tags": ["tags_lr"],
    "user_item": ["user_item_fm", "user_item_mf", "user_item_ncf"],
}  # fmt: skip


def pipeline(folder: Path, *words: str) -> None:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{(done.stdout + done.stderr)[-3000:]}")


def run(folder: Path, data: str, experiment: str, seed: int) -> dict[str, Any]:
    """The measures of one run, trained if it is not there yet."""
    run_dir = Path("runs") / f"{experiment}_{seed}"
    if not (folder / "datasets" / data / "dataset.json").exists():
        raw = f"datasets/raw/{data}.tsv"
        pipeline(folder, "generate", f"data={data}", f"output={raw}")
        pipeline(folder, "prepare", f"data={data}", f"source={raw}")
    if not list((folder / run_dir).glob("evaluation*test*.json")):
        pipeline(folder, "train", f"experiment={experiment}", f"trainer.seed={seed}", f"run_dir={run_dir}")
        pipeline(folder, "evaluate", f"run={run_dir}", "split=test")
    test = json.loads(next((folder / run_dir).glob("evaluation*test*.json")).read_text())
    throughput = json.loads((folder / run_dir / "summary.json").read_text())["throughput"]
    dataset = load_dataset(str(folder / "datasets" / data))
    best = dataset.best_auc("test", dataset.label)
    assert best is not None, data
    share = 100 * (test["auc"] - 0.5) / (best - 0.5)
    return {
        "auc": test["auc"],
        "best": best,
        "share": share,
        "ne": test["ne"],
        "speed": throughput["samples_per_cpu_s"],
    }


def figure(experiment: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    shares = [run["share"] for run in runs]
    return {
        "experiment": experiment,
        "seeds": len(runs),
        "test_AUC": f"{statistics.mean(run['auc'] for run in runs):.4f}",
        "best_possible": f"{runs[0]['best']:.4f}",
        "share_of_the_lift_%": f"{statistics.mean(shares):.2f}",
        "deviation_%": f"{statistics.stdev(shares):.2f}",
        "least_and_most_%": f"{min(shares):.2f} to {max(shares):.2f}",
        "test_NE": f"{statistics.mean(run['ne'] for run in runs):.4f}",
        "samples_per_CPU_second": round(statistics.median(run["speed"] for run in runs)),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for names in EXPERIMENTS.values() for name in names]
    parser.add_argument("--experiments", nargs="+", choices=every, default=every)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True, help="of the data sets and runs")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.experiments}
    for seed in range(1, arguments.seeds + 1):
        for data, names in EXPERIMENTS.items():
            for name in (name for name in names if name in found):
                found[name].append(run(arguments.folder, data, name, seed))
                print(name, seed, json.dumps(found[name][-1]), flush=True)
    if arguments.output and arguments.seeds > 1:
        figures = [figure(name, runs) for name, runs in found.items()]
        arguments.output.write_text(json.dumps({"about": about(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
