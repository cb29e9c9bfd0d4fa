"""Details of an evaluation are kept up to a number of rows of all ranks together, and above it not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pipeline.devices.process_group import init_distributed
from pipeline.extras.runs.stats_collector import StatsCollector
from pipeline.models.tasks.click import Prediction
from tests.support.ranks import RankPool

ROWS_A_RANK, BATCH = 40, 10


def _rows_in_details(rank: int, world_size: int, max_rows: int) -> tuple[int, float | None]:
    """How many rows this rank holds at the end, and how many the details are of."""
    context = init_distributed()
    num_rows = ROWS_A_RANK * world_size
    positions = np.arange(rank * ROWS_A_RANK, (rank + 1) * ROWS_A_RANK).reshape(-1, BATCH)
    reader = SimpleNamespace(
        dataset_fingerprint="rows", plain_features=[], num_rows=num_rows, positions=lambda epoch: iter(positions)
    )
    collector = StatsCollector(cast(Any, reader), context, max_rows)
    for _ in positions:
        labels = torch.arange(BATCH).float() % 2
        prediction = Prediction(torch.tensor(0.0), labels - 0.3, labels, torch.ones(BATCH))
        collector.update({"": prediction}, cast(Any, None), prediction)
    details = collector.compute("validation", 1, {})
    held = sum(len(labels) for _, _, labels, _ in collector._labels[""]._rows)
    return held, None if details is None else float(details.blocks.rows.sum())


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_are_held_up_to_the_limit_of_all_ranks_and_no_details_are_above_it(
    ranks: RankPool, world_size: int
) -> None:
    total = ROWS_A_RANK * world_size
    assert ranks.run(world_size, _rows_in_details, world_size, total)[0] == (ROWS_A_RANK, total)
    for limit in (total - 1, 15):
        for held, of_rows in ranks.run(world_size, _rows_in_details, world_size, limit):
            assert of_rows is None and held <= min(limit, ROWS_A_RANK)
