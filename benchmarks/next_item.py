"""Train SASRec and HSTU on files of user sequences with several seeds, and measure the next item among all items:

    python -m benchmarks.next_item --sources Beauty.txt Toys_and_Games.txt --folder DIR [--seeds 3] [--output docs/measurements/next_item.json]

Each file goes through `inspect`, `prepare`, `train`, `evaluate split=test` and `export`, each in a separate process. The
artifact of a seed then retrieves the items of each user, as /retrieve does. A run whose folder has an evaluation is not trained
again: run the same command again to continue, or with more seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.about import about
from benchmarks.experiments import pipeline
from pipeline.extras.retrieval.queries import Wish
from pipeline.extras.retrieval.retriever import Retriever
from pipeline.serving.scoring.scorer import schema_of

MODELS = {"sasrec": "SASRec", "hstu": "HSTU"}
# HR@10 and NDCG@10 that S3-Rec's authors print for SASRec and for S3-Rec (CIKM 2020), ranked among all items.
PUBLISHED = {
    "beauty": ((0.0605, 0.0318), (0.0647, 0.0327)),
    "toys_and_games": ((0.0675, 0.0374), (0.0700, 0.0376)),
}


def prepare(folder: Path, source: Path) -> str:
    """Prepare the file by the config that `inspect` proposes. Return the name of the data set."""
    name = re.sub(r"\W+", "_", source.stem).lower()
    config = folder / "conf" / "data" / f"{name}.yaml"
    if not (folder / "datasets" / name / "dataset.json").exists():
        config.parent.mkdir(parents=True, exist_ok=True)
        pipeline(folder, "inspect", f"source={source}", f"data_name={name}", f"output={config}")
        pipeline(folder, "prepare", "--config-dir", "conf", f"data={name}", f"source={source}")
    return name


def run(folder: Path, name: str, model: str, seed: int) -> dict[str, Any]:
    """Return the measures of one run, which is trained if it has no evaluation."""
    run_dir = f"runs/{name}_{model}_{seed}"
    if not list((folder / run_dir).glob("evaluation*test*.json")):
        words = [f"experiment=user_sequences_{model}", f"trainer.seed={seed}", f"run_dir={run_dir}"]
        pipeline(folder, "train", *words, f"data.path=datasets/{name}")
        pipeline(folder, "evaluate", f"run={run_dir}", "split=test")
    test = json.loads(next((folder / run_dir).glob("evaluation*test*.json")).read_text())
    summary = json.loads((folder / run_dir / "summary.json").read_text())
    times = [json.loads(line)["time"] for line in (folder / run_dir / "metrics.jsonl").read_text().splitlines()]
    minutes = (times[-1] - times[0]) / 60
    return {
        "hr": test["recall_at_10"],
        "ndcg": test["ndcg_at_10"],
        "items": test["catalogue_items"],
        "validation_hr": summary["validation"]["recall_at_10"],
        "validation_ndcg": summary["validation"]["ndcg_at_10"],
        "minutes": minutes,
        "speed": summary["throughput"]["samples_per_cpu_s"],
    }


def retrieved(
    folder: Path, name: str, model: str, seed: int, source: Path, *, only_finished: bool
) -> list[float] | None:
    """Return HR@10 and NDCG@10 of the items that the artifact of a run retrieves for all users, without
    all items that the user has seen. None if it was not measured before, with `only_finished`.
    """
    written = folder / f"runs/{name}_{model}_{seed}/retrieved.json"
    if written.exists():
        return list(json.loads(written.read_text()))
    if only_finished:
        return None
    artifact = f"artifacts/{name}_{model}_{seed}"
    if not (folder / artifact).exists():
        words = ["precision=fp32", "parity.splits=[validation]", "parity.max_rows=2000"]
        pipeline(folder, "export", f"run=runs/{name}_{model}_{seed}", f"output={artifact}", *words)
    retriever = Retriever.load(str(folder / artifact))
    schema, places = schema_of(retriever.columns), []
    for line in source.read_text().splitlines():
        _, *seen, wanted = line.split()
        rows = pa.table({"history": [seen]}, schema=schema)
        found = retriever.retrieve(rows, [(1, Wish(10, excluded=tuple(seen)))]).scores[0]
        items = retriever.items.values_at(found.positions).to_pylist()
        places.append(items.index(wanted) + 1 if wanted in items else math.inf)
    hits, gains = sum(place <= 10 for place in places), sum(1 / math.log2(1 + place) for place in places)
    written.write_text(json.dumps([hits / len(places), gains / len(places)]))
    return [hits / len(places), gains / len(places)]


def figure(name: str, model: str, runs: list[dict[str, Any]], served: list[float] | None) -> dict[str, Any]:
    hits, gains = [each["hr"] for each in runs], [each["ndcg"] for each in runs]
    of_sasrec, of_s3rec = PUBLISHED.get(name, ((math.nan, math.nan), (math.nan, math.nan)))
    return {
        "data_set": name,
        "model": MODELS[model],
        "seeds": len(runs),
        "test_HR@10": f"{statistics.mean(hits):.4f}",
        "test_NDCG@10": f"{statistics.mean(gains):.4f}",
        "least_and_most_HR@10": f"{min(hits):.4f} to {max(hits):.4f}",
        "least_and_most_NDCG@10": f"{min(gains):.4f} to {max(gains):.4f}",
        "retrieved_HR@10_and_NDCG@10": "" if served is None else f"{served[0]:.4f}, {served[1]:.4f}",
        "published_for_SASRec": f"{of_sasrec[0]:.4f}, {of_sasrec[1]:.4f}",
        "published_for_S3-Rec": f"{of_s3rec[0]:.4f}, {of_s3rec[1]:.4f}",
        "validation_HR@10": f"{statistics.mean(each['validation_hr'] for each in runs):.4f}",
        "items": runs[0]["items"],
        "minutes_of_a_run": f"{statistics.median(each['minutes'] for each in runs):.1f}",
        "users_per_CPU_second": round(statistics.median(each["speed"] for each in runs)),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", nargs="+", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only-finished", action="store_true", help="train nothing: write what is there")
    parser.add_argument("--folder", type=Path, required=True, help="of the data sets, runs and artifacts")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sources = {prepare(folder, source.resolve()): source.resolve() for source in arguments.sources}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {
        (name, model): [] for name in sources for model in arguments.models
    }
    for seed in range(1, arguments.seeds + 1):
        for (name, model), runs in found.items():
            is_finished = list((folder / f"runs/{name}_{model}_{seed}").glob("evaluation*test*.json"))
            if is_finished or not arguments.only_finished:
                runs.append(run(folder, name, model, seed))
                print(name, model, seed, json.dumps(runs[-1]), flush=True)
    figures = []
    for (name, model), runs in found.items():
        if runs:
            served = retrieved(folder, name, model, 1, sources[name], only_finished=arguments.only_finished)
            print(name, model, "retrieved", served, flush=True)
            figures.append(figure(name, model, runs, served))
    if arguments.output:
        arguments.output.write_text(json.dumps({"about": about(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
