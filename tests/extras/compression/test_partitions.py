"""Partitions give every id a code of its own, cover the table, and take the memory that they promise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.tables import CompressionConfig, ConstraintConfig, InitConfig
from pipeline.embeddings.id_splitter import hashed_to
from pipeline.embeddings.physical import num_numbers
from pipeline.embeddings.table import Table
from pipeline.extras.compression import partitions, quotient_remainder
from pipeline.extras.compression.quotient_remainder import QuotientRemainder, balanced_bases
from tests.support.examples import examples


def table_of(num_ids: int, dim: int = 16, **config: Any) -> Table:
    return Table(
        "t",
        num_ids,
        dim,
        ["f"],
        "sum",
        "fp32",
        InitConfig(),
        ConstraintConfig(),
        [1.0],
        compression=CompressionConfig(**{"kind": "quotient_remainder", **config}),
        max_ids=[1],
    )


def codes(table: Table) -> np.ndarray[Any, Any]:
    """[ids, partitions]."""
    ids = np.arange(table.num_embeddings)
    partitions = QuotientRemainder(table).partitions
    found = [partition.classes_of(ids) for partition in partitions]
    for classes, partition in zip(found, partitions, strict=True):
        assert classes.min() >= 0
        assert classes.max() < partition.num_classes
    return np.stack(found, axis=1)


def assert_unique(table: Table) -> None:
    found = codes(table)
    assert len(np.unique(found, axis=0)) == table.num_embeddings


@examples(60)
@given(st.integers(1, 20_000), st.integers(1, 300))
def test_quotient_and_remainder_tell_all_ids_apart(num_ids: int, base: int) -> None:
    assert_unique(table_of(num_ids, bases=[base]))


@examples(60)
@given(st.integers(2, 20_000), st.integers(2, 5), st.sampled_from(["generalised", "chinese_remainder"]))
def test_chosen_bases_tell_all_ids_apart(num_ids: int, count: int, scheme: str) -> None:
    table = table_of(num_ids, scheme=scheme, num_partitions=count)
    assert_unique(table)
    bases = [partition.num_classes for partition in QuotientRemainder(table).partitions]
    if scheme == "chinese_remainder":
        assert all(math.gcd(a, b) == 1 for i, a in enumerate(bases) for b in bases[:i])


@examples(60)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=4), st.data())
def test_given_bases_tell_as_many_ids_apart_as_their_product(bases: list[int], data: st.DataObject) -> None:
    num_ids = data.draw(st.integers(1, min(20_000, math.prod(bases))))
    assert_unique(table_of(num_ids, scheme="generalised", bases=bases))


@examples(100)
@given(st.integers(1, 10**9), st.integers(2, 6))
def test_balanced_bases_are_as_few_classes_as_the_paper_says(num_ids: int, count: int) -> None:
    """O(k n^(1/k)): each is the k-th root at most, rounded up."""
    bases = balanced_bases(num_ids, count)
    assert math.prod(bases) >= num_ids
    assert sum(bases) <= count * max(2, math.ceil(num_ids ** (1 / count)))


@examples(100)
@given(st.integers(10, 10**7), st.integers(2, 4), st.floats(1.5, 200), st.booleans())
def test_bases_within_a_budget_keep_to_it_and_cover_the_table(
    num_ids: int, count: int, ratio: float, coprime: bool
) -> None:
    limit = int(num_ids / ratio)
    module = partitions if coprime else quotient_remainder
    bases = module.bases_within(num_ids, count, limit)
    if bases is None:
        assert sum(module.balanced_bases(num_ids, count)) > limit
        return
    assert sum(bases) <= limit
    assert math.prod(bases) >= num_ids
    if coprime:
        assert all(math.gcd(a, b) == 1 for i, a in enumerate(bases) for b in bases[:i])


@pytest.mark.parametrize("operation", ["add", "multiply", "concatenate"])
@pytest.mark.parametrize("ratio", [4, 16, 60])
def test_a_ratio_is_kept_and_used(operation: str, ratio: float) -> None:
    table = table_of(100_000, operation=operation, ratio=ratio)
    assert 0.98 * 100_000 * 16 / ratio <= num_numbers(table) <= 100_000 * 16 / ratio


def test_a_hash_spreads_ids_evenly_and_by_its_seed() -> None:
    ids = np.arange(100_000)
    first, same, other = (hashed_to(1000, seed, ids) for seed in (1, 1, 2))
    assert (first == same).all()
    assert (first == other).mean() < 0.01
    counts = np.bincount(first, minlength=1000)
    assert ((counts - 100) ** 2 / 100).sum() == pytest.approx(1000, abs=150)  # chi-square of 999 degrees of freedom
    # Neighbours, and ids one table size apart, are not neighbours in the table: what a bare modulo would do.
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.02
    assert (first[:-1000] == first[1000:]).mean() < 0.01


def test_partitions_are_read_from_a_numpy_file(tmp_path: Path) -> None:
    groups = np.stack([np.arange(60) % 7, np.arange(60) // 7]).astype(np.int32)
    np.save(tmp_path / "groups.npy", groups)
    table = table_of(60, scheme="given", assignments_file=str(tmp_path / "groups.npy"))
    assert (codes(table) == groups.T).all()
