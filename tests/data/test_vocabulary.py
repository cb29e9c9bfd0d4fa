"""Ids by frequency equal a count in plain Python, whatever the batches; hashed ids never change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.data import IdsConfig
from pipeline.data.prepare.vocabulary import RankedFeature, rank_values, vocabulary_file
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


@pytest.mark.long
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
    ranked = rank_values(batches(ordered, batch_size), IdsConfig(**ids), total, str(path))
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


def test_vocabulary_files_of_odd_names_stay_in_their_folder() -> None:
    assert vocabulary_file("user/../id 1") == "vocabulary/user%2F..%2Fid%201.parquet"
