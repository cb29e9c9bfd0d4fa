"""The promises of ShardReader: same global batches at any world size, every row once, exact resume, loud errors."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from iopath.common.file_io import PathHandler

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import Dataset
from pipeline.data.read.decode import Block
from pipeline.data.read.reader import ShardReader
from pipeline.data.read.shard_files import ShardError
from pipeline.data.read.streams import Segment
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.storage import storage
from tests.data.readers import PADDING, SPOILT, epoch_of, make_reader, rows_of, sample_of, samples_of, spoil
from tests.data.shard_files import MAX_TAGS, write_dataset
from tests.support.examples import examples
from tests.support.messages import names

RAGGED = [[20, 1, 7], [3], [16, 16, 16, 5], [1, 1, 1, 1], [9, 30]]
NUM_ROWS = sum(map(sum, RAGGED))  # 127
ORDERS = [(shuffle, drop_last) for shuffle in ("row_groups", "none") for drop_last in (True, False)]


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Dataset]:
    folder = tmp_path_factory.mktemp("ragged")
    return str(folder), write_dataset(folder, RAGGED)


@pytest.mark.parametrize(("shuffle", "drop_last"), ORDERS)
def test_1_2_and_4_ranks_see_the_same_global_batches(
    ragged: tuple[str, Dataset], shuffle: str, drop_last: bool
) -> None:
    def global_batches(world_size: int) -> list[list[tuple[Any, ...]]]:
        readers = [
            make_reader(ragged, rank, world_size, shuffle=shuffle, drop_last=drop_last, multi_hot={"bucket": 3})
            for rank in range(world_size)
        ]
        epochs = [epoch_of(reader, 1) for reader in readers]
        assert {len(batches) for batches in epochs} == {readers[0].steps_per_epoch}
        assert {batch.batch_size for batches in epochs for batch in batches} == {16 // world_size}
        return [[sample for batch in step for sample in samples_of(batch)] for step in zip(*epochs, strict=True)]

    alone = global_batches(1)
    assert len(alone) == (NUM_ROWS // 16 if drop_last else -(-NUM_ROWS // 16))
    assert global_batches(2) == alone
    assert global_batches(4) == alone


@pytest.mark.parametrize("shuffle", ["row_groups", "none"])
def test_an_epoch_reads_every_row_once_but_for_less_than_a_batch(ragged: tuple[str, Dataset], shuffle: str) -> None:
    batches = epoch_of(make_reader(ragged, shuffle=shuffle))
    rows = rows_of(batches)
    assert len(rows) == len(set(rows)) == NUM_ROWS // 16 * 16
    assert [sample for batch in batches for sample in samples_of(batch)] == [sample_of(row) for row in rows]


@pytest.mark.parametrize("shuffle", ["row_groups", "none"])
@pytest.mark.parametrize("global_batch_size", [4, 16, 124, 128, 400])
def test_evaluation_reads_every_row_once_and_fills_up_with_weight_0(
    ragged: tuple[str, Dataset], shuffle: str, global_batch_size: int
) -> None:
    reader = make_reader(ragged, shuffle=shuffle, drop_last=False, global_batch_size=global_batch_size)
    batches = epoch_of(reader)
    assert sorted(rows_of(batches)) == list(range(NUM_ROWS))
    samples = [sample for batch in batches for sample in samples_of(batch)]
    assert [sample for sample in samples if sample != PADDING] == [sample_of(row) for row in rows_of(batches)]
    assert samples.count(PADDING) == len(batches) * global_batch_size - NUM_ROWS < global_batch_size


def test_epochs_and_seeds_read_in_other_orders_and_drop_other_rows(ragged: tuple[str, Dataset]) -> None:
    first, second = (rows_of(epoch_of(make_reader(ragged), epoch)) for epoch in (0, 1))
    assert first != second
    assert set(first) != set(second)
    assert rows_of(epoch_of(make_reader(ragged, seed=8))) != first
    assert rows_of(epoch_of(make_reader(ragged), 0)) == first


def test_without_shuffle_batches_follow_the_file_order(tmp_path: Path) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[8] * 8, [8] * 8])
    rows = rows_of(epoch_of(make_reader(data, shuffle="none"), epoch=3))
    assert rows[:16] == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
    rounds = np.array(rows).reshape(-1, 32)  # 4 streams of one row group each
    assert np.array_equal(np.sort(rounds), np.arange(128).reshape(-1, 32))


@given(epoch=st.integers(0, 3), start_step=st.integers(0, 8), order=st.sampled_from(ORDERS), rank=st.integers(0, 1))
@examples(40)
def test_resume_at_any_step_continues_exactly(
    ragged: tuple[str, Dataset], epoch: int, start_step: int, order: tuple[str, bool], rank: int
) -> None:
    reader = make_reader(ragged, rank, 2, shuffle=order[0], drop_last=order[1])
    start_step = min(start_step, reader.steps_per_epoch)
    whole = [samples_of(batch) for batch in epoch_of(reader, epoch)]
    assert [samples_of(batch) for batch in epoch_of(reader, epoch, start_step)] == whole[start_step:]


def test_resume_decodes_only_the_row_groups_that_are_left(
    ragged: tuple[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = make_reader(ragged)
    decoded: list[Segment] = []
    decode = reader._shards.decode

    def counting_decode(segment: Segment, seed: int, epoch: int, shuffled: bool) -> Block:
        decoded.append(segment)
        return decode(segment, seed, epoch, shuffled)

    monkeypatch.setattr(reader._shards, "decode", counting_decode)
    epoch_of(reader, 0, reader.steps_per_epoch - 1)
    rows_left = NUM_ROWS - (reader.steps_per_epoch - 1) * 16
    assert sum(segment.stop - segment.start for segment in decoded) <= rows_left


def test_a_split_that_fits_is_decoded_once_and_gives_the_same_rows(
    ragged: tuple[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, anew = (make_reader(ragged, keep_mib=size) for size in (1, 0))
    read: list[int] = []
    plain_read = kept._shards._read

    def counting_read(index: int, row_group: int) -> pa.Table:
        read.append(row_group)
        return plain_read(index, row_group)

    monkeypatch.setattr(kept._shards, "_read", counting_read)
    for epoch in (0, 1, 0):
        batches = epoch_of(kept, epoch)
        assert [samples_of(batch) for batch in batches] == [samples_of(batch) for batch in epoch_of(anew, epoch)]
    assert len(read) == len(kept._shards.row_group_sizes)


def test_a_kept_split_whose_file_changes_is_an_error_all_the_same(tmp_path: Path) -> None:
    reader = make_reader((str(tmp_path), write_dataset(tmp_path, [[64] * 4])))
    epoch_of(reader)
    path = tmp_path / "train" / "part-0.parquet"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(DataError, match=names("part-0.parquet changed")):
        epoch_of(reader, 1)


def test_more_decode_threads_change_nothing(ragged: tuple[str, Dataset]) -> None:
    one, three = (rows_of(epoch_of(make_reader(ragged, decode_threads=threads))) for threads in (1, 3))
    assert one == three


def test_position_is_bound_to_data_seed_streams_and_batch_size(ragged: tuple[str, Dataset]) -> None:
    same = make_reader(ragged).order_fingerprint
    assert make_reader(ragged, rank=1, world_size=2, decode_threads=2).order_fingerprint == same
    for change in ({"seed": 8}, {"num_streams": 8}, {"shuffle": "none"}, {"global_batch_size": 32}):
        assert make_reader(ragged, **change).order_fingerprint != same


def test_the_time_that_the_consumer_waits_is_counted(ragged: tuple[str, Dataset]) -> None:
    reader = make_reader(ragged)
    assert reader.stall_seconds == 0.0
    epoch_of(reader)
    assert 0.0 < reader.stall_seconds < 10.0


# What must not be trained on


@pytest.mark.parametrize("case", SPOILT)
def test_values_that_would_train_wrong_are_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message = SPOILT[case]
    data = str(tmp_path), write_dataset(tmp_path, [[16, 16]], change)
    with pytest.raises(DataError, match=names(message)) as error:
        epoch_of(make_reader(data))
    assert "part-0.parquet" in str(error.value)
    assert "python -m pipeline prepare" in str(error.value)


def test_batches_before_the_bad_row_group_still_arrive(tmp_path: Path) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[16] * 8], spoil("last", lambda ids: [*ids[:-1], 99]))
    iterator = make_reader(data, shuffle="none", global_batch_size=4).batches(0)
    arrived = []
    with pytest.raises(DataError, match=names("7")):
        for batch in iterator:
            arrived.append(batch)
    assert len(arrived) == 16  # rows 64..128 are the second round, and its last row group is bad
    with pytest.raises(DataError, match=names("7")):
        next(iterator)


def test_missing_shards_are_named_before_anything_is_read(tmp_path: Path) -> None:
    data = str(tmp_path), write_dataset(tmp_path, RAGGED)
    for index in (1, 3):
        (tmp_path / "train" / f"part-{index}.parquet").unlink()
    with pytest.raises(DataError, match=names("train/part-1.parquet")):
        make_reader(data)


def test_a_shard_of_another_size_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    data = str(tmp_path), write_dataset(tmp_path, RAGGED)
    with open(tmp_path / "train" / "part-2.parquet", "ab") as file:
        file.write(b"12345")
    size = data[1].splits["train"].files[2].size_bytes
    with pytest.raises(DataError, match=names(f"part-2.parquet {size + 5} {size}")):
        make_reader(data)


def test_a_shard_with_other_row_groups_is_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [[16, 16]])
    dataset.splits["train"].files[0].row_groups[:] = [8, 24]
    with pytest.raises(ShardError, match=names("32")):
        epoch_of(make_reader((str(tmp_path), dataset)))


def test_a_description_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [[16, 16]])
    dataset.splits["train"].files[0].row_groups.append(8)
    with pytest.raises(DataError, match=names("dataset.json 32 40")):
        make_reader((str(tmp_path), dataset))


def test_flipped_bits_in_a_page_are_refused(tmp_path: Path) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[64] * 4])
    path = tmp_path / "train" / "part-0.parquet"
    spoilt = bytearray(path.read_bytes())
    spoilt[100] ^= 0x10
    path.write_bytes(spoilt)
    with pytest.raises(ShardError, match=names("part-0.parquet")):
        epoch_of(make_reader(data))


def test_a_split_smaller_than_a_global_batch_is_refused(ragged: tuple[str, Dataset]) -> None:
    with pytest.raises(DataError, match=names("127 128 train tiny")):
        make_reader(ragged, global_batch_size=128)


def test_wrong_arguments_are_refused_with_the_way_out(ragged: tuple[str, Dataset]) -> None:
    with pytest.raises(DataError, match=names("trian train")):
        ShardReader(*ragged, "trian", global_batch_size=16, rank=0, world_size=1, config=ReaderConfig(), seed=0)
    with pytest.raises(ConfigError, match=names("num_streams=4")):
        make_reader(ragged, 0, 3)
    with pytest.raises(DataError, match=names("rank=2 [0 1]")):
        make_reader(ragged, 2, 2)
    with pytest.raises(DataError, match=names("buckets")):
        make_reader(ragged, multi_hot={"buckets": 3})
    with pytest.raises(DataError, match=names("bucket=0")):
        make_reader(ragged, multi_hot={"bucket": 0})
    with pytest.raises(DataError, match=names("tags")):
        make_reader(ragged, multi_hot={"tags": 3})
    with pytest.raises(DataError, match=names("start_step=8")):
        make_reader(ragged).batches(0, 8)


# Threads


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reader-")]


def test_an_iterator_closed_early_leaves_no_thread(ragged: tuple[str, Dataset]) -> None:
    iterator = make_reader(ragged).batches(0)
    next(iterator)
    assert reader_threads()
    iterator.close()
    assert reader_threads() == []
    assert list(iterator) == []


def test_a_dropped_iterator_leaves_no_thread(ragged: tuple[str, Dataset]) -> None:
    iterator = make_reader(ragged).batches(0)
    next(iterator)
    del iterator
    gc.collect()
    assert reader_threads() == []


# Storage other than local paths


class FarAway(PathHandler):
    """faraway://x stands for <root>/x; counts what is downloaded."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.downloads: list[str] = []

    def _get_supported_prefixes(self) -> list[str]:
        return ["faraway://"]

    def _local(self, path: str) -> str:
        return os.path.join(self.root, path.removeprefix("faraway://"))

    def _ls(self, path: str, **_: Any) -> list[str]:
        return os.listdir(self._local(path))

    def _isfile(self, path: str, **_: Any) -> bool:
        return os.path.isfile(self._local(path))

    def _exists(self, path: str, **_: Any) -> bool:
        return os.path.exists(self._local(path))

    def _get_local_path(self, path: str, force: bool = False, **_: Any) -> str:
        self.downloads.append(path)
        return self._local(path)


def test_shards_behind_a_uri_are_read_alike_and_missing_ones_named(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "set", RAGGED)
    handler = FarAway(tmp_path)
    storage.path_manager().register_handler(handler, allow_override=True)
    batches = epoch_of(make_reader(("faraway://set", dataset)))
    assert rows_of(batches) == rows_of(epoch_of(make_reader((str(tmp_path / "set"), dataset))))
    assert sorted(set(handler.downloads)) == [f"faraway://set/train/part-{index}.parquet" for index in range(5)]
    (tmp_path / "set" / "train" / "part-4.parquet").unlink()
    with pytest.raises(DataError, match=names("faraway://set train/part-4")):
        make_reader(("faraway://set", dataset))


def test_lists_of_every_length_arrive(ragged: tuple[str, Dataset]) -> None:
    batch = epoch_of(make_reader(ragged))[0]
    lengths = batch.sparse_features["tags"].lengths()
    assert set(lengths.tolist()) == set(range(MAX_TAGS))
    assert lengths.dtype == torch.int32
