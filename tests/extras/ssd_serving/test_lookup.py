"""Tables on disk give what tables in memory give, to the bit, and the cache is as large as it has to be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.data.dataset import FrequencyCurve
from pipeline.extras.ssd_serving.cache_plan import (
    TableHeat,
    joined,
    misses_allowed,
    plan_for_bytes,
    plan_for_misses,
    quantile,
)
from pipeline.extras.ssd_serving.lookup import SsdLookup, read_latency_us
from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.quantize import RowMask, quantize_rows
from pipeline.serving.scoring.lookup import RamLookup, ServedFeature, ServedTable
from tests.support.messages import names

BATCH = 37


def written(
    folder: Path, number: int, rows: int, dim: int, precision: str, pooling: str, kept: bool = False
) -> ServedTable:
    generator = torch.Generator().manual_seed(number)
    mask = RowMask(rows)
    mask.add(np.arange(0, rows, 3))
    keep = mask.finish() if kept else None
    stored = keep.num_kept if keep else rows
    path = folder / f"{number}.rows"
    path.write_bytes(quantize_rows(torch.randn(stored, dim, generator=generator), precision).numpy().tobytes())
    return ServedTable(f"t{number}", rows, stored, dim, precision, pooling, str(path), keep)


@pytest.fixture
def tables(tmp_path: Path) -> list[ServedTable]:
    return [
        written(tmp_path, 0, 5000, 16, "int8", "sum"),
        written(tmp_path, 1, 300, 16, "int4", "mean"),
        written(tmp_path, 2, 7, 8, "fp32", "sum"),
        written(tmp_path, 3, 900, 16, "int8", "sum", kept=True),
    ]


FEATURES = [
    ServedFeature("a", 0),
    ServedFeature("b", 1),
    ServedFeature("c", 2),
    ServedFeature("d", 3),
    ServedFeature("e", 0),
]


def batch_of(tables: list[ServedTable], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    values, lengths = [], []
    for feature in FEATURES:
        counts = generator.integers(0, 5, BATCH)
        values.append(np.minimum(generator.zipf(1.3, counts.sum()) - 1, tables[feature.table].rows - 1))
        lengths.append(counts)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return torch.from_numpy(np.concatenate(values)), torch.from_numpy(offsets)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_pooled_rows_are_bitwise_those_of_tables_in_memory(tables: list[ServedTable], share: float) -> None:
    heads = [math.ceil(table.stored_rows * share) for table in tables]
    ram, ssd = RamLookup(tables, FEATURES), SsdLookup(tables, FEATURES, heads, io_threads=3)
    for seed in range(20):
        values, offsets = batch_of(tables, seed)
        weights = torch.randn(len(values)) if seed % 2 else None
        assert torch.equal(ssd.pooled(values, offsets, weights), ram.pooled(values, offsets, weights))
    assert (ssd.counts.hits == ssd.counts.lookups) == (share == 1.0)
    assert ssd.cache_bytes == sum(head * table.row_bytes for head, table in zip(heads, tables, strict=True))


def test_an_empty_batch_and_a_batch_of_empty_bags_are_pooled(tables: list[ServedTable]) -> None:
    ram, ssd = RamLookup(tables, FEATURES), SsdLookup(tables, FEATURES, [1] * 4, io_threads=2)
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(len(FEATURES) * 3 + 1, dtype=torch.int64)
    assert torch.equal(ssd.pooled(*nothing), ram.pooled(*nothing))


def test_hits_are_counted(tables: list[ServedTable]) -> None:
    ssd = SsdLookup(tables, FEATURES, [10, 10, 7, 10], io_threads=2)
    offsets = torch.arange(6)
    ssd.pooled(torch.tensor([9, 10, 6, 3, 4999]), offsets)  # row 3 of table 3 is kept as its second row
    assert (ssd.counts.lookups, ssd.counts.hits) == (5, 3)


def test_ids_outside_their_table_are_refused_as_in_memory(tables: list[ServedTable]) -> None:
    ssd = SsdLookup(tables, FEATURES, [1] * 4, io_threads=2)
    with pytest.raises(ServingError, match=names("5000 [0")):
        ssd.pooled(torch.tensor([5000]), torch.tensor([0, 1, 1, 1, 1, 1]))


def test_a_file_of_another_size_is_refused(tables: list[ServedTable]) -> None:
    with open(tables[0].path, "ab") as file:
        file.write(b"x")
    with pytest.raises(ServingError, match=names("100,000 t0")):
        SsdLookup(tables, FEATURES, [1] * 4, io_threads=2)


def zipf_heat(num_rows: int, row_bytes: int, lookups: float, exponent: float) -> TableHeat:
    weights = np.arange(1, num_rows, dtype=np.float64) ** -exponent
    shares = np.cumsum(weights) / weights.sum()
    ranks = [*range(1, 20), *(int(20 * 1.2**i) for i in range(100) if 20 * 1.2**i < num_rows - 1), num_rows - 1]
    return TableHeat(num_rows, row_bytes, lookups, FrequencyCurve(ranks, [float(shares[rank - 1]) for rank in ranks]))


TABLES = [zipf_heat(100_000, 68, 1.0, 1.1), zipf_heat(20_000, 20, 5.0, 0.7), zipf_heat(50, 68, 1.0, 1.0)]


@pytest.mark.parametrize("cache_bytes", [10_000, 200_000, 3_000_000])
def test_no_exchange_of_rows_between_tables_would_save_reads(cache_bytes: int) -> None:
    plan = plan_for_bytes(TABLES, cache_bytes)
    assert 0.99 * cache_bytes - 200 <= plan.cache_bytes <= cache_bytes

    def misses(heads: list[int]) -> float:
        shares = [
            np.interp(h - 1, [0, *t.curve.ranks], [0, *t.curve.shares]) for h, t in zip(heads, TABLES, strict=True)
        ]
        return float(sum(t.lookups_per_row * (1 - share) for t, share in zip(TABLES, shares, strict=True)))

    assert misses(plan.heads) == pytest.approx(plan.misses_per_row)
    for one in range(3):
        for other in range(3):
            moved = list(plan.heads)
            moved[one] -= 500
            moved[other] += 500 * TABLES[one].row_bytes // TABLES[other].row_bytes
            if one != other and moved[one] >= 1 and moved[other] <= TABLES[other].num_rows:
                assert misses(moved) >= plan.misses_per_row - 1e-9


def test_the_least_cache_that_keeps_the_misses_is_planned() -> None:
    plan = plan_for_misses(TABLES, 0.5)
    assert plan.misses_per_row == pytest.approx(0.5, abs=0.001)
    assert plan_for_bytes(TABLES, plan.cache_bytes - 5000).misses_per_row > 0.5
    assert plan_for_misses(TABLES, 7.0).heads == [1, 1, 1]
    assert plan_for_misses(TABLES, 0.0).misses_per_row == pytest.approx(0.0, abs=1e-9)


def test_misses_allowed_keep_99_of_100_requests_in_time() -> None:
    mean = misses_allowed(p99_target_ms=5.0, request_rows=64, io_threads=8, read_us=100.0) * 64
    drawn = np.random.default_rng(0).poisson(mean, 100_000)
    assert 0.985 <= np.mean(np.ceil(drawn / 8) * 0.1 <= 5.0) <= 0.9999
    assert misses_allowed(1.0, 64, 8, 2000.0) * 64 < 0.02  # one read is too slow already: hardly any request may miss
    assert [quantile(mean) for mean in (0.0, 0.005, 0.1)] == [0.0, 0.0, 1.0]


def test_features_that_share_a_table_share_its_curve() -> None:
    curve = joined([(1.0, FrequencyCurve([10], [1.0])), (3.0, FrequencyCurve([20], [1.0]))])
    assert curve.ranks == [10, 20] and curve.shares == pytest.approx([0.25 + 0.375, 1.0])


def test_reads_are_timed_on_the_files_themselves(tables: list[ServedTable]) -> None:
    assert 0 < read_latency_us([tables[0].path]) < 1e6
    assert read_latency_us([tables[2].path]) == 0.0  # smaller than a page
