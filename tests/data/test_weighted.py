"""Weighted bags from raw rows to batches: `id:weight` becomes an id and a float32, in every format; what is no number is bad."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import ReaderConfig, SplitConfig
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.raw.weighted import split_element, split_elements
from pipeline.data.read import check_rows
from pipeline.data.read.check_rows import Lists, check_columns
from pipeline.data.read.reader import ShardReader
from pipeline.embeddings.tables import resolve_tables
from pipeline.runtime.errors import ConfigError
from tests.data.criteo_rows import read_split, run_prepare
from tests.support.examples import examples
from tests.support.messages import mentions

ALL = SplitConfig(validation_fraction=0.0, test_fraction=0.0)
COLUMNS = ColumnsConfig(sparse=["item"], multi_hot=["tags"], weighted=["tags"])
LISTS = [["a:0.5", "b", "a:b:2e1"], [], ["a:-1", ""], ["c:+.25", ":3"]]
IDS = [["a", "b", "a:b"], [], ["a", ""], ["c", ""]]
WEIGHTS = [[0.5, 1.0, 20.0], [], [-1.0, 1.0], [0.25, 3.0]]
BAD = ["a:", "a:x", "a:nan", "a:inf", "a:1e39", "a:1_0", "a: 1"]


def _prepared(path: Path, dataset: Dataset) -> tuple[list[list[str]], list[list[float]]]:
    rows = read_split(path, dataset, "train")
    table = pq.read_table(path / str(dataset.sparse_feature("tags").vocabulary))
    values = {0: "", **dict(zip(table["id"].to_pylist(), table["value"].to_pylist(), strict=True))}
    return [[values[each] for each in row] for row in rows["tags"].to_pylist()], rows["__weights__tags"].to_pylist()


def _write(tmp_path: Path, kind: str, lists: list[list[str]]) -> str:
    path = tmp_path / f"rows.{'csv' if kind == 'json' else kind}"
    if kind == "parquet":
        table = {
            "label": [0, 1] * (len(lists) // 2),
            "item": ["x"] * len(lists),
            "tags": pa.array(lists, pa.list_(pa.string())),
        }
        pq.write_table(pa.table(table), path)
    elif kind == "jsonl":
        rows = [{"label": number % 2, "item": "x", "tags": tags} for number, tags in enumerate(lists)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        cells = [json.dumps(tags).replace('"', '""') if kind == "json" else "|".join(tags) for tags in lists]
        lines = [f'{number % 2},x,"{cell}"' for number, cell in enumerate(cells)]
        path.write_text("\n".join(["label,item,tags", *lines]) + "\n")
    return str(path)


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_ids_and_weights_are_told_apart_and_what_is_no_number_is_bad(tmp_path: Path, kind: str) -> None:
    lists = [*LISTS, *([["b:1", bad]] for bad in BAD), ["b"]]
    lists = [each if isinstance(each[0] if each else "", str) else each[0] for each in lists]
    columns = replace(COLUMNS, list_separator="json" if kind == "json" else "|")
    dataset = run_prepare(
        _write(tmp_path, kind, lists),
        tmp_path / "prepared",
        format="csv" if kind == "json" else kind,
        columns=columns,
        split=ALL,
        max_quarantined_fraction=1.0,
    )
    ids, weights = _prepared(tmp_path / "prepared", dataset)
    assert (ids, weights) == ([*IDS, ["b"]], [*WEIGHTS, [1.0]])
    assert (dataset.accepted_rows, dataset.quarantined_rows) == (5, len(BAD))
    entries = [json.loads(line) for line in (tmp_path / "prepared" / "quarantine.jsonl").read_text().splitlines()]
    for entry, bad in zip(entries, BAD, strict=True):
        assert mentions(entry["reason"], f"tags {bad!r} finite 32-bit number")
    feature = dataset.sparse_feature("tags")
    assert feature.weighted and feature.multi_hot and feature.mean_pooling_factor == 8 / 5
    assert dataset.weighted_features == ["tags"] and load_dataset(str(tmp_path / "prepared")) == dataset


def test_rows_that_differ_in_a_weight_alone_are_no_copies(tmp_path: Path) -> None:
    train = _write(tmp_path, "csv", [["a:1", "b:2"], ["a:1", "b"]])
    (tmp_path / "other").mkdir()
    test = _write(tmp_path / "other", "csv", [["a:1", "b:3"], ["a", "b:1.0"]])
    dataset = run_prepare(
        None,
        tmp_path / "prepared",
        format="csv",
        columns=COLUMNS,
        split=SplitConfig(kind="given", train=train, validation=test),
    )
    assert dataset.shared_rows["validation"] == 1  # a:1 is a, and b is b:1.0


def test_data_without_weights_are_described_as_before(tmp_path: Path) -> None:
    plain = replace(COLUMNS, weighted=[])
    dataset = run_prepare(_write(tmp_path, "csv", LISTS), tmp_path / "prepared", format="csv", columns=plain, split=ALL)
    assert "weighted" not in (tmp_path / "prepared" / "dataset.json").read_text()
    assert read_split(tmp_path / "prepared", dataset, "train").column_names == ["label", "item", "tags"]
    assert not resolve_tables({}, dataset)[1].is_weighted
    weighted = replace(
        dataset, sparse_features=[dataset.sparse_features[0], replace(dataset.sparse_feature("tags"), weighted=True)]
    )
    assert [table.is_weighted for table in resolve_tables({}, weighted)] == [False, True]
    assert weighted.schema_hash() != dataset.schema_hash()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weighted": ["tag"]}, "tags"),
        ({"weighted": ["item"]}, "multi_hot"),
        ({"weighted": ["tags"], "list_separator": ":"}, "list_separator"),
    ],
    ids=["typo", "one_value", "separator"],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        ColumnsConfig(sparse=["item"], multi_hot=["tags"], **settings)
    assert mentions(error.value, f"data.columns {named}")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    folder = tmp_path_factory.mktemp("weighted")
    lists = [[f"t{tag}:{row + tag / 8}" for tag in range(row % 5)] for row in range(64)]
    dataset = run_prepare(_write(folder, "csv", lists), folder / "prepared", format="csv", columns=COLUMNS, split=ALL)
    return folder / "prepared", dataset


def _reader(folder: Path, dataset: Dataset, **settings: object) -> ShardReader:
    return ShardReader(
        str(folder),
        dataset,
        "train",
        global_batch_size=8,
        rank=0,
        world_size=1,
        seed=0,
        config=ReaderConfig(num_streams=2, **settings),
    )


def test_batches_carry_the_weights_and_1_for_features_without(prepared: tuple[Path, Dataset]) -> None:
    seen = []
    for batch in _reader(*prepared).batches(0):
        sparse = batch.sparse_features
        assert sparse["item"].weights().tolist() == [1.0] * 8
        tags = sparse["tags"]
        assert tags.weights().dtype == torch.float32
        for weights in tags.weights().split(tags.lengths().tolist()):
            first = weights[:1].tolist()
            assert weights.tolist() == [first[0] + number / 8 for number in range(len(weights))]
            seen += first
    assert sorted(seen) == [float(row) for row in range(64) if row % 5]
    assert _reader(*prepared).empty_batch().sparse_features.weights().tolist() == []


def test_rows_of_a_shard_with_bad_weights_are_found(prepared: tuple[Path, Dataset]) -> None:
    folder, dataset = prepared
    shard = pq.read_table(folder / dataset.splits["train"].files[0].path)
    weights = shard["__weights__tags"].to_pylist()
    weights[3][1], weights[6] = float("nan"), [1.0, 2.0]
    position, kind = shard.schema.get_field_index("__weights__tags"), pa.list_(pa.float32())
    spoilt = shard.set_column(position, "__weights__tags", pa.array(weights, kind))
    columns, reasons = check_columns(spoilt, dataset)
    assert sorted(reasons) == [3, 6]
    assert mentions(reasons[3], "__weights__tags finite") and mentions(reasons[6], "__weights__tags 'tags'")
    sound, none = check_columns(shard, dataset)
    assert not none
    rows = np.array([1, 2, 4, 7])
    for one, other in zip(columns.lists, sound.lists, strict=True):
        assert one.take(rows).weights.tolist() == other.take(rows).weights.tolist()
    present = np.ones(64, np.bool_)
    present[[3, 6]] = False
    assert np.isfinite(columns.lists[0].take(np.arange(64), present).weights).all()


ELEMENTS = st.one_of(
    st.sampled_from(
        ["a", "", ":", "a:", "a:b:1", "a:0x1", "a:1e400", "a:-1e-400", "a:+1.", "a:.5", "a:\u0661", "a: 1", "a:1_0"]
    ),
    st.floats(allow_nan=True).map(lambda number: f"a:{number!r}"),
    st.floats(width=32).map(lambda number: f"b:{number}"),
    st.text(max_size=6),
)


@examples(300)
@given(st.lists(ELEMENTS, max_size=8))
def test_one_element_is_split_as_a_column_of_them(elements: list[str]) -> None:
    ids, weights = split_elements(pa.array(elements, pa.string()))
    for element, text, weight in zip(elements, ids.to_pylist(), weights.tolist(), strict=True):
        assert split_element(element) == (None if np.isnan(weight) else (text, weight))


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_chosen_lists_are_equal_with_and_without_the_kernel(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 40, 60) * (draw.random(60) < 0.8)
    ids = draw.integers(0, 1000, lengths.sum()).astype(kind)
    lists = Lists(ids, np.concatenate([[0], np.cumsum(lengths)]), draw.random(len(ids), np.float32))
    rows, present = draw.integers(0, 60, 200), draw.random(200) < 0.7
    wanted = [lists.ids[lists.offsets[row] : lists.offsets[row + 1]] for row in rows[present]]
    for kernels in (check_rows.kernels, lambda _: None):
        monkeypatch.setattr(check_rows, "kernels", kernels)
        found = lists.take(rows, present)
        assert np.array_equal(found.ids, np.concatenate(wanted)) and found.ids.dtype == kind
        assert (np.diff(found.offsets)[present] == [len(each) for each in wanted]).all() and found.offsets[-1] == len(
            found.ids
        )
        assert not np.diff(found.offsets)[~present].any()
        into, chosen = np.empty(len(found.ids), np.int64), lists.choose(rows, present)
        chosen.copy_ids(into)
        assert np.array_equal(into, found.ids) and found.weights is not None and len(found.weights) == len(into)
        assert np.array_equal(lists.choose(np.arange(60)).lengths, lengths) and len(lists.take(rows[:0]).ids) == 0
