"""Sequences from raw rows to batches: cut, counted with the feature whose ids they share, as long as the one beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig, SequenceConfig
from pipeline.config.data import IdsConfig, ReaderConfig, SplitConfig
from pipeline.data.dataset import Dataset, SequenceFeature, load_dataset
from pipeline.data.read.check_rows import check_columns
from pipeline.data.read.reader import ShardReader
from pipeline.runtime.errors import ConfigError, DataError
from tests.data.criteo_rows import read_split, run_prepare
from tests.support.messages import mentions

ALL = SplitConfig(validation_fraction=0.0, test_fraction=0.0)
HEADER = "label,item,category,history,history_category"
SEQUENCES = {
    "history": SequenceConfig(max_length=3, shares="item"),
    "history_category": SequenceConfig(beside="history", shares="category"),
}


def _columns(**sequences: SequenceConfig) -> ColumnsConfig:
    return ColumnsConfig(sparse=["item", "category"], sequence={**SEQUENCES, **sequences})


def _prepare(tmp_path: Path, rows: list[str], columns: ColumnsConfig | None = None, **settings: object) -> Dataset:
    source = tmp_path / "rows.csv"
    source.write_text("\n".join([HEADER, *rows]) + "\n")
    return run_prepare(
        str(source),
        tmp_path / "prepared",
        format="csv",
        columns=columns or _columns(),
        **settings,
    )


ROWS = [
    "1,a,x,,",
    "0,b,y,a,x",
    "1,a,x,a|b,x|y",
    "0,c,x,b|b|b|a,y|y|y|x",
    "1,b,y,c|b||a|b,x|y||x|y",
]


def _values(prepared: Path, dataset: Dataset, feature: str) -> dict[int, str]:
    table = pq.read_table(prepared / str(dataset.sparse_feature(feature).vocabulary))
    return {0: "", **dict(zip(table["id"].to_pylist(), table["value"].to_pylist(), strict=True))}


def test_a_sequence_is_cut_and_has_the_ids_of_the_feature_that_it_shares(tmp_path: Path) -> None:
    dataset = _prepare(tmp_path, ROWS, split=ALL)
    prepared = tmp_path / "prepared"
    rows = read_split(prepared, dataset, "train")
    items, categories = _values(prepared, dataset, "item"), _values(prepared, dataset, "category")
    assert items == _values(prepared, dataset, "history")
    assert categories == _values(prepared, dataset, "history_category")
    table = pq.read_table(prepared / str(dataset.sparse_feature("history").vocabulary))
    assert dict(zip(table["value"].to_pylist(), table["count"].to_pylist(), strict=True)) == {"a": 6, "b": 6, "c": 1}
    found = [[items[each] for each in row] for row in rows["history"].to_pylist()]
    assert found == [[], ["a"], ["a", "b"], ["b", "b", "a"], ["", "a", "b"]]
    beside = [[categories[each] for each in row] for row in rows["history_category"].to_pylist()]
    assert beside == [[], ["x"], ["x", "y"], ["y", "y", "x"], ["", "x", "y"]]
    assert [items[each] for each in rows["item"].to_pylist()] == ["a", "b", "a", "c", "b"]
    history = dataset.sparse_feature("history")
    assert history.sequence == SequenceFeature(3, "last", None, "item") and history.multi_hot
    assert history.mean_pooling_factor == 9 / 5 and dataset.sparse_feature("item").mean_pooling_factor == 1.0
    assert dataset.sparse_feature("history_category").sequence == SequenceFeature(3, "last", "history", "category")
    assert load_dataset(str(prepared)) == dataset
    assert dataset.sparse_feature("item").cardinality == history.cardinality == 4


def test_the_first_ids_are_kept_where_that_is_asked_for_and_hashes_are_shared(tmp_path: Path) -> None:

    columns = _columns(history=SequenceConfig(max_length=2, keep="first", shares="item"))
    dataset = _prepare(
        tmp_path,
        ROWS,
        columns,
        split=ALL,
        feature_ids={"item": IdsConfig("hash", hash_size=50, hash_seed=3)},
    )
    rows = read_split(tmp_path / "prepared", dataset, "train")
    a, b, _, c, _ = rows["item"].to_pylist()
    assert rows["history"].to_pylist() == [[], [a], [a, b], [b, b], [c, b]]
    shared = dataset.sparse_feature("history")
    assert (shared.hash_size, shared.hash_seed) == (50, 3)


def test_a_row_whose_sequences_differ_in_length_is_quarantined(tmp_path: Path) -> None:
    rows = [*ROWS * 4, "1,a,x,a|b,x", "1,a,x,,x"]
    dataset = _prepare(tmp_path, rows, max_quarantined_fraction=0.2)
    assert (dataset.accepted_rows, dataset.quarantined_rows) == (20, 2)
    quarantine = (tmp_path / "prepared" / "quarantine.jsonl").read_text()
    assert "history_category has 1 values, not the 2 of history" in quarantine


def test_lists_of_parquet_files_are_cut_and_compared_too(tmp_path: Path) -> None:
    lists = [[], ["a", "b", "c", "d"], None, ["a"]]
    table = pa.table(
        {
            "label": [1, 0, 1, 0] * 5,
            "item": ["a", "b", "c", "a"] * 5,
            "category": ["x"] * 20,
            "history": pa.array(lists * 5, pa.list_(pa.string())),
            "history_category": pa.array([[], ["x"] * 4, None, ["x", "x"]] * 5, pa.list_(pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    dataset = run_prepare(
        str(tmp_path / "rows.parquet"),
        tmp_path / "prepared",
        format="parquet",
        columns=_columns(),
        max_quarantined_fraction=0.3,
    )
    assert (dataset.accepted_rows, dataset.quarantined_rows) == (15, 5)
    rows = read_split(tmp_path / "prepared", dataset, "train")
    items = _values(tmp_path / "prepared", dataset, "item")
    assert [[items[each] for each in row] for row in rows["history"].to_pylist()[:3]] == [[], ["b", "c", "d"], []]


def test_a_batch_holds_sequences_as_jagged_lists_and_bad_ones_are_found(tmp_path: Path) -> None:
    dataset = _prepare(tmp_path, ROWS * 8)
    reader = ShardReader(
        str(tmp_path / "prepared"),
        dataset,
        "train",
        global_batch_size=8,
        rank=0,
        world_size=1,
        config=ReaderConfig(num_streams=2),
        seed=0,
    )
    batch = next(reader.batches(0))
    sparse = batch.sparse_features
    assert sparse.keys() == ["item", "category", "history", "history_category"]
    lengths = sparse.lengths().view(4, 8)
    assert (lengths[2] == lengths[3]).all() and int(lengths[2].max()) == 3
    shard = pq.read_table(tmp_path / "prepared" / dataset.splits["train"].files[0].path)
    shorter = [
        replace(each, sequence=replace(each.sequence, max_length=2)) if each.sequence else each
        for each in dataset.sparse_features
    ]
    assert not check_columns(shard, dataset)[1]
    _, reasons = check_columns(shard, replace(dataset, sparse_features=shorter))
    assert len(reasons) == sum(len(row) > 2 for row in shard["history"].to_pylist()) > 0
    position = shard.schema.get_field_index("history_category")
    uneven = shard.set_column(
        position, shard.schema.field(position), pa.array([[]] * len(shard), shard.schema.field(position).type)
    )
    assert len(check_columns(uneven, dataset)[1]) == sum(len(row) > 0 for row in shard["history"].to_pylist())


@pytest.mark.parametrize(
    ("sequences", "said"),
    [
        ({"history": SequenceConfig()}, "history max_length"),
        ({"history": SequenceConfig(max_length=3, shares="itme")}, "itme item"),
        ({"history": SequenceConfig(max_length=3), "other": SequenceConfig(beside="histoy")}, "histoy history"),
        ({"history": SequenceConfig(max_length=3), "other": SequenceConfig(3, beside="history")}, "other max_length"),
    ],
)
def test_sequences_that_cannot_be_are_refused(sequences: dict[str, SequenceConfig], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ColumnsConfig(sparse=["item"], sequence=sequences)
    assert mentions(error.value, said)


def test_a_side_or_a_length_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for settings in ({"keep": "newest"}, {"max_length": 0}, {"max_length": 20_000}):
        with pytest.raises(ConfigError):
            SequenceConfig(**settings)

    with pytest.raises(DataError) as error:
        _prepare(tmp_path, ROWS, feature_ids={"history": IdsConfig(min_frequency=2)})
    assert mentions(error.value, "history item")
