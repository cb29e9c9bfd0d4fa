"""Which ids of a managed table get a row, and which lose it for not coming."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from pipeline.config.tables import CompressionConfig
from pipeline.embeddings.table import IDS_A_BUCKET, ManagedRows
from pipeline.extras.managed_collision.kind import ManagedCollision
from pipeline.extras.managed_collision.managed_tables import LocalTable, ManagedTable, state_sizes
from pipeline.runtime.errors import ConfigError
from tests.embeddings.compressed import table_of
from tests.support.messages import names
from tests.support.waits import Waits

BUCKETS, ROWS, INTERVAL = 2, 16, 4


def make(policy: str = "lfu", **options: Any) -> ManagedTable:
    managed = ManagedRows("m", BUCKETS * ROWS, BUCKETS, policy, INTERVAL, **options)
    config = EmbeddingBagConfig(
        name="m", num_embeddings=BUCKETS * ROWS, embedding_dim=4, feature_names=["f"], init_fn=torch.nn.init.ones_
    )
    weight = torch.zeros(BUCKETS * ROWS, 4)
    return ManagedTable(managed, config, LocalTable(weight, [torch.zeros(BUCKETS * ROWS)], 0), 0)


def train(table: ManagedTable, steps: list[list[int]], bucket: int = 1) -> None:
    for ids in steps:
        table.remap(torch.tensor(ids, dtype=torch.int64) + bucket * IDS_A_BUCKET, training=True)


def with_rows(table: ManagedTable, ids: list[int], bucket: int = 1) -> set[int]:
    rows = table.remap(torch.tensor(ids, dtype=torch.int64) + bucket * IDS_A_BUCKET, training=False)
    return {one for one, row in zip(ids, rows.tolist(), strict=True) if row != (bucket + 1) * ROWS - 1}


@pytest.mark.parametrize("policy", ["lfu", "lru", "distance_lfu"])
def test_an_id_that_came_once_gets_no_row_where_two_times_are_asked_for(policy: str) -> None:
    steps = [[1, 2, 3], [1, 4], [5, 1], [2, 6]]
    assert with_rows(_trained(make(policy), steps), list(range(1, 8))) == {1, 2, 3, 4, 5, 6}
    table = _trained(make(policy, admit_count=2), steps)
    assert with_rows(table, list(range(1, 8))) == {1, 2}
    train(table, [[3, 7], [3], [], []])
    assert with_rows(table, list(range(1, 8))) == {1, 2, 3}, "those with a row keep it"


@pytest.mark.parametrize("options", [{}, {"admit_probability": 0.5, "max_idle_steps": 3}])
def test_only_steps_that_evict_wait_for_a_gpu(options: dict[str, Any]) -> None:
    table = make(**options)
    ids = torch.cat([torch.arange(20), torch.arange(10) + IDS_A_BUCKET])
    table.remap(ids, training=True)  # the first step reads where the run is
    waits = []
    for _ in range(INTERVAL):
        with Waits() as step:
            table.remap(ids, training=True)
        waits.append(bool(step.found))
    assert waits == [False, False, True, False]


@pytest.mark.parametrize("policy", ["lfu", "lru", "distance_lfu"])
@pytest.mark.parametrize("options", [{}, {"admit_count": 2, "admit_probability": 0.6, "max_idle_steps": 5}])
def test_buckets_counted_together_are_as_counted_one_by_one(policy: str, options: dict[str, Any]) -> None:
    """Histories are as large as one step's ids, so that some steps evict amid their ids."""
    together, apart = make(policy, **options), [make(policy, **options) for _ in range(BUCKETS)]
    generator = torch.Generator().manual_seed(3)
    for step in range(9):
        ids = (torch.rand(700, generator=generator) ** 4 * 400).long() + torch.arange(700) % BUCKETS * IDS_A_BUCKET
        rows = together.remap(ids, training=True)
        for bucket in range(BUCKETS):
            own = ids // IDS_A_BUCKET == bucket
            assert torch.equal(rows[own], apart[bucket].remap(ids[own], training=True)), (step, bucket)


def _trained(table: ManagedTable, steps: list[list[int]]) -> ManagedTable:
    train(table, steps)
    return table


def test_by_probability_ids_that_come_often_get_rows_first() -> None:
    assert with_rows(_trained(make(admit_probability=0.0), [[1, 2, 3]] * 8), [1, 2, 3]) == set()
    many = torch.arange(5000)
    table = make(admit_probability=0.2)
    buckets = torch.ones_like(many)
    counts = torch.stack([table._seen(many + IDS_A_BUCKET, buckets, step) for step in range(1, 11)])
    assert 850 < counts.sum(dim=1).float().mean() < 1150
    shares = [float(counts[:steps].any(dim=0).float().mean()) for steps in (1, 5, 10)]
    assert [round(share, 1) for share in shares] == [0.2, 0.7, 0.9], "1 - 0.8 ** steps"
    again = table._seen(many.flip(0) + IDS_A_BUCKET, buckets, 3)
    assert torch.equal(again.flip(0), counts[2]), "the same for any order"


@pytest.mark.parametrize("policy", ["lfu", "lru", "distance_lfu"])
def test_an_id_that_does_not_come_loses_its_row_which_begins_anew(policy: str) -> None:
    table = _trained(make(policy, max_idle_steps=4), [[1, 2, 3]] * 4)
    row = int(table.remap(torch.tensor([2 + IDS_A_BUCKET]), training=False))
    table._weight[row] = 7.0
    train(table, [[1, 3]] * 4)
    assert with_rows(table, [1, 2, 3]) == {1, 2, 3}, "idle for 4 steps, and no longer"
    train(table, [[1]] * 4)
    assert with_rows(table, [1, 2, 3]) == {1, 3}
    assert float(table._weight[row, 0]) == 7.0
    train(table, [[1, *range(10, 24)]] * 4)  # as many new ids as there are rows: the free one is among theirs
    assert with_rows(table, [1]) == {1} and float(table._weight[row, 0]) == 1.0
    forever = _trained(make(policy), [[1, 2, 3]] * 4 + [[1]] * 12)
    assert with_rows(forever, [1, 2, 3]) == {1, 2, 3}


def test_tables_without_these_settings_keep_the_state_that_they_had() -> None:
    plain = ManagedRows("m", 32, 2, "lfu", 4)
    assert "last_seen" not in state_sizes(plain)
    assert state_sizes(ManagedRows("m", 32, 2, "lfu", 4, max_idle_steps=9))["last_seen"] == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admit_count": 0}, "admit_count"),
        ({"admit_probability": 1.5}, "admit_probability"),
        ({"max_idle_steps": 0}, "max_idle_steps"),
        ({"admit_cout": 2}, "admit_cout"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        CompressionConfig("managed_collision", num_rows=64, options=options)


def test_options_reach_the_map() -> None:
    config = CompressionConfig(
        "managed_collision", num_rows=64, options={"admit_count": 3, "admit_probability": 0.5, "max_idle_steps": 7}
    )
    rows = ManagedCollision(table_of("m", config)).rows
    assert (rows.admit_count, rows.admit_probability, rows.max_idle_steps) == (3, 0.5, 7)
