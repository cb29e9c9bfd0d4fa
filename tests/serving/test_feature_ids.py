"""A value has the id that prepare gave it: in vocabularies searched together, by hashes, remembered or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.serving import LimitsConfig
from pipeline.data.raw.hashing import hash_ids, hash_text
from pipeline.data.read import value_index
from pipeline.data.read.value_index import ValueIndex, index_values
from pipeline.runtime.errors import DataError
from pipeline.serving.artifact.raw_schema import RawFeature, RawSchema
from pipeline.serving.http.request_rows import RequestReader
from pipeline.serving.scoring import feature_ids
from pipeline.serving.scoring.feature_ids import FeatureIds
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists, concat_rows, schema_of
from tests.support.examples import examples
from tests.support.messages import mentions

VALUES = [
    "",
    "a",
    "b",
    "7",
    "07",
    "-1",
    "123456789",
    "12345678",
    "1234567",
    "Ünï",
    "\U0001f600",
    "\x00",
    "a\x00",
    "a b",
    "x" * 70,
]
texts = st.one_of(st.sampled_from(VALUES), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
numbers = st.one_of(st.integers(-(10**20), 10**20), st.sampled_from([7, 123456789, -1]))
vocabularies = st.lists(st.lists(texts.filter(bool), unique=True, max_size=30), min_size=1, max_size=5)


@contextmanager
def few_hashes(kinds: int | None) -> Iterator[None]:
    """Values of `kinds` different hashes; None: as they are."""
    with pytest.MonkeyPatch.context() as patch:
        if kinds is not None:
            of_texts = value_index.hash_texts
            patch.setattr(value_index, "hash_texts", lambda texts, seed: of_texts(texts, seed) % np.uint64(kinds))
            patch.setattr(value_index, "hash_text", lambda column, seed: hash_text(column, seed) % np.uint64(kinds))
        yield


@examples(150)
@given(vocabularies, st.lists(texts, max_size=40), st.sampled_from([None, 1, 3]), st.data())
def test_vocabularies_searched_together_give_each_its_own_ids(
    lists: list[list[str]], others: list[str], kinds: int | None, data: Any
) -> None:
    asked = [*others, *(value for values in lists for value in values)]
    owners = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=len(asked), max_size=len(asked)))
    with few_hashes(kinds):
        tables = [index_values([(1, values[:9]), (1 + len(values[:9]), values[9:])]) for values in lists]
        together = ValueIndex(tables).ids(np.array(owners, np.int64), pa.array(asked, pa.string()))
        alone = [ValueIndex([tables[owner]]).ids(np.zeros(1, np.int64), pa.array([value])) for owner, value in zip(owners, asked, strict=True)]  # fmt: skip
    wanted = [lists[owner].index(value) + 1 if value in lists[owner] else 0 for owner, value in zip(owners, asked, strict=True)]  # fmt: skip
    assert together.tolist() == wanted == [int(found[0]) for found in alone]


def encoder_of(lists: list[list[str]], room: int) -> RowEncoder:
    """Features c0, c1, ... of vocabularies, h hashed, m lists of the first vocabulary's values, b bags of them."""
    features = [RawFeature(f"c{number}", len(values) + 1, False) for number, values in enumerate(lists)]
    features += [
        RawFeature("m", len(lists[0]) + 1, True), RawFeature("h", 50, False, hash_size=50, hash_seed=3),
        RawFeature("b", len(lists[0]) + 1, False, bag_size=3), RawFeature("g", 9, True, hash_size=9, hash_seed=4),
    ]  # fmt: skip
    tables = {one.name: lists[int(one.name[1:] or 0)] for one in features if one.hash_size is None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_ids, "REMEMBERED", room * len(features))
        schema = RawSchema(["d"], features, "log1p", "|")
        return RowEncoder(schema, {name: index_values([(1, values)]) for name, values in tables.items()})


@pytest.mark.long
@examples(150)
@given(vocabularies, st.sampled_from([2, 1000]), st.data())
def test_rows_by_the_short_way_are_rows_by_prepares(lists: list[list[str]], room: int, data: Any) -> None:
    """`room` of 2: what is remembered of a hashed feature is forgotten again and again."""
    encoder = encoder_of(lists, room)
    own = st.sampled_from([value for values in lists for value in values] or [""])
    value = st.one_of(st.none(), texts, numbers, own, own)
    row = st.fixed_dictionaries(
        {}, optional={
            "d": st.one_of(st.none(), st.floats(-1e5, 1e30)),
            **dict.fromkeys(encoder.layout.columns.sparse, value),
            **{name: st.one_of(st.none(), st.lists(value.filter(lambda one: one is not None), max_size=5)) for name in ("m", "g")},
        }
    )  # fmt: skip
    import msgspec

    reader = RequestReader(encoder.layout.columns, LimitsConfig())
    for rows in data.draw(st.lists(st.lists(row, max_size=6), min_size=1, max_size=3)):
        asked = reader.read_json(msgspec.json.encode({"rows": rows}))
        assert isinstance(asked, ColumnLists)
        found, table = encoder.encode(asked), asked.to_table()
        long_way = encoder.encode_as_prepare(table)
        for other in (long_way, encoder.encode(table), encoder.encode(concat_rows([asked, table.slice(0, 0)]))):
            assert found.dense.numpy().tobytes() == other.dense.numpy().tobytes()
            assert torch.equal(found.values, other.values) and torch.equal(found.offsets, other.offsets)
            assert found.kept.tolist() == other.kept.tolist() == list(range(len(rows)))


def test_rows_that_are_bad_or_of_other_types_go_the_long_way() -> None:
    encoder = encoder_of([["red", "7"]], 10)
    schema = schema_of(encoder.layout.columns)
    rows = [{"d": 1.0, "c0": "red"}, {"d": 1e300, "c0": "7"}, {"d": float("inf")}, {"c0": "red", "m": ["7", "", None]}]
    table = pa.Table.from_pylist(rows, schema=schema)
    lists = ColumnLists(schema, [table[name].to_pylist() for name in schema.names], 4)
    body = b'{"rows": [{"d": 1.0, "c0": "red"}, {"d": 1e400, "c0": "7"}, {"d": -1e999999}, {"c0": "red", "m": ["7", "", null]}]}'
    requested = RequestReader(encoder.layout.columns, LimitsConfig()).read_json(body)
    for asked in (lists, table, requested):
        encoded = encoder.encode(asked)
        assert encoded.kept.tolist() == [0, 3] and [bad.line for bad in encoded.bad_rows] == [2, 3]
        assert encoded.values[:2].tolist() == [1, 1]
        assert encoded.values[2:5].tolist() == [2, 0, 0]
    whole = table.slice(0, 1)
    for kind, value, found in (
        (pa.int64(), 7, 2),
        (pa.null(), None, 0),
        (pa.dictionary(pa.int8(), pa.string()), "red", 1),
    ):
        other = whole.set_column(schema.get_field_index("c0"), "c0", pa.array([value], kind))
        assert encoder.encode(other).values.tolist()[0] == found
    garbled = pa.array([b"\xff"], pa.binary()).view(pa.string())
    (bad,) = encoder.encode(whole.set_column(schema.get_field_index("c0"), "c0", garbled)).bad_rows
    assert mentions(bad.reason, "c0 UTF-8")


def test_what_is_remembered_is_bounded() -> None:
    features = [RawFeature("h", 1000, False, hash_size=1000), RawFeature("c", 1001, False)]
    values = [f"value {number}" for number in range(1000)]
    ids = FeatureIds(features, {"c": index_values([(1, values)])})
    ids._room = 100
    column = [*values, "y" * 1000, "unknown"]
    for _ in range(2):
        found = ids.of_columns([column, column])
        assert found[len(column) :].tolist() == [*range(1, 1001), 0, 0]
        assert found[: len(column)].tolist() == hash_ids(pa.array(column), 1000, 0).tolist()
        hashed, listed = ids._known
        assert len(hashed) <= 100 + 2
        assert {text for text in listed if text} == set(values[:100])  # the most frequent ones, whatever was asked


def test_a_vocabulary_keeps_the_values_whose_rows_are_kept() -> None:
    values = [f"v{i}" for i in range(10)]
    table = index_values([(1, values)], keep=lambda ids: ids % 2 == 0)
    found = ValueIndex([table]).ids(np.zeros(10, np.int64), pa.array(values))
    assert found.tolist() == [0, 2, 0, 4, 0, 6, 0, 8, 0, 10]
    schema = RawSchema([], [RawFeature("f", 11, False)], "none", "|")
    rows = pa.table({"f": pa.array(["v1", None, "v0", ""])})
    assert RowEncoder(schema, {"f": table}).encode(rows).values.tolist() == [2, 0, 0, 0]


def test_a_table_that_is_no_vocabulary_is_refused() -> None:
    table = index_values([(1, ["a", "b", "c"])])
    for wrong in (table.rename_columns(["id", "text"]), table.take([2, 1, 0])):
        with pytest.raises(DataError, match="a vocabulary"):
            ValueIndex([wrong])
