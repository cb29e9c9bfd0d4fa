"""Log the scores of champion and challenger by request id, as Parquet files, and compare them while serving.

A row has the score of the model that answered, and for shadowed requests also the challenger's
score. Files are written every few seconds and the oldest are removed, so the folder stays bounded.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge
from scipy.stats import spearmanr

from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.masking import mask
from pipeline.runtime.storage import storage
from pipeline.serving.http.batching import Scores

EVERY_S = 2.0  # between two files
COMPARED = 10_000  # pairs that the metrics compare
SAY_EVERY_S = 60.0
FLOATS = pa.float32()
SCHEMA = pa.schema(
    [
        ("request_id", pa.string()), ("row", pa.int32()), ("at", pa.float64()), ("by_challenger", pa.bool_()),
        ("champion", pa.string()), ("champion_score", FLOATS),
        ("challenger", pa.string()), ("challenger_score", FLOATS),
    ]
)  # fmt: skip
logger = get_logger(__name__)


@dataclass(frozen=True)
class Pairs:
    """The rows of one request. A version is None and its scores are NaN if that model did not score them."""

    request_id: str
    at: float
    by_challenger: bool
    champion: str | None
    champion_scores: NDArray[np.float32]
    challenger: str | None
    challenger_scores: NDArray[np.float32]

    @classmethod
    def of_answer(cls, request_id: str, at: float, scored: Scores, by_challenger: bool) -> Pairs:
        own = _first_label(scored)
        none = np.full_like(own, np.nan)
        if by_challenger:
            return cls(request_id, at, True, None, none, scored.version, own)
        return cls(request_id, at, False, scored.version, own, None, none)

    @classmethod
    def of_both(cls, request_id: str, at: float, champion: Scores, challenger: Scores) -> Pairs:
        scores = _first_label(champion), _first_label(challenger)
        return cls(request_id, at, False, champion.version, scores[0], challenger.version, scores[1])


def _first_label(scored: Scores) -> NDArray[np.float32]:
    scores: NDArray[np.float32] = scored.scores.reshape(len(scored.scores), -1)[:, 0]
    return scores


def table_of(requests: Sequence[Pairs]) -> pa.Table:
    """Return the rows of requests with SCHEMA."""
    counts = [len(each.champion_scores) for each in requests]
    of_row = np.repeat(np.arange(len(requests)), counts)
    scores = [
        pa.array(np.concatenate([getattr(each, name) for each in requests]), FLOATS, from_pandas=True)
        for name in ("champion_scores", "challenger_scores")
    ]

    def of_requests(name: str) -> pa.Array:
        return pa.array([getattr(each, name) for each in requests], SCHEMA.field(name).type).take(pa.array(of_row))

    ids, at, by_challenger, champion, challenger = map(
        of_requests, ("request_id", "at", "by_challenger", "champion", "challenger")
    )
    rows = pa.array(np.concatenate([np.arange(count, dtype=np.int32) for count in counts]), pa.int32())
    return pa.table([ids, rows, at, by_challenger, champion, scores[0], challenger, scores[1]], schema=SCHEMA)


def read_pairs(log: str) -> pa.Table:
    """Return the rows of a log, oldest file first, while a server goes on writing it: files that it removes meanwhile
    are left out. Raises DataError: not a log, or a log without a file.
    """
    names = [log] if storage.is_file(log) else [storage.join(log, name) for name in _file_names(log)]
    tables = []
    for name in names:
        try:
            with storage.open_file(name, "rb") as file:
                table = pq.read_table(file)
        except FileNotFoundError:
            continue
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{name} of log={log} is not Parquet: {' '.join(str(error).split())[:150]}") from None
        if not table.schema.equals(SCHEMA):
            raise DataError(
                f"log={log} is not a log of router.canary.log: it has the columns {table.column_names[:10]}"
            )
        tables.append(table)
    if not tables:
        raise DataError(
            f"log={log} has no file yet: give the folder of router.canary.log, and wait until the canary has answered"
        )
    return pa.concat_tables(tables)


def _file_names(folder: str) -> list[str]:
    return [name for name in storage.list_folder(folder) if name.endswith(".parquet")]


class PairLog:
    """Collects pairs on the event loop. Files are written in another thread."""

    def __init__(self, folder: str | None, max_bytes: int, registry: CollectorRegistry, prefix: str) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._rows: list[Pairs] = []
        self._compared: deque[tuple[float, float]] = deque(maxlen=COMPARED)
        self._versions = ("", "")  # of the compared pairs, without deltas
        self._is_new = False  # there are pairs that were not compared yet
        self._said_at, self._failed_as = time.monotonic(), ""
        self._failures = Counter(f"{prefix}_failures", "Requests that the challenger failed at", registry=registry)
        self.dropped = Counter(f"{prefix}_shadow_drops", "Shadow requests that did not fit", registry=registry)
        self._shadows = Counter(f"{prefix}_shadow_rows", "Rows that both models have scored", registry=registry)
        about = f"Of the newest {COMPARED} rows that both models have scored: "
        self._difference = Gauge(f"{prefix}_mean_difference", f"{about}mean absolute difference", registry=registry)
        self._correlation = Gauge(f"{prefix}_rank_correlation", f"{about}Spearman's", registry=registry)

    def add(self, pairs: Pairs) -> None:
        if self._folder is not None:
            self._rows.append(pairs)
        if pairs.champion is None or pairs.challenger is None:
            return
        versions = pairs.champion.partition("+")[0], pairs.challenger.partition("+")[0]
        if versions != self._versions:
            self._compared.clear()
            self._versions = versions
        self._is_new = True
        self._shadows.inc(len(pairs.champion_scores))
        for pair in zip(pairs.champion_scores.tolist(), pairs.challenger_scores.tolist(), strict=True):
            if np.isfinite(pair).all():
                self._compared.append(pair)

    def failed(self, error: Exception) -> None:
        """Count a request that the challenger failed at; the champion has answered it."""
        self._failures.inc()
        said = f"{type(error).__name__}: {error}"[:200]
        if said != self._failed_as:
            logger.warning("the challenger failed, and the champion answers: %s", mask(said))
        self._failed_as = said

    async def write_often(self) -> None:
        """Write files and update the metrics, until the task is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            rows, self._rows = self._rows, []
            try:
                await asyncio.to_thread(self._write, rows)
            except OSError as error:
                logger.error("the pairs of %d requests are lost: %s", len(rows), mask(str(error)))
            self._compare()

    def _compare(self) -> None:
        if len(self._compared) < 2 or not self._is_new:
            return
        self._is_new = False
        champion, challenger = np.array(self._compared).T
        difference = float(np.abs(champion - challenger).mean())
        constant = np.ptp(champion) == 0 or np.ptp(challenger) == 0
        correlation = float("nan") if constant else float(spearmanr(champion, challenger).statistic)
        self._difference.set(difference)
        self._correlation.set(correlation)
        if time.monotonic() - self._said_at >= SAY_EVERY_S:
            self._said_at = time.monotonic()
            logger.info(
                "challenger %s compared with %s on %s rows: mean difference %.5f, rank correlation %.4f",
                self._versions[1], self._versions[0], f"{len(champion):,}", difference, correlation,
            )  # fmt: skip

    def _write(self, rows: list[Pairs]) -> None:
        if not rows or self._folder is None:
            return
        sink = pa.BufferOutputStream()
        pq.write_table(table_of(rows), sink, compression="zstd")
        storage.make_folder(self._folder)
        name = f"{time.time_ns():020d}-{os.getpid()}.parquet"
        storage.publish_bytes(storage.join(self._folder, name), sink.getvalue().to_pybytes())
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        assert self._folder is not None
        names = _file_names(self._folder)
        sizes = {name: storage.size_bytes(storage.join(self._folder, name)) for name in names}
        left = sum(sizes.values())
        for name in names[:-1]:
            if left <= self._max_bytes:
                return
            storage.remove(storage.join(self._folder, name))
            left -= sizes[name]

    def close(self) -> None:
        rows, self._rows = self._rows, []
        self._write(rows)
