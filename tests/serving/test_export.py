"""A checkpoint becomes an artifact whose scores are the trainer's within its certificate, without the training's code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.data import ReaderConfig
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.serving import AUTO, PRECISIONS
from pipeline.data.dataset import load_dataset
from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact import export as recipe
from pipeline.serving.artifact.certificate import refusal
from pipeline.serving.artifact.export import ExportSummary, ending
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.evaluate import evaluate
from tests.serving.exports import run_export
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

SPLITS = {"train": 24_000, "validation": 3_000, "test": 3_000}
SCORE = """
import json, sys
import numpy as np, torch
from pipeline.serving.scoring.predictor import Predictor

predictor = Predictor.load(sys.argv[1])
class Features:
    def keys(self): return json.loads(str(found["keys"]))
    def values(self): return torch.from_numpy(found["values"])
    def offsets(self): return torch.from_numpy(found["offsets"])
    def weights_or_none(self): return None
for rows, out in zip(sys.argv[2::2], sys.argv[3::2]):
    found = np.load(rows)
    np.save(out, predictor.score_batch(torch.from_numpy(found["dense"]), Features()).numpy())
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("torchrec", "duckdb") or name.startswith(("pipeline.models", "pipeline.training", "pipeline.embeddings"))]))
"""


def _evaluate(rank: int, run: str, split: str) -> dict[str, float]:
    return evaluate(load_config(EvaluateJob, [f"run={run}", f"split={split}"])).metrics


@pytest.mark.long
def test_the_model_that_the_certificate_compares_with_is_the_one_that_the_trainer_evaluates(
    small_artifact: ExportSummary, small_run: Path, ranks: RankPool
) -> None:
    for split, rows in SPLITS.items():
        measured = ranks.run(1, _evaluate, str(small_run), split)[0]
        model, artifact = small_artifact.certificate["model"][split], small_artifact.parity[split]
        assert artifact["rows"] == rows == measured["num_samples"]
        assert model["ne"] == pytest.approx(measured["ne"], abs=1e-6)
        assert model["auc"] == pytest.approx(measured["auc"], abs=1e-6)
        assert artifact["ne"] == pytest.approx(measured["ne"] + artifact["ne_delta"], abs=1e-6)
        assert abs(artifact["ne_delta"]) < 1e-3 and 0 < artifact["max_score_difference"] < 0.05
    assert small_artifact.sizes["tables_after"] < 0.34 * small_artifact.sizes["tables_before"]


def rows_of_split(data_path: str, split: str) -> Batch:
    """All of them in one batch, padded at the end."""
    (batch,) = ShardReader(
        data_path, load_dataset(data_path), split, global_batch_size=-(-SPLITS[split] // 16) * 16, rank=0, world_size=1,
        config=ReaderConfig(shuffle="none"), seed=0, drop_last=False,
    ).batches(epoch=0)  # fmt: skip
    return batch


def scored_in_a_fresh_process(artifact: str, batches: dict[str, Batch], folder: Path) -> dict[str, np.ndarray]:
    """Split -> scores, from a process that has imported nothing of the training."""
    files = []
    for split, batch in batches.items():
        sparse = batch.sparse_features
        files += [str(folder / f"{split}.npz"), str(folder / f"{split}.npy")]
        np.savez(
            files[-2], dense=batch.dense_features.numpy(), values=sparse.values().numpy(),
            offsets=sparse.offsets().numpy(), keys=json.dumps(sparse.keys()),
        )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCORE, artifact, *files], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    return {split: np.load(folder / f"{split}.npy") for split in batches}


def ne_of(scores: np.ndarray, batch: Batch) -> float:
    real = batch.sample_weights > 0
    labels, given = batch.labels[real].double().numpy(), scores[real.numpy()].astype(np.float64)
    logloss = -np.mean(labels * np.log(given) + (1 - labels) * np.log1p(-given))
    rate = labels.mean()
    return float(logloss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


@pytest.mark.long
def test_a_fresh_process_scores_prepared_rows_as_certified_without_the_trainings_code(
    small_artifact: ExportSummary, prepared_clicks: str, tmp_path: Path
) -> None:
    batch = rows_of_split(prepared_clicks, "validation")
    scores = scored_in_a_fresh_process(small_artifact.artifact, {"validation": batch}, tmp_path)["validation"]
    predictor = Predictor.load(small_artifact.artifact)
    np.testing.assert_array_equal(scores, predictor.score_batch(batch.dense_features, batch.sparse_features).numpy())
    assert ne_of(scores, batch) == pytest.approx(small_artifact.parity["validation"]["ne"], abs=1e-6)
    with pytest.raises(ServingError, match=names("[3008 12] 13]")):
        predictor.score_batch(batch.dense_features[:, 1:], batch.sparse_features)


@pytest.fixture(scope="module")
def trainers_ne(small_run: Path, ranks: RankPool) -> dict[str, float]:
    return {split: ranks.run(1, _evaluate, str(small_run), split)[0]["ne"] for split in SPLITS}


@pytest.fixture(scope="module")
def exact_artifact(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_export(small_run, tmp_path_factory.mktemp("exact") / "artifact", "precision=fp32").artifact


@pytest.mark.campaign
@pytest.mark.parametrize("precision", [*PRECISIONS, AUTO])
def test_a_fresh_process_scores_every_split_as_certified_at_each_precision(
    small_run: Path,
    prepared_clicks: str,
    trainers_ne: dict[str, float],
    exact_artifact: str,
    tmp_path: Path,
    precision: str,
) -> None:
    limits = [f"parity.{name}=1" for name in ("max_ne_increase", "max_auc_decrease", "max_score_difference")]
    summary = run_export(small_run, tmp_path / "artifact", f"precision={precision}", *limits)
    batches = {split: rows_of_split(prepared_clicks, split) for split in SPLITS}
    scores = scored_in_a_fresh_process(summary.artifact, batches, tmp_path)
    model = scored_in_a_fresh_process(exact_artifact, batches, tmp_path)
    for split, batch in batches.items():
        certified, real = summary.parity[split], (batch.sample_weights > 0).numpy()
        trained = trainers_ne[split]
        assert ne_of(scores[split], batch) == pytest.approx(certified["ne"], abs=1e-6)
        assert ne_of(scores[split], batch) - trained == pytest.approx(certified["ne_delta"], abs=2e-6)
        apart = np.abs(scores[split] - model[split])[real]
        assert apart.max() == pytest.approx(certified["max_score_difference"], abs=1e-5)
        assert apart.mean() == pytest.approx(certified["mean_score_difference"], abs=1e-5)


@pytest.mark.parametrize("memory", ["ram", "mapped"])
def test_tables_score_the_same_from_memory_and_from_their_files(small_artifact: ExportSummary, memory: str, prepared_clicks: str) -> None:  # fmt: skip
    predictor = Predictor.load(small_artifact.artifact, memory=memory)
    tables = predictor.lookup.tables
    torch.manual_seed(0)
    ids = [torch.randint(0, table.rows, (64,)) for table in tables]
    pooled = predictor.lookup.pooled(torch.cat(ids), torch.arange(64 * len(ids) + 1))
    wanted = Predictor.load(small_artifact.artifact).lookup.pooled(torch.cat(ids), torch.arange(64 * len(ids) + 1))
    assert torch.equal(pooled, wanted)


def test_a_second_export_of_the_same_finds_the_first_and_another_is_refused(
    small_artifact: ExportSummary, small_run: Path
) -> None:
    again = run_export(small_run, Path(small_artifact.artifact), "precision=int8")
    assert again.already_exported and again.version == small_artifact.version
    with pytest.raises(ServingError):
        run_export(small_run, Path(small_artifact.artifact), "precision=int4")


def test_an_export_that_another_one_overtakes_finds_what_that_has_made(
    small_run: Path, small_artifact: ExportSummary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the other were done between this one's look at the output and its commit."""
    output, attempts = tmp_path / "artifact", []

    def overtaken(*given: object) -> object:
        attempts.append(given)
        shutil.copytree(small_artifact.artifact, output)
        return SimpleNamespace(to_text=lambda: "{}")

    monkeypatch.setattr(recipe, "write_scorer", overtaken)
    monkeypatch.setattr(recipe, "if_installed", lambda name: None)  # no card of what overtaken() returns
    found = run_export(small_run, output, "precision=int8")
    assert found.already_exported and found.version == small_artifact.version and len(attempts) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


@pytest.mark.long
def test_an_artifact_too_far_from_its_model_is_refused_with_numbers_and_nothing_is_left(
    small_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServingError, match=names("0.002 precision=int8")) as refused:  # fmt: skip
        run_export(small_run, tmp_path / "artifact", "precision=int2", "parity.max_score_difference=0.002")
    assert "precision=auto" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("precision", "suggested"),
    [
        ("int2", "precision=int4 keeps"),
        ("int4", "precision=int8 keeps"),
        ("fp32", ""),
        ("auto", "precision=int4 keeps"),
    ],
)
def test_a_refused_export_is_not_told_to_export_the_same_again(precision: str, suggested: str) -> None:
    """It is refused for a split other than the one that precisions are compared on."""
    cost = {"ne_delta": 0.0, "auc_delta": 0.0, "max_score_difference": 0.0}
    costs = dict.fromkeys(PRECISIONS, cost) | {"int2": cost | {"ne_delta": 0.0 if precision == "int2" else 1.0}}
    limits = {"max_ne_increase": 0.001, "max_auc_decrease": 0.001, "max_score_difference": 0.1}
    text = refusal(["train: NE rises"], {"limits": limits, "precisions": costs}, ["prune less"], precision)
    assert suggested in text and ("keeps" in text) == bool(suggested)
    assert text.endswith("prune less; or raise the limit")


def test_a_long_export_names_the_setting_that_makes_it_shorter(small_artifact: ExportSummary) -> None:
    rows = sum(parity["rows"] for parity in small_artifact.parity.values())
    short, long = (ending(replace(small_artifact, seconds=seconds))[0] for seconds in (5.0, 206.0))
    assert "parity.max_rows" not in short and mentions(long, f"206.0 s {rows:,} rows parity.max_rows=")
