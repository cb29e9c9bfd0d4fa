"""Ids by frequency equal a count in plain Python, whatever the batches; hashed ids never change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.ids import IdsConfig
from pipeline.data.prepare import vocabulary
from pipeline.data.prepare.vocabulary import (
    ENTRIES_SCHEMA,
    RankedFeature,
    count_values,
    map_entries,
    open_engine,
    rank_values,
    read_counts,
    vocabulary_file,
)
from pipeline.data.raw.hashing import hash_ids
from tests.support.examples import examples

MASK = (1 << 64) - 1


def mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & MASK
    return state ^ state >> 31


def plain_hash(value: str, size: int, seed: int) -> int:
    """hash_ids, one value at a time."""
    data, state = value.encode(), mix(seed)
    for begin in range(0, len(data), 8):
        state = mix(state ^ int.from_bytes(data[begin : begin + 8], "little"))
    return mix(state ^ len(data)) % (size - 1) + 1


@given(st.lists(st.one_of(st.none(), st.text(max_size=40)), max_size=30), st.integers(2, 2**31 - 1), st.integers(0, 99))
@examples(100)
def test_hashed_ids_equal_the_definition_one_value_at_a_time(values: list[str | None], size: int, seed: int) -> None:
    expected = [0 if value is None else plain_hash(value, size, seed) for value in values]
    assert hash_ids(pa.array(values, pa.string()), size, seed).tolist() == expected
    assert hash_ids(pa.array(["x", *values], pa.string()).slice(1), size, seed).tolist() == expected


def test_hashed_ids_of_this_release_are_those_of_every_release() -> None:
    values = pa.array(["", "a", "68fd1e64", "longer than eight bytes", None])
    assert hash_ids(values, 1_000_000, 7).tolist() == [plain_hash(v, 1_000_000, 7) for v in values.to_pylist()[:4]] + [
        0
    ]
    assert hash_ids(values, 1_000_000, 0)[2] == 385404


def test_hash_spreads_hex_ids_evenly_and_another_seed_is_another_hash() -> None:
    values = pa.array([f"{i:08x}" for i in range(50_000)])
    counts = np.bincount(hash_ids(values, 101, 0), minlength=101)
    assert counts[0] == 0 and counts[1:].min() > 400 and counts[1:].max() < 600
    assert (hash_ids(values, 101, 0) == hash_ids(values, 101, 1)).mean() < 0.02


def batches(values: Sequence[tuple[str, int]], size: int) -> list[tuple[pa.Array, np.ndarray]]:
    parts = [values[begin : begin + size] for begin in range(0, len(values), size)]
    return [(pa.array([v for v, _ in part]), np.array([c for _, c in part])) for part in parts]


def rank(
    counts: Counter[str], tmp_path: Path, missing: int = 0, batch_size: int = 7, **ids: int
) -> tuple[RankedFeature, list[dict[str, object]]]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    path = tmp_path / "vocabulary.parquet"
    total = sum(counts.values()) + missing
    ranked = rank_values(batches(ordered, batch_size), IdsConfig(**ids), total, str(path))  # type: ignore[arg-type]
    return ranked, pq.read_table(path).to_pylist()


def test_rare_values_and_those_beyond_max_size_share_id_0(tmp_path: Path) -> None:
    counts = Counter({"d": 9, "b": 5, "a": 5, "c": 2, "e": 1})
    ranked, rows = rank(counts, tmp_path, min_frequency=2)
    assert [(row["value"], row["id"]) for row in rows] == [("d", 1), ("a", 2), ("b", 3), ("c", 4)]
    assert (ranked.cardinality, ranked.num_distinct) == (5, 5)
    ranked, rows = rank(counts, tmp_path, max_size=3, batch_size=1)
    assert [(row["value"], row["count"], row["id"]) for row in rows] == [("d", 9, 1), ("a", 5, 2)]
    assert (ranked.cardinality, ranked.num_distinct) == (3, 5)


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(0, 400), st.integers(1, 4), st.integers(1, 40))
@examples(60)
def test_frequency_curve_equals_sums_over_sorted_counts(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], missing: int, min_frequency: int, batch_size: int
) -> None:
    named = Counter({str(i): count for i, count in enumerate(counts)})
    folder = tmp_path_factory.mktemp("rank")
    ranked, _ = rank(named, folder, missing, batch_size, min_frequency=min_frequency)
    kept = [count for count in counts if count >= min_frequency]
    total = sum(counts) + missing
    by_id = sorted([*kept, total - sum(kept)], reverse=True)  # id 0 among them
    curve = ranked.frequency_curve
    assert ranked.cardinality == len(by_id) == curve.ranks[-1]
    assert curve.ranks == sorted(set(curve.ranks)) and curve.ranks[0] == 1
    expected = [sum(by_id[:rank]) / total if total else 1.0 for rank in curve.ranks]
    assert curve.shares == pytest.approx(expected, abs=1e-8)


def write_entries(path: Path, blocks: list[list[list[tuple[str, int]]]]) -> None:
    """blocks[block][feature] are (value, count) in the order of codes."""
    rows, entry = [], 0
    for block, features in enumerate(blocks):
        for feature, values in enumerate(features):
            for value, count in values:
                rows.append({"entry": entry, "block": block, "feature": feature, "value": value, "count": count})
                entry += 1
    pq.write_table(pa.Table.from_pylist(rows, schema=ENTRIES_SCHEMA), path)


def memory_limit(engine: duckdb.DuckDBPyConnection) -> object:
    return engine.execute("SELECT current_setting('memory_limit')").fetchone()


@pytest.mark.parametrize("most_values", [3, 2], ids=["at_once", "one_after_the_other"])
def test_ids_come_from_training_blocks_only_and_map_every_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_values: int
) -> None:
    monkeypatch.setattr(vocabulary, "VALUES_JOINED_AND_SORTED", most_values)
    blocks = [
        [[("x", 2), ("y", 1)], [("17", 4)]],
        [[("y", 1), ("z", 1)], [("17", 1), ("3", 2)]],
        [[("only evaluated", 9), ("z", 1)], [("5", 1)]],
    ]
    write_entries(tmp_path / "entries.parquet", blocks)
    entries, counts = [str(tmp_path / "entries.parquet")], str(tmp_path / "counts.parquet")
    with closing(open_engine(str(tmp_path / "spill"), 200 << 20, 2)) as engine:
        count_values(engine, entries, [0, 1], counts)
        ranked = {feature: [(v, c) for vs, cs in parts for v, c in zip(vs.to_pylist(), cs.tolist(), strict=True)]
                  for feature, parts in read_counts(counts)}  # fmt: skip
        rank_values(batches(ranked[0], 2), IdsConfig(), 5, str(tmp_path / "0.parquet"))
        outputs = [(str(tmp_path / "ids"), 7), (str(tmp_path / "none"), 0), (str(tmp_path / "more"), 3)]
        before = memory_limit(engine)
        table = str(tmp_path / "ids.parquet")
        map_entries(engine, entries, {0: str(tmp_path / "0.parquet")}, [1], outputs, table, 200 << 20)
        assert memory_limit(engine) == before
    assert not list(tmp_path.glob("ids.parquet*"))
    assert ranked == {0: [("x", 2), ("y", 2), ("z", 1)], 1: [("17", 5), ("3", 2)]}
    assert [np.fromfile(path, np.int32).tolist() for path, _ in outputs] == [[1, 2, 17, 2, 3, 17, 3], [], [0, 3, 5]]


def test_more_values_than_memory_are_ranked_by_spilling_to_disk(tmp_path: Path) -> None:
    values = [f"value number {i:030d}" for i in np.random.default_rng(0).permutation(600_000)]
    ones = np.ones(len(values), np.int64)
    columns = [np.arange(len(values)), 0 * ones, (0 * ones).astype(np.int32), values, ones]
    entries, counts = [str(tmp_path / "entries.parquet")], str(tmp_path / "counts.parquet")
    pq.write_table(pa.table([pa.array(c) for c in columns], schema=ENTRIES_SCHEMA), entries[0])
    with closing(open_engine(str(tmp_path / "spill"), 72 << 20, 1)) as engine:
        engine.execute("SET max_temp_directory_size = '0KiB'")
        with pytest.raises(duckdb.OutOfMemoryException):
            count_values(engine, entries, [0], counts)
        engine.execute("SET max_temp_directory_size = '1GiB'")
        count_values(engine, entries, [0], counts)
    assert pq.read_table(counts)["value"].equals(pa.chunked_array([pa.array(sorted(values))]))


def test_vocabulary_files_of_odd_names_stay_in_their_folder() -> None:
    assert vocabulary_file("user/../id 1") == "vocabulary/user%2F..%2Fid%201.parquet"
