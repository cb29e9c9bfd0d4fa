"""Tables in tiers train to the same bits as tables in memory, however few slots they have and whatever ids come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.runtime.errors import TierError
from pipeline.sharding.tiers.stats import TierStats
from pipeline.sharding.torchrec.cpu_tables import FastLookup
from tests.sharding.tiers.lookups import OPTIMIZERS, Shape, batches, build, state_of, train
from tests.support.examples import examples

SHAPE = Shape()
STEPS = 12
KINDS = ("uniform", "zipf", "scan")


def check(
    optimizer: str, kind: str, slots: dict[str, float], folder: Path, *, seed: int = 0, ahead: bool = True
) -> TierStats:
    memory = build(optimizer, SHAPE, {}, folder)
    tiers = build(optimizer, SHAPE, slots, folder)
    expected = train(memory, kind, SHAPE, STEPS, seed=seed)
    found = train(tiers, kind, SHAPE, STEPS, seed=seed, ahead=ahead)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(state_of(memory), state_of(tiers), strict=True):
        assert torch.equal(one, other)
    stats = tiers.forward.tiered.stats()
    assert 0 < stats.missed_rows <= stats.missed_lookups <= stats.lookups and stats.rows <= stats.lookups
    assert not list(folder.iterdir())  # the store has no name
    return stats


@pytest.mark.parametrize(
    ("optimizer", "kind"), [("sgd", "scan"), ("adagrad", "zipf"), ("rowwise_adagrad", "uniform"), ("adam", "scan")]
)
def test_weights_states_and_pooled_rows_are_those_of_training_in_memory(
    optimizer: str, kind: str, tmp_path: Path
) -> None:
    stats = check(optimizer, kind, {"a": 0.16, "b": 0.2}, tmp_path)
    assert stats.written_bytes and stats.read_bytes


@pytest.mark.campaign
@settings(examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    kind=st.sampled_from(KINDS),
    slots=st.tuples(*[st.floats(0.15, 1.0)] * 3),
    chosen=st.sets(st.sampled_from("abc"), min_size=1),
    seed=st.integers(0, 1 << 20),
    ahead=st.booleans(),
)
def test_any_optimizer_ids_and_slots_train_to_the_same_bits(
    tmp_path: Path, optimizer: str, kind: str, slots: tuple[float, ...], chosen: set[str], seed: int, ahead: bool
) -> None:
    least = {"a": 0.13, "b": 0.14, "c": 0.8}  # a batch has up to 48 and 96 distinct rows
    shares = {name: max(share, least[name]) for name, share in zip("abc", slots, strict=True) if name in chosen}
    check(optimizer, kind, shares, tmp_path, seed=seed, ahead=ahead)


@pytest.mark.campaign
@pytest.mark.parametrize("share", [0.02, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_slots_of_2_to_100_percent_of_large_tables(optimizer: str, kind: str, share: float, tmp_path: Path) -> None:
    shape = Shape(rows=(6_000, 9_000, 60), dims=(16, 8, 4))
    memory, tiers = (build(optimizer, shape, slots, tmp_path) for slots in ({}, {"a": share, "b": share}))
    for one, other in zip(train(memory, kind, shape, 60), train(tiers, kind, shape, 60), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(state_of(memory), state_of(tiers), strict=True):
        assert torch.equal(one, other)


def test_a_batch_with_more_rows_than_slots_is_refused_with_both_numbers(tmp_path: Path) -> None:
    tiers = build("sgd", SHAPE, {"b": 10 / 700}, tmp_path)
    with pytest.raises(TierError, match=r"'b' has 10 slots .* has \d+ distinct rows; raise tables.b.tiers.slots"):
        train(tiers, "uniform", SHAPE, 2)


@pytest.mark.parametrize("bad", [-1, 700])
def test_an_id_that_is_no_row_is_refused(tmp_path: Path, bad: int) -> None:
    forward = build("sgd", SHAPE, {"b": 0.5}, tmp_path).forward
    assert isinstance(forward, FastLookup)
    ids, offsets = next(batches("uniform", SHAPE, 1, 0))
    ids[int(offsets[30])] = bad
    with pytest.raises(TierError, match=rf"id {bad} of table 'b' is out of range: this rank has rows 0..699"):
        forward(ids, offsets)


def test_after_a_failed_write_nothing_is_looked_up_or_saved(tmp_path: Path) -> None:
    tiers = build("adagrad", SHAPE, {"a": 0.16, "b": 0.2}, tmp_path)
    forward = tiers.forward
    assert isinstance(forward, FastLookup) and forward.tiered is not None
    for table in forward.tiered.tables:
        table.store.close()
        table.store._fd = os.open("/dev/full", os.O_RDWR)  # reads give zeros, writes find no space
    with pytest.raises(TierError, match="No space left on device"):
        train(tiers, "scan", SHAPE, STEPS)
    with pytest.raises(TierError, match="No space left on device"):
        state_of(tiers)
    with pytest.raises(TierError, match="No space left on device"):
        train(tiers, "scan", SHAPE, 1)


def test_a_batch_whose_backward_never_runs_lets_its_rows_go(tmp_path: Path) -> None:
    forward = build("sgd", SHAPE, {"a": 0.16, "b": 0.2}, tmp_path).forward
    assert isinstance(forward, FastLookup)
    for ids, offsets in batches("scan", SHAPE, 20, 0):
        forward(ids, offsets)  # pooled rows, and the graph behind them, are dropped at once
