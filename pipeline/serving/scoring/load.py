"""Turn `artifact=` of a job into a loaded scorer: a folder that export wrote, a link to one, or a registry's champion."""

from __future__ import annotations

import os
from typing import Any

from pipeline.config.server import SsdConfig
from pipeline.serving.scoring.scorer import Scorer


def load_artifact(artifact: str, memory: str, ssd: SsdConfig, threads: int | None, compiled: bool) -> Scorer:
    """Raises ServingError where the artifact is damaged, `artifact` names none, or has no compiled layers that are asked for."""
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    from pipeline.serving.scoring.predictor import Predictor

    cache_bytes = None if ssd.cache_gb is None else int(ssd.cache_gb * 2**30)
    return Predictor.load(artifact, memory=memory, cache_bytes=cache_bytes, ssd=ssd, compiled=compiled)


def cache_counts(scorer: object) -> tuple[int, int, int] | None:
    """Lookups of tables on SSD, those that memory answered, and what it holds of them in bytes; None for tables in memory."""
    lookup: Any = getattr(scorer, "lookup", None)
    counts = getattr(lookup, "counts", None)
    return None if counts is None else (counts.lookups, counts.hits, lookup.cache_bytes)
