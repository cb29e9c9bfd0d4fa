"""Propensities of benchmarks/debiasing.py, on ratings whose propensities are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.debiasing import (
    NAIVE_BAYES,
    naive_bayes,
    popularity,
    read_ratings,
    sample_weights,
    write_splits,
)
from pipeline.runtime.errors import UserError

NUM_USERS, NUM_ITEMS = 600, 500
USERS, ITEMS = (ids.ravel() for ids in np.meshgrid(np.arange(NUM_USERS), np.arange(NUM_ITEMS), indexing="ij"))


def test_naive_bayes_finds_the_planted_propensity_of_each_rating() -> None:
    draw = np.random.default_rng(0)
    ratings = draw.choice(np.arange(1, 6), NUM_USERS * NUM_ITEMS, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    planted = np.array([0.0, 0.02, 0.03, 0.06, 0.12, 0.2])
    observed = draw.random(len(ratings)) < planted[ratings]
    found = naive_bayes(ratings[observed], draw.choice(ratings, 20_000), len(ratings))
    for rating in range(1, 6):
        assert found[ratings[observed] == rating] == pytest.approx(planted[rating], rel=0.08)
    weights = sample_weights(found)
    assert ratings[observed].mean() > ratings.mean() + 0.5
    assert np.average(ratings[observed], weights=weights) == pytest.approx(ratings.mean(), abs=0.03)


def test_popularity_finds_the_planted_propensity_of_each_pair() -> None:
    draw = np.random.default_rng(0)
    planted = draw.uniform(0.1, 0.9, NUM_USERS)[USERS] * draw.uniform(0.2, 0.9, NUM_ITEMS)[ITEMS]
    observed = draw.random(len(planted)) < planted
    found = popularity(USERS[observed], ITEMS[observed])
    assert np.abs(found / planted[observed] - 1).mean() < 0.1
    assert found.max() <= 1


def test_weights_have_the_mean_1_and_a_limit() -> None:
    weights = sample_weights(np.array([1e-6, *[0.5] * 999]))
    assert weights.mean() == pytest.approx(1)
    assert sample_weights(np.array([0.1, 0.2])) == pytest.approx([4 / 3, 2 / 3])
    assert sample_weights(np.array([0.1, 0.2]), clip=1.0) == pytest.approx([1.2, 0.8])


def test_test_rows_have_the_weight_1_and_do_not_give_the_marginals(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    chosen, random = (
        np.stack([draw.integers(0, 30, 200), draw.integers(0, 40, 200), draw.integers(1, 6, 200)], axis=1)
        for _ in range(2)
    )
    weights = write_splits(chosen, random, NAIVE_BAYES, 1, tmp_path / "splits")
    rows = {
        split: np.loadtxt(tmp_path / "splits" / f"{split}.csv", delimiter=",", skiprows=1)
        for split in ("train", "validation", "test")
    }
    assert {split: len(found) for split, found in rows.items()} == {"train": 180, "validation": 20, "test": 190}
    assert (rows["test"][:, 4] == 1).all()
    assert np.concatenate([rows["validation"], rows["train"]])[:, 4] == pytest.approx(weights)
    assert (rows["train"][:, 2] == (rows["train"][:, 3] >= 3)).all()
    # Each rating has one weight, by the 10 random ratings that are not in the test.
    held_out = np.random.default_rng(1)
    held_out.permutation(chosen)
    marginals = held_out.permutation(random)[:10, 2]
    ratings = np.concatenate([rows["validation"], rows["train"]])[:, 3].astype(int)
    assert weights == pytest.approx(sample_weights(naive_bayes(ratings, marginals, 1200)))


def test_both_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "ydata-ymusic-rating-study-v1_0-train.txt").write_text("1\t14\t5\n1\t35\t1\n")
    (tmp_path / "ydata-ymusic-rating-study-v1_0-test.txt").write_text("1\t49\t1\n")
    chosen, random = read_ratings(tmp_path)
    assert chosen.tolist() == [[1, 14, 5], [1, 35, 1]]
    assert random.tolist() == [[1, 49, 1]]
    with pytest.raises(UserError, match="give the folder of Coat or Yahoo R3"):
        read_ratings(tmp_path / "nothing")
