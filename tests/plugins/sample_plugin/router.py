"""A router in one file: one model answers, and requests whose id begins with `refused` are turned away."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pipeline.config.registry import register
from pipeline.serving.http.request_rows import BadRequest
from pipeline.serving.http.routing import Read, read_rows


@register("router", "doorkeeper")
@dataclass
class Doorkeeper:
    refused: str = "???"

    def make(self, server: Any) -> _Router:
        return _Router(self.refused, server.slot)


class _Router:
    def __init__(self, refused: str, slot: Any) -> None:
        self._refused, self._slot = refused, slot

    async def score(self, request_id: str, body: bytes, read: Read) -> Any:
        if request_id.startswith(self._refused):
            raise BadRequest(403, f"{request_id} is turned away")
        with self._slot.hold() as model:
            rows = await read_rows(model, body, read)
            return model, rows, await model.batcher.score(rows)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass
