"""Read, evaluate, continue and use training runs."""

from __future__ import annotations

import dataclasses
import html
import os
import tempfile
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.cli.api.artifact import Artifact
from pipeline.cli.api.calls import Overrides, changed, compose, export, train
from pipeline.cli.api.frames import Frame, to_table
from pipeline.cli.api.session import session
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import from_extra
from pipeline.config.saved_jobs import load_saved_job
from pipeline.runtime.errors import ConfigError, check_choice, did_you_mean
from pipeline.runtime.storage import storage
from pipeline.training.summary import TrainSummary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

FRAME_HEIGHT = 620  # pixels of the tile in a notebook


class Run:
    """A run folder. Raises ConfigError if `path` is not one.

    Its model is the best step if the run keeps it, otherwise the newest. step: another step.
    """

    def __init__(self, path: str, *, step: int | None = None) -> None:
        self.path, self.step = str(path), step
        self._folder: Any = from_extra("open_run", "Run")(self.path)

    def __repr__(self) -> str:
        return f"Run({self.path!r}, {self._folder.state} at step {self._folder.step})"

    def _repr_html_(self) -> str:
        """The figures and curves of the run's page. A frame keeps its style and the notebook's apart."""
        page = html.escape(from_extra("render_tile", "Run")(self._folder), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'

    @cached_property
    def config(self) -> TrainJob:
        """The job that was trained. Raises ConfigError if it needs a plugin that is not imported."""
        return load_saved_job(TrainJob, storage.join(self.path, "config.yaml"))

    @cached_property
    def summary(self) -> TrainSummary:
        """The record that train() returned. Raises ConfigError until the run has ended."""
        values = from_extra("open_run", "Run")(self.path).summary
        if not values:
            raise ConfigError(f"{self.path} has no summary: it has not ended; train it to the end with resume()")
        return TrainSummary(**values)

    def metrics(self, kind: str | None = None) -> pa.Table:
        """Return what was measured: a row for each logged step of training and each evaluation.

        kind: only the rows of one kind, such as "train" or "validation".
        """
        lines = from_extra("open_run", "Run")(self.path).lines
        rows = [line for line in lines if kind in (None, line["kind"])]
        return to_table(rows) if rows else pa.table({"kind": pa.array([], pa.string())})

    @property
    def evaluations(self) -> dict[tuple[str, int], dict[str, float]]:
        """(split, step) -> metrics."""
        return dict(from_extra("open_run", "Run")(self.path).evaluations)

    @cached_property
    def _artifact(self) -> Artifact:
        """The run's model as an artifact in fp32, in a folder that is removed with this object."""
        self._temporary = tempfile.TemporaryDirectory(prefix="run-")
        output = os.path.join(self._temporary.name, "artifact")
        settings = {"run": self.path, "precision": "fp32", "parity.max_rows": 1000, "output": output, "step": self.step}
        export(compose("export", settings))
        return Artifact(output)

    def predict(self, rows: Frame, *, bad_rows: str = "raise") -> NDArray[np.float32]:
        """Return the score of each row, as Artifact.predict does, by an artifact in fp32 that the first call makes."""
        return self._artifact.predict(rows, bad_rows=bad_rows)

    def explain(self, rows: Frame, *, label: str | None = None) -> pa.Table:
        """Return what each column adds to each row's score, as Artifact.explain does."""
        return self._artifact.explain(rows, label=label)

    def embeddings(self, table: str) -> pa.Table:
        """Return a table of the model: row, value and vector. `table` is the name of the table or its feature."""
        with tempfile.TemporaryDirectory() as folder, session():
            output = os.path.join(folder, "table.parquet")
            from_extra("export_table_of_run", "Run.embeddings")(self.path, self.step, table, output)
            return pq.read_table(output)

    def model(self) -> nn.Module:
        """Return the model with its trained weights in plain PyTorch and TorchRec modules, on the CPU.

        forward(dense_features [batch, num_dense], sparse_features KeyedJaggedTensor) -> logits
        """
        from pipeline.serving.artifact.trained_step import load_model

        with session():
            return load_model(ExportJob(self.path, step=self.step))

    def evaluate(self, rows: Frame) -> dict[str, float]:
        """Return the metrics of the model on labelled raw rows, whose columns are those of the training's source.

        NE, AUC, log loss, calibration, label rate and the number of rows; of several labels as label/metric.
        pipeline.evaluate(run, split="test") measures a split of the data set.
        """
        from pipeline.serving.scoring.measure import measure_rows

        return measure_rows(self.config.data, to_table(rows), self._artifact.labels, self._artifact.predict)

    def resume(
        self, overrides: Overrides = (), *, ranks: int = 1, verbose: bool = False, progress: bool | None = None
    ) -> TrainSummary:
        """Train on from the newest step. `overrides` are keys with new values, such as {"trainer.epochs": 3}."""
        job = dataclasses.replace(self.config, run_dir=self.path)
        summary = train(changed(job, overrides), ranks=ranks, verbose=verbose, progress=progress)
        self.__dict__.pop("config", None)
        self.__dict__.pop("summary", None)
        self.__dict__.pop("_artifact", None)
        self._folder = from_extra("open_run", "Run")(self.path)
        return summary


class Runs:
    """The runs in a folder and the folders below it. Raises ConfigError if there is no such folder."""

    def __init__(self, root: str = "runs") -> None:
        self.root = str(root)
        self._runs: list[Any] = from_extra("find_runs", "Runs")(self.root)

    def __iter__(self) -> Iterator[Run]:
        return (Run(run.path) for run in self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"Runs({self.root!r}, {len(self)} runs)"

    def __getitem__(self, name: str) -> Run:
        """Return a run by the name of its folder."""
        found = {run.name: run.path for run in self._runs}
        check_choice("run", name, found)
        return Run(found[name])

    def to_arrow(self) -> pa.Table:
        """Return a row for each run and label: state, step, metrics, speed and cost."""
        rows = from_extra("rows_of_runs", "Runs")(self._runs)
        return to_table(rows) if rows else pa.table({"run": pa.array([], pa.string())})

    def best(self, metric: str = "ne") -> Run:
        """Return the best run by a metric. Raises ConfigError if no run was measured by it."""
        if not self._runs:
            raise ConfigError(f"there is no run in {self.root}")
        return Run(from_extra("sorted_runs", "Runs")(self._runs, metric)[0].path)

    def compare(self, *names: str, split: str | None = None) -> pa.Table:
        """Return the metrics of the runs (all by default) next to the first one's, with intervals of the difference."""
        known = {run.name: run for run in self._runs}
        for name in names:
            if name not in known:
                raise ConfigError(f"{self.root} has no run {name!r}{did_you_mean(name, known)}")
        chosen = [known[name] for name in names] if names else self._runs
        return to_table(from_extra("compare_runs", "Runs")(chosen, split).as_rows())
