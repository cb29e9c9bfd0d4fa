"""Multi-hot bags drawn from one-hot ids: the same for an id everywhere, uniform, within the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.config.data import ReaderConfig
from pipeline.data.read import multi_hot
from pipeline.data.read.reader import ShardReader
from tests.data.shard_files import NUM_BUCKETS, write_dataset


def sample_bags(ids: NDArray[np.int64], feature: str, cardinality: int, size: int) -> NDArray[np.int64]:
    bags = np.full((len(ids), size), -1)
    multi_hot.sample_bags(ids, feature, cardinality, bags)
    return bags


def test_the_id_itself_comes_first_and_every_id_lies_within_the_table() -> None:
    for cardinality, size in [(3, 6), (10, 1), (40_000_000, 100), (2**31, 7), (227_605_432, 3)]:
        ids = np.array([0, 1, cardinality // 2, cardinality - 1])
        bags = sample_bags(ids, "cat_0", cardinality, size)
        assert bags.shape == (4, size)
        assert np.array_equal(bags[:, 0], ids)
        assert bags.min() >= 0
        assert bags.max() < cardinality


def test_an_id_has_one_bag_whatever_else_is_drawn_with_it() -> None:
    alone = sample_bags(np.array([17]), "cat_3", 1000, 5)
    among = sample_bags(np.array([3, 17, 17, 999]), "cat_3", 1000, 5)
    assert np.array_equal(among[1], alone[0])
    assert np.array_equal(among[2], alone[0])


def test_bags_do_not_change_between_releases() -> None:
    assert sample_bags(np.array([0, 7, 999]), "cat_3", 1000, 4).tolist() == [
        [0, 438, 582, 723],
        [7, 919, 305, 184],
        [999, 716, 846, 801],
    ]


def test_features_and_ids_have_bags_of_their_own() -> None:
    ids = np.arange(1000)
    bags = sample_bags(ids, "cat_0", 1_000_000, 8)[:, 1:]
    other = sample_bags(ids, "cat_1", 1_000_000, 8)[:, 1:]
    assert (bags == other).mean() < 0.001
    assert len(np.unique(bags, axis=0)) == 1000


def test_draws_are_uniform_and_places_independent() -> None:
    cardinality, size = 100, 21
    draws = sample_bags(np.arange(50_000), "cat_0", cardinality, size)[:, 1:]
    expected = draws.size / cardinality
    # chi-square with 99 degrees of freedom: mean 99, standard deviation 14
    assert ((np.bincount(draws.ravel(), minlength=cardinality) - expected) ** 2 / expected).sum() < 99 + 5 * 14
    correlations = np.corrcoef(draws.T) - np.eye(size - 1)
    assert np.abs(correlations).max() < 5 / np.sqrt(50_000)


@pytest.mark.long
def test_the_reader_hands_out_fixed_size_bags_in_feature_order(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [[32, 32]])
    sizes = {"bucket": 5, "last": 2}
    reader = ShardReader(
        str(tmp_path),
        dataset,
        "train",
        global_batch_size=16,
        rank=0,
        world_size=1,
        config=ReaderConfig(num_streams=4),
        seed=0,
        multi_hot=sizes,
    )
    batch = next(reader.batches(0))
    sparse = batch.sparse_features
    for name, cardinality in (("bucket", NUM_BUCKETS), ("last", 11)):
        bags = sparse[name].values().numpy().reshape(16, sizes[name])
        assert np.array_equal(bags, sample_bags(bags[:, 0], name, cardinality, sizes[name]))
        assert sparse[name].lengths().tolist() == [sizes[name]] * 16
    rows = sparse["row"].values()
    assert torch.equal(sparse["bucket"].values()[::5], rows * 7 % NUM_BUCKETS)
    assert torch.equal(sparse["last"].values()[::2], rows % 11)
    assert sparse.length_per_key() == sparse.lengths().view(4, 16).sum(1).tolist()


@pytest.mark.parametrize("size", [1, 4])
def test_padding_rows_get_no_bag(tmp_path: Path, size: int) -> None:
    dataset = write_dataset(tmp_path, [[5]])
    reader = ShardReader(
        str(tmp_path),
        dataset,
        "train",
        global_batch_size=8,
        rank=0,
        world_size=1,
        config=ReaderConfig(num_streams=4),
        seed=0,
        multi_hot={"bucket": size},
        drop_last=False,
    )
    batch = next(reader.batches(0))
    lengths = batch.sparse_features["bucket"].lengths()
    assert lengths.tolist() == (batch.sample_weights * size).int().tolist()
    assert lengths.sum() == 5 * size
