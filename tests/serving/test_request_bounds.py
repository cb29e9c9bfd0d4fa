"""A request stands for no more memory than a multiple of its limits, and columns of any name are read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.serving import LimitsConfig
from pipeline.data.raw.value_types import to_text
from pipeline.serving.http.arrow_bounds import EXPANSION
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, BadRequest, RequestReader

COLUMNS = ColumnsConfig(label="", dense=["price"], sparse=["city", "device"], multi_hot=["tags", "words"])
LIMITS = LimitsConfig(body_mb=1.0, rows=4096, values_per_cell=1000)
READER = RequestReader(COLUMNS, LIMITS)
MOST = EXPANSION * LIMITS.body_bytes


def _stream(rows: int, chunk: int | None = None, **columns: pa.Array) -> bytes:
    none = {"price": pa.nulls(rows), "city": pa.nulls(rows), "device": pa.nulls(rows)}
    lists = dict.fromkeys(("tags", "words"), pa.nulls(rows, pa.list_(pa.null())))
    table, sink = pa.table({**none, **lists, **columns}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return bytes(sink.getvalue())


def _coded(rows: int, text: str) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([text]))


def _lists(values: pa.Array, length: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, length, dtype=np.int32)), values)


BOMBS: dict[str, Callable[[], bytes]] = {
    "a dictionary": lambda: _stream(4096, city=_coded(4096, "x" * 100_000)),
    "two dictionaries": lambda: _stream(4096, city=_coded(4096, "x" * 1100), device=_coded(4096, "x" * 1100)),
    "a dictionary for each of many batches": lambda: _stream(900, 1, city=_coded(900, "x" * 20_000).slice(0, 900)),
    "a dictionary of lists": lambda: _stream(400, tags=_lists(_coded(40_000, "x" * 1000), 100)),
    "nulls in lists": lambda: _stream(1, tags=pa.ListArray.from_arrays(pa.array([0, 2**30], pa.int32()), pa.nulls(2**30))),
    "bits in lists": lambda: _stream(1000, tags=_lists(pa.array(np.zeros(10**6, np.bool_)), 1000)),
}  # fmt: skip


@contextmanager
def _arrow_memory() -> Iterator[pa.MemoryPool]:
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_body_that_stands_for_much_memory_is_refused_before_it_takes_it(name: str) -> None:
    body = BOMBS[name]()
    assert len(body) < 2 * LIMITS.body_bytes
    with _arrow_memory() as pool:
        with pytest.raises(BadRequest) as refused:
            READER.read(body, ARROW_TYPE)
        assert pool.max_memory() < MOST
    assert refused.value.status == 413 and "limits.body_mb=1" in refused.value.message


def test_dictionaries_within_the_limit_are_read_as_their_values_are() -> None:
    texts, numbers = pa.array(["Rom", "Oslo", None] * 20), pa.array([3.0, 1e20, 0.5] * 20)
    plain = READER.read_arrow(_stream(60, city=texts, device=numbers, tags=_lists(numbers, 1)))
    coded = READER.read_arrow(
        _stream(60, city=texts.dictionary_encode(), device=numbers.dictionary_encode(),
                tags=_lists(numbers.dictionary_encode(), 1))
    )  # fmt: skip
    assert coded.equals(plain) and plain["device"].to_pylist() == to_text(numbers).to_pylist()


def test_rows_are_counted_before_they_are_decoded() -> None:
    reader = RequestReader(COLUMNS, LimitsConfig(rows=10))
    braces = {"rows": [{"city": "{" * 50}] * 10}
    assert reader.read_json(json.dumps(braces).encode()).num_rows == 10
    for body in (b'{"rows":[' + b"{}," * 300_000 + b"{}]}", json.dumps({"rows": [{}] * 11}).encode()):
        with pytest.raises(BadRequest) as refused:
            reader.read_json(body)
        assert refused.value.status == 422 and "limits.rows" in refused.value.message


ODD = ['=HYPERLINK("http://evil")', "back\\slash", "tab\tand\nline", "column 0", "", "`", "é\u2028", "$.rows"]


def _odd_columns(odd: list[str]) -> ColumnsConfig:
    return ColumnsConfig(label="", dense=[f"d{each}" for each in odd], sparse=[f"s{each}" for each in odd],
                         multi_hot=[f"l{each}" for each in odd])  # fmt: skip


def test_columns_of_any_name_are_read_from_json_and_their_errors_name_them() -> None:
    columns = _odd_columns(ODD)
    reader, plain = (
        RequestReader(columns, LIMITS),
        RequestReader(_odd_columns([str(n) for n in range(len(ODD))]), LIMITS),
    )
    values = [*map(float, range(len(ODD))), *ODD, *([each, "x"] for each in ODD)]
    names = [*columns.dense, *columns.sparse, *columns.multi_hot]
    rows = {"rows": [dict(zip(names, values, strict=True)), {names[0]: None}]}
    read = reader.read(json.dumps(rows).encode(), JSON_TYPE)
    assert read.schema.names == names
    other = {"rows": [dict(zip(plain.schema.names, values, strict=True)), {}]}
    assert read.columns == plain.read(json.dumps(other).encode(), JSON_TYPE).columns
    for name, value, said in ((names[0], "text", names[0]), (names[-8], [[]], names[-8]), ("column 0", 1, "column 0")):
        with pytest.raises(BadRequest) as refused:
            reader.read_json(json.dumps({"rows": [{}, {name: value}]}).encode())
        assert refused.value.status == 422 and " ".join(said.split()) in refused.value.message
    for body in (b"[]", b'{"rows": 1}', b'{"rows": [[]]}', b'{"rows": {"a": 1}}', b'{"more": []}', b"{", b"[" * 99_999):
        with pytest.raises(BadRequest):
            reader.read_json(body)


def test_mutated_bodies_are_read_or_refused_in_process() -> None:
    chance, refusals = random.Random(43), 0
    arrow = _stream(20, city=_coded(20, "Rom"), tags=_lists(pa.array(["x"] * 40).dictionary_encode(), 2))
    text = json.dumps({"rows": [{"price": 1.5, "city": "Rom", "tags": ["x", 1, True]}] * 5}).encode()
    for number in range(1500):
        whole, kind = (arrow, ARROW_TYPE) if number % 2 else (text, JSON_TYPE)
        body = bytearray(whole)
        for _ in range(chance.randrange(1, 5)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        try:
            READER.read(bytes(body), kind)
        except BadRequest as refused:
            refusals += 1
            assert 400 <= refused.status < 500 and refused.message
    assert refusals > 300
