"""Quantized rows, what is left of pruned tables, and looking up in both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.quantize import BITS, KeptRows, RowMask, dequantize_rows, fits, quantize_rows, row_bytes
from pipeline.serving.scoring.lookup import RamLookup, ServedFeature, ServedTable
from tests.support.messages import names

LARGEST_ERRORS = {"fp32": 0.0, "fp16": 3e-4, "int8": 0.006, "int4": 0.1, "int2": 0.5}
CASES = [(dim, precision) for dim in (1, 2, 6, 8, 10, 16, 64) for precision in BITS if fits(dim, precision)]


def _table(folder: Path, name: str, weights: torch.Tensor, precision: str, pooling: str, kept: KeptRows | None = None) -> ServedTable:  # fmt: skip
    rows = quantize_rows(weights, precision)
    if kept is not None:
        rows = rows[torch.from_numpy(kept.mask(0, len(rows)))]
    path = folder / f"{name}.rows"
    rows.numpy().tofile(path)
    return ServedTable(name, len(weights), len(rows), weights.shape[1], precision, pooling, str(path), kept)


def _bags(num_bags: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(0, 4, (num_bags,))
    return torch.randint(0, num_rows, (int(lengths.sum()),)), torch.cat(
        [torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]
    )


@pytest.mark.parametrize(("dim", "precision"), CASES)
def test_a_lookup_gives_the_numbers_that_the_quantized_row_stands_for(tmp_path: Path, dim: int, precision: str) -> None:
    torch.manual_seed(dim)
    weights = torch.randn(50, dim)
    quantized = quantize_rows(weights, precision)
    assert quantized.shape == (50, row_bytes(dim, precision))
    numbers = dequantize_rows(quantized, dim, precision)
    assert (numbers - weights).norm() <= LARGEST_ERRORS[precision] * weights.norm()
    lookup = RamLookup([_table(tmp_path, "t", weights, precision, "sum")], [ServedFeature("f", 0)])
    ids = torch.randint(0, 50, (50,))
    torch.testing.assert_close(lookup.pooled(ids, torch.arange(51)), numbers[ids], rtol=1e-6, atol=1e-6)


def test_tables_of_any_precision_and_pooling_are_pooled_as_embedding_bags(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dims, poolings = [16, 8, 16, 4, 8], ["sum", "mean", "sum", "mean", "sum"]
    weights = [torch.randn(30 + i, dim) for i, dim in enumerate(dims)]
    tables = [
        _table(tmp_path, f"t{i}", weights[i], precision, poolings[i])
        for i, precision in enumerate(["fp32", "fp16", "int8", "int4", "int8"])
    ]
    features = [ServedFeature(f"f{i}", table) for i, table in enumerate([0, 1, 2, 3, 4, 0])]
    lookup = RamLookup(tables, features)
    batch = 7
    values, offsets = _bags(6 * batch, 30)
    found = lookup.pooled(values, offsets).split([dims[feature.table] for feature in features], dim=1)
    for i, feature in enumerate(features):
        table = tables[feature.table]
        numbers = dequantize_rows(quantize_rows(weights[feature.table], table.precision), table.dim, table.precision)
        ends = offsets[i * batch : (i + 1) * batch + 1]
        wanted = torch.nn.functional.embedding_bag(
            values[ends[0] : ends[-1]], numbers, ends[:-1] - ends[0], mode=table.pooling
        )
        torch.testing.assert_close(found[i], wanted, rtol=1e-5, atol=1e-5)


def test_a_pruned_row_is_the_unknown_row_and_the_others_stay_what_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = torch.randn(1000, 8)
    mask = RowMask(1000)
    mask.add(np.arange(10, 900, 3))
    kept = mask.finish()
    lookup = RamLookup([_table(tmp_path, "t", weights, "fp32", "sum", kept)], [ServedFeature("f", 0)])
    assert lookup.tables[0].stored_rows == kept.num_kept == 298
    found = lookup.pooled(torch.arange(1000), torch.arange(1001))
    stays = torch.tensor([row == 0 or (10 <= row < 900 and (row - 10) % 3 == 0) for row in range(1000)])
    assert torch.equal(found, torch.where(stays[:, None], weights, weights[0]))


def test_rows_are_marked_in_blocks_as_one_by_one() -> None:
    wanted = np.random.default_rng(0).random(1000) < 0.3
    mask = RowMask(1000)
    for first in range(0, 1000, 64):
        mask.set_block(first, wanted[first : first + 64])
    wanted[0] = True
    kept = mask.finish()
    np.testing.assert_array_equal(kept.mask(64, 500), wanted[64:564])
    np.testing.assert_array_equal(kept.remap(np.arange(1000)), np.where(wanted, np.cumsum(wanted) - 1, 0))


def test_ids_outside_their_table_and_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    lookup = RamLookup([_table(tmp_path, "t", torch.randn(5, 4), "int8", "sum")], [ServedFeature("colour", 0)])
    for wrong in (-1, 5):
        with pytest.raises(ServingError, match=rf"'colour' has id {wrong}, not one within \[0, 5\)"):
            lookup.pooled(torch.tensor([0, wrong]), torch.tensor([0, 1, 2]))
    with pytest.raises(ServingError, match="NaN"):
        quantize_rows(torch.tensor([[1.0, float("nan")]]), "int8")
    with pytest.raises(ServingError, match=names("4")):
        row_bytes(6, "int4")
    with pytest.raises(ServingError, match="row 0"):
        KeptRows(70, np.array([2, 1], np.uint64))
