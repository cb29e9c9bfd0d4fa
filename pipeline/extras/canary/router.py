"""Answer a share of the requests by a challenger:  python -m pipeline serve artifact=registry/q router.canary.artifact=registry/q

The hash of a key (a column, or the request id) and of the challenger's version chooses the model,
so a key has one model on every server and after every restart. A request is scored by one model, in
one batcher, which applies deltas between requests: no answer mixes versions. If the challenger
fails, the champion answers. Shadow scores are computed after the answer, by the challenger's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from dataclasses import dataclass

from pipeline.config.registry import register
from pipeline.extras.canary.pair_log import PairLog, Pairs
from pipeline.extras.canary.slot import ChallengerSlot
from pipeline.runtime.errors import ConfigError, ServingError, check_above, check_within
from pipeline.runtime.logs import get_logger
from pipeline.serving.http.batching import PREFIX, Asked, Overloaded, Scores
from pipeline.serving.http.request_rows import BadRequest
from pipeline.serving.http.routing import Read, ServerParts, read_rows
from pipeline.serving.http.switching import ServedModel
from pipeline.serving.scoring.scorer import JoinedRows, UserItems, names_of, retrieves, schema_of, tables_of

WAITING = 256  # shadow requests; more are dropped and counted
AT_ONCE = 32
CHALLENGER = f"{PREFIX}_challenger"  # prefix of its metrics
logger = get_logger(__name__)


@register("router", "canary")
@dataclass
class CanarySettings:
    """artifact: a registry, whose canary.json names the challenger, or an artifact's folder. share of
    the keys that the challenger answers; None: the share in canary.json. key: a column of the
    requests' rows; None: the request id. shadow: share of the champion's requests that the challenger
    scores too. log: a folder for the pairs of scores, at most log_mb large; None: no log.
    """

    artifact: str = "???"
    share: float | None = None
    key: str | None = None
    shadow: float = 0.0
    log: str | None = None
    log_mb: float = 256.0

    def __post_init__(self) -> None:
        if self.share is not None:
            check_within("router.canary.share", self.share, 0.0, 1.0)
        check_within("router.canary.shadow", self.shadow, 0.0, 1.0)
        check_above("router.canary.log_mb", self.log_mb, 0.0)

    def make(self, server: ServerParts) -> Canary:
        return Canary(self, server)


def is_in_share(key: str, salt: str, share: float) -> bool:
    """Return True for a share of all keys. Another salt takes other keys."""
    digest = hashlib.blake2b(f"{salt}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def key_of(rows: Asked, column: str) -> str | None:
    """Return the column's value in the first row as text; None if it is missing."""
    if isinstance(rows, UserItems):
        rows = rows.user if column in names_of(rows.user) else rows.items
    elif isinstance(rows, JoinedRows):
        return key_of(rows.parts[0], column)
    columns = getattr(rows, "columns", None)
    if not rows.num_rows or columns is None or column not in names_of(rows):
        return None
    first = columns[names_of(rows).index(column)][0]
    value = first.as_py() if hasattr(first, "as_py") else first
    return None if value is None else str(value)


@dataclass(frozen=True)
class _Shadow:
    """A request that the champion has answered and the challenger scores too."""

    request_id: str
    at: float
    model: ServedModel
    rows: Asked
    scored: Scores
    body: bytes
    read: Read


class Canary:
    """The router. It holds the challenger; the champion is the server's slot."""

    def __init__(self, settings: CanarySettings, server: ServerParts) -> None:
        """Raises ServingError if the key is not a column, or the champion retrieves items."""
        champion = server.slot.model
        if retrieves(champion.scorer):
            raise ServingError("router.canary compares scores, and this artifact finds items: leave the router out")
        names = schema_of(champion.scorer.columns).names
        if settings.key is not None and settings.key not in names:
            raise ConfigError(
                f"router.canary.key={settings.key} is not a column of the requests; choose one of "
                f"{', '.join(names[:20])}"
            )
        self._settings, self._champion, self._watch_s = settings, server.slot, server.watch_s
        self._challenger = ChallengerSlot(settings.artifact, server)
        self._log = PairLog(settings.log, int(settings.log_mb * 2**20), server.metrics.registry, CHALLENGER)
        self._waiting: deque[_Shadow] = deque()
        self._came = asyncio.Event()

    @property
    def _share(self) -> float:
        return self._challenger.share if self._settings.share is None else self._settings.share

    async def score(self, request_id: str, body: bytes, read: Read) -> tuple[ServedModel, Asked, Scores]:
        with self._champion.hold() as model:
            rows = await read_rows(model, body, read)
            if self._challenger.is_loaded:  # nothing is awaited until it is held
                key = None if self._settings.key is None else key_of(rows, self._settings.key)
                if is_in_share(request_id if key is None else key, self._challenger.salt, self._share):
                    answered = await self._by_challenger(request_id, (model, rows), body, read)
                    if answered is not None:
                        return answered
            scored = await model.batcher.score(rows)
        self._maybe_shadow(_Shadow(request_id, time.time(), model, rows, scored, body, read))
        return model, rows, scored

    async def _by_challenger(
        self, request_id: str, of_champion: tuple[ServedModel, Asked], body: bytes, read: Read
    ) -> tuple[ServedModel, Asked, Scores] | None:
        """Return the challenger's answer; None if it fails, and then the champion answers."""
        try:
            with self._challenger.hold() as other:
                rows = await _rows_for(other, of_champion, body, read)
                scored = await other.batcher.score(rows)
        except (BadRequest, Overloaded, ValueError, RuntimeError, ArithmeticError, LookupError, TypeError) as error:
            self._log.failed(error)
            return None
        self._log.add(Pairs.of_answer(request_id, time.time(), scored, by_challenger=True))
        return other, rows, scored

    def _maybe_shadow(self, request: _Shadow) -> None:
        if not self._challenger.is_loaded:
            return
        chosen = is_in_share(request.request_id, f"shadow {self._challenger.salt}", self._settings.shadow)
        if chosen and len(self._waiting) < WAITING:
            self._waiting.append(request)
            self._came.set()
        elif chosen:
            self._log.dropped.inc()
        else:
            self._log.add(Pairs.of_answer(request.request_id, request.at, request.scored, by_challenger=False))

    async def watch(self) -> None:
        await asyncio.gather(self._challenger.watch(self._watch_s), self._score_shadows(), self._log.write_often())

    async def _score_shadows(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                taken = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
                await asyncio.gather(*map(self._shadow, taken))

    async def _shadow(self, request: _Shadow) -> None:
        if not self._challenger.is_loaded:
            return
        try:
            with self._challenger.hold() as other:
                rows = await _rows_for(other, (request.model, request.rows), request.body, request.read)
                scored = await other.batcher.score(rows)
        except Exception as error:
            self._log.failed(error)
            return
        self._log.add(Pairs.of_both(request.request_id, request.at, request.scored, scored))

    async def close(self) -> None:
        await self._challenger.drop()
        await asyncio.to_thread(self._log.close)


async def _rows_for(other: ServedModel, of_champion: tuple[ServedModel, Asked], body: bytes, read: Read) -> Asked:
    """Return the rows as the challenger reads them. If both read the same columns, these are the champion's rows."""
    model, rows = of_champion
    has_tables = tables_of(other.scorer) is not None or tables_of(model.scorer) is not None  # each fills its own
    if other.reader.schema.equals(model.reader.schema) and other.path == model.path and not has_tables:
        return rows
    return await read_rows(other, body, read)
