"""Rows are dealt to splits, shards and row groups without loss or overlap, at any sizes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import SPLITS, IdsConfig, SplitConfig
from pipeline.data.prepare import resources
from pipeline.data.prepare.divide import DividedFile
from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.prepare.splits import Boundaries, blocks_of_file, find_boundaries
from pipeline.data.prepare.staging import StagedFile
from pipeline.data.prepare.write_shards import SharedByShards, plan_shards
from pipeline.runtime.errors import DataError
from tests.data.criteo_rows import random_lines, read_split, run_prepare, write_lines
from tests.support.examples import examples
from tests.support.messages import names


def staged(number: int, block_rows: list[int]) -> StagedFile:
    return StagedFile("unused", number, block_rows=block_rows, num_values=[[2, 1] for _ in block_rows])


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 15))
@examples(100)
def test_row_groups_have_their_size_and_the_rows_their_order(sizes: list[int], group: int) -> None:
    ends = np.cumsum([0, *sizes])
    tables = [pa.table({"row": np.arange(a, b)}) for a, b in pairwise(ends)]
    groups = list(in_row_groups(tables, group))
    assert [row for table in groups for row in table["row"].to_pylist()] == list(range(ends[-1]))
    assert all(len(table) == group for table in groups[:-1])
    assert not groups or 0 < len(groups[-1]) <= group


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 25),
)
@examples(100)
def test_shards_cover_each_split_once_and_in_order(files: list[list[int]], a: int, b: int, rows_per_shard: int) -> None:
    sizes = [sum(rows) for rows in files]
    firsts, total = (np.cumsum(sizes) - sizes).tolist(), sum(sizes)
    boundaries = Boundaries(min(a, b) + 1, max(a, b) + 1)
    splits = boundaries.split_of(np.arange(total))
    divided = []
    for number, (rows, first) in enumerate(zip(files, firsts, strict=True)):
        blocks = blocks_of_file(staged(number, rows), boundaries, first)
        for block in blocks:
            held = splits[block.first_row : block.first_row + block.num_rows]
            assert block.per_split == tuple(np.bincount(held, minlength=3).tolist())
        per_split = [sum(block.per_split[split] for block in blocks) for split in range(3)]
        divided.append(DividedFile(str(number), "", per_split, [2 * len(rows), len(rows)], [], {}))
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for item in plan_shards(divided, rows_per_shard, SharedByShards(boundaries, [])):
        numbers = [int(file.folder) for file in item.files]
        rows = [r for n in numbers for r in range(firsts[n], firsts[n] + sizes[n]) if splits[r] == item.split]
        mine = rows[item.first_row : item.first_row + item.num_rows]
        assert item.path == f"{SPLITS[item.split]}/{item.number:05d}.parquet" and len(mine) == item.num_rows
        before = sum(len(files[n]) for n in range(numbers[0]))
        assert item.files[0].first_values == [2 * before, before]
        seen[item.split] += mine
    assert seen == {split: np.flatnonzero(splits == split).tolist() for split in range(3)}


@pytest.mark.parametrize(
    ("rows", "validation", "test", "expected"),
    [
        (45_840_617, 1 / 14, 1 / 14, (39_291_958, 42_566_288)),
        (10, 0.1, 0.1, (8, 9)),
        (7, 0.0, 0.3, (5, 5)),
        (5, 0, 0, (5, 5)),
        (14, 1 / 14, 1 / 14, (12, 13)),
        (100, 0.3, 0.0, (70, 100)),
    ],
)
def test_row_range_holds_out_the_last_rows(
    rows: int, validation: float, test: float, expected: tuple[int, int]
) -> None:
    config = SplitConfig(validation_fraction=validation, test_fraction=test)
    found = find_boundaries(config, [staged(0, [rows])], no_times)
    assert (found.first_validation, found.first_test) == expected


def no_times(_: list[int]) -> list[int]:
    raise AssertionError("rows are not sorted by time")


def test_last_file_is_halved_validation_first() -> None:
    files = [staged(0, [5, 5]), staged(1, [7])]
    found = find_boundaries(SplitConfig(kind="files"), files, no_times)
    assert (found.first_validation, found.first_test) == (10, 14)
    with pytest.raises(DataError, match=names("1")):
        find_boundaries(SplitConfig(kind="files"), files[:1], no_times)


OWN = ColumnsConfig(label="y", dense=["x"], sparse=["a"], multi_hot=["tags"], timestamp="t")


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_time_split_keeps_one_moment_together_and_counts_training_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", 400)
    monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", 400)
    draw = np.random.default_rng(0)
    times = np.sort(draw.integers(0, 60, 500)) if order == "sorted" else draw.integers(0, 60, 500)
    tags = ["|".join(f"t{v}" for v in draw.integers(0, 9, draw.integers(0, 4))) for _ in times]
    values = [f"v{draw.integers(0, 20)}" for _ in times]
    rows = [f"{i % 2},{i},{values[i]},{tags[i]},{times[i]}" for i in range(500)]
    source = write_lines(tmp_path / "own.csv", ["y,x,a,tags,t", *rows])
    split = SplitConfig(kind="time", validation_fraction=0.2, test_fraction=0.1)
    dataset = run_prepare(
        source,
        tmp_path / "ds",
        format="csv",
        columns=OWN,
        split=split,
        dense_transform="none",
        rows_per_shard=64,
        rows_per_row_group=10,
    )
    ranked = np.sort(times)
    first_validation, first_test = ranked[350], ranked[450]
    held = {"train": times < first_validation, "test": times >= first_test}
    held["validation"] = ~held["train"] & ~held["test"]
    for name, mask in held.items():
        table = read_split(tmp_path / "ds", dataset, name)
        assert table["x"].to_pylist() == np.flatnonzero(mask).tolist()
    seen = {values[i] for i in np.flatnonzero(held["train"])}
    assert dataset.sparse_feature("a").num_distinct == len(seen)
    num_tags = [len(tags[i].split("|")) if tags[i] else 0 for i in range(500)]
    assert dataset.sparse_feature("tags").mean_pooling_factor == pytest.approx(
        np.mean(np.array(num_tags)[held["train"]])
    )
    lengths = [len(ids) for ids in read_split(tmp_path / "ds", dataset, "test")["tags"].to_pylist()]
    assert lengths == [num_tags[i] for i in np.flatnonzero(held["test"])]


def test_shards_have_the_columns_that_readers_rely_on_and_dataset_json_describes_them(tmp_path: Path) -> None:
    table = pa.table(
        {
            "y": [0, 1, 1, 0] * 30,
            "x": [0.5] * 120,
            "a": ["", "v", "u", "u"] * 30,
            "tags": [["p", "q"], [], None, ["p", "", None]] * 30,
            "t": range(120),
        }
    )
    pq.write_table(table, tmp_path / "own.parquet", row_group_size=50)
    dataset = run_prepare(
        str(tmp_path / "own.parquet"),
        tmp_path / "ds",
        format="parquet",
        columns=OWN,
        dense_transform="none",
        rows_per_shard=40,
        rows_per_row_group=16,
        feature_ids={"tags": IdsConfig(kind="hash", hash_size=100)},
    )
    train = dataset.splits["train"]
    assert (train.num_rows, train.num_positives) == (96, 48)
    assert [(file.path, file.row_groups) for file in train.files] == [
        ("train/00000.parquet", [16, 16, 8]),
        ("train/00001.parquet", [16, 16, 8]),
        ("train/00002.parquet", [16]),
    ]
    with pq.ParquetFile(tmp_path / "ds" / train.files[0].path) as file:
        assert [file.metadata.row_group(i).num_rows for i in range(3)] == [16, 16, 8]
        schema = file.schema_arrow
    assert schema.names == ["y", "x", "a", "tags"]
    assert [str(field.type) for field in schema][:3] == ["int8", "float", "int32"] and schema.field(
        "tags"
    ).type.value_type == pa.int32()
    assert not any(field.nullable for field in schema)
    rows = read_split(tmp_path / "ds", dataset, "train").slice(0, 4).to_pydict()
    assert rows["a"] == [0, 2, 1, 1]
    assert (dataset.sparse_feature("a").cardinality, dataset.sparse_feature("a").num_distinct) == (3, 2)
    vocabulary = pq.read_table(tmp_path / "ds" / "vocabulary" / "a.parquet").to_pydict()
    assert vocabulary == {"value": ["u", "v"], "count": [48, 24], "id": [1, 2]}
    hashed = rows["tags"]
    assert [len(ids) for ids in hashed] == [2, 0, 0, 3]
    assert hashed[3] == [hashed[0][0], 0, 0] and all(0 < i < 100 for i in hashed[0])
    tags = dataset.sparse_feature("tags")
    assert (tags.cardinality, tags.hash_size, tags.vocabulary, tags.multi_hot) == (100, 100, None, True)
    assert tags.mean_pooling_factor == pytest.approx(5 / 4)
    assert tags.frequency_curve.shares[:3] == pytest.approx([2 / 5, 4 / 5, 1.0])


def test_flipped_bit_in_a_shard_is_an_error_for_readers_that_verify(tmp_path: Path) -> None:
    dataset = run_prepare(write_lines(tmp_path / "train.txt", random_lines(200)), tmp_path / "ds")
    path = tmp_path / "ds" / dataset.splits["train"].files[0].path
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum"):
        pq.read_table(path, page_checksum_verification=True)


def test_hashed_features_need_no_vocabulary_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "train.txt", random_lines(60))
    with pytest.raises(DataError, match=names("cat_26 cat_")):
        run_prepare(source, tmp_path / "ds", feature_ids={"cat_26": IdsConfig(min_frequency=2)})
    dataset = run_prepare(source, tmp_path / "ds", ids=IdsConfig(kind="hash", hash_size=50, hash_seed=3))
    assert not (tmp_path / "ds" / "vocabulary").exists()
    assert {f.cardinality for f in dataset.sparse_features} == {50}
