"""Joined columns: the bits of a table joined beforehand, no value from later, leaks that are named, and bad tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.checkpoint.vocabularies import read_values
from pipeline.cli.api.dataset import Dataset as Opened
from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig, SequenceConfig
from pipeline.config.data import BaseVocabularyConfig, BucketsConfig, DataConfig, IdsConfig, ReaderConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import describe, prepare
from pipeline.data.raw.source import find_sources
from pipeline.data.read.reader import ShardReader
from pipeline.data.read.value_index import index_values
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.datasets import _missing_values, erase_from_dataset
from pipeline.extras.erase.folders import rewriting
from pipeline.extras.erase.run import erase
from pipeline.extras.erase.scan import found_in
from pipeline.extras.erase.target import Target
from pipeline.extras.joins.config import JoinConfig
from pipeline.extras.joins.versions import read_versions
from pipeline.extras.select_features.subset import data_without
from pipeline.retraining.feature_changes import source_names, view
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.serving.artifact.raw_schema import schema_of
from pipeline.serving.artifact.writer import vocabulary_path
from pipeline.serving.scoring.raw_rows import RowEncoder
from tests.extras.joins.tables import BEGIN, join_beforehand, write_tables

ITEMS = {
    "table": "items.parquet",
    "on": "item",
    "columns": ["genre", "price", "clicks", "tags"],
    "written_at": "written_at",
}
FEW = ITEMS | {"columns": ["genre", "price", "clicks"]}
USERS = {"table": "users.parquet", "on": "user", "columns": ["history", "emb"], "valid_from": "seen_from"}


def assert_says(raised: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    assert [part for part in parts if part not in str(raised.value)] == [], str(raised.value)


def job_of(
    folder: Path, name: str, source: str = "rows.parquet", joins: Any = (ITEMS, USERS), **changes: Any
) -> PrepareJob:
    columns = ColumnsConfig(
        label="click", sparse=["item", "user", "genre"], dense=["price", "clicks"], vectors={"emb": 3}, timestamp="ts", multi_hot=["tags"], weighted=["tags"],
        sequence={"history": SequenceConfig(max_length=20, shares="item")},
    )  # fmt: skip
    joined = [{**join, "table": str(folder / join["table"])} for join in joins]
    settings: dict[str, Any] = {
        "format": "parquet", "columns": columns, "split": SplitConfig("time", 0.1, 0.1), "group_column": "user", "joins": joined,
        "buckets": {"price": BucketsConfig("quantile", 5)}, "dense_transforms": {"clicks": "standardize"},
        "transforms": {"both": {"kind": "cross", "columns": ["user", "genre"]}},
        "feature_ids": {"item": IdsConfig(min_frequency=3)}, "rows_per_shard": 1100, "rows_per_row_group": 256,
    }  # fmt: skip
    data = DataConfig(name="rows", path=str(folder / name), **settings | changes)
    return PrepareJob(data=data, source=str(folder / source))


def encoded_by_server(job: PrepareJob, path: str, rows: pa.Table) -> pa.Table:
    """The numbers and ids that an artifact of the data set gives to raw rows, without bags."""
    dataset = load_dataset(path)
    schema = schema_of(dataset, dataset.sparse_feature_names, job.data.columns, {})
    vocabularies = {
        each.name: index_values(read_values(vocabulary_path(each, path))) for each in dataset.sparse_features
    }
    encoder = RowEncoder(schema, vocabularies)
    encoded = encoder.encode(rows.select(encoder.raw_names))
    found = {name: encoded.dense[:, at].numpy() for at, name in enumerate(dataset.dense_features)}
    for at, feature in enumerate(dataset.sparse_features):
        if not feature.multi_hot:
            found[feature.name] = encoded.values[encoded.offsets[at * len(rows) : (at + 1) * len(rows)]].numpy()
    return pa.table(found)


def batches_of(path: str, split: str) -> list[Any]:
    dataset = load_dataset(path)
    reader = ShardReader(path, dataset, split, global_batch_size=64, rank=0, world_size=1, seed=3, drop_last=split == "train",
                         config=ReaderConfig(num_streams=4, keep_mib=0), with_groups=True)  # fmt: skip
    return list(reader.batches(0))


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    write_tables(tmp_path)
    return tmp_path


def test_batches_and_rows_equal_a_table_joined_beforehand_to_the_bit(tables: Path) -> None:
    join_beforehand(tables)
    narrow = prepare(job_of(tables, "narrow"))
    wide = prepare(job_of(tables, "wide", "joined.parquet", joins=()))
    assert narrow.dataset.schema_hash() == wide.dataset.schema_hash()
    assert narrow.dataset.sparse_features == wide.dataset.sparse_features
    for split in ("train", "validation", "test"):
        mine, theirs = (Opened(each.path).to_arrow(split) for each in (narrow, wide))
        assert mine.select(theirs.column_names).equals(theirs) and len(mine)
        for one, other in zip(batches_of(narrow.path, split), batches_of(wide.path, split), strict=True):
            for left, right in (
                (one.dense_features, other.dense_features), (one.labels, other.labels), (one.groups, other.groups),
                (one.sparse_features.values(), other.sparse_features.values()),
                (one.sparse_features.weights(), other.sparse_features.weights()),
                (one.sparse_features.lengths(), other.sparse_features.lengths()),
            ):  # fmt: skip
                assert torch.equal(left, right)
    stored = pq.read_schema(tables / "narrow" / narrow.dataset.splits["train"].files[0].path).names
    assert stored == ["click", "item", "user", "both", "__group__", "__join_0__", "__join_1__"]
    assert prepare(job_of(tables, "narrow")).already_prepared


def test_prepare_names_planted_leaks_and_what_rows_may_not_see(tables: Path) -> None:
    summary = prepare(job_of(tables, "data"))
    items, users = (side.about for side in summary.dataset.side_tables)
    before, newest = items["columns"]["clicks"]["auc"]
    assert abs(before - 0.5) < 0.05 and newest > 0.8
    assert items["columns"]["clicks"]["differs"] > 0.5
    lines = describe(summary).splitlines()
    assert [line.split()[0] for line in lines if line.endswith(": a leak")] == ["clicks"]
    assert items["unmatched"] > items["unknown_keys"] > 0 and users["unmatched"] == 0


def test_raw_rows_of_a_request_hold_the_joined_columns(tables: Path) -> None:
    job = job_of(tables, "data")
    summary = prepare(job)
    raw = pq.read_table(join_beforehand(tables))
    rows = encoded_by_server(job, summary.path, raw)
    order = np.argsort(raw["ts"].to_numpy(), kind="stable")  # of rows.parquet: they are sorted, but not the splits
    prepared = pa.concat_tables([Opened(summary.path).to_arrow(split) for split in ("train", "validation", "test")])
    for name in rows.column_names:
        assert np.array_equal(rows[name].to_numpy()[order], prepared[name].to_numpy())


@pytest.mark.long
def test_a_later_window_continues_vocabularies_and_reads_the_grown_table(tables: Path) -> None:
    for source, joins in (("rows.parquet", (ITEMS, USERS)), ("joined.parquet", ())):
        join_beforehand(tables)
        job = job_of(tables, f"first-{source}", source, joins)
        job.vocabularies = None
        prepare(job)
    later = pa.table(
        {
            "item": [1, 2],
            "written_at": [BEGIN + 9000, BEGIN + 9500],
            "genre": ["new", "g1"],
            "price": [1.0, 2.0],
            "clicks": [9.0, 9.0],
            "tags": [["t1:2"], None],
        }
    )
    pq.write_table(
        pa.concat_tables([pq.read_table(tables / "items.parquet"), later], promote_options="permissive"),
        tables / "items.parquet",
    )
    join_beforehand(tables)
    with pytest.raises(DataError) as raised:
        prepare(job_of(tables, "first-rows.parquet"))
    assert_says(raised, "items.parquet has changed", "choose another data.path")
    found = []
    for source, joins in (("rows.parquet", (ITEMS, USERS)), ("joined.parquet", ())):
        job = job_of(tables, f"second-{source}", source, joins)
        job.vocabularies = BaseVocabularyConfig(str(tables / f"first-{source}"))
        found.append(Opened(prepare(job).path).to_arrow("train"))
    assert found[0].select(found[1].column_names).equals(found[1])
    data = job_of(tables, "names").data
    assert source_names(data) == ["click", "item", "user"]
    assert view(data, data, data)[0].joined_columns == data.joined_columns
    assert data_without(data, ["price", "history", "emb[0]"], "subset").joined_columns == [
        "genre",
        "clicks",
        "tags",
        "emb",
    ]


def visible_by_hand(rows: list[dict[str, Any]], key: int, time: int, delay: int) -> int | None:
    seen = [row for row in rows if row["k"] == key and max(row["valid"], row["written"]) + delay <= time]
    return max(seen, key=lambda row: (row["valid"], row["written"]))["value"] if seen else None


@pytest.mark.parametrize("delay", [0, 3])
def test_a_row_sees_the_newest_valid_version_among_those_written_by_its_time(tmp_path: Path, delay: int) -> None:
    generator = np.random.default_rng(delay)
    times = {(int(k), int(v), int(w)) for k, v, w in generator.integers(0, [5, 30, 40], (120, 3))}
    rows = [{"k": k, "valid": v, "written": w, "value": n} for n, (k, v, w) in enumerate(sorted(times, key=hash))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "versions.parquet")
    join = JoinConfig("versions.parquet", "k", ["value"], "valid", "written", delay)
    versions = read_versions(
        join, find_sources(str(tmp_path / "versions.parquet")), ColumnsConfig(sparse=["value"]), []
    )
    keys, moments = (each.reshape(-1) for each in np.meshgrid(np.arange(6), np.arange(45)))
    found = versions.find(pa.chunked_array([keys]), moments)
    assert versions.rows(found.visible)["value"].to_pylist() == [
        visible_by_hand(rows, int(key), int(time), delay) for key, time in zip(keys, moments, strict=True)
    ]
    newest = [visible_by_hand(rows, int(key), 10**6, delay) for key in keys]
    assert versions.rows(found.latest)["value"].to_pylist() == newest


def _items(**columns: Any) -> pa.Table:
    usual = {"item": [1, 1, 2], "written_at": [BEGIN, BEGIN + 9, BEGIN], "genre": ["a", "b", "c"], "price": [1.0, 2.0, None],
             "clicks": [0.0, 1.0, 2.0]}  # fmt: skip
    return pa.table({name: values for name, values in (usual | columns).items() if values is not None})


ZONED = pa.array([BEGIN] * 3, pa.timestamp("s", "Europe/Berlin"))
BAD: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no table": (lambda path: (path / "items.parquet").unlink(), ("items.parquet",)),
    "no key": (lambda path: pq.write_table(_items(item=None), path / "items.parquet"), ("lacks 1 of", "'item'")),
    "no rows": (lambda path: pq.write_table(_items().slice(0, 0), path / "items.parquet"), ("items.parquet has no rows",)),
    "twice": (lambda path: pq.write_table(_items(written_at=[BEGIN] * 3), path / "items.parquet"), ("1 rows whose item and written_at equal", "keep one row")),
    "no time": (lambda path: pq.write_table(_items(written_at=["soon", "1", "2"]), path / "items.parquet"), ("line 1", "written_at is 'soon', not a time")),
    "missing time": (lambda path: pq.write_table(_items(written_at=[1, None, 2]), path / "items.parquet"), ("line 2", "written_at is None, not a time")),
    "another unit": (lambda path: pq.write_table(_items(written_at=pa.array([BEGIN] * 3, pa.timestamp("s")), item=[1, 2, 3]), path / "items.parquet"), ("like seconds", "microseconds", "in one unit")),
    "no number": (lambda path: pq.write_table(_items(price=["1", "2", "much"]), path / "items.parquet"), ("line 3", "price is 'much'", "older values")),
    "two of a name": (lambda path: pq.write_table(pq.read_table(path / "rows.parquet").append_column("price", pa.array([1.0] * 3000)), path / "rows.parquet"), ("'price'", "items.parquet too: rename")),
    "zones": (lambda path: (_dated(path), pq.write_table(_items(written_at=ZONED, item=[1, 2, 3]), path / "items.parquet")), ("have no zone", "hours too early")),
}  # fmt: skip


def _dated(path: Path) -> None:
    rows = pq.read_table(path / "rows.parquet")
    pq.write_table(rows.set_column(3, "ts", rows["ts"].cast(pa.timestamp("s"))), path / "rows.parquet")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_refused_with_the_fix(tables: Path, name: str) -> None:
    spoil, parts = BAD[name]
    spoil(tables)
    with pytest.raises(DataError) as raised:
        prepare(job_of(tables, "data", joins=(FEW,), columns=ColumnsConfig(label="click", sparse=["item", "genre"], dense=["price", "clicks"], timestamp="ts"), transforms={}))  # fmt: skip
    assert_says(raised, *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"written_at": None}, ("neither written_at nor valid_from",)),
        ({"columns": ["genre", "click"]}, ("'click', a label",)),
        ({"columns": ["genre", "prise"]}, ("'prise', but no feature", "'price'")),
        ({"columns": ["genre", "item"]}, ("'item', its key",)),
        ({"written": "x"}, ("data.joins[0].written", "written_at")),
        ({"delay": -1}, ("data.joins[0].delay",)),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        job_of(tmp_path, "data", joins=({**ITEMS, **change}, USERS))
    assert_says(raised, *parts)


def test_rows_without_a_time_are_refused(tmp_path: Path) -> None:
    columns = ColumnsConfig(label="click", sparse=["item", "genre"], dense=["price", "clicks"])
    with pytest.raises(ConfigError) as raised:
        job_of(tmp_path, "data", joins=(FEW,), columns=columns, split=SplitConfig(), transforms={})
    assert_says(raised, "data.columns.timestamp=", "leaks")


def test_an_erased_item_leaves_side_tables_and_histories_and_nothing_else_changes(tables: Path) -> None:
    path = prepare(job_of(tables, "data")).path
    feature, side = load_dataset(path).sparse_feature("item"), load_dataset(path).side_tables[0]
    before, schema = Opened(path).to_arrow("train"), pq.read_schema(Path(path, side.path))
    row_id = int(
        next(each for cell in before["history"].to_pylist() for each in cell if each in before["item"].to_pylist())
    )
    value = {
        number: text
        for first, texts in read_values(vocabulary_path(feature, path))
        for number, text in enumerate(texts, first)
    }[row_id]
    unmatched = pq.read_table(Path(path, side.path)).slice(0, 1)
    assert _missing_values(schema, load_dataset(path)).equals(unmatched)
    target = Target("item", value, sharing={"history"})
    files = [f"{tables}/{name}.parquet" for name in ("rows", "items", "users")]
    assert [found_in(target, each) for each in files] == [
        f"the value in column {name!r}" for name in ("item", "item", "history")
    ]
    result = erase(EraseJob(feature="item", value=value, folders=[path, *files]))
    assert result.left == {} and {path, *files} == {*result.rewritten}
    assert [found_in(target, each) for each in files] == ["", "", ""]
    after, own = Opened(path).to_arrow("train"), before["item"].to_numpy() == row_id
    assert own.any() and not (after["item"].to_numpy() == row_id).any()
    for name in before.column_names:
        for erased, old, new in zip(own, before[name].to_pylist(), after[name].to_pylist(), strict=True):
            if erased and name in unmatched.column_names:
                assert new == unmatched[name][0].as_py()
            elif name in ("history", "item"):
                old = old if name == "history" else [old]
                assert [0 if each == row_id else each for each in old] == (new if name == "history" else [new])
            else:
                assert new == old
    assert len(batches_of(path, "train")) > 1 and (load_dataset(path).side_tables[0].num_rows < side.num_rows)


@pytest.mark.long
def test_rows_of_an_erased_user_see_missing_values(tables: Path) -> None:
    path = prepare(job_of(tables, "data")).path
    with rewriting(path) as folder:
        row_id = erase_from_dataset(Target("user", "3"), folder, {})
        before = Opened(path).to_arrow("train")
        assert folder.commit()
    after, own, side = (
        Opened(path).to_arrow("train"),
        before["user"].to_numpy() == row_id,
        load_dataset(path).side_tables[1],
    )
    assert own.any() and not after.filter(pa.array(own))["history"].combine_chunks().flatten().to_pylist()
    assert {tuple(after[f"emb[{at}]"].to_numpy()[own]) for at in range(3)} == {(0.0,) * int(own.sum())}
    assert after.filter(pa.array(~own)).equals(before.filter(pa.array(~own)))
    assert pq.read_table(Path(path, side.path))["version"].to_pylist()[0] == 0
    assert len(batches_of(path, "train")) > 1


def test_a_damaged_side_table_or_version_is_found(tables: Path) -> None:
    summary = prepare(job_of(tables, "data"))
    side = summary.dataset.side_tables[0]
    path = Path(summary.path, side.path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        batches_of(summary.path, "train")
    assert_says(raised, "joins/0.parquet", "checksum")
    path.unlink()
    with pytest.raises(DataError) as raised:
        prepare(job_of(tables, "data"))
    assert_says(raised, "joins/0.parquet", "choose another data.path")


def test_text_rows_and_a_text_table_are_joined_as_parquet_is(tables: Path) -> None:
    columns = ColumnsConfig(label="click", sparse=["item", "genre"], dense=["price", "clicks"], timestamp="ts")
    for name in ("rows", "items"):
        duckdb.sql(f"COPY (FROM '{tables / name}.parquet') TO '{tables / name}.csv' (HEADER)")
    found = []
    for suffix in ("parquet", "csv"):
        join = {**FEW, "table": f"items.{suffix}"}
        job = job_of(tables, suffix, f"rows.{suffix}", (join,), columns=columns, transforms={}, format=suffix)
        found.append(Opened(prepare(job).path).to_arrow("train"))
    assert found[0].equals(found[1]) and len(found[0]) > 1000


def test_a_config_file_may_write_on_without_quotes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shop.yaml").write_text(
        "name: shop\nformat: parquet\ncolumns: {label: y, sparse: [item, genre], timestamp: ts}\n"
        "joins:\n  - {table: items.parquet, on: item, columns: [genre], written_at: at}\n"
    )
    job = load_config(PrepareJob, [f"--config-dir={tmp_path}", "data=shop", "source=rows.parquet"])
    assert [join["on"] for join in job.data.joins] == ["item"]
