"""What takes minutes: three rounds in one process, several ranks, a notebook's components, a script under mypy --strict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.test_calls import assert_same, words
from tests.support.forks import ENVIRONMENT
from tests.support.own_folder import REPOSITORY

pytestmark = pytest.mark.campaign

ROUNDS = """
import os, signal, sys
import pipeline
from tests.api.process import changes, held
from pipeline.training.hooks import record

words, source = sys.argv[2:], sys.argv[1]
states, described = [], record.describe_start

def interrupt(step, world_size):
    if step == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return described(step, world_size)

for number in range(3):
    job = pipeline.compose("train", [*words, f"run_dir=runs/{number}"])
    if number == 1:
        record.describe_start = interrupt
        try:
            pipeline.train(job)
            raise SystemExit("it was not interrupted")
        except KeyboardInterrupt:
            record.describe_start = described
    pipeline.train(job)
    pipeline.evaluate(f"runs/{number}", split="test")
    pipeline.export(f"runs/{number}", output=f"artifacts/{number}")
    pipeline.predict(f"artifacts/{number}", source=source, output=f"scores{number}.parquet")
    states.append(held())
different = [changes(states[0], each) for each in states[1:]]
assert different == [{}, {}], different
"""


def run(arguments: list[str], folder: Path) -> str:
    environ = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_three_rounds_in_one_process_leave_nothing_and_have_the_bits_of_commands(
    prepared_clicks: str, tmp_path: Path
) -> None:
    """Ctrl-C stops the training of the second."""
    (tmp_path / "rounds.py").write_text(ROUNDS)
    source = str(Path(prepared_clicks).parent / "clicks.tsv")
    small = words(prepared_clicks, "")[:-1]
    run(["rounds.py", source, *small], tmp_path)
    run(["-m", "pipeline", "train", *small, "run_dir=runs/command"], tmp_path)
    run(["-m", "pipeline", "export", "run=runs/command", "output=artifacts/command"], tmp_path)
    run(["-m", "pipeline", "predict", "artifact=artifacts/command", f"source={source}", "output=command.parquet"], tmp_path)  # fmt: skip
    for number in range(3):
        assert_same(tmp_path / "runs" / str(number), tmp_path / "runs" / "command")
        assert (tmp_path / f"scores{number}.parquet").read_bytes() == (tmp_path / "command.parquet").read_bytes()


TWO_RANKS = """
import os, signal, sys, threading, time
import pipeline
from tests.api.process import changes, held

job = pipeline.compose("train", [*sys.argv[1:], "run_dir=runs/two"])
before = held()
summary = pipeline.train(job, ranks=2)
assert summary.step == 4 and summary.validation["auc"] > 0.5, summary
assert pipeline.train(job, ranks=2).step == 4
assert pipeline.evaluate("runs/two", ranks=2, split="test", max_batches=2).metrics["num_samples"] > 0
try:
    pipeline.train(pipeline.compose("train", [*sys.argv[1:], "run_dir=runs/two", "trainer.seed=9"]), ranks=2)
    raise SystemExit("it was not refused")
except pipeline.UserError as error:
    assert "trainer.seed" in str(error) and type(error).__name__ == "TrainingError", error

def interrupt():
    file = "runs/three/metrics.jsonl"
    while not (os.path.exists(file) and os.path.getsize(file)):  # before the first step there is nothing to save
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

waiting = threading.Thread(target=interrupt)
waiting.start()
try:
    pipeline.train(pipeline.compose("train", [*sys.argv[1:], "run_dir=runs/three", "trainer.max_steps=90000", "trainer.epochs=1000"]), ranks=2)
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    assert any(name.startswith("step_") for name in os.listdir("runs/three/checkpoints"))
waiting.join()
assert changes(before, held(), ("frozen",)) == {}, changes(before, held())
"""
JOINED = """
import os, sys
import pipeline

for number in range(2):
    summary = pipeline.train(pipeline.compose("train", [*sys.argv[1:], f"run_dir=runs/joined{number}"]))
    assert summary.step == 4, summary
try:
    pipeline.train(pipeline.compose("train", [*sys.argv[1:], "run_dir=runs/more"]), ranks=2)
    raise SystemExit("it was not refused")
except pipeline.UserError as error:
    assert "ranks=2" in str(error), error
"""


def test_two_ranks_are_started_or_joined(prepared_clicks: str, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_RANKS)
    (tmp_path / "joined.py").write_text(JOINED)
    small = words(prepared_clicks, "")[:-1]
    run(["two.py", *small], tmp_path)
    run(["-m", "torch.distributed.run", "--nproc-per-node", "2", "joined.py", *small], tmp_path)
    for number in range(2):
        assert_same(tmp_path / "runs" / "two", tmp_path / "runs" / f"joined{number}")


CELLS = [
    """
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import pipeline
from pipeline.config.model import ModelConfig
from pipeline.embeddings.collection import build_embeddings
from pipeline.models.metrics.metric import Metric
from pipeline.training.hooks.base import Hook

SCALE = 0.5
""",
    """
class Scaled(nn.Module):
    def forward(self, inputs):
        return SCALE * inputs  # a constant of another cell
""",
    """
@pipeline.register("model", "of_a_cell")
@dataclass
class CellConfig(ModelConfig):
    kind: str = "of_a_cell"
    hidden: int = 8

    def build(self, tables, num_dense_features):
        width = num_dense_features + sum(table.embedding_dim * len(table.feature_names) for table in tables)
        names = [name for table in tables for name in table.feature_names]
        return CellModel(build_embeddings(tables), names, width, self.hidden)


class CellModel(nn.Module):
    def __init__(self, embeddings, names, width, hidden):
        super().__init__()
        self.embeddings, self.names, self.scale = embeddings, names, Scaled()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense_features, sparse_features):
        pooled = self.embeddings(sparse_features)
        return self.layers(self.scale(torch.cat([dense_features, *(pooled[name] for name in self.names)], dim=1)))
""",
    """
@pipeline.register("metric", "mean_prediction")
class MeanPrediction(Metric):
    def sums(self, predictions, labels, weights):
        return np.array([weights.sum(), (weights * predictions).sum()])

    def value(self, sums):
        return sums[1] / sums[0]


@pipeline.register("hook", "counted")
class Counted(Hook):
    def log_values(self, state):
        return {"counted": 7.0}
""",
    """
words = [*WORDS, "model=of_a_cell", "trainer.metrics=[mean_prediction]", "trainer.hooks=[counted]", "trainer.log_every_steps=1"]
for ranks in (1, 2):
    job = pipeline.compose("train", [*words, f"run_dir=runs/{ranks}"])
    summary = pipeline.train(job, ranks=ranks)
    assert 0 < summary.validation["mean_prediction"] < 1, summary
    assert pipeline.Run(f"runs/{ranks}").resume({"trainer.max_steps": 6}, ranks=ranks).step == 6
    assert set(pipeline.Run(f"runs/{ranks}").metrics("train")["counted"].to_pylist()) == {7.0}
    kept = open(f"runs/{ranks}/source/plugins/notebook_cells.py").read()
    assert "class Scaled" in kept and "SCALE = 0.5" in kept and "# a constant of another cell" in kept, kept
    assert "pipeline.train(" not in kept
    exported = pipeline.export(f"runs/{ranks}", output=f"artifacts/{ranks}")
    row = {name: None for name in pipeline.Artifact(exported.artifact).schema.names}
    assert 0 < pipeline.Artifact(exported.artifact).predict([row])[0] < 1
""",
]


def test_components_of_a_cell_train_on_one_rank_and_two_resume_and_export(prepared_clicks: str, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    small = f"WORDS = {words(prepared_clicks, '')[:-1]!r}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text.strip()) for text in (small, *CELLS)])
    environ = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute(env=environ)
    kept = tmp_path / "runs" / "2" / "source" / "plugins"
    environ["PYTHONPATH"] = f"{REPOSITORY}:{kept}"
    command = ["-m", "pipeline", "evaluate", "run=runs/2", "plugins=[notebook_cells]", "max_batches=2"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "mean_prediction" in done.stdout, done.stderr[-2000:]


SCRIPT = """
import pipeline
from pipeline import Artifact, Dataset, Registry, Run, Runs, UserError, compose, evaluate, export, inspect, plan, predict, prepare, retrain_tick, train


def main(path: str) -> float:
    found = inspect(path, label="label")
    prepared = prepare(compose("prepare", {"data": "clicks", "source": path}, config_dir=found.name))
    job = compose("train", ["experiment=quickstart"], **{"run_dir": "runs/a"})
    job.trainer.epochs = 2
    summary = train(job, ranks=2, progress=False)
    try:
        metrics: dict[str, float] = evaluate(summary.run_dir, split="test").metrics
    except UserError as error:
        print(error.code, prepared.path)
        raise
    artifact = Artifact(export(summary.run_dir, precision="int8").artifact)
    scores = artifact.predict([{"a": 1}])
    predict(artifact.path, source=path, output="scores.parquet")
    run: Run = Runs("runs").best("auc")
    print(run.summary.step, run.config.trainer.seed, Dataset(prepared.path).splits["train"].num_rows)
    print(plan(compose("plan")).plan_file, retrain_tick(compose("retrain")).champion, Registry("r").history()[0].state)
    return float(scores[0]) + metrics["ne"] + len(pipeline.__version__)
"""
WRONG = """
from pipeline import compose, train

train(compose("evaluate", run="runs/a"))
print(train(compose("train")).no_such_field)
"""


def test_a_users_script_passes_mypy_strict_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = ["-m", "mypy", "--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    run([*command, "right.py"], tmp_path)
    environ = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, *command, "wrong.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)  # fmt: skip
    assert "EvaluateJob" in done.stdout and "no_such_field" in done.stdout, done.stdout
