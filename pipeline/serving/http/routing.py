"""Choose the model that answers a request, if the server has several: a registered router does.

A file registers settings, whose `make` returns the router (`serve router.<name>.<setting>=...`):

    @register("router", "by_country")
    @dataclass
    class ByCountry:
        def make(self, server: ServerParts) -> Router: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pipeline.config.serving import BatchingConfig, LimitsConfig
from pipeline.serving.http.batching import Asked, Scores, ServerMetrics
from pipeline.serving.http.switching import ModelSlot, ServedModel
from pipeline.serving.scoring.load import FoundArtifact
from pipeline.serving.scoring.scorer import Scorer

INLINE_BYTES = 16_384  # what is decoded so quickly that a thread costs more
Read: TypeAlias = Callable[[ServedModel, bytes], Asked]


@dataclass(frozen=True)
class ServerParts:
    """What a router is made of. slot: the model of `artifact=`. load: loads another artifact as `slot` does."""

    slot: ModelSlot
    load: Callable[[FoundArtifact], Scorer]
    batching: BatchingConfig
    limits: LimitsConfig
    metrics: ServerMetrics
    watch_s: float


class Router(Protocol):
    """Scores requests by one of several models. All methods run on the event loop."""

    async def score(self, request_id: str, body: bytes, read: Read) -> tuple[ServedModel, Asked, Scores]:
        """Return the model that answers, the rows as it has read them, and its scores. All scores are of one version."""
        ...

    async def watch(self) -> None:
        """Load other artifacts and do other work, until the task is cancelled."""
        ...

    async def close(self) -> None:
        """End after the last answer."""
        ...


class RouterSettings(Protocol):
    """The settings of a registered router, a dataclass."""

    def make(self, server: ServerParts) -> Router: ...


async def read_rows(model: ServedModel, body: bytes, read: Read) -> Asked:
    """Return the rows of a body, read as the model needs them. Raises BadRequest."""
    return read(model, body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(read, model, body)
