"""Both paths by which CPU ranks of one host exchange: shared memory, and gloo with DDP, which GPUs and several hosts take.

A test that asks for `ranks_each_way` runs once a path; the builders of models (tests.support.sharded_models.build_sharded,
tests.training.tiny.build) then take it where they are given no CommsConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.config.training import CommsConfig
from tests.support.ranks import RankPool

PATHS = {"shared_memory": True, "gloo": False}
_shared_memory = True


def default_comms() -> CommsConfig:
    """What a model of this process is built with."""
    return CommsConfig(shared_memory=_shared_memory)


def _run_on_path(rank: int, shared_memory: bool, function: Callable[..., Any], *args: Any) -> Any:
    global _shared_memory
    before, _shared_memory = _shared_memory, shared_memory
    try:
        return function(rank, *args)
    finally:
        _shared_memory = before


class PathPool(RankPool):
    """The session's pool, whose ranks build models that exchange by one path."""

    def __init__(self, pool: RankPool, shared_memory: bool) -> None:
        self._pool, self._shared_memory = pool, shared_memory

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, local_world_size: int | None = None
    ) -> list[Any]:
        arguments = (self._shared_memory, function, *args)
        return self._pool.run(world_size, _run_on_path, *arguments, local_world_size=local_world_size)

    def close(self) -> None:
        """The session's fixture closes the pool."""


@pytest.fixture(params=list(PATHS))
def ranks_each_way(ranks: RankPool, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield PathPool(ranks, PATHS[request.param])
