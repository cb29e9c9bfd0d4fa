"""Planted differences between served rows and training rows are named by column, with what they look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.dataset import SequenceFeature
from pipeline.extras.serving_log.compare_rows import ColumnSkew, compare, explain, read_training_rows
from pipeline.extras.serving_log.observers.log import Packer
from pipeline.extras.serving_log.records import Model, Requests, read_messages
from pipeline.extras.serving_log.writer import table_of
from pipeline.runtime.errors import DataError
from pipeline.serving.artifact.raw_schema import RawFeature, RawSchema
from pipeline.serving.http.batching import Scores
from pipeline.serving.http.observers import Answered
from pipeline.serving.scoring.encoded import Encoded, EncodedSpan
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import schema_of
from tests.support.messages import mentions

HASHED = ("city", "device", "hour", "user", "item_brand", "zip")
SCHEMA = RawSchema(
    ["price", "age", "seconds"],
    [
        *(RawFeature(name, 1 << 20, False, hash_size=1 << 20, hash_seed=seed) for seed, name in enumerate(HASHED)),
        RawFeature("tags", 1 << 20, True, hash_size=1 << 20, hash_seed=7),
        RawFeature("history", 1 << 20, True, hash_size=1 << 20, hash_seed=8, sequence=SequenceFeature(50)),
    ],
    "log1p",
    "|",
)
ENCODER = RowEncoder(SCHEMA, {})
ROWS = 60


def served_rows() -> list[dict[str, Any]]:
    chance = np.random.default_rng(3)
    return [
        {
            "price": None if number % 5 == 0 else round(float(chance.uniform(1, 99)), 3),
            "age": float(chance.integers(18, 90)),
            "seconds": float(chance.integers(10_000, 80_000)),
            "city": ["rom", "bern", "oslo"][chance.integers(3)],
            "device": ["phone", "tablet", "pc"][chance.integers(3)],
            "hour": str(chance.integers(24)),
            "user": str(chance.integers(1000)),
            "item_brand": f"brand {chance.integers(30)}",
            "zip": f"{chance.integers(99999):05d}",
            "tags": [f"t{each}" for each in chance.permutation(9)[:4]],
            "history": [f"i{each}" for each in chance.permutation(99)[:9]],
        }
        for number in range(ROWS)
    ]


def answered_requests() -> list[Answered]:
    """Two requests with these rows, scored in one batch."""
    columns = ENCODER.layout.columns
    table = pa.Table.from_pylist(served_rows(), schema=schema_of(columns))
    encoded = ENCODER.encode(table)
    part = Encoded(encoded.kept, encoded.dense, lambda: (encoded.values, encoded.offsets))
    manifest = SimpleNamespace(lineage={"name": "test"}, schema=SCHEMA)
    scorer: Any = SimpleNamespace(version="abc+2", columns=columns, tasks=(), manifest=manifest, program=None)
    model: Any = SimpleNamespace(scorer=scorer, retrieves=False)
    scores = np.linspace(0, 1, ROWS, dtype=np.float32)
    group = []
    for name, begin, end in (("first", 0, 20), ("second", 20, ROWS)):
        scored = Scores(scores[begin:end], [], "abc+2", (EncodedSpan([part], begin, end),))
        group.append(Answered(name, 1e9, table.slice(begin, end - begin), scored, model))
    return group


def logged(group: Sequence[Answered]) -> tuple[Model, pa.Table]:
    """What the process that writes the log makes of the messages of these requests."""
    packer = Packer()
    packed = [packer.pack(each) for each in group]
    sent = [
        Requests(*read_messages(bytearray(each.batch())), [*read_messages(bytearray(each.message))]) for each in packed
    ]
    return packed[0].model, table_of(packed[0].model, sent)


def _change(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {**row, name: change(row[name])}


PLANTED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, str]]] = {
    "missing lower-case": (_change("city", str.upper), {"city": "case"}),
    "time zone of an hour": (_change("hour", lambda hour: str((int(hour) + 2) % 24)), {"hour": "time zone"}),
    "time zone of a time": (_change("seconds", lambda time: time + 7200), {"seconds": "time zone"}),
    "int against float": (_change("user", lambda user: f"{user}.0"), {"user": "spelling"}),
    "leading zeros lost": (_change("zip", lambda zip: str(int(zip))), {"zip": "spelling"}),
    "stale item table": (_change("item_brand", lambda brand: f"brand {len(brand)}x"), {"item_brand": "other values"}),
    "default for missing": (_change("price", lambda price: 9.5 if price is None else price), {"price": "missing"}),
    "unit": (_change("age", lambda age: age * 12), {"age": "unit"}),
    "truncated list": (_change("tags", lambda tags: tags[:2]), {"tags": "beginning"}),
    "reversed history": (_change("history", lambda items: items[::-1]), {"history": "reversed"}),
    "dropped column": (lambda row: {k: v for k, v in row.items() if k != "device"}, {"device": "missing"}),
    "swapped columns": (
        lambda row: {**row, "city": row["device"], "device": row["city"]}, {"city": "swapped", "device": "swapped"},
    ),
    "white space": (_change("city", lambda city: f"{city} "), {"city": "white space"}),
    "rounding": (_change("price", lambda price: price and round(price, 1)), {"price": "rounded"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def log() -> tuple[Any, pa.Table]:
    model, table = logged(answered_requests())
    return model.about, table


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_skew_is_named_by_column_and_alone(log: tuple[Any, pa.Table], planted: str) -> None:
    change, wanted = PLANTED[planted]
    training = pa.Table.from_pylist([change(row) for row in served_rows()])
    found: dict[str, ColumnSkew] = {}
    num_rows = compare(ENCODER, *log, training, found)
    explain(found)
    assert found.keys() == wanted.keys()
    for column, word in wanted.items():
        skew = found[column]
        assert word in skew.looks_like, skew.looks_like
        assert 0 < skew.prepared <= skew.rows <= num_rows and skew.pairs[0][0] != skew.pairs[0][1]


def test_rows_that_prepare_reads_alike_do_not_differ(log: tuple[Any, pa.Table]) -> None:
    rows = [
        {**row, "user": int(row["user"]), "age": int(row["age"]), "tags": "|".join(row["tags"])}
        for row in served_rows()
    ]
    training = pa.Table.from_pylist(rows)
    training = training.set_column(0, "price", training["price"].cast(pa.string()))
    found: dict[str, ColumnSkew] = {}
    assert compare(ENCODER, *log, training, found) == 0 and not found


def test_training_rows_are_found_by_request_and_row(log: tuple[Any, pa.Table], tmp_path) -> None:
    rows = [{**row, "request_id": "second", "row": number} for number, row in enumerate(served_rows()[20:])]
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist([*rows[::-1], rows[3]]), path)
    training = read_training_rows(path, "request_id", "row")
    places = training.find(log[1])
    assert training.num_doubled == 1 and (places[:20] == -1).all()
    assert places[20:].tolist() == list(range(39, -1, -1))
    with pytest.raises(DataError) as error:
        read_training_rows(path, "requestid", "row")
    assert mentions(str(error.value), "'requestid' id_column")
