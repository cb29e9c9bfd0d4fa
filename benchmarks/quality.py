"""Measure the quality of the models beside FuxiCTR's, on the same files, in the same run:

    python -m benchmarks.quality --data FOLDER [...] --fuxictr PYTHON SOURCE [--models DeepFM ...] [--seeds 5] --output quality.jsonl

A data folder holds train.csv, valid.csv and test.csv with a header, and spec.json: the columns and what both sides share
(SPEC below has the fields); benchmarks.quality_data makes such folders. PYTHON is an interpreter that FuxiCTR (PyPI fuxictr
2.3, with polars below 2) is installed in, SOURCE a checkout of its repository, whose model_zoo is not on PyPI.

Both sides get one thread, Adam of all rows at the same rate, the same batch size, dimension and layers, and L2 of tables (but
LR and FM, whose regularizer in FuxiCTR is one for all); an evaluation an epoch, a tenth of the rate when validation AUC does not
improve, the end at the second such epoch in a row, and the best epoch's weights on test. Lists are averaged. Each side has a
process of its own for each model and seed, in turns. The output has a line a run; a run that it already holds is not repeated.
`samples_per_cpu_s` counts the process's own CPU time, for a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.about import about, commit

# FuxiCTR's name, what its constructor is told beside the shared settings -> this package's kind, and its overrides.
# Sizes are FuxiCTR's own defaults: three layers of 64, no dropout, no batch norm, two attention layers of one head of 8.
HIDDEN = [64, 64, 64]
PLAIN = ["model.dropout=0", "model.batch_norm=false"]
WIDTH_OF_ONE = ["tables.default.embedding_dim=4"]  # the least that a sharded table has; a weight is the sum of a row
# FuxiCTR limits the norm of all gradients together to 10. Only models that normalize vectors which start near 0 reach it. Here
# tables update during backward, so the limits are of a row and of the layers.
CLIPPED = ["optimizer.sparse.gradient_clip_norm=0.1", "trainer.gradient_clip_norm=10"]
SCHEDULE = ["schedule.plateau.patience=1", "trainer.early_stop.patience=2"]  # FuxiCTR's
SIZES = ["model.hidden_layer_sizes=[64,64,64]", *PLAIN]
MODELS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "LR": ({}, "logistic_regression", WIDTH_OF_ONE),
    "FM": ({}, "fm", []),
    "DeepFM": ({"hidden_units": HIDDEN}, "deepfm", SIZES),
    "DCNv2": ({"parallel_dnn_hidden_units": HIDDEN}, "dcnv2", SIZES),
    "GDCN": ({"dnn_hidden_units": HIDDEN}, "gdcn", [*SIZES, "model.structure=stacked"]),
    "GDCNP": ({"dnn_hidden_units": HIDDEN}, "gdcn", SIZES),
    "DLRM": (
        {"top_mlp_units": HIDDEN, "bottom_mlp_units": HIDDEN}, "dlrm",
        ["model.over_arch_layer_sizes=[64,64,64,1]", *PLAIN, "model.init=xavier_normal", "tables.default.init.kind=normal",
         "tables.default.init.scale=0.01"],  # as our models over vectors begin; the paper's tables begin by 1/sqrt(rows)
    ),
    "AutoInt": (
        {"dnn_hidden_units": HIDDEN}, "autoint",
        [*SIZES, "model.num_attention_layers=2", "model.attention_dim=8", "model.num_heads=1", "model.attention_norm=false",
         "model.scale_attention=false"],
    ),
    "xDeepFM": ({"dnn_hidden_units": HIDDEN}, "xdeepfm", [*SIZES, "model.cin_layer_sizes=[16,16,16]"]),
    "MaskNet": ({"dnn_hidden_units": HIDDEN}, "masknet", [*SIZES, "model.feature_norm=true", *CLIPPED]),
    "FinalMLP": (
        {"mlp1_hidden_units": HIDDEN, "mlp2_hidden_units": HIDDEN}, "finalmlp",
        [*PLAIN, "model.first_layer_sizes=[64,64,64]", "model.second_layer_sizes=[64,64,64]",
         "model.gate_layer_sizes=[64]", "model.num_heads=1"],
    ),
    "FinalNet": (
        {"block1_hidden_units": HIDDEN, "block2_hidden_units": HIDDEN}, "finalnet",
        ["model.first_layer_sizes=[64,64,64]", "model.second_layer_sizes=[64,64,64]", "model.dropout=0",
         "model.feature_gates=false", *CLIPPED, "tables.default.init.kind=normal",
         "tables.default.init.scale=0.0001"],  # with batch norm on both sides
    ),
    "WuKong": (
        {"fmb_mlp_units": HIDDEN, "mlp_hidden_units": HIDDEN}, "wukong",
        ["model.fm_layer_sizes=[64,64,64]", "model.hidden_layer_sizes=[64,64,64]", "model.dropout=0", *CLIPPED],
    ),  # with batch norm in the last MLP on both sides
    "DIN": (
        {"dnn_hidden_units": HIDDEN, "attention_hidden_units": [16], "din_use_softmax": True}, "din",
        [*SIZES, "model.activation=relu", "model.attention_layer_sizes=[16]", "model.attention_activation=dice",
         "model.attention_softmax=true"],
    ),
    "MLP": ({}, "shared_bottom", ["model.hidden_layer_sizes=[64,64]", "model.tower_layer_sizes=[64]", *PLAIN]),
}  # fmt: skip
NO_L2 = ("LR", "FM")
DEEP = ("DeepFM", "DCNv2", "GDCN", "GDCNP", "DLRM", "AutoInt", "xDeepFM", "MaskNet", "FinalMLP", "FinalNet", "WuKong")
READS_POSITIONS = ("DIN",)  # of a data set's histories; the other models take the mean of a history's vectors
OURS_ALONE = ("MLP",)  # DIN's layers over the mean of a history, which FuxiCTR's model_zoo does not have by itself
SPEC: dict[str, Any] = {
    "name": "",
    "label": "click",
    "categorical": [],
    "sequences": [],
    "numeric": [],
    "histories": {},  # name -> {"target": the feature whose table it shares, "length": its newest ids that count}
    "sequence_length": 6,
    "min_count": 1,  # ids seen less often in train share a row
    "lr": 1e-3,
    "dim": 16,
    "batch_size": 1024,
    "epochs": 100,
    "l2": 1e-3,
    "overrides": [],  # of this package alone, for the data set
}
OURS, THEIRS = "ours", "FuxiCTR"


def load_spec(folder: Path) -> dict[str, Any]:
    spec = {**SPEC, **json.loads((folder / "spec.json").read_text())}
    spec["name"] = spec["name"] or folder.name
    return spec


def count_rows(path: Path) -> int:
    with path.open(encoding="utf-8") as file:
        return sum(1 for _ in file) - 1


def run(command: Sequence[str], folder: Path) -> str:
    """Its standard output. Raises RuntimeError with its last lines where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if command[0] == sys.executable:
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def run_fuxictr(job: dict[str, Any], python: str, source: str) -> dict[str, Any]:
    work = Path(job["work"])
    work.mkdir(parents=True, exist_ok=True)
    (work / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("quality_fuxictr.py")
    out = run([python, str(script), "--source", source, "--job", str(work / "job.json")], work)
    line = next(line for line in out.splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def prepare(job: dict[str, Any]) -> None:
    """Write the data config as a user would, conf/data/NAME.yaml in the working folder, and prepare by it."""
    spec, work = job["spec"], Path(job["work"])
    if (work / "datasets" / spec["name"] / "dataset.json").exists():
        return
    config = work / "conf" / "data" / f"{option(spec)}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(data_config(spec, Path(job["data"])), indent=1))
    pipeline("prepare", [f"data={option(spec)}", *spec.get("prepare_overrides", [])], work)


def option(spec: dict[str, Any]) -> str:
    """Its name in the config group data. The package has options of its own, such as ml100k."""
    return f"quality_{spec['name']}"


def pipeline(verb: str, words: Sequence[str], work: Path) -> None:
    """Run a verb in `work`, with the configs that are there."""
    run([sys.executable, "-m", "pipeline", verb, "--config-dir", "conf", *words], work)


def data_config(spec: dict[str, Any], data: Path) -> dict[str, Any]:
    """The config of a data folder. JSON is YAML."""
    sequences = {
        name: {"max_length": history["length"], "shares": history["target"]}
        for name, history in spec["histories"].items()
    }
    columns = {
        "label": spec["label"],
        "sparse": spec["categorical"],
        "dense": spec["numeric"],
        "multi_hot": spec["sequences"],
        "sequence": sequences,
    }
    files = {"train": "train", "validation": "valid", "test": "test"}
    splits = {split: str(data / f"{name}.csv") for split, name in files.items()}
    return {
        "name": spec["name"],
        "path": f"datasets/{spec['name']}",
        "format": "csv",
        "columns": {name: value for name, value in columns.items() if value},
        "split": {"kind": "given", **splits},
        "ids": {"min_frequency": spec["min_count"]},
    }


def run_ours(job: dict[str, Any]) -> dict[str, Any]:
    prepare(job)
    spec, work = job["spec"], Path(job["work"])
    run_dir = work / "runs" / f"{job['model']}_{job['seed']}"
    words = [
        f"data={option(spec)}", f"run_dir={run_dir}",
        f"model={job['kind']}", "early_stop=auc", *SCHEDULE, "optimizer=adam", "optimizer.sparse.update_rows=all",
        f"optimizer.sparse.lr={job['lr']}", f"optimizer.dense.lr={job['lr']}", f"tables.default.embedding_dim={job['dim']}",
        f"tables.default.l2={job['l2']}", f"trainer.global_batch_size={job['batch_size']}",
        f"trainer.epochs={job['epochs']}", f"trainer.seed={job['seed']}", *job["overrides"], *spec["overrides"],
    ]  # fmt: skip
    words += [f"tables.{name}.pooling=mean" for name in spec["sequences"]]
    targets = [history["target"] for history in spec["histories"].values()]
    if job["model"] in READS_POSITIONS:
        words += [f"model.sequences=[{','.join(spec['histories'])}]", f"model.targets=[{','.join(targets)}]"]
    else:
        words += [f"tables.{target}.pooling=mean" for target in dict.fromkeys(targets)]
    pipeline("train", words, work)
    pipeline("evaluate", [f"run={run_dir}", "split=test"], work)
    return read_run(run_dir, job)


def read_run(run_dir: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The measures of a finished run and its evaluation on test."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "validation"]
    best = max(evaluations, key=lambda line: line["auc"])
    steps = -(-job["train_rows"] // job["batch_size"])
    test = json.loads(sorted(run_dir.glob("evaluation*test*.json"))[-1].read_text())
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "auc": test["auc"],
        "logloss": test["logloss"],
        "best_epoch": round(best["step"] / steps),
        "epochs": round(evaluations[-1]["step"] / steps),
        "samples_per_s": summary["throughput"]["samples_per_s"],
        "samples_per_cpu_s": summary["throughput"]["samples_per_cpu_s"],
    }


def jobs(folders: Sequence[Path], models: Sequence[str], seeds: int, work: Path) -> Iterator[dict[str, Any]]:
    for folder in folders:
        spec = load_spec(folder)
        rows = count_rows(folder / "train.csv")
        for seed in range(1, seeds + 1):
            for model in models:
                theirs, kind, overrides = MODELS[model]
                if model in READS_POSITIONS and not spec["histories"]:
                    continue
                shared = {key: spec[key] for key in ("lr", "dim", "l2", "batch_size", "epochs")}
                if model in NO_L2:
                    shared["l2"] = 0
                for system in (OURS,) if model in OURS_ALONE else (OURS, THEIRS):
                    yield {
                        **shared,
                        "system": system,
                        "set": spec["name"],
                        "model": model,
                        "seed": seed,
                        "spec": spec,
                        "data": str(folder.resolve()),
                        "train_rows": rows,
                        "work": str(work / system / spec["name"]),
                        "kind": kind,
                        "overrides": overrides,
                        "model_settings": theirs,
                    }


def figures(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record a data set and model: means over seeds, and ours less theirs."""
    found = []
    for name in dict.fromkeys(result["set"] for result in results):
        for model in MODELS:
            theirs, ours = (
                [r for r in results if (r["set"], r["model"], r["system"]) == (name, model, system)]
                for system in (THEIRS, OURS)
            )
            if ours and (theirs or model in OURS_ALONE):
                found.append({"data": name, "model": model, "seeds": len(ours), **_compared(theirs, ours)})
    return found


def _compared(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    ratio = _mean(ours, "samples_per_cpu_s") / _mean(theirs, "samples_per_cpu_s") if theirs else None
    return {
        "AUC_FuxiCTR": _auc(theirs),
        "AUC_here": _auc(ours),
        "difference": f"{_mean(ours, 'auc') - _mean(theirs, 'auc'):+.4f}" if theirs else "",
        "standard_error": f"{math.hypot(_error(theirs), _error(ours)):.4f}" if theirs else "",
        "logloss_FuxiCTR": f"{_mean(theirs, 'logloss'):.4f}" if theirs else "",
        "logloss_here": f"{_mean(ours, 'logloss'):.4f}",
        "best_epoch_FuxiCTR": f"{_mean(theirs, 'best_epoch'):.1f}" if theirs else "",
        "best_epoch_here": f"{_mean(ours, 'best_epoch'):.1f}",
        "samples_per_CPU_second,_ratio": f"{ratio:.2f}" if ratio else "",
    }


def mean_differences(found: list[dict[str, Any]]) -> dict[str, str]:
    """Data set -> the mean of the differences of the deep models."""
    text = {}
    for name in dict.fromkeys(figure["data"] for figure in found):
        deep = [float(f["difference"]) for f in found if f["data"] == name and f["model"] in DEEP]
        if deep:
            text[f"mean difference on {name}"] = f"{statistics.mean(deep):+.4f} ({len(deep)} deep models)"
    return text


def _mean(side: list[dict[str, Any]], key: str) -> float:
    return statistics.mean(result[key] for result in side)


def _error(side: list[dict[str, Any]]) -> float:
    """Standard error of the mean AUC."""
    return statistics.stdev(r["auc"] for r in side) / math.sqrt(len(side)) if len(side) > 1 else math.nan


def _auc(side: list[dict[str, Any]]) -> str:
    if not side:
        return ""
    spread = f" ({statistics.stdev(r['auc'] for r in side):.4f})" if len(side) > 1 else ""
    return f"{_mean(side, 'auc'):.4f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", type=Path, default=[])
    parser.add_argument("--fuxictr", nargs=2, metavar=("PYTHON", "SOURCE"))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=(OURS, THEIRS), default=[OURS, THEIRS])
    parser.add_argument("--work", type=Path, help="of the runs; a temporary folder where it is not given")
    parser.add_argument("--output", type=Path, default=Path("quality.jsonl"), help="a line a run")
    parser.add_argument("--figures", type=Path, help="docs/measurements/quality.json: means of all runs in --output")
    arguments = parser.parse_args()
    if THEIRS in arguments.sides and arguments.data and not arguments.fuxictr:
        parser.error("FuxiCTR's side wants --fuxictr PYTHON SOURCE; without it give --sides ours")
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        results = (
            [json.loads(line) for line in arguments.output.read_text().splitlines()]
            if arguments.output.exists()
            else []
        )
        known = {(r["system"], r["set"], r["model"], r["seed"]) for r in results}
        for job in jobs(arguments.data, arguments.models, arguments.seeds, work):
            key = job["system"], job["set"], job["model"], job["seed"]
            if key in known or job["system"] not in arguments.sides:
                continue
            found = run_ours(job) if job["system"] == OURS else run_fuxictr(job, *arguments.fuxictr)
            names = dict(zip(("system", "set", "model", "seed"), key, strict=True))
            results.append({**names, **found, "commit": commit()})
            with arguments.output.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
            print(json.dumps(results[-1]), flush=True)
    found = figures(results)
    for figure in found:
        print(json.dumps(figure))
    if arguments.figures:
        commits = ", ".join(sorted({r["commit"] for r in results}))
        head = {**about(), "commit": commits, **mean_differences(found)}
        arguments.figures.write_text(json.dumps({"about": head, "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
