"""Collect requests that arrive together into batches, score them on one thread, and split the
scores again. The event loop never scores. While a batch is scored, the next batch is collected.
A request that would wait longer than the latency budget is refused before it is read into a
batch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pipeline.config.serving import BatchingConfig
from pipeline.runtime.logs import get_logger
from pipeline.serving.scoring.encoded import EncodedSpan
from pipeline.serving.scoring.score_files import add_counts
from pipeline.serving.scoring.scorer import AnyRows, RefusedRow, Scorer, join_rows, refused_rows

PREFIX = "pipeline_serving"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class ServerMetrics:
    """The Prometheus metrics of one server, in a separate registry. A second model has another prefix."""

    def __init__(self, prefix: str = PREFIX, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"{prefix}_{name}", about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"{prefix}_{name}", about, labels, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests answered", "path", "status")
        self.request_seconds = histogram("request_seconds", "From header to answer", SECONDS, "path")
        self.rows = counter("rows", "Rows scored")
        self.bad_rows = counter("bad_rows", "Rows without a score")
        self.values = counter("values", "Values of features with a vocabulary", "feature")
        self.unknown_values = counter(
            "unknown_values", "Those of them that the model does not know, or missing", "feature"
        )
        self.batch_rows = histogram("batch_rows", "Rows scored at once", ROWS)
        self.batch_seconds = histogram("batch_seconds", "A batch in the model", SECONDS)
        self.queue_rows = gauge("queue_rows", "Rows that wait for a batch")
        self.overloads = counter("overloads", "Requests answered with 503, for the queue was full or slow")
        self.artifact = gauge("artifact", "1 for the artifact that serves", "version")
        self.artifact_loaded = gauge("artifact_loaded_timestamp_seconds", "When it was loaded")
        self.switches = counter("artifact_switches", "Changes to another artifact")
        self.refusals = counter("artifact_refusals", "Artifacts that could not be loaded: the one before goes on")
        self.delta_sequence = gauge("delta_sequence", "Number of the delta that serves; 0: the artifact itself")
        self.embedding_age = gauge("embedding_age_seconds", "Since the step that serves was saved")
        about = "Since the newest event that the delta which serves was trained on; 0: not known"
        self.event_age = gauge("event_age_seconds", about)
        self.delta_refusals = counter("delta_refusals", "Deltas that were not taken: what served before goes on")
        self.items = gauge("items", "Items that /retrieve finds among")
        self.retrieved_items = counter("retrieved_items", "Items in the answers of /retrieve")
        self.table_lookups = counter("table_lookups", "Rows of tables on SSD that were asked for")
        self.table_hits = counter("table_cache_hits", "Those of them that were in memory")
        self.observer_drops = counter("observer_drops", "Requests that an observer was too slow for", "observer")
        self.observer_failures = counter("observer_failures", "Requests that an observer failed at", "observer")
        self.feature_ids = counter("feature_table_ids", "Ids that were looked up in feature tables", "column")
        about = "Those of them that the table does not have, or missing"
        self.unknown_ids = counter("feature_table_unknown_ids", about, "column")
        self.cache_bytes = gauge("table_cache_bytes", "Hot rows of tables on SSD in memory")

    def count_ids(self, column: str, num_ids: int, num_unknown: int) -> None:
        """Count ids that were looked up in a feature table."""
        self.feature_ids.labels(column).inc(num_ids)
        self.unknown_ids.labels(column).inc(num_unknown)


FIRST_LOOK_ROWS = 1000  # after so many rows, ten times as many, and so on
SPEED_MEMORY = 0.8  # of the running mean of rows a second
logger = get_logger(__name__)


class Queries(Protocol):
    """Rows with constraints, as a retriever takes them. concat_requests(parts) joins the rows of several requests."""

    @property
    def num_rows(self) -> int: ...

    def slice(self, begin: int, length: int) -> Queries: ...


Asked: TypeAlias = AnyRows | Queries


class Overloaded(Exception):
    """The response would come too late. `retry_after_s`: the time after which the queue should be shorter."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


@dataclass(frozen=True)
class Scores:
    """`scores` float32 [num_rows] or [num_rows, tasks], NaN for `refused` rows; for Queries objects or None.
    encoded: what the rows became, in the batches that they were scored in; empty for Queries.
    """

    scores: np.ndarray
    refused: list[RefusedRow]
    version: str = ""  # of what scored them
    encoded: tuple[EncodedSpan, ...] = ()


@dataclass
class _Item:
    rows: Asked
    answer: asyncio.Future[Scores]
    is_first: bool = True  # of its request
    arrived: float = field(default_factory=lambda: time.monotonic())  # looked up anew: tests set the clock


class Batcher:
    """Makes batches. All methods run on the event loop that made the object; only the scorer runs in another thread."""

    def __init__(self, scorer: Scorer, config: BatchingConfig, metrics: ServerMetrics) -> None:
        self._scorer, self._config, self._metrics = scorer, config, metrics
        self._waiting: deque[_Item] = deque()
        self._queued_rows = self._rows_under_way = 0
        self._rows_per_s = 0.0  # unknown before the first batch
        self._row_zero: dict[str, list[int]] = {}
        self._of_features: dict[str, tuple[Counter, Counter]] = {}
        self._num_rows, self._look_at_rows = 0, FIRST_LOOK_ROWS
        self._last_batch, self._idle_since = 1, 0.0  # its requests, and when they were answered
        self._arrival = asyncio.Event()
        self._changes: deque[tuple[Callable[[], None], asyncio.Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._task = asyncio.create_task(self._run())

    async def score(self, rows: Asked) -> Scores:
        """Score rows. Raises Overloaded, or the exception that the scorer raises for these rows alone."""
        if not rows.num_rows:
            return Scores(np.zeros(0, np.float32), [], self._scorer.version)
        self._admit(rows.num_rows)
        size = self._config.max_rows
        loop = asyncio.get_running_loop()
        items = [
            _Item(rows.slice(begin, size), loop.create_future(), begin == 0) for begin in range(0, rows.num_rows, size)
        ]
        for item in items:
            self._waiting.append(item)
            self._count_queued(item.rows.num_rows)
        self._arrival.set()
        parts = await asyncio.gather(*(item.answer for item in items))
        if len(parts) == 1:
            return parts[0]
        refused = [
            RefusedRow(row.row + number * size, row.reason) for number, part in enumerate(parts) for row in part.refused
        ]
        scores, encoded = (np.concatenate([part.scores for part in parts]), sum((part.encoded for part in parts), ()))
        return Scores(scores, refused, parts[0].version, encoded)

    async def change(self, work: Callable[[], None]) -> None:
        """Run `work` on the scoring thread, between two batches and two requests. Raises what it raises."""
        done = asyncio.get_running_loop().create_future()
        self._changes.append((work, done))
        self._arrival.set()
        await done

    async def _make_changes(self) -> None:
        """Make the changes, unless a request was scored in part: all rows of a response must come from one model."""
        while self._changes and (not self._waiting or self._waiting[0].is_first):
            work, done = self._changes.popleft()
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, work)
                if not done.done():  # else whoever waited has gone
                    done.set_result(None)
            except Exception as error:
                _fail(done, error)

    def _admit(self, num_rows: int) -> None:
        queued, config = self._queued_rows, self._config
        if queued and queued + num_rows > config.queue_rows:
            self._metrics.overloads.inc()
            raise Overloaded(f"{queued} rows are waiting, the queue holds {config.queue_rows}", self._wait_s(queued))
        if (wait_s := self._wait_s(queued + self._rows_under_way)) * 1000 > config.latency_budget_ms:
            self._metrics.overloads.inc()
            raise Overloaded(f"an answer would take about {wait_s:.1f} s", wait_s)

    def _wait_s(self, num_rows: int) -> float:
        return num_rows / self._rows_per_s if self._rows_per_s else 0.0

    def _count_queued(self, change: int) -> None:
        self._queued_rows += change
        self._metrics.queue_rows.inc(change)

    async def _run(self) -> None:
        while True:
            await self._arrival.wait()
            await self._make_changes()
            batch = await self._gather()
            if batch:
                await self._answer(batch)
                self._last_batch, self._idle_since = len(batch), time.monotonic()

    async def _gather(self) -> list[_Item]:
        """Return the waiting requests. If several came, first wait max_delay_ms for more of them."""
        config, delay_s = self._config, self._config.max_delay_ms / 1000
        now = time.monotonic()
        until = self._waiting[0].arrived + delay_s if self._waiting else now
        wanted = self._last_batch if now - self._idle_since < delay_s else 1
        while (
            len(self._waiting) < wanted
            and self._queued_rows < config.max_rows
            and (left := until - time.monotonic()) > 0
        ):
            self._arrival.clear()
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except TimeoutError:
                break
        batch: list[_Item] = []
        num_rows = 0
        while self._waiting and (not batch or num_rows + self._waiting[0].rows.num_rows <= config.max_rows):
            item = self._waiting.popleft()
            self._count_queued(-item.rows.num_rows)
            waited_s = time.monotonic() - item.arrived
            if item.answer.done():  # its client has gone
                continue
            if waited_s * 1000 > config.latency_budget_ms:
                self._metrics.overloads.inc()
                item.answer.set_exception(Overloaded(f"waited for {waited_s:.1f} s", waited_s))
                continue
            batch.append(item)
            num_rows += item.rows.num_rows
        if self._waiting:
            self._arrival.set()
        else:
            self._arrival.clear()
        return batch

    async def _answer(self, batch: list[_Item]) -> None:
        self._rows_under_way = sum(item.rows.num_rows for item in batch)
        try:
            parts = [item.rows for item in batch]
            scored = await self._score(getattr(type(parts[0]), "concat_requests", join_rows)(parts))
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0].answer, error)
                return
            for item in batch:  # one request's rows must not fail another's
                await self._answer([item])
            return
        finally:
            self._rows_under_way = 0
        begin, refused = 0, deque(scored.refused)
        for item in batch:
            end = begin + item.rows.num_rows
            of_item = []
            while refused and refused[0].row < end:
                row = refused.popleft()
                of_item.append(RefusedRow(row.row - begin, row.reason))
            if not item.answer.done():
                encoded = tuple(EncodedSpan(span.parts, begin, end) for span in scored.encoded)  # one, or none
                item.answer.set_result(Scores(scored.scores[begin:end], of_item, scored.version, encoded))
            begin = end

    async def _score(self, rows: Asked) -> Scores:
        def work() -> tuple[Scores, float, Mapping[str, Sequence[int]]]:
            started = time.monotonic()
            scored = self._scorer.score(rows)  # Queries where it retrieves
            parts = getattr(scored, "encoded", None)
            encoded = (EncodedSpan(parts, 0, rows.num_rows),) if parts else ()
            scores = Scores(scored.scores, refused_rows(scored), self._scorer.version, encoded)
            return scores, time.monotonic() - started, scored.row_zero

        scores, seconds, row_zero = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        speed = rows.num_rows / max(seconds, 1e-9)
        self._rows_per_s = SPEED_MEMORY * self._rows_per_s + (1 - SPEED_MEMORY) * speed if self._rows_per_s else speed
        self._metrics.batch_rows.observe(rows.num_rows)
        self._metrics.batch_seconds.observe(seconds)
        self._metrics.rows.inc(rows.num_rows)
        self._metrics.bad_rows.inc(len(scores.refused))
        self._count_unknown(row_zero, rows.num_rows)
        return scores

    def _count_unknown(self, row_zero: Mapping[str, Sequence[int]], num_rows: int) -> None:
        """Count unknown values. If a feature has unusually many, log a warning, less and less often."""
        add_counts(self._row_zero, row_zero)
        for name, (values, unknown) in row_zero.items():
            if (counters := self._of_features.get(name)) is None:  # finding one by its label costs more than counting
                labelled = self._metrics.values.labels(name), self._metrics.unknown_values.labels(name)
                counters = self._of_features[name] = labelled
            counters[0].inc(values)
            if unknown:
                counters[1].inc(unknown)
        self._num_rows += num_rows
        if self._num_rows >= self._look_at_rows:
            self._look_at_rows *= 10
            if text := self._scorer.unusual(self._row_zero):
                logger.warning("%s rows scored; %s", f"{self._num_rows:,}", text)

    async def close(self) -> None:
        """Stop. The caller must have no request left."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for item in self._waiting:
            self._count_queued(-item.rows.num_rows)
            item.answer.cancel()
        for _, done in self._changes:
            done.cancel()
        await asyncio.to_thread(self._thread.shutdown)


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():  # else whoever waited has gone
        answer.set_exception(error)
