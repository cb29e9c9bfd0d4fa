"""Records come back as they were stored, whatever lies beside them in their segments; a store that fails says where and why."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.extras.tiers import row_store, transfers
from pipeline.extras.tiers.row_store import READS, WRITES, WRITTEN_BYTES, RowStore, _open
from pipeline.extras.tiers.transfers import Transfers
from pipeline.runtime.errors import TierError

Truth = dict[int, np.ndarray]


def _columns(num_slots: int, widths: tuple[int, int, int]) -> list[np.ndarray]:
    return [np.zeros((num_slots, width), np.float32) for width in widths]


def _store(store: RowStore, rows: np.ndarray, rng: np.random.Generator, truth: Truth) -> None:
    records = rng.random((len(rows), store.record), dtype=np.float32)
    store.store(rows, records)
    truth |= dict(zip(rows.tolist(), records, strict=True))


def _check_load(
    store: RowStore, rng: np.random.Generator, truth: Truth, widths: tuple[int, int, int], take: bool
) -> None:
    wanted = np.sort(rng.choice(sorted(truth), min(50, len(truth)), replace=False))
    slots, columns = rng.permutation(70)[: len(wanted)], _columns(70, widths)
    store.load(wanted, slots, columns, take=take)
    assert np.array_equal(np.concatenate(columns, axis=1)[slots], np.stack([truth[row] for row in wanted.tolist()]))
    for row in wanted.tolist() if take else ():
        del truth[row]


def _check_all(store: RowStore, truth: Truth, widths: tuple[int, int, int]) -> None:
    is_there = [row in truth for row in range(7, store.num_rows)]
    assert store.are_stored(np.arange(7, store.num_rows)).tolist() == is_there
    for column in range(3):
        begin = sum(widths[:column])
        values, stored = store.read_column(column, np.arange(7, store.num_rows))
        assert stored.tolist() == is_there
        expected = [truth[row][begin : begin + widths[column]] for row in range(7, store.num_rows) if row in truth]
        assert not expected or np.array_equal(values[stored], np.stack(expected))


@pytest.mark.parametrize("is_asynchronous", [True, False], ids=["io_submit", "threads"])
@pytest.mark.parametrize("widths", [(4, 0, 0), (64, 32, 0), (64, 64, 0), (128, 1, 0), (700, 700, 700)], ids=str)
def test_records_come_back_as_they_were_stored(
    tmp_path: Path, widths: tuple[int, int, int], is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = Transfers(is_asynchronous)
    monkeypatch.setattr(row_store, "transfers", lambda: mover)
    num_rows, rng = 500, np.random.default_rng(0)
    truth: Truth = {}
    store = RowStore(str(tmp_path), "t", num_rows, widths, pool_rows=32, region_bytes=1 << 14, segment_bytes=1 << 13)
    for step in range(30):
        size = 60 if step % 3 else 12
        _store(store, np.sort(rng.choice(num_rows, size, replace=False)), rng, truth)
        _check_load(store, rng, truth, widths, take=step % 2 == 0)
        store.make_room(8)
    _check_all(store, truth, widths)
    assert os.fstat(store._fd).st_size == store.size_bytes and store.counts[WRITES] and store.counts[READS]
    everything = np.arange(num_rows)
    for _ in range(3):  # as full as it gets, and written over
        _store(store, everything, rng, truth)
    _check_all(store, truth, widths)
    store.forget()
    assert not store.are_stored(everything).any() and os.fstat(store._fd).st_blocks == 0


def test_rows_that_lie_anywhere_are_written_together(tmp_path: Path) -> None:
    num_rows, rng = 1 << 14, np.random.default_rng(0)
    store = RowStore(str(tmp_path), "t", num_rows, (64, 64, 0), pool_rows=512)
    everything = np.arange(num_rows)
    store.store(everything, np.ones((num_rows, 128), np.float32))
    columns = _columns(256, (64, 64, 0))
    store.counts[:] = 0
    steps = 60
    for _ in range(steps):
        rows = np.sort(rng.choice(num_rows, 128, replace=False))
        store.load(rows, np.arange(128), columns, take=True)
        store.store(rows, np.ones((128, 128), np.float32))
        store.make_room(128)
    assert store.counts[WRITES] <= steps * 128 / 16  # one for each of 16 rows, and better
    assert store.counts[WRITTEN_BYTES] <= 6 * steps * 128 * 512  # at slots of 0.8 %: places are almost all taken


def test_a_sparse_store_takes_no_space_for_rows_that_were_never_stored(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), "t", 1 << 22, (64, 64, 0))
    rows = np.array([5, (1 << 22) - 1])
    store.store(rows, np.ones((2, 128), np.float32))
    store.make_room(store.pool_size)
    assert store.counts[WRITES] == 2 and os.fstat(store._fd).st_blocks * 512 <= 1 << 16
    assert (1 << 22) * 512 * 1.25 <= store.size_bytes <= (1 << 22) * 512 * 1.27
    bits = np.unpackbits(store.stored_bits(), bitorder="little")
    assert np.flatnonzero(bits).tolist() == rows.tolist()


def test_more_spans_than_are_moved_at_once_come_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "AT_ONCE", 7)
    mover = Transfers()
    monkeypatch.setattr(row_store, "transfers", lambda: mover)
    store = RowStore(str(tmp_path), "t", 1000, (1024, 0, 0))
    records = np.random.default_rng(0).random((1000, 1024), np.float32)
    store.store(np.arange(1000), records)
    rows, columns = np.arange(0, 1000, 9), _columns(200, (1024, 0, 0))
    store.load(rows, np.arange(len(rows)), columns)
    assert np.array_equal(columns[0][: len(rows)], records[rows]) and store.counts[READS] > 7


def test_a_full_ssd_is_an_error_that_names_the_folder_and_the_way_out(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), "clicks", 100, (64, 0, 0))
    store.close()
    store._fd = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(
        TierError,
        match=rf"'clicks' could not be written in {tmp_path}: No space left on device.* sharding.tier_folder, .* intact",
    ):
        store.store(np.arange(30), np.ones((30, 64), np.float32))


def test_an_io_error_is_one_too(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path), "clicks", 100, (64, 0, 0))
    rows = np.arange(30)
    store.store(rows, np.ones((30, 64), np.float32))
    store.close()
    store._fd = os.open(tmp_path, os.O_RDONLY)  # a folder cannot be read
    with pytest.raises(TierError, match=r"'clicks' could not be read .* Is a directory"):
        store.load(rows, rows, _columns(30, (64, 0, 0)))


@pytest.mark.parametrize("is_asynchronous", [True, False], ids=["io_submit", "threads"])
def test_of_several_tables_the_error_names_the_one_whose_file_failed(tmp_path: Path, is_asynchronous: bool) -> None:
    stores = [RowStore(str(tmp_path), name, 100, (64, 0, 0)) for name in ("clicks", "views", "buys")]
    rows, columns = np.arange(0, 100, 7), _columns(100, (64, 0, 0))
    for store in stores:
        store.store(np.arange(100), np.ones((100, 64), np.float32))
    stores[1].close()
    stores[1]._fd = os.open("/dev/full", os.O_RDWR)
    mover = Transfers(is_asynchronous)
    with pytest.raises(TierError, match=r"'views' could not be written .* No space left on device"):
        mover.write([piece for store in stores for piece in store._writes(rows, np.ones((len(rows), 64), np.float32))])
    stores[1].close()
    stores[1]._fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(TierError, match=r"'views' could not be read .* Is a directory"):
        mover.read([piece for store in stores for piece in store.begin_load(rows, rows, columns)])


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"'t' cannot have a row store .* set sharding.tier_folder"):
        _open(str(tmp_path / "file"), "t")
