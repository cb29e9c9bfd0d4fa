"""Ids of a table with managed collision have the rows in an artifact that they had in its training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from pipeline.config.tables import CompressionConfig
from pipeline.embeddings.collection import Managed
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.table import IDS_A_BUCKET, ManagedRows
from pipeline.extras.managed_collision.managed_tables import LocalTable, ManagedTable
from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.composed import ComposedTables, row_map
from tests.embeddings.compressed import as_features, table_of

BUCKETS, ROWS = 4, 32
FAR = 10**15


def trained(policy: str, steps: int) -> ManagedTable:
    managed = ManagedRows("m__managed", ROWS, BUCKETS, policy, 2)
    config = EmbeddingBagConfig(
        name="m__managed", embedding_dim=4, num_embeddings=ROWS, feature_names=["f"],
        init_fn=Managed(managed, torch.zero_),
    )  # fmt: skip
    table = ManagedTable(managed, config, LocalTable(torch.zeros(ROWS, 4), [], 0), 0)
    for step in range(steps):
        table.remap(hashed(ids_of(step)), True)
    return table


def ids_of(step: int) -> np.ndarray:
    generator = np.random.default_rng(step)
    return np.concatenate([generator.integers(0, 12, 60) * 1_000_003, generator.integers(0, FAR, 20)])


def settings() -> CompressionConfig:
    return CompressionConfig("managed_collision", policy="lfu", num_rows=ROWS, buckets=BUCKETS, eviction_interval=2)


def hashed(ids: np.ndarray) -> torch.Tensor:
    table = table_of("m", settings(), num_ids=FAR)
    one = replace(table, feature_names=table.feature_names[:1], max_ids=table.max_ids[:1])
    return IdSplitter([one])(
        as_features({one.feature_names[0]: [[int(number)] for number in ids]}, slice(None))
    ).values()


@pytest.mark.parametrize("policy", ["lfu", "lru", "distance_lfu"])
@pytest.mark.parametrize("steps", [0, 3, 12])
def test_ids_have_the_rows_of_the_trainings_map(policy: str, steps: int) -> None:
    table = trained(policy, steps)
    found = row_map(table.state["sorted_ids"].numpy(), table.state["rows"].numpy(), BUCKETS)
    asked = hashed(np.concatenate([ids_of(step) for step in range(steps + 2)]))
    wanted = table.remap(asked, False)
    assert torch.equal(torch.from_numpy(found.rows_of(asked.numpy())), wanted)
    of_their_own = (wanted % (ROWS // BUCKETS) != ROWS // BUCKETS - 1).float().mean()
    assert of_their_own > 0.3 if steps else of_their_own == 0
    assert len(found.ids) == 0 or ((np.diff(found.ids) > 0).all() and found.ids.max() < BUCKETS * IDS_A_BUCKET)


def test_the_map_goes_with_the_artifact_and_a_missing_or_torn_one_is_refused() -> None:
    table, state = table_of("m", settings(), num_ids=FAR), trained("lfu", 6).state
    found = row_map(state["sorted_ids"].numpy(), state["rows"].numpy(), BUCKETS)
    composed = ComposedTables([table], table.feature_names, row_maps={"m__managed": found})
    again = ComposedTables.from_bytes(composed.to_bytes())
    bags = {feature: [[int(number)] for number in ids_of(3)] for feature in table.feature_names}
    for one in (composed, again):
        rows, _, _ = one.ids_looked_up(one.split(as_features(bags, slice(None))))
        assert rows.tolist() == found.rows_of(hashed(ids_of(3)).numpy()).tolist() * len(table.feature_names)
    with pytest.raises(ServingError, match="need maps"):
        ComposedTables([table], table.feature_names)
    for torn in (composed.to_bytes()[:-8], composed.to_bytes() + bytes(8)):
        with pytest.raises(ServingError):
            ComposedTables.from_bytes(torn)
