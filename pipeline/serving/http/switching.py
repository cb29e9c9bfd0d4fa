"""Switch to a new artifact between two requests: load it, try it, and then replace the model that
serves.

Each request uses one model from beginning to end. The earlier model is closed after its last
response. An artifact that cannot be loaded is refused once, and the earlier model continues. Deltas
are applied in place, on the thread that scores; a pin on an earlier delta loads the artifact again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from pipeline.config.serving import BatchingConfig, LimitsConfig
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.masking import mask
from pipeline.serving.artifact.deltas import StagedDelta, deltas_folder, newest_sequence, stage_delta
from pipeline.serving.http.batching import Batcher, ServerMetrics
from pipeline.serving.http.request_rows import RequestReader
from pipeline.serving.scoring.load import FoundArtifact
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import Scorer, retrieves, tables_of

SCORE, RETRIEVE = "/score", "/retrieve"
RETRY_S = 30.0  # what failed for want of memory, or of a disk, may come right
logger = get_logger(__name__)


class ServedModel:
    """A scorer with its queue, and the number of requests that use it."""

    def __init__(
        self, scorer: Scorer, key: str, batching: BatchingConfig, limits: LimitsConfig, metrics: ServerMetrics
    ):
        self.scorer, self.key = scorer, key
        self.retrieves = retrieves(scorer)
        self.path = RETRIEVE if self.retrieves else SCORE
        if self.retrieves:
            self.reader: RequestReader = scorer.request_reader(limits)  # type: ignore[attr-defined]
        else:
            self.reader = RequestReader(scorer.columns, limits, tables=tables_of(scorer))
        self.reader.count_ids = metrics.count_ids
        self.batcher = Batcher(scorer, batching, metrics)
        self.num_held = 0
        self.released = asyncio.Event()
        self.released.set()


def try_out(scorer: Scorer) -> None:
    """Score an empty row. Raises ServingError if that gives no valid score."""
    if retrieves(scorer):
        scorer.try_out()  # type: ignore[attr-defined]
        return
    schema = RequestReader(scorer.columns, LimitsConfig()).schema
    scored = scorer.score(pa.table([pa.nulls(2, field.type) for field in schema], schema=schema))
    scores = scored.scores.reshape(len(scored.scores), -1)
    binary = [i for i in range(scores.shape[1]) if not scorer.tasks or scorer.tasks[i].kind == "binary"]
    if not np.all((scores[:, binary] >= 0) & (scores[:, binary] <= 1)) or not np.isfinite(scores).all():
        raise ServingError(f"artifact {scorer.version} gives {scored.scores[0]} for an empty row, no probability")


class ModelSlot:
    """The model that serves. All methods run on one event loop, except load() and find()."""

    what = "artifact to serve"

    def __init__(
        self,
        find: Callable[[], FoundArtifact | None],
        load: Callable[[FoundArtifact], Scorer],
        batching: BatchingConfig,
        limits: LimitsConfig,
        metrics: ServerMetrics,
    ) -> None:
        self._find, self._load = find, load
        self._batching, self._limits, self._metrics = batching, limits, metrics
        self._model: ServedModel | None = None
        self._refused: tuple[str, float] = ("", 0.0)  # key, when
        self._refused_delta: tuple[int, float] = (0, 0.0)  # sequence, when
        self._said = ""

    @property
    def model(self) -> ServedModel:
        assert self._model is not None, "nothing is loaded yet"
        return self._model

    @property
    def is_loaded(self) -> bool:
        return self._model is not None

    def begin(self, found: FoundArtifact, scorer: Scorer) -> None:
        """Serve an artifact that was loaded before the event loop started."""
        self._take(found, scorer)

    @contextmanager
    def hold(self) -> Iterator[ServedModel]:
        model = self.model
        model.num_held += 1
        model.released.clear()
        try:
            yield model
        finally:
            model.num_held -= 1
            if not model.num_held:
                model.released.set()

    async def watch(self, every_s: float) -> None:
        """Check for a new artifact every `every_s` seconds, load it and switch to it, until the task is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.check()

    async def check(self) -> None:
        """Switch to the artifact that the pointer names now, if it is another artifact and can be loaded."""
        try:
            found = await asyncio.to_thread(self._find)
        except Exception as error:  # half-way through being replaced, or a store that cannot be reached
            self._warn_once(f"cannot find the {self.what}: {error}")
            return
        self._said = ""
        await self.follow(found)

    async def follow(self, found: FoundArtifact | None) -> None:
        """Switch to an artifact, or apply its new deltas if it serves already."""
        assert found is not None, "only a slot that may be empty finds none"
        refused, when = self._refused
        if found.key == self.model.key:
            await self._follow_deltas(found)
            return
        if found.key == refused and time.monotonic() - when < RETRY_S:
            return
        await self._load_and_switch(found)

    async def _load_and_switch(self, found: FoundArtifact) -> None:
        refused, _ = self._refused
        try:
            scorer = await asyncio.to_thread(self._load, found)
            await asyncio.to_thread(try_out, scorer)
        except Exception as error:
            self._metrics.refusals.inc()
            if found.key != refused:
                logger.error("refused %s, %s goes on: %s", found.path, self.model.scorer.version, mask(str(error)))
            self._refused = (found.key, time.monotonic())
            return
        before = self.model
        self._take(found, scorer)
        self._metrics.switches.inc()
        logger.info("artifact %s serves now, in place of %s", scorer.version, before.scorer.version)
        await before.released.wait()
        await before.batcher.close()

    async def _follow_deltas(self, found: FoundArtifact) -> None:
        """Apply new deltas. If a pin names an earlier delta, load the artifact again, and apply deltas up to it."""
        scorer = self.model.scorer
        if not isinstance(scorer, Predictor):  # the items of a retriever would have to be found again
            return
        refused, when = self._refused_delta
        try:
            wanted = await asyncio.to_thread(newest_sequence, deltas_folder(found.path))
            if wanted < scorer.sequence:
                logger.info("delta %d is pinned: %s is loaded anew", wanted, found.path)
                await self._load_and_switch(found)
                return
            for sequence in range(scorer.sequence + 1, wanted + 1):
                if sequence == refused and time.monotonic() - when < RETRY_S:
                    return
                staged = await asyncio.to_thread(stage_delta, found.path, scorer.manifest, sequence)
                await self._apply(scorer, staged)
        except Exception as error:
            sequence = scorer.sequence + 1
            self._metrics.delta_refusals.inc()
            if sequence != refused:
                logger.error("refused delta %d, %s goes on: %s", sequence, scorer.version, mask(str(error)))
            self._refused_delta = (sequence, time.monotonic())

    async def _apply(self, scorer: Predictor, staged: StagedDelta) -> None:
        before = scorer.version
        await self.model.batcher.change(lambda: scorer.apply(staged))
        self._metrics.artifact.remove(before)
        self._count_version(scorer)
        changed = sum(len(patch.ids) for patch in staged.patches)
        logger.info("delta %d serves now: step %d, %s rows", scorer.sequence, staged.delta.step, f"{changed:,}")

    def _take(self, found: FoundArtifact, scorer: Scorer) -> None:
        before = self._model
        self._model = ServedModel(scorer, found.key, self._batching, self._limits, self._metrics)
        if before and before.scorer.version != scorer.version:
            self._metrics.artifact.remove(before.scorer.version)
        self._count_version(scorer)
        self._metrics.artifact_loaded.set_to_current_time()
        self._metrics.items.set(len(scorer.items) if retrieves(scorer) else 0)  # type: ignore[attr-defined]

    def _count_version(self, scorer: Scorer) -> None:
        self._metrics.artifact.labels(scorer.version).set(1)
        self._metrics.delta_sequence.set(scorer.sequence if isinstance(scorer, Predictor) else 0)

    def _warn_once(self, text: str) -> None:
        if text != self._said:
            logger.warning("%s", mask(text))
        self._said = text

    async def close(self) -> None:
        await self.model.released.wait()
        await self.model.batcher.close()
