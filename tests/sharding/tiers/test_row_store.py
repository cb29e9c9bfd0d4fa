"""Records come back as they were written, whatever lies beside them in their blocks; a store that fails says where and why."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.runtime.errors import TierError
from pipeline.sharding.tiers.row_store import READS, SECTOR_BYTES, WRITES, RowStore, _open


def _columns(num_slots: int, widths: tuple[int, int, int]) -> list[np.ndarray]:
    return [np.zeros((num_slots, width), np.float32) for width in widths]


@pytest.mark.parametrize("widths", [(4, 0, 0), (64, 32, 0), (64, 64, 0), (128, 1, 0), (700, 700, 700)], ids=str)
def test_records_come_back_as_they_were_written(tmp_path: Path, widths: tuple[int, int, int]) -> None:
    num_rows, rng = 500, np.random.default_rng(0)
    store = RowStore(str(tmp_path), "t", num_rows, widths, num_threads=3)
    truth: dict[int, np.ndarray] = {}
    for _ in range(25):
        rows = np.sort(rng.choice(num_rows, 60, replace=False))
        records = rng.random((60, sum(widths)), dtype=np.float32)
        store.finish(store.begin_store(rows, records))
        store.mark_written(rows)
        truth |= dict(zip(rows.tolist(), records, strict=True))
        wanted = np.sort(rng.choice(sorted(truth), 50, replace=False))
        slots, columns = rng.permutation(70)[:50], _columns(70, widths)
        store.finish(store.begin_load(wanted, slots, columns))
        loaded = np.concatenate(columns, axis=1)[slots]
        assert np.array_equal(loaded, np.stack([truth[row] for row in wanted.tolist()]))
    values, written = store.read_column(0, 7, 300)
    assert written.tolist() == [row in truth for row in range(7, 307)]
    expected = [truth[row][: widths[0]] for row in range(7, 307) if row in truth]
    assert np.array_equal(values[written], np.stack(expected))


def test_a_sparse_store_takes_no_space_for_rows_that_were_never_written(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), "t", 1 << 22, (64, 64, 0), num_threads=1)
    rows = np.array([5, (1 << 22) - 1])
    store.finish(store.begin_store(rows, np.ones((2, 128), np.float32)))
    assert store.size_bytes == (1 << 22) * 512 and os.fstat(store._fd).st_blocks * 512 <= 1 << 16


def test_records_of_whole_sectors_are_written_without_a_read(tmp_path: Path) -> None:
    for widths, reads in {(64, 64, 0): 0, (64, 32, 0): 0, (64, 0, 0): 1}.items():
        store = RowStore(str(tmp_path), "t", 1000, widths, num_threads=1)
        if store.is_direct and store._layout[-1] * 4 != SECTOR_BYTES:
            pytest.skip("a device whose sectors are blocks")
        for rows in (np.arange(40), np.array([17])):
            store.finish(store.begin_store(rows, np.ones((len(rows), sum(widths)), np.float32)))
            store.mark_written(rows)
        if store.is_direct:
            assert store.counts[READS] == reads and store.counts[WRITES] == 2


def test_a_full_ssd_is_an_error_that_names_the_folder_and_the_way_out(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), "clicks", 100, (64, 0, 0), num_threads=1)
    store.close()
    store._fd = os.open("/dev/full", os.O_RDWR)
    rows = np.arange(10)
    with pytest.raises(
        TierError,
        match=rf"'clicks' could not be written in {tmp_path}: No space left on device.* sharding.tier_folder, .* intact",
    ):
        store.finish(store.begin_store(rows, np.ones((10, 64), np.float32)))


def test_an_io_error_is_one_too(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), "clicks", 100, (64, 0, 0), num_threads=1)
    rows = np.arange(10)
    store.mark_written(rows)
    store.close()
    store._fd = os.open(tmp_path, os.O_RDONLY)  # a folder cannot be read
    with pytest.raises(TierError, match=r"'clicks' could not be read .* Is a directory"):
        store.finish(store.begin_load(rows, rows, _columns(10, (64, 0, 0))))


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"'t' cannot have a row store .* set sharding.tier_folder"):
        _open(str(tmp_path / "file"), "t")
