"""Frozen tables, tables that start from files and columns of vectors together with 2 ranks, resume, differential steps,
tiers, export and deltas. tests/gpu/test_table_files.py has the GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.checkpoint.chains import open_step
from pipeline.extras.publish.publish import publish
from pipeline.serving.scoring.load import find_folder
from pipeline.serving.scoring.predictor import Predictor
from tests.extras.publish.test_deltas import export_step, job_of
from tests.extras.table_files.combined import DIM, prepared, words_of_tables
from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool

WAYS = {
    "plain": [],
    "differential": ["checkpoint.differential=true"],
    "tiers": ["+tables.default.tiers.slots=0.45", "+tables.default.tiers.min_rows=100"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("combined")
    return folder, prepared(folder)


def _train(
    ranks: RankPool, num_ranks: int, data: tuple[Path, list[str]], run: Path, steps: int, more: list[str]
) -> None:
    folder, words = data
    common = [
        "hardware=cpu", "trainer.global_batch_size=64", "trainer.evaluate_max_batches=1", "trainer.evaluate_batch_size=64",
        "checkpoint.save_every_steps=2", "checkpoint.keep_last_n=9", "logger.report=false", "logger.tensorboard=false",
    ]  # fmt: skip
    job = [*words, *words_of_tables(folder), *common, f"trainer.max_steps={steps}", f"run_dir={run}", *more]
    ranks.run(num_ranks, train_on_rank, job)


@pytest.fixture(scope="module")
def straight(
    ranks: RankPool, data: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """The tensors of one rank that trains 8 steps without a stop."""
    run = tmp_path_factory.mktemp("straight") / "run"
    _train(ranks, 1, data, run, 8, [])
    return _tensors(run)


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    """Of step 8, with the changes of its chain."""
    _, _, tensors = open_step(str(run / "checkpoints"), 8)
    return {key: tensors.read(key, [0] * len(tensors.shape(key)), tensors.shape(key)) for key in tensors.entries}


# test_table_files.py has the plain way in the default suite.
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("plain", marks=pytest.mark.campaign),
        *(pytest.param(way, marks=pytest.mark.long) for way in ("differential", "tiers")),
    ],
)
def test_two_ranks_one_that_resumes_an_export_and_a_delta_agree_with_one_run(
    ranks: RankPool, data: tuple[Path, list[str]], straight: dict[str, torch.Tensor], tmp_path: Path, way: str
) -> None:
    _train(ranks, 2, data, tmp_path / "run", 4, [*WAYS[way], "world_size=2"])
    _train(ranks, 1, data, tmp_path / "run", 8, WAYS[way])
    found = _tensors(tmp_path / "run")
    assert found.keys() == straight.keys()
    for key, wanted in straight.items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    _assert_frozen(found, data[0])
    artifact = export_step(tmp_path / "run", 4, tmp_path / "artifact", "precision=fp32")
    predictor, rows = Predictor.load(artifact), pq.read_table(data[0] / "rows.parquet").slice(0, 300)
    before = predictor.score(rows).scores
    publish(job_of(artifact, "delta_gate.max_rows_fraction=1", "delta_gate.max_ne_increase=9"), find_folder)
    predictor.catch_up(artifact)
    assert predictor.sequence == 1
    whole = Predictor.load(export_step(tmp_path / "run", 8, tmp_path / "whole", "precision=fp32"))
    np.testing.assert_array_equal(predictor.score(rows).scores, whole.score(rows).scores)  # bit for bit
    assert not np.array_equal(before, whole.score(rows).scores)


def _assert_frozen(found: dict[str, torch.Tensor], folder: Path) -> None:
    """The rows of items with a vector keep its bits, and the table has no state."""
    (weights,) = (values for key, values in found.items() if key.endswith(".item.weight"))
    given = pq.read_table(folder / "items.parquet").to_pydict()
    vocabulary = pq.read_table(next((folder / "prepared").rglob("*item*.parquet")))
    of_values = dict(zip(*(vocabulary[name].to_pylist() for name in ("value", "id")), strict=True))
    known = [
        (of_values[value], vector)
        for value, vector in zip(given["value"], given["vector"], strict=True)
        if value in of_values
    ]
    rows, vectors = zip(*known, strict=True)
    np.testing.assert_array_equal(weights[list(rows), :DIM].numpy(), np.array(vectors, np.float32))
    assert len(known) > 100 and not any(".item." in key for key in found if key.startswith("optimizer"))
