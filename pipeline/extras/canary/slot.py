"""Hold the challenger of a server: load it when a canary starts, follow its deltas, and drop it when the canary ends."""

from __future__ import annotations

import asyncio
import time

from pipeline.extras.canary.pointer import FILE, CanaryFile
from pipeline.retraining.registry import POINTER, Registry
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.masking import mask
from pipeline.runtime.storage import storage
from pipeline.serving.http.batching import PREFIX, ServerMetrics
from pipeline.serving.http.routing import ServerParts
from pipeline.serving.http.switching import RETRY_S, ModelSlot, try_out
from pipeline.serving.scoring.load import FoundArtifact, find_folder
from pipeline.serving.scoring.scorer import Scorer, retrieves

logger = get_logger(__name__)


class ChallengerSlot(ModelSlot):
    """A slot that may be empty. share: the share in canary.json; 0 for an artifact's folder."""

    what = "challenger"

    def __init__(self, artifact: str, server: ServerParts) -> None:
        def load(found: FoundArtifact) -> Scorer:
            scorer = server.load(found)
            if retrieves(scorer):
                raise ServingError(f"{found.path} finds items, and a challenger gives scores")
            return scorer

        metrics = ServerMetrics(f"{PREFIX}_challenger", server.metrics.registry)
        super().__init__(self.find_challenger, load, server.batching, server.limits, metrics)
        self._artifact, self.share = artifact, 0.0
        self._checking = asyncio.Lock()

    @property
    def salt(self) -> str:
        """Return the artifact's version without the delta, so that keys stay with their model."""
        return self.model.scorer.version.partition("+")[0]

    def find_challenger(self) -> FoundArtifact | None:
        """Return the challenger that is wanted now, None if there is none. Raises UserError."""
        is_registry = any(storage.is_file(storage.join(self._artifact, name)) for name in (POINTER, FILE))
        if not is_registry:
            return find_folder(self._artifact)
        pointer = CanaryFile(self._artifact).read()
        self.share = pointer.share
        if pointer.version is None:
            return None
        artifact = Registry(self._artifact).version(pointer.version).artifact
        if artifact is None:
            raise ServingError(f"{pointer.version} of {self._artifact} has no artifact")
        return FoundArtifact(artifact, f"{self._artifact}:{pointer.version}")

    async def watch(self, every_s: float) -> None:
        await self.check()
        await super().watch(every_s)

    async def check(self) -> None:
        async with self._checking:  # else two of them could load two models
            await super().check()

    async def follow(self, found: FoundArtifact | None) -> None:
        refused, when = self._refused
        if found is None:
            await self._drop()
        elif self.is_loaded:
            await super().follow(found)
        elif found.key != refused or time.monotonic() - when >= RETRY_S:
            await self._load_first(found)

    async def _load_first(self, found: FoundArtifact) -> None:
        try:
            scorer = await asyncio.to_thread(self._load, found)
            await asyncio.to_thread(try_out, scorer)
        except Exception as error:
            self._metrics.refusals.inc()
            if found.key != self._refused[0]:
                logger.error("refused the challenger %s: %s", found.path, mask(str(error)))
            self._refused = (found.key, time.monotonic())
            return
        self.begin(found, scorer)
        logger.info("challenger %s serves now", scorer.version)

    async def drop(self) -> None:
        """Serve no challenger. Waits for its answers."""
        async with self._checking:
            await self._drop()

    async def _drop(self) -> None:
        if self._model is None:
            return
        model, self._model = self._model, None
        self._metrics.artifact.remove(model.scorer.version)
        logger.info("challenger %s serves no longer", model.scorer.version)
        await model.released.wait()
        await model.batcher.close()
