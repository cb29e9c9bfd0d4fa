"""Compression that cannot be is refused from the config alone, with numbers and the way out; what can be is resolved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.tables import CompressionConfig, InitConfig, TableConfig
from pipeline.data.dataset import FrequencyCurve, SparseFeature
from pipeline.embeddings.physical import num_numbers, physical_tables
from pipeline.embeddings.tables import resolve_tables
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.training.preflight import validate_job
from tests.support.datasets import described_dataset
from tests.support.messages import mentions, names

DATASET = described_dataset({"user": 100, "item": 5000, "context": 7}, num_dense=13, num_rows=4096)


def resolved(feature: str = "item", multi_hot: dict[str, int] | None = None, **settings: Any) -> list[str]:
    config = TableConfig(embedding_dim=16, compression=CompressionConfig(**settings))
    tables = resolve_tables({"default": TableConfig(embedding_dim=16), feature: config}, DATASET, multi_hot)
    return [f"{table.name} {table.num_embeddings}x{table.embedding_dim}" for table in physical_tables(tables)]


def test_parts_are_plain_tables_at_the_place_of_their_table() -> None:
    assert resolved(kind="quotient_remainder", bases=[100]) == [
        "user 100x16",
        "item__remainder 100x16",
        "item__quotient 50x16",
        "context 7x16",
    ]
    assert resolved(kind="hash", ratio=10)[1] == "item__hash 500x16"
    assert resolved(kind="tensor_train", rank=4) == ["user 100x16", "context 7x16"]


def test_the_default_is_for_large_tables_and_one_may_opt_out() -> None:
    default = TableConfig(embedding_dim=16, compression=CompressionConfig("quotient_remainder", min_rows=50))
    tables = resolve_tables({"default": default, "user": TableConfig(compression=CompressionConfig("none"))}, DATASET)
    assert [table.compression is not None for table in tables] == [False, True, False]


def test_the_default_leaves_tables_as_they_are_that_it_would_not_make_smaller() -> None:
    default = TableConfig(embedding_dim=16, compression=CompressionConfig("tensor_train", rank=16))
    tables = resolve_tables({"default": default}, DATASET)
    assert [table.compression is not None for table in tables] == [False, True, False]
    assert all(num_numbers(table) < table.num_embeddings * 16 for table in tables if table.compression)


QR = {"kind": "quotient_remainder"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "hsh"}, "compression.kind='hsh' hash"),
        ({"kind": "hash", "bases": [3]}, "compression.bases=[3] quotient_remainder compression.kind=hash"),
        ({"kind": "hash"}, "kind=hash num_rows"),
        ({"kind": "hash", "num_rows": 5001}, "num_rows=5,001 5,000"),
        ({"kind": "hash", "num_rows": -3}, "compression.num_rows=-3"),
        ({"kind": "hash", "ratio": 1.0}, "compression.ratio=1.0"),
        ({**QR, "scheme": "generalised", "bases": [10, 10, 10]}, "bases=[10 10 10] 1,000 5,000"),
        ({**QR, "bases": [10, 20]}, "bases=[10 20] 200"),
        ({**QR, "bases": [0]}, "compression.bases=0"),
        ({**QR, "bases": [10, 20, 30]}, "scheme=generalised"),
        ({**QR, "scheme": "chinese_remainder", "bases": [70, 84]}, "70 84 14 420"),
        ({**QR, "dims": [16, 8]}, "dims=[16 8] operation=add embedding_dim=16"),
        ({**QR, "operation": "multiply", "dims": [8, 8]}, "operation=multiply operation=concatenate"),
        ({**QR, "operation": "concatenate", "dims": [8, 4]}, "12 16"),
        ({**QR, "operation": "concatenate", "dims": [16]}, "dims 1 2"),
        ({**QR, "scheme": "generalised", "num_partitions": 3, "operation": "concatenate"}, "embedding_dim=16"),
        ({**QR, "scheme": "generalised", "num_partitions": 8, "operation": "concatenate"}, "2 4"),
        ({**QR, "ratio": 100}, "ratio=100 5,000 35.2"),
        ({**QR, "ratio": 4, "bases": [100]}, "bases ratio"),
        ({**QR, "scheme": "given"}, "assignments_file"),
        ({**QR, "scheme": "given", "assignments": [[0, 1]]}, "5,000"),
        (
            {**QR, "scheme": "given", "assignments": [[i % 70 for i in range(5000)], [i // 80 for i in range(5000)]]},
            "70 [0 0]",
        ),
        ({**QR, "scheme": "given", "assignments_file": "no/such.npy"}, "no/such.npy"),
        ({"kind": "path_based", "num_rows": 6000}, "num_rows=6,000 5,000"),
        ({"kind": "path_based", "ratio": 64}, "ratio=64 16 5,000"),
        ({"kind": "mixed_dimension"}, "dims temperature ratio"),
        ({"kind": "mixed_dimension", "ratio": 8}, "4 embedding_dim=16"),
        ({"kind": "mixed_dimension", "dims": [8, 16]}, "dims=[8 16]"),
        ({"kind": "mixed_dimension", "dims": [32, 4]}, "embedding_dim=16"),
        ({"kind": "mixed_dimension", "dims": [16, 6]}, "item__block_1"),
        ({"kind": "tensor_train", "row_factors": [10, 10, 10]}, "row_factors=[10 10 10] 5,000"),
        ({"kind": "tensor_train", "dim_factors": [2, 2, 2]}, "embedding_dim=16"),
        ({"kind": "tensor_train", "rank": -1}, "compression.rank=-1"),
        ({"kind": "tensor_train", "rank": 4, "ratio": 8}, "rank ratio"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        resolved(**settings)


@pytest.mark.parametrize("kind", [{**QR, "operation": "multiply"}, {"kind": "tensor_train"}])
def test_products_of_zeros_are_refused(kind: dict[str, Any]) -> None:
    config = TableConfig(embedding_dim=16, init=InitConfig("zeros"), compression=CompressionConfig(**kind))
    with pytest.raises(ConfigError, match=names("init.kind=zeros")):
        resolve_tables({"item": config}, DATASET)


def test_lists_of_any_length_must_say_how_long_they_get_where_ids_are_composed_one_by_one() -> None:
    lists = SparseFeature("tags", 500, True, 3.5, FrequencyCurve([1, 500], [0.1, 1.0]))
    dataset = described_dataset({})
    dataset.sparse_features.append(lists)
    for settings in ({**QR, "operation": "multiply"}, {"kind": "path_based"}):
        with pytest.raises(ConfigError, match=names("max_ids_per_bag=<ids> tags")):
            resolve_tables({"tags": TableConfig(compression=CompressionConfig(**settings))}, dataset)
        limited = CompressionConfig(**settings, max_ids_per_bag=9)
        (table,) = resolve_tables({"tags": TableConfig(compression=limited)}, dataset)
        part = physical_tables([table])[0]
        assert len(part.feature_names) == 9
        assert sum(part.pooling_factors) == pytest.approx(3.5)


def test_hashed_ids_have_no_popularity_to_go_by() -> None:
    hashed = SparseFeature("ip", 500, False, 1.0, FrequencyCurve([1, 500], [0.1, 1.0]), hash_size=500)
    dataset = described_dataset({})
    dataset.sparse_features.append(hashed)
    with pytest.raises(ConfigError):
        resolve_tables({"ip": TableConfig(compression=CompressionConfig("mixed_dimension", ratio=2))}, dataset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros(5000, np.int64), "<i8 [5000]"),
        (np.zeros((1, 5000)), "<f8"),
        (np.zeros((2, 5000), np.int16), "0 1"),
        (b"0,1,2", ".npy"),
    ],
)
def test_a_file_that_holds_no_partitions_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "groups.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ConfigError, match=names(message)):
        resolved(**QR, scheme="given", assignments_file=str(path))


def job_of(folder: Path, *words: str) -> TrainJob:
    (folder / "dataset.json").write_text(DATASET.to_json())
    return load_config(TrainJob, ["experiment=quickstart", f"data.path={folder}", *words])


def test_a_job_says_compression_by_its_config_lines(tmp_path: Path) -> None:
    words = ["tables.item.compression={kind: quotient_remainder, bases: [80], operation: multiply}"]
    tables = validate_job(job_of(tmp_path, *words), 2)
    assert [part.num_embeddings for part in physical_tables(tables)] == [100, 80, 63, 7]
    with pytest.raises(ConfigError, match=names("tables.item.compression.basis compression.bases")):
        job_of(tmp_path, "tables.item.compression.basis=[80]")


def test_a_model_of_tensor_trains_alone_is_refused(tmp_path: Path) -> None:
    words = [f"tables.{name}.compression={{kind: tensor_train, rank: 2}}" for name in ("user", "item", "context")]
    with pytest.raises(TrainingError, match=names("tables.context.compression.kind=none")):
        validate_job(job_of(tmp_path, *words), 2)


@pytest.mark.long
def test_a_bad_compression_stops_a_job_before_torch_is_there(tmp_path: Path) -> None:
    job_of(tmp_path)
    words = ["experiment=quickstart", f"data.path={tmp_path}", "tables.item.compression.kind=hash"]
    script = (
        "import sys\nfrom pipeline.cli.command_line import load_config\nfrom pipeline.config.jobs.train import TrainJob\nfrom pipeline.training.preflight import validate_job\n"
        f"try:\n    validate_job(load_config(TrainJob, {words!r}), 2)\nexcept ValueError as error:\n    print(error)\n"
        "assert not {'torch', 'numpy', 'torchrec'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert mentions(result.stdout, "kind=hash num_rows")
