"""Turn `artifact=` of a job into a loaded scorer: a folder that export wrote, a link to one, or a registry's champion."""

from __future__ import annotations

import os

from pipeline.serving.scorer import Scorer
from pipeline.serving.server_config import SsdConfig


def load_artifact(artifact: str, memory: str, ssd: SsdConfig, threads: int | None) -> Scorer:
    """Raises ValueError where the artifact is damaged, or `artifact` names none."""
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    from pipeline.serving.predictor import Predictor

    return Predictor.load(artifact, memory=memory)  # type: ignore[no-any-return]
