"""Compression that cannot be is refused from the config alone, with numbers and the way out; what can be is resolved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.compression import CompressionConfig
from pipeline.config.jobs import TrainJob
from pipeline.config.tables import InitConfig, TableConfig
from pipeline.data.dataset import FrequencyCurve, SparseFeature
from pipeline.embeddings.compression.physical import num_numbers, physical_tables
from pipeline.embeddings.tables import resolve_tables
from pipeline.training.preflight import validate_job
from tests.support.datasets import described_dataset

DATASET = described_dataset({"user": 100, "item": 5000, "context": 7}, num_dense=13, num_rows=4096)


def resolved(feature: str = "item", multi_hot: dict[str, int] | None = None, **settings: Any) -> list[str]:
    config = TableConfig(embedding_dim=16, compression=CompressionConfig(**settings))
    tables = resolve_tables({"default": TableConfig(embedding_dim=16), feature: config}, DATASET, multi_hot)
    return [f"{table.name} {table.num_embeddings}x{table.embedding_dim}" for table in physical_tables(tables)]


def test_parts_are_plain_tables_at_the_place_of_their_table() -> None:
    assert resolved(kind="quotient_remainder", bases=[100]) == [
        "user 100x16", "item__remainder 100x16", "item__quotient 50x16", "context 7x16",
    ]  # fmt: skip
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
        ({"kind": "hsh"}, r"compression.kind='hsh' is not one of .*did you mean 'hash'"),
        ({"kind": "hash", "bases": [3]}, r"compression.bases=\[3\] is a setting of quotient_remainder, but compression.kind=hash"),
        ({"kind": "hash"}, "kind=hash wants one of num_rows .* and ratio"),
        ({"kind": "hash", "num_rows": 5001}, r"num_rows=5,001, but the table has 5,000 ids: .* use fewer"),
        ({"kind": "hash", "num_rows": -3}, "compression.num_rows=-3 must be at least 1"),
        ({"kind": "hash", "ratio": 1.0}, "compression.ratio=1.0 must be above 1"),
        ({**QR, "scheme": "generalised", "bases": [10, 10, 10]}, r"bases=\[10, 10, 10\] tell 1,000 ids apart, and the table has 5,000"),
        ({**QR, "bases": [10, 20]}, r"bases=\[10, 20\] tell 200 ids apart"),
        ({**QR, "bases": [0]}, "each of compression.bases=0 must be at least 1"),
        ({**QR, "bases": [10, 20, 30]}, "has 3 entries.*more are scheme=generalised"),
        ({**QR, "scheme": "chinese_remainder", "bases": [70, 84]}, r"70 and 84 are not coprime \(both are divisible by 14\).* ids that differ by 420"),
        ({**QR, "dims": [16, 8]}, r"dims=\[16, 8\]: operation=add goes number by number.*embedding_dim=16, not 8"),
        ({**QR, "operation": "multiply", "dims": [8, 8]}, "operation=multiply goes number by number.*set operation=concatenate"),
        ({**QR, "operation": "concatenate", "dims": [8, 4]}, "add up to 12, and concatenated they are to be 16"),
        ({**QR, "operation": "concatenate", "dims": [16]}, "has 1 entries, and there are 2 parts"),
        ({**QR, "scheme": "generalised", "num_partitions": 3, "operation": "concatenate"}, "3 parts cannot share embedding_dim=16"),
        ({**QR, "scheme": "generalised", "num_partitions": 8, "operation": "concatenate"}, "of 2 columns.*multiple of 4"),
        ({**QR, "ratio": 100}, r"ratio=100 is more than 2 partitions of 5,000 ids can reach, which is 35.2"),
        ({**QR, "ratio": 4, "bases": [100]}, "bases and ratio both say the sizes"),
        ({**QR, "scheme": "given"}, "wants one of assignments .* and assignments_file"),
        ({**QR, "scheme": "given", "assignments": [[0, 1]]}, "assigns 2 ids, and the table has 5,000"),
        ({**QR, "scheme": "given", "assignments": [[i % 70 for i in range(5000)], [i // 80 for i in range(5000)]]},
         r"ids 0 and 70 have the same classes \[0, 0\].*must be complementary"),
        ({**QR, "scheme": "given", "assignments_file": "no/such.npy"}, "no/such.npy is no file; write it with numpy.save"),
        ({"kind": "path_based", "num_rows": 6000}, "num_rows=6,000, but the table has 5,000 ids"),
        ({"kind": "path_based", "ratio": 64}, "ratio=64 is more than paths of 16 hidden units can reach for 5,000 ids"),
        ({"kind": "mixed_dimension"}, "wants one of dims, temperature and ratio"),
        ({"kind": "mixed_dimension", "ratio": 8}, "more than blocks of at least 4 columns can reach, which is 3.[0-9]+ at embedding_dim=16"),
        ({"kind": "mixed_dimension", "dims": [8, 16]}, r"dims=\[8, 16\] must not grow"),
        ({"kind": "mixed_dimension", "dims": [32, 4]}, "no block is wider than the table's embedding_dim=16"),
        ({"kind": "mixed_dimension", "dims": [16, 6]}, "a part 'item__block_1' of 6 columns.*multiple of 4"),
        ({"kind": "tensor_train", "row_factors": [10, 10, 10]}, r"row_factors=\[10, 10, 10\] must be three numbers whose product covers the table's 5,000"),
        ({"kind": "tensor_train", "dim_factors": [2, 2, 2]}, "three numbers whose product is embedding_dim=16"),
        ({"kind": "tensor_train", "rank": -1}, "compression.rank=-1 must be at least 1"),
        ({"kind": "tensor_train", "rank": 4, "ratio": 8}, "rank and ratio both say the size"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_way_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(**settings)


@pytest.mark.parametrize("kind", [{**QR, "operation": "multiply"}, {"kind": "tensor_train"}])
def test_products_of_zeros_are_refused(kind: dict[str, Any]) -> None:
    config = TableConfig(embedding_dim=16, init=InitConfig("zeros"), compression=CompressionConfig(**kind))
    with pytest.raises(ValueError, match=r"init.kind=zeros under .* would never train"):
        resolve_tables({"item": config}, DATASET)


def test_lists_of_any_length_must_say_how_long_they_get_where_ids_are_composed_one_by_one() -> None:
    lists = SparseFeature("tags", 500, True, 3.5, FrequencyCurve([1, 500], [0.1, 1.0]))
    dataset = described_dataset({})
    dataset.sparse_features.append(lists)
    for settings in ({**QR, "operation": "multiply"}, {"kind": "path_based"}):
        with pytest.raises(ValueError, match=r"'tags' has lists, whose ids .* one by one: .*max_ids_per_bag=<ids>"):
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
    with pytest.raises(ValueError, match="goes by popularity, and hashed ids are in no order"):
        resolve_tables({"ip": TableConfig(compression=CompressionConfig("mixed_dimension", ratio=2))}, dataset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros(5000, np.int64), r"must be a .npy file \[partitions, ids\] of integers.*holds <i8 of shape \[5000\]"),
        (np.zeros((1, 5000)), "it holds <f8"),
        (np.zeros((2, 5000), np.int16), "ids 0 and 1 have the same classes"),
        (b"0,1,2", "it is no .npy file"),
    ],
)
def test_a_file_that_holds_no_partitions_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "groups.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ValueError, match=message):
        resolved(**QR, scheme="given", assignments_file=str(path))


def job_of(folder: Path, *words: str) -> TrainJob:
    (folder / "dataset.json").write_text(DATASET.to_json())
    return load_config(TrainJob, ["experiment=quickstart", f"data.path={folder}", *words])


def test_a_job_says_compression_by_its_config_lines(tmp_path: Path) -> None:
    words = ["tables.item.compression={kind: quotient_remainder, bases: [80], operation: multiply}"]
    tables = validate_job(job_of(tmp_path, *words), 2)
    assert [part.num_embeddings for part in physical_tables(tables)] == [100, 80, 63, 7]
    with pytest.raises(
        ValueError, match=r"unknown key 'tables.item.compression.basis'; did you mean .*compression.bases"
    ):
        job_of(tmp_path, "tables.item.compression.basis=[80]")


def test_a_model_of_tensor_trains_alone_is_refused(tmp_path: Path) -> None:
    words = [f"tables.{name}.compression={{kind: tensor_train, rank: 2}}" for name in ("user", "item", "context")]
    with pytest.raises(ValueError, match=r"all 3 tables are tensor trains.*tables.context.compression.kind=none"):
        validate_job(job_of(tmp_path, *words), 2)


def test_a_bad_compression_stops_a_job_before_torch_is_there(tmp_path: Path) -> None:
    job_of(tmp_path)
    words = ["experiment=quickstart", f"data.path={tmp_path}", "tables.item.compression.kind=hash"]
    script = (
        "import sys\nfrom pipeline.cli.command_line import load_config\nfrom pipeline.config.jobs import TrainJob\nfrom pipeline.training.preflight import validate_job\n"
        f"try:\n    validate_job(load_config(TrainJob, {words!r}), 2)\nexcept ValueError as error:\n    print(error)\n"
        "assert not {'torch', 'numpy', 'torchrec'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "kind=hash wants one of num_rows" in result.stdout
