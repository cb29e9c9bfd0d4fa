"""Train one FuxiCTR model on CSV files and print its measures as a JSON line; benchmarks.quality starts it.

It runs under the interpreter that FuxiCTR is installed in, and imports nothing of this package. FuxiCTR's trainer is used as it
comes: Adam, an evaluation an epoch, a tenth of the learning rate when it does not improve, the best weights at the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDERS = {"DeepFM": "DeepFM/DeepFM_torch", "GDCNP": "GDCN"}  # of the others: their own name


READS_POSITIONS = ("DIN",)


def columns(spec: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """FuxiCTR's description of the columns of a data set; most models take the mean of a history's vectors."""
    pooling = None if model in READS_POSITIONS else "layers.MaskedAveragePooling()"
    given = {"active": True}
    categorical = [{**given, "name": name, "dtype": "str", "type": "categorical"} for name in spec["categorical"]]
    sequences = [
        {
            **given,
            "name": name,
            "dtype": "str",
            "type": "sequence",
            "splitter": "|",
            "padding": "pre",
            "max_len": spec["sequence_length"],
            "feature_encoder": "layers.MaskedAveragePooling()",
        }
        for name in spec["sequences"]
    ]
    histories = [
        {
            **given,
            "name": name,
            "dtype": "str",
            "type": "sequence",
            "splitter": "|",
            "padding": "pre",
            "max_len": history["length"],
            "share_embedding": history["target"],
            "feature_encoder": pooling,
        }
        for name, history in spec["histories"].items()
    ]
    numeric = [{**given, "name": name, "dtype": "float", "type": "numeric", "fill_na": 0} for name in spec["numeric"]]
    return [*categorical, *sequences, *histories, *numeric]


def dataset_id(job: dict[str, Any]) -> str:
    """FuxiCTR keeps how a sequence is read with the prepared data."""
    name: str = job["spec"]["name"]
    return f"{name}_positions" if job["model"] in READS_POSITIONS else name


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """What FuxiCTR's experiment files say, from the benchmark's job."""
    spec, name = job["spec"], job["model"]
    positions = {}
    if name in READS_POSITIONS:
        targets = [history["target"] for history in spec["histories"].values()]
        positions = {"din_target_field": targets, "din_sequence_field": list(spec["histories"])}
    return {
        "model": name, "model_id": f"{name}_{job['seed']}", "dataset_id": dataset_id(job), "data_root": job["work"],
        "model_root": f"{job['work']}/models/", "data_format": "csv", "train_data": f"{job['data']}/train.csv",
        "valid_data": f"{job['data']}/valid.csv", "test_data": f"{job['data']}/test.csv",
        "min_categr_count": spec["min_count"], "feature_cols": columns(spec, name),
        "label_col": {"name": spec["label"], "dtype": "float"}, "loss": "binary_crossentropy",
        "metrics": ["AUC", "logloss"], "task": "binary_classification", "optimizer": "adam",
        "learning_rate": job["lr"], "embedding_dim": job["dim"], "batch_size": job["batch_size"], "shuffle": True,
        "num_workers": 0, "verbose": 0, "early_stop_patience": 2, "save_best_only": True, "eval_steps": None,
        "monitor": "AUC", "monitor_mode": "max", "pickle_feature_encoder": True, "use_features": None,
        "feature_specs": None, "gpu": -1, "seed": job["seed"], "epochs": job["epochs"], "debug_mode": False,
        "group_id": None, "data_loader": RowsInMemory, **({"embedding_regularizer": job["l2"]} if job["l2"] else {}),
        **job["model_settings"], **positions,
    }  # fmt: skip


class RowsInMemory:
    """Batches of a split's Parquet files as tensors; FuxiCTR 2.3.10's own loader starts a Ray cluster, which is slower."""

    def __init__(self, features: Any, path: str, split: str = "train", **options: Any) -> None:
        import pandas
        import torch

        files = sorted(Path(path).glob("*.parquet")) if Path(path).is_dir() else [Path(path)]
        frame = pandas.concat([pandas.read_parquet(file) for file in files], ignore_index=True)
        names = [*features.features, *features.labels]
        self.columns = {name: torch.as_tensor(_array(frame[name])) for name in names}
        self.num_samples, self.num_blocks = len(frame), 1
        self._batch_size, self._is_shuffled = options["batch_size"], options["shuffle"] and split == "train"

    def __len__(self) -> int:
        return -(-self.num_samples // self._batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch

        order = torch.randperm(self.num_samples) if self._is_shuffled else torch.arange(self.num_samples)
        for rows in order.split(self._batch_size):
            yield {name: column[rows] for name, column in self.columns.items()}


def _array(column: Any) -> Any:
    import numpy

    return numpy.stack(column.to_list()) if column.dtype == object else column.to_numpy(copy=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="a checkout of FuxiCTR, for its model_zoo")
    parser.add_argument("--job", required=True, help="a JSON file")
    arguments = parser.parse_args()
    job = json.loads(Path(arguments.job).read_text())
    sys.path.insert(0, str(Path(arguments.source) / "model_zoo" / FOLDERS.get(job["model"], job["model"])))
    import torch
    from fuxictr.features import FeatureMap
    from fuxictr.preprocess import FeatureProcessor, build_dataset
    from fuxictr.pytorch.dataloaders import RankDataLoader
    from fuxictr.pytorch.torch_utils import seed_everything

    torch.set_num_threads(1)
    Path(job["work"]).mkdir(parents=True, exist_ok=True)
    os.chdir(job["work"])
    given = settings(job)
    Path(given["model_root"], dataset_id(job)).mkdir(parents=True, exist_ok=True)
    seed_everything(job["seed"])
    folder = Path(job["work"]) / dataset_id(job)
    splits = ("train_data", "valid_data", "test_data")
    if (folder / "feature_map.json").exists():
        given |= {split: str(folder / f"{split.removesuffix('_data')}.parquet") for split in splits}
    else:
        given |= dict(zip(splits, build_dataset(FeatureProcessor(**given), **given), strict=True))
    features = FeatureMap(dataset_id(job), str(folder))
    features.load(str(folder / "feature_map.json"), given)
    model = getattr(importlib.import_module("src"), job["model"])(features, **given)
    train, validation = RankDataLoader(features, stage="train", **given)

    evaluate, evaluations, spent = model.evaluate, [], [0.0, 0.0]

    def timed(*arguments: Any, **options: Any) -> dict[str, float]:
        clock, cpu = time.perf_counter(), time.process_time()
        found: dict[str, float] = evaluate(*arguments, **options)
        spent[0], spent[1] = spent[0] + time.perf_counter() - clock, spent[1] + time.process_time() - cpu
        evaluations.append(dict(found))
        return found

    model.evaluate = timed
    clock, cpu = time.perf_counter(), time.process_time()
    model.fit(train, validation_data=validation, **given)
    clock, cpu = time.perf_counter() - clock - spent[0], time.process_time() - cpu - spent[1]
    test = evaluate(RankDataLoader(features, stage="test", **given))
    rows = job["train_rows"] * len(evaluations)
    best = max(range(len(evaluations)), key=lambda epoch: evaluations[epoch]["AUC"]) + 1
    result = {
        "auc": float(test["AUC"]),
        "logloss": float(test["logloss"]),
        "best_epoch": best,
        "epochs": len(evaluations),
        "wall_s": clock,
        "samples_per_s": rows / clock,
        "samples_per_cpu_s": rows / cpu,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
