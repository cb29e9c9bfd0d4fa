"""Tables start from vectors of files: by the values of ids, on any number of ranks, through resume and export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.tables import CompressionConfig, InitConfig, TableConfig
from pipeline.embeddings.collection import build_embedding_bag_collection
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.checkpoints.cli.checkpoints import export_checkpoint
from pipeline.extras.checkpoints.config import CheckpointsJob
from pipeline.extras.table_files.fill import fill_from_files
from pipeline.extras.table_files.vectors import read_vectors
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.serving.artifact.export import export
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.support.datasets import described_dataset
from tests.support.jobs import train_on_rank
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

TABLE = "cat_25"
WORDS = [
    "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=64", "trainer.evaluate_max_batches=1",
    "trainer.evaluate_batch_size=64", "logger.report=false",
]  # fmt: skip


def _rows(run: Path, folder: Path) -> pa.Table:
    output = str(folder / f"{run.name}.parquet")
    export_checkpoint(CheckpointsJob(command="export", run=str(run), table=TABLE, output=output))
    return pq.read_table(output)


def _vectors(rows: pa.Table) -> np.ndarray:
    return np.stack(rows["vector"].to_numpy()).view(np.uint32)


@pytest.mark.long
def test_frozen_rows_start_from_another_runs_export_and_keep_every_bit(
    ranks: RankPool, prepared_clicks: str, small_run: Path, tmp_path: Path
) -> None:
    """Two ranks, then one rank that resumes. Half of the values have no vector and keep their initial rows."""
    words = [*WORDS, f"data.path={prepared_clicks}"]
    given = _rows(small_run, tmp_path)
    pq.write_table(given.slice(0, given.num_rows // 2), tmp_path / "half.parquet")
    own = [
        *words, f"tables.{TABLE}.init.file={tmp_path / 'half.parquet'}", f"tables.{TABLE}.frozen=true",
        f"tables.{TABLE}.sharding.sharding_types=[row_wise]", f"run_dir={tmp_path / 'second'}",
    ]  # fmt: skip
    ranks.run(2, train_on_rank, [*own, "world_size=2", "trainer.max_steps=2"])
    ranks.run(1, train_on_rank, [*own, "trainer.max_steps=4"])
    found, half = _rows(tmp_path / "second", tmp_path), given.num_rows // 2
    assert found["value"].equals(given["value"])
    np.testing.assert_array_equal(_vectors(found)[1:half], _vectors(given)[1:half])  # row 0 has no value
    ranks.run(
        1,
        train_on_rank,
        [*words, "trainer.max_steps=1", f"tables.{TABLE}.frozen=true", f"run_dir={tmp_path / 'third'}"],
    )
    np.testing.assert_array_equal(_vectors(found)[half:], _vectors(_rows(tmp_path / "third", tmp_path))[half:])
    lines = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert "lr_sparse" in lines[0] and not any(f"lr_sparse_{TABLE}" in line for line in lines)  # 0 would be a finding
    (about,) = json.loads((tmp_path / "second" / "table_files.json").read_text())
    assert (about["table"], about["covered"], about["ids"]) == (TABLE, half - 1, given.num_rows - 1)
    words = [f"run={tmp_path / 'second'}", f"output={tmp_path / 'artifact'}", "precision=fp32", "parity.max_rows=200"]
    export(load_config(ExportJob, words))  # it compares the artifact's scores with the step's


VALUES = ["7", "b", "2", "d"]  # their ids are 1 to 4
EYE = np.eye(4, dtype=np.float32) + 10


def _fill(folder: Path, content: dict[str, pa.Array] | np.ndarray, **init: str) -> tuple[torch.Tensor, str]:
    """The rows of a table of 4 columns that starts from zeros and a file, and the line of the log."""
    vocabulary = {"value": VALUES, "count": [40, 30, 20, 10], "id": [1, 2, 3, 4]}
    pq.write_table(pa.table(vocabulary), folder / "item.parquet")
    if isinstance(content, np.ndarray):
        file = str(folder / "vectors.npy")
        np.save(file, content)
    else:
        file = str(folder / "vectors.parquet")
        pq.write_table(pa.table(content), file)
    dataset = described_dataset({"item": 5})
    dataset = replace(dataset, sparse_features=[replace(dataset.sparse_features[0], vocabulary="item.parquet")])
    config = TableConfig(embedding_dim=4, init=InitConfig("zeros", file=file, **init))
    (item,) = resolve_tables({"item": config}, dataset)
    tables = build_embedding_bag_collection([item], torch.device("cpu"))
    initialize_tables(tables, 3)
    (found,) = fill_from_files(tables, [item], dataset, str(folder))
    return tables.embedding_bags["item"].weight.detach(), found.line()


@pytest.mark.parametrize("kind", [pa.list_(pa.float32(), 4), pa.list_(pa.float64()), pa.large_list(pa.float16())])
def test_vectors_reach_the_rows_of_their_values(tmp_path: Path, kind: pa.DataType) -> None:
    vectors = pa.array([*EYE.astype(np.float16).tolist()[:3], None], pa.list_(pa.float16())).cast(kind)
    ids = pa.array(["b", "unknown", "7", "d"])
    rows, line = _fill(tmp_path, {"sku": ids, "emb": vectors}, value_column="sku", vector_column="emb")
    expected = np.zeros((5, 4), np.float32)
    expected[[2, 1]] = EYE[[0, 2]]
    np.testing.assert_array_equal(rows.numpy(), expected)
    assert mentions(line, "item: 2 of 4 ids (50.0 %, 70.0 % of the training lookups) 1 of its vectors")


def test_the_row_number_of_a_npy_file_is_the_value_and_narrow_vectors_fill_the_first_columns(tmp_path: Path) -> None:
    rows, line = _fill(tmp_path, np.arange(16, dtype=np.float32).reshape(8, 2))
    assert rows.tolist() == [[0] * 4, [14, 15, 0, 0], [0] * 4, [4, 5, 0, 0], [0] * 4]
    assert mentions(line, "2 of 4 ids 60.0 % 6 of its vectors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"value": pa.array(["7"]), "vectors": pa.array([[1.0]])}, "no column 'vector' vectors init.vector_column"),
        ({"value": pa.array(["7"]), "vector": pa.array([1.0])}, "'vector' double not lists"),
        ({"value": pa.array(["7", "b"]), "vector": pa.array([[1.0], [1.0, 2.0]])}, "'b' 2 numbers 1"),
        ({"value": pa.array(["7"]), "vector": pa.array([[1.0] * 5])}, "5 numbers embedding_dim=4 embedding_dim=5"),
        ({"value": pa.array(["7"]), "vector": pa.array([[float("nan")]])}, "'7' not finite"),
        ({"value": pa.array(["7"]), "vector": pa.array([[1.0, None]])}, "missing numbers"),
        ({"value": pa.array(["b", "7", "7"]), "vector": pa.array([[1.0]] * 3)}, "two vectors '7'"),
        ({"value": pa.array(["x", "y"]), "vector": pa.array([[1.0]] * 2)}, "none 2 vectors item"),
        (np.zeros(3, np.float32), "shape [3]"),
        (np.array([["a"]], object), "cannot be read"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, content: dict[str, pa.Array] | np.ndarray, message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=names(message)):
        _fill(tmp_path, content)


def test_a_missing_file_and_a_compressed_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=names("tables.item.init.file no such file")):
        next(read_vectors(InitConfig(file=str(tmp_path / "none.parquet")), "tables.item.init.file"))
    config = TableConfig(init=InitConfig(file="a.npy"), compression=CompressionConfig("hash", num_rows=2))
    with pytest.raises(ConfigError, match=names("tables.item.init.file=a.npy compression.kind=none")):
        resolve_tables({"item": config}, described_dataset({"item": 5}))
