"""data.reader.shuffle=groups keeps the rows of a group together, in training, at any number of ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.read.decode import _warn_of_scattered_groups
from pipeline.data.read.reader import ShardReader
from pipeline.data.read.streams import with_groups_together
from tests.extras.models.planted_logs import PLACES, prepared

BATCH, STREAMS = 192, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(prepared(tmp_path_factory.mktemp("lists")) / "ds")


def _reader(folder: str, rank: int = 0, world: int = 1, shuffle: str = "groups", keep_mib: int = 128) -> ShardReader:
    return ShardReader(
        folder, load_dataset(folder), "train", global_batch_size=BATCH, rank=rank, world_size=world, seed=3, with_groups=True,
        config=ReaderConfig(num_streams=STREAMS, shuffle=shuffle, keep_mib=keep_mib),
    )  # fmt: skip


def _pairs(groups: torch.Tensor) -> int:
    """Pairs of rows of one group in one stream of a batch."""
    streams = groups.reshape(STREAMS, -1)
    return int((streams[:, :, None] == streams[:, None, :]).sum() - groups.numel()) // 2


def test_groups_stay_together_and_each_row_is_read_once(folder: str) -> None:
    batches = list(_reader(folder).batches(0))
    groups = torch.cat([batch.groups for batch in batches])
    counts = torch.unique(groups, return_counts=True)[1]
    assert len(groups) == len(batches) * BATCH and counts.max() == PLACES
    whole = sum(_pairs(batch.groups) for batch in batches) / (len(groups) * (PLACES - 1) / 2)
    mixed = [_pairs(batch.groups) for batch in _reader(folder, shuffle="row_groups").batches(0)]
    print(whole, sum(mixed) / (len(groups) * (PLACES - 1) / 2))
    assert whole > 0.9 > 0.3 > sum(mixed) / (len(groups) * (PLACES - 1) / 2)
    again = torch.cat([batch.groups for batch in _reader(folder).batches(1)])
    assert not torch.equal(groups, again)


def test_two_ranks_read_the_batches_of_one_and_a_row_is_located(folder: str) -> None:
    readers = [_reader(folder, keep_mib=0), _reader(folder, 0, 2), _reader(folder, 1, 2)]
    for one, left, right in zip(*(reader.batches(0, 2) for reader in readers), strict=True):
        for name in ("groups", "labels"):
            parts = torch.cat([getattr(left, name), getattr(right, name)])
            assert torch.equal(getattr(one, name), parts)
    first = next(iter(readers[0].batches(0, 2)))
    groups = np.concatenate(
        [np.asarray(pieces) for pieces in _groups_in_file_order(folder, [row for _, row in readers[0].locate(0, 2, list(range(BATCH)))])]
    )  # fmt: skip
    assert (groups == first.groups.numpy()).all()


def _groups_in_file_order(folder: str, rows: list[int]) -> list[np.ndarray]:
    import pyarrow.parquet as pq

    (file,) = load_dataset(folder).splits["train"].files
    table = pq.read_table(Path(folder) / file.path)
    return [table["__group__"].to_numpy()[rows]]


def test_rows_without_a_group_are_not_put_together() -> None:
    groups = np.array([0, 7, 0, 9, 7, 0, 9, 0])
    order = with_groups_together(np.array([1, 0, 3, 2, 5, 4, 7, 6]), groups)
    assert order.tolist() == [1, 4, 0, 3, 6, 2, 5, 7]


def test_scattered_groups_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _warn_of_scattered_groups(np.array([1, 1, 2, 2, 3]))
        assert not caplog.text
        _warn_of_scattered_groups(np.array([1, 1, 2, 0, 3]))
    assert "3 of 5 rows" in caplog.text
