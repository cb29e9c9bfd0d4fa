"""Given vectors of ids as features: what they add on planted data, and the same scores in training, resume and export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.tables import CompressionConfig, TableConfig
from pipeline.data.prepare.run import prepare
from pipeline.embeddings.compression.kind import compressed
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.tables import resolve_tables
from pipeline.runtime.errors import ConfigError
from pipeline.serving.artifact.export import export
from tests.models.learning import auc
from tests.support.datasets import described_dataset
from tests.support.jobs import train_on_rank
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.support.stored_tensors import step_tensors

NUM_ITEMS, WIDTH, NUM_ROWS = 2_000, 8, 12_000


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Rows of items that occur five times in training. The logit is linear in the item's vector, and 1 for the tenth of the
    items that have no vector. Return the folder, and the best possible AUC on validation rows."""
    folder, random = tmp_path_factory.mktemp("planted"), np.random.default_rng(3)
    vectors = random.standard_normal((NUM_ITEMS, WIDTH)).astype(np.float32)
    logits = vectors @ (random.standard_normal(WIDTH) / WIDTH**0.5)
    has_vector = np.arange(NUM_ITEMS) % 10 > 0
    logits[~has_vector] = 1.0
    items = random.integers(0, NUM_ITEMS, NUM_ROWS)
    truth = 1 / (1 + np.exp(-logits[items]))
    clicks = random.random(NUM_ROWS) < truth
    lines = [f"{int(click)},i{item},{item % 3}" for click, item in zip(clicks, items, strict=True)]
    (folder / "rows.csv").write_text("label,item,other\n" + "\n".join(lines) + "\n")
    values = [f"i{item}" for item in np.flatnonzero(has_vector)]
    pq.write_table(pa.table({"value": values, "vector": list(vectors[has_vector])}), folder / "vectors.parquet")
    data = {
        "defaults": ["default", "_self_"], "name": "planted", "format": "csv", "path": str(folder / "prepared"),
        "columns": {"sparse": ["item", "other"]}, "rows_per_row_group": 256,
        "split": {"validation_fraction": 0.25, "test_fraction": 0.0},
    }  # fmt: skip
    (folder / "data").mkdir()
    (folder / "data" / "planted.yaml").write_text(yaml.safe_dump(data))
    prepare(load_config(PrepareJob, [*_data(folder), f"source={folder / 'rows.csv'}"]))
    held_out = slice(NUM_ROWS * 3 // 4, None)
    best = auc(truth[held_out], clicks[held_out])
    return folder, best


def _data(folder: Path) -> list[str]:
    return [f"--config-dir={folder}", "data=planted"]


def _job(folder: Path, run: Path, *more: str) -> list[str]:
    return [
        *_data(folder), "hardware=cpu", "model=logistic_regression", "tables.default.embedding_dim=8",
        "trainer.global_batch_size=256", "trainer.evaluate_batch_size=1024", "optimizer=adam", "optimizer.sparse.lr=0.01",
        "optimizer.dense.lr=0.005", "trainer.epochs=6", "logger.report=false", "logger.tensorboard=false", f"run_dir={run}", *more,
    ]  # fmt: skip


def _vectors(folder: Path, **options: object) -> list[str]:
    given = {"file": str(folder / "vectors.parquet"), "width": WIDTH, **options}
    return [
        f"tables.item.compression.options.{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in given.items()
    ] + ["tables.item.compression.kind=vectors"]


@pytest.mark.campaign
def test_vectors_add_the_known_lift_to_rare_items(ranks: RankPool, planted: tuple[Path, float], tmp_path: Path) -> None:
    folder, best = planted
    lifts = {}
    for name, more in (
        ("ids", []),
        ("vectors", [*_vectors(folder), "tables.item.lr_factor=0.02"]),
    ):
        (summary,) = ranks.run(1, train_on_rank, _job(folder, tmp_path / name, *more))
        lifts[name] = (summary.validation["auc"] - 0.5) / (best - 0.5)
    print(f"share of the lift of {best:.4f}: " + ", ".join(f"{name} {lift:.3f}" for name, lift in lifts.items()))
    assert lifts["ids"] < 0.7 and lifts["vectors"] > 0.93


@pytest.mark.long
def test_a_run_resumes_on_other_ranks_with_the_same_vectors_and_is_exported(
    ranks: RankPool, planted: tuple[Path, float], tmp_path: Path
) -> None:
    """Two ranks to step 4, one rank to step 8, as two ranks to step 8. Vectors keep their bits, and have no state."""
    folder, _ = planted
    words = [*_vectors(folder), "trainer.evaluate_max_batches=1", "tables.item.sharding.sharding_types=[row_wise]"]
    ranks.run(2, train_on_rank, [*_job(folder, tmp_path / "run", *words, "trainer.max_steps=4"), "world_size=2"])
    ranks.run(1, train_on_rank, _job(folder, tmp_path / "run", *words, "trainer.max_steps=8"))
    ranks.run(2, train_on_rank, [*_job(folder, tmp_path / "straight", *words, "trainer.max_steps=8"), "world_size=2"])
    found, straight = step_tensors(tmp_path / "run", 8), step_tensors(tmp_path / "straight", 8)
    for key, values in straight.items():
        torch.testing.assert_close(found[key], values, rtol=1e-4, atol=1e-6, msg=key)
    (stored,) = (values for key, values in found.items() if key.endswith(".item__vectors.weight"))
    given = pq.read_table(folder / "vectors.parquet").to_pydict()
    vectors = dict(zip(given["value"], given["vector"], strict=True))
    vocabulary = pq.read_table(next((folder / "prepared").rglob("*item*.parquet"))).to_pydict()
    expected = np.zeros(stored.shape, np.float32)
    for value, row in zip(vocabulary["value"], vocabulary["id"], strict=True):
        if value in vectors:
            expected[row, : WIDTH + 1] = [*vectors[value], 1.0]
    np.testing.assert_array_equal(stored.numpy().view(np.uint32), expected.view(np.uint32))
    assert not any("item__vectors" in key for key in found if key.startswith("optimizer."))
    (about,) = json.loads((tmp_path / "run" / "table_files.json").read_text())
    assert about["covered"] == int((expected[:, WIDTH] == 1).sum()) and about["ids"] == len(vocabulary["id"])
    words = [f"run={tmp_path / 'run'}", f"output={tmp_path / 'artifact'}", "precision=fp32", "parity.max_rows=200"]
    export(load_config(ExportJob, words))  # it compares the artifact's scores with the step's


@pytest.mark.parametrize("project", [True, False])
def test_the_row_of_a_list_is_the_sum_of_projected_vectors_rows_and_missing_rows(project: bool) -> None:
    options = {"file": "a.npy", "width": 8, "project": project}
    table = TableConfig(embedding_dim=8, compression=CompressionConfig("vectors", options=options))
    (item,) = resolve_tables({"item": table}, described_dataset({"item": 6}))
    kind, random = compressed(item), torch.Generator().manual_seed(3)
    parameters = {name: torch.randn(value.shape, generator=random) for name, value in kind.initial_parameters().items()}
    vectors, own = torch.randn(6, 12, generator=random), torch.randn(6, 8, generator=random)
    vectors[:, 8], vectors[:, 9:] = 1.0, 0.0
    vectors[2] = 0.0  # has no vector
    ids = [2, 4, 2]
    features = KeyedJaggedTensor(
        ["item__vectors", "item__own"], torch.tensor(ids * 2), lengths=torch.tensor([3, 0, 3, 0])
    )
    none = torch.zeros(1, 8)
    pooled = {
        "item__vectors": torch.stack([vectors[ids].sum(0), torch.zeros(12)]),
        "item__own": torch.cat([own[ids].sum(0, keepdim=True), none]),
    }
    projected = vectors[4, :8] @ parameters["projection"] if project else vectors[4, :8]
    expected = torch.cat([(projected + 2 * parameters["missing"] + own[ids].sum(0)).unsqueeze(0), none])
    torch.testing.assert_close(kind.compose(parameters, pooled, features, 0), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "options.file"),
        ({"file": "a.npy"}, "options.width"),
        ({"file": "a.npy", "width": 6, "project": False}, "width=6 embedding_dim=8 project=true"),
        ({"file": "a.npy", "width": 6, "with": 1}, "with width"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        config = TableConfig(embedding_dim=8, compression=CompressionConfig("vectors", options=options))
        physical_tables(resolve_tables({"item": config}, described_dataset({"item": 6})))
