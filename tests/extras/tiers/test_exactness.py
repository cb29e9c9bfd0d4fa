"""Tables in tiers train to the same bits as tables in memory, however few slots they have and whatever ids come."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.runtime.errors import TierError
from pipeline.sharding.table_storage import TierStats
from pipeline.sharding.torchrec.cpu_tables import FastLookup
from tests.extras.tiers.lookups import OPTIMIZERS, Shape, batches, build, state_of, train
from tests.support.examples import examples

SHAPE = Shape()
STEPS = 12
KINDS = ("uniform", "zipf", "scan")


def check(
    optimizer: str,
    kind: str,
    slots: dict[str, float],
    folder: Path,
    *,
    heads: dict[str, float] | None = None,
    seed: int = 0,
    ahead: bool = True,
) -> TierStats:
    memory = build(optimizer, SHAPE, {}, folder)
    tiers = build(optimizer, SHAPE, slots, folder, heads)
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "kind"), [("sgd", "scan"), ("adagrad", "zipf"), ("rowwise_adagrad", "uniform"), ("adam", "scan")]
)
def test_weights_states_and_pooled_rows_are_those_of_training_in_memory(
    optimizer: str, kind: str, tmp_path: Path
) -> None:
    stats = check(optimizer, kind, {"a": 0.16, "b": 0.2}, tmp_path)
    assert stats.written_bytes and stats.read_bytes


@pytest.mark.long
def test_the_head_is_in_its_slots_before_the_first_lookup_and_never_leaves(tmp_path: Path) -> None:
    tiers = build("adagrad", SHAPE, {"a": 0.5, "b": 0.5}, tmp_path, {"a": 0.5, "b": 0.3})
    forward = tiers.forward
    assert isinstance(forward, FastLookup) and forward.tiered is not None
    heads = [table.head for table in forward.tiered.tables]
    assert heads == [100, 105]
    for _ in range(2):  # before and after a load
        for table, ids in zip(forward.tiered.tables, (0, 1), strict=True):
            table.bring_head()
            slots = np.empty(table.head, np.int64)
            _, missing = table.pin(np.arange(table.head), slots)
            assert not len(missing) and slots.tolist() == list(range(table.head)), ids
            table.unpin(slots)
        train(tiers, "scan", SHAPE, 20)
        for number, table in enumerate(forward.tiered.tables):
            assert table._row_of[: table.head].tolist() == list(range(heads[number]))
        weights = tiers.split_embedding_weights()
        for each in weights[:2]:
            each.write(5, each.read(5, 3))


@pytest.mark.parametrize("kind", ["zipf", "scan"])
def test_a_head_changes_no_bit_and_goes_where_slots_beside_it_are_too_few(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check("adam", kind, {"a": 0.4, "b": 0.4}, tmp_path, heads={"a": 0.5, "b": 0.3})
    assert "no longer" not in caplog.text
    check("adagrad", kind, {"a": 0.16, "b": 0.2}, tmp_path, heads={"a": 0.9, "b": 0.9})
    assert "'b' no longer keeps its first 126 rows in slots" in caplog.text


@pytest.mark.campaign
@settings(examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    kind=st.sampled_from(KINDS),
    slots=st.tuples(*[st.floats(0.15, 1.0)] * 3),
    chosen=st.sets(st.sampled_from("abc"), min_size=1),
    head=st.sampled_from([0.0, 0.2, 0.5, 0.95]),
    seed=st.integers(0, 1 << 20),
    ahead=st.booleans(),
)
def test_any_optimizer_ids_and_slots_train_to_the_same_bits(
    tmp_path: Path,
    optimizer: str,
    kind: str,
    slots: tuple[float, ...],
    chosen: set[str],
    head: float,
    seed: int,
    ahead: bool,
) -> None:
    least = {"a": 0.13, "b": 0.14, "c": 0.8}  # a batch has up to 48 and 96 distinct rows
    shares = {name: max(share, least[name]) for name, share in zip("abc", slots, strict=True) if name in chosen}
    check(optimizer, kind, shares, tmp_path, heads=dict.fromkeys(chosen, head), seed=seed, ahead=ahead)


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
