"""When a batch begins: at once for a lone request, with others where they come together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from pipeline.config.serving import BatchingConfig
from pipeline.serving.http import batching
from pipeline.serving.http.batching import Batcher, ServerMetrics
from pipeline.serving.scoring.scorer import ColumnLists, schema_of
from tests.serving.servers import ROW
from tests.serving.stand_in import COLUMNS, StandIn, score_of

TABLE = pa.Table.from_pylist([ROW], schema=schema_of(COLUMNS))
LISTS = ColumnLists(TABLE.schema, [TABLE[name].to_pylist() for name in TABLE.column_names], 1)


async def _ask(batcher: Batcher, pauses_s: list[float]) -> None:
    """Requests that are made so long after the first, as Arrow and as lists; returns when all are answered."""

    async def one(number: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        scores = await batcher.score(LISTS if number % 2 else TABLE)
        assert scores.scores.tolist() == [score_of(ROW, "v1")]

    await asyncio.wait_for(asyncio.gather(*(one(number, pause_s) for number, pause_s in enumerate(pauses_s))), 300)


async def _batches_of(delay_s: float, *asked: list[float]) -> list[int]:
    """The sizes of the batches of requests made one after the other, each when the one before is answered."""
    scorer: Any = StandIn("v1")
    batcher = Batcher(scorer, BatchingConfig(max_delay_ms=1000 * delay_s, latency_budget_ms=1e7), ServerMetrics())
    for pauses_s in asked:
        await _ask(batcher, pauses_s)
    await batcher.close()
    return list(scorer.batches)


@pytest.fixture(autouse=True)
def clock_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, one request comes right behind the other."""
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: 1000.0))


def test_a_lone_request_and_as_many_as_before_wait_for_nobody_else() -> None:
    """Whoever waited here would wait for an hour."""
    assert asyncio.run(_batches_of(3600.0, [0.0], [0.0], [0.0] * 3, [0.0, 0.05, 0.1])) == [1, 1, 3, 3]


def test_clients_that_came_together_and_stay_away_are_waited_for_once() -> None:
    waits: list[float] = []

    async def wait_for(event: Any, timeout_s: float) -> None:
        waits.append(timeout_s)
        event.close()
        raise TimeoutError

    async def run() -> list[int]:
        with patch.object(batching.asyncio, "wait_for", wait_for):
            scorer: Any = StandIn("v1")
            batcher = Batcher(scorer, BatchingConfig(max_delay_ms=500.0, latency_budget_ms=1e7), ServerMetrics())
            await asyncio.gather(*(batcher.score(TABLE) for _ in range(3)))
            for _ in range(2):
                await batcher.score(TABLE)
            await batcher.close()
        return list(scorer.batches)

    assert asyncio.run(run()) == [3, 1, 1]
    assert waits == [0.5]
