"""Whole Arrow columns have the ids that prepare's functions give their values, whatever lies in Arrow's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.serving import LimitsConfig
from pipeline.data.read.value_index import ValueIndex, index_values
from pipeline.serving.artifact.raw_schema import RawFeature, RawSchema
from pipeline.serving.http.request_rows import ARROW_TYPE, RequestReader
from pipeline.serving.scoring import feature_ids as column_ids
from pipeline.serving.scoring.feature_ids import MIN_ROWS, ColumnIds
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists, concat_rows, schema_of
from tests.support.examples import examples
from tests.support.messages import mentions

NUMBERS = [0, 7, -1, 10, 123456789, 12345678, -(2**63), 2**63 - 1]
WORDS = ["", "a", "07", "a\x00", "\x00", "12345678", "123456789", "Ünï", "\U0001f600", "x" * 7, "x" * 70, "x" * 71]
values = st.one_of(st.none(), st.sampled_from(WORDS), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
vocabularies = st.lists(
    st.lists(values.filter(bool), unique=True, max_size=30).map(lambda own: [*own, *map(str, NUMBERS[:5])]),
    min_size=1,
    max_size=5,
).map(lambda lists: [list(dict.fromkeys(own)) for own in lists])


def encoder_of(lists: list[list[str]]) -> RowEncoder:
    """Features c0, c1, ... of vocabularies, between two that are hashed."""
    listed = [RawFeature(f"c{number}", len(own) + 1, False) for number, own in enumerate(lists)]
    hashed = [RawFeature(name, 50, False, hash_size=50, hash_seed=seed) for name, seed in (("h", 3), ("g", 0))]
    schema = RawSchema(["d", "e"], [hashed[0], *listed, hashed[1]], "log1p", "|")
    return RowEncoder(schema, {f"c{number}": index_values([(1, own)]) for number, own in enumerate(lists)})


def assert_same(encoder: RowEncoder, table: pa.Table) -> None:
    found, wanted = encoder._encode_whole(table), encoder.encode_as_prepare(table)
    assert found is not None
    assert found.dense.numpy().tobytes() == wanted.dense.numpy().tobytes()
    assert torch.equal(found.values, wanted.values) and torch.equal(found.offsets, wanted.offsets)
    assert found.kept.tolist() == wanted.kept.tolist()


@examples(60)
@given(vocabularies, st.data())
def test_columns_of_text_and_whole_numbers_have_the_ids_that_prepare_gives(lists: list[list[str]], data: Any) -> None:
    encoder, num_rows = encoder_of(lists), data.draw(st.integers(1, 12))
    own = st.one_of(values, st.sampled_from([value for each in lists for value in each]))
    columns: dict[str, pa.Array] = {}
    for name in encoder.layout.columns.sparse:
        kind = data.draw(st.sampled_from([pa.string(), pa.large_string(), pa.int64(), pa.int8(), pa.uint32()]))
        if pa.types.is_integer(kind):
            fits = [number for number in NUMBERS if number < 128 and number > -129] if kind != pa.int64() else NUMBERS
            value = st.one_of(st.none(), st.sampled_from([n for n in fits if kind != pa.uint32() or n >= 0]))
        else:
            value = own
        columns[name] = pa.array(data.draw(st.lists(value, min_size=num_rows, max_size=num_rows)), kind)
    for name in ("d", "e"):
        number = st.one_of(st.none(), st.floats(-1e5, 1e30), st.just(float("nan")))
        columns[name] = pa.array(data.draw(st.lists(number, min_size=num_rows, max_size=num_rows)), pa.float64())
    table = pa.table(columns)
    assert_same(encoder, table)
    assert_same(encoder, table.slice(data.draw(st.integers(0, num_rows - 1))))
    assert_same(encoder, pa.concat_tables([table, table.slice(num_rows // 2)]))


def test_rows_as_lists_and_as_a_table_have_the_same_ids() -> None:
    encoder = encoder_of([["red", "7"], ["blue"]])
    rows = [{"d": 1.0, "c0": "red", "c1": "blue", "h": "7"}, {"e": 2.5, "c0": "", "c1": None, "g": "x"}] * MIN_ROWS
    table = pa.Table.from_pylist(rows, schema=schema_of(encoder.layout.columns))
    lists = ColumnLists(table.schema, [column.to_pylist() for column in table.columns], table.num_rows)
    found, wanted = encoder._encode_whole(lists), encoder.encode_as_prepare(table)
    assert found is not None and torch.equal(found.values, wanted.values) and torch.equal(found.dense, wanted.dense)


@pytest.mark.parametrize("by_kernels", [True, False])
def test_added_values_have_the_ids_that_a_vocabulary_would_give_them(by_kernels: bool) -> None:
    whole, grown = encoder_of([["red", "7", "Ünï"], ["blue", "new"]]), encoder_of([["red"], ["blue", "new"]])
    if not by_kernels:
        grown._ids._of_arrow = None
    grown.added.add(1, 2, ["7", "Ünï"])
    grown.added.note_unknown([2])
    rows = [{"d": 1.0, "c0": "Ünï", "c1": "blue", "h": "7"}, {"e": 2.5, "c0": "", "c1": None}, {"c0": "x", "c1": "y"}]
    for table in (
        pa.Table.from_pylist(rows * MIN_ROWS, schema=schema_of(whole.layout.columns)),
        pa.Table.from_pylist(rows, schema=schema_of(whole.layout.columns)),
        pa.Table.from_pylist([{"c0": "7", "c1": "z"}] * MIN_ROWS, schema=schema_of(whole.layout.columns)),
    ):
        assert torch.equal(grown.encode(table).values, whole.encode(table).values)
    numbers = {"d": [1.0], "e": [1.0], **dict.fromkeys(("c0", "c1", "h", "g"), pa.array([7], pa.int16()))}
    table = pa.concat_tables([pa.table(numbers)] * MIN_ROWS)
    assert torch.equal(grown.encode(table).values, whole.encode(table).values)
    assert grown.added.take_unknown() == {2: {"y", "z", "7"}} and grown.added.take_unknown() == {}
    grown.forget_added()
    assert grown.encode(table).values[MIN_ROWS] == 0


@pytest.mark.parametrize("by_kernels", [True, False])
def test_requests_of_whole_numbers_and_of_text_are_scored_together(by_kernels: bool) -> None:
    encoder = encoder_of([["7", "-12"], ["3"]])
    if not by_kernels:
        encoder._ids._of_arrow = None
    reader, wanted, parts = RequestReader(encoder.layout.columns, LimitsConfig()), [], []
    for num_rows in (MIN_ROWS, 3, MIN_ROWS + 5):
        for kind in (pa.int16(), pa.string(), pa.uint64()):
            numbers = [abs(number) if kind == pa.uint64() else number for number in (7, -12, 3)] * num_rows
            texts = pa.array(numbers[:num_rows]).cast(kind)
            table = pa.table(
                {"d": pa.array([1] * num_rows), "e": [0.5] * num_rows, **dict.fromkeys(("c0", "c1", "h", "g"), texts)}
            )
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            parts.append(reader.read(sink.getvalue().to_pybytes(), ARROW_TYPE))
            found, whole = encoder.encode(parts[-1]), encoder.encode_as_prepare(table)
            assert torch.equal(found.values, whole.values) and torch.equal(found.dense, whole.dense)
            wanted.append(whole.values.view(4, num_rows))
    assert {part.schema.field("c0").type for part in parts} == {pa.int64(), pa.string()}
    together = encoder.encode(concat_rows(parts))
    assert torch.equal(together.values.view(4, -1), torch.cat(wanted, dim=1))


def test_another_value_of_the_same_key_is_another_value() -> None:
    own = ["one value", "another value", "a third"]
    index = ValueIndex([index_values([(1, own)])])
    last = index.keys[-1]
    index.keys[:] = last  # all of them as if they had the hash of one
    number = int(index.row_ids[-1])
    features = [RawFeature("c", 4, False)]
    asked = pa.array([own[number - 1], *own, None])
    found = ColumnIds(features, index, [0]).ids([asked])
    assert found is not None
    assert found.tolist() == [number, *(each if each == number else 0 for each in (1, 2, 3)), 0]


def test_vocabularies_without_a_value_know_none() -> None:
    for lists in ([[]], [[], ["a"], []], [["a"], []]):
        index = ValueIndex([index_values([(1, own)]) for own in lists])
        features = [RawFeature(f"c{number}", len(own) + 1, False) for number, own in enumerate(lists)]
        found = ColumnIds(features, index, range(len(lists))).ids([pa.array(["a", "b", None, ""])] * len(lists))
        assert found is not None
        assert found.tolist() == [row for own in lists for row in (len(own), 0, 0, 0)]


def test_bytes_that_are_no_text_go_the_long_way_and_are_named() -> None:
    encoder = encoder_of([["red"]])
    good = pa.Table.from_pylist([{"d": 1.0, "c0": "red"}] * MIN_ROWS, schema=schema_of(encoder.layout.columns))
    for name in ("c0", "h"):
        garbled = pa.array([b"\xff", *[b"red"] * (MIN_ROWS - 1)], pa.binary()).view(pa.string())
        table = good.set_column(good.schema.get_field_index(name), name, garbled)
        assert encoder._encode_whole(table) is None
        (bad,) = encoder.encode(table).bad_rows
        assert bad.line == 1 and mentions(bad.reason, f"{name} UTF-8")
    large = good.set_column(0, "d", pa.array([1e300] * MIN_ROWS))
    assert len(encoder.encode(large).bad_rows) == MIN_ROWS


def test_without_numba_and_for_other_features_rows_are_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bags = RawSchema([], [RawFeature("b", 9, False, bag_size=3, hash_size=9)], "none", "|")
    assert RowEncoder(with_bags, {})._ids._of_arrow is None
    table = pa.table(
        {"d": [1.0] * 40, "e": [None, *[2.0] * 39], "c0": ["red", "blue"] * 20, "g": ["x"] * 40, "h": [3] * 40}
    )
    wanted = encoder_of([["red"]]).encode(table)
    monkeypatch.setattr(column_ids, "find_spec", lambda name: None)
    encoder = encoder_of([["red"]])
    assert encoder._ids._of_arrow is None
    found = encoder.encode(table)
    assert torch.equal(found.values, wanted.values)
    assert np.array_equal(found.dense.numpy(), wanted.dense.numpy())
