"""Find the best of a run's steps by the metrics that were measured when each was saved (without
torch)."""

from __future__ import annotations

import math
from typing import Any

from pipeline.checkpoint.retention import is_higher_better, measured_metric
from pipeline.checkpoint.steps import list_steps, read_manifest, step_path
from pipeline.runtime.errors import DamagedError


def best_step(folder: str, metric: str) -> tuple[int, dict[str, Any]] | None:
    """Return the step with the best `metric` and all its metrics; of equal steps the later one.

    A step with an unreadable manifest, or saved without an evaluation, is not considered.
    """
    found: list[tuple[float, int, dict[str, Any]]] = []
    sign = 1.0 if is_higher_better(metric) else -1.0
    for step in list_steps(folder):
        try:
            manifest = read_manifest(step_path(folder, step))
        except DamagedError:
            continue
        value = measured_metric(manifest, metric)
        if value is not None and not math.isnan(value):
            metrics = {name: math.nan if each is None else each for name, each in manifest["metrics"].items()}
            found.append((sign * value, step, metrics))
    best = max(found, key=lambda each: each[:2], default=None)
    return None if best is None else best[1:]
