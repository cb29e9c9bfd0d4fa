"""When a batch begins: at once for a lone request, with others where they come together."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pyarrow as pa

from pipeline.config.server import BatchingConfig
from pipeline.serving.http.batching import Batcher
from pipeline.serving.http.metrics import ServerMetrics
from pipeline.serving.scoring.column_lists import ColumnLists
from pipeline.serving.scoring.scorer import schema_of
from tests.serving.servers import ROW
from tests.serving.stand_in import COLUMNS, StandIn, score_of

DELAY_S = 3.0
TABLE = pa.Table.from_pylist([ROW], schema=schema_of(COLUMNS))
LISTS = ColumnLists(TABLE.schema, [TABLE[name].to_pylist() for name in TABLE.column_names], 1)


async def _ask(batcher: Batcher, pauses_s: list[float]) -> float:
    """Seconds until all are answered, of requests that are made so long after the first, as Arrow and as lists."""

    async def one(number: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        scores = await batcher.score(LISTS if number % 2 else TABLE)
        assert scores.scores.tolist() == [score_of(ROW, "v1")]

    begun = time.monotonic()
    await asyncio.gather(*(one(number, pause_s) for number, pause_s in enumerate(pauses_s)))
    return time.monotonic() - begun


def test_only_clients_that_came_together_are_waited_for() -> None:
    async def run() -> None:
        scorer: Any = StandIn("v1")
        batcher = Batcher(
            scorer, BatchingConfig(max_delay_ms=1000 * DELAY_S, latency_budget_ms=60_000), ServerMetrics()
        )
        assert await _ask(batcher, [0.0]) < DELAY_S and await _ask(batcher, [0.0]) < DELAY_S
        await _ask(batcher, [0.0, 0.0, 0.0])
        assert await _ask(batcher, [0.0, 0.05, 0.1]) < DELAY_S  # as many as before: nobody else is waited for
        assert scorer.batches == [1, 1, 3, 3]
        assert await _ask(batcher, [0.0]) >= DELAY_S - 0.1  # the others stay away
        assert await _ask(batcher, [0.0]) < DELAY_S
        assert scorer.batches == [1, 1, 3, 3, 1, 1]
        await batcher.close()

    asyncio.run(run())
