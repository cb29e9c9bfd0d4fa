"""A quick baseline in a grid search: a model with fit and predict_proba, as scikit-learn's models have.

    search = GridSearchCV(PipelineModel("work"), {"lr": [0.02, 0.1]}, scoring="roc_auc", cv=2)
    search.fit(frame, labels)

The frame has numbers and text. `work` is an empty folder for the data sets and the runs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.base import BaseEstimator, ClassifierMixin

import pipeline


class PipelineModel(ClassifierMixin, BaseEstimator):
    """`model` is a model of the pipeline, `lr` the learning rate of the tables."""

    def __init__(self, folder: str, model: str = "deepfm", lr: float = 0.05, epochs: int = 1) -> None:
        self.folder, self.model, self.lr, self.epochs = folder, model, lr, epochs

    def fit(self, rows: Any, labels: Any) -> PipelineModel:
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        own = tempfile.mkdtemp(dir=self.folder)
        table = pa.table(rows).append_column("label", pa.array(np.asarray(labels, np.float32)))
        pq.write_table(table, f"{own}/rows.parquet")
        kinds = {
            field.name: pa.types.is_floating(field.type) or pa.types.is_integer(field.type) for field in table.schema
        }
        data = {
            "data.name": "fit",
            "data.format": "parquet",
            "data.path": f"{own}/data",
            "data.columns.label": "label",
            "data.columns.dense": [name for name, is_number in kinds.items() if is_number and name != "label"],
            "data.columns.sparse": [name for name, is_number in kinds.items() if not is_number],
            "data.split.kind": "random",
        }
        pipeline.prepare(pipeline.compose("prepare", {**data, "source": f"{own}/rows.parquet"}))
        training = {
            "model": self.model,
            "name": "fit",
            "run_dir": f"{own}/run",
            "trainer.epochs": self.epochs,
            "trainer.global_batch_size": 256,
            "optimizer.sparse.lr": self.lr,
        }
        pipeline.train(pipeline.compose("train", {**data, **training}))
        self.artifact_ = pipeline.Artifact(pipeline.export(f"{own}/run", precision="fp32").artifact)
        self.classes_ = np.array([0, 1])
        return self

    def predict_proba(self, rows: Any) -> np.ndarray:
        scores = self.artifact_.predict(rows)
        return np.stack([1 - scores, scores], axis=1)

    def predict(self, rows: Any) -> np.ndarray:
        return (self.predict_proba(rows)[:, 1] >= 0.5).astype(int)
