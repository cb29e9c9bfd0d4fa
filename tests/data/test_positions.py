"""A row's position is its number in the order of the files, however the batches are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.read.positions import PADDING
from pipeline.data.read.reader import ShardReader


@pytest.mark.parametrize(
    ("shuffle", "world_size", "batch_size", "seed"), [("row_groups", 1, 512, 0), ("none", 2, 256, 3)]
)
def test_each_row_of_a_split_has_one_position_and_is_the_row_there(
    prepared_clicks: str, shuffle: str, world_size: int, batch_size: int, seed: int
) -> None:
    dataset = load_dataset(prepared_clicks)
    files = dataset.splits["test"].files
    labels = np.concatenate([pq.read_table(Path(prepared_clicks) / file.path)[dataset.label] for file in files])
    found = np.full(len(labels), -1.0)
    for rank in range(world_size):
        reader = ShardReader(
            prepared_clicks,
            dataset,
            "test",
            global_batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            config=ReaderConfig(shuffle=shuffle),
            seed=seed,
            drop_last=False,
        )
        for batch, positions in zip(reader.batches(0), reader.positions(0), strict=True):
            real = batch.sample_weights.numpy() > 0
            assert np.array_equal(positions != PADDING, real)
            assert (found[positions[real]] == -1.0).all()  # nobody has read it before
            found[positions[real]] = batch.labels.numpy()[real]
    assert np.array_equal(found, labels)
