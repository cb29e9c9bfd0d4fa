"""Choose which steps of a checkpoint folder can be removed. The last and the best steps are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.steps import list_steps, read_manifest, step_path
from pipeline.config.registry import FEATURE, components
from pipeline.runtime.errors import DamagedError

HIGHER_IS_BETTER = ("auc", "gauc", "ndcg_at_", "hit_rate_at_", "recall_at_", "mrr", "r2")
LATER_VERIFIED = 2  # a step is removed only if this many later steps are known to be intact


@dataclass(frozen=True)
class Retention:
    """Keeps the last `keep_last_n` chains, and the chains of the `keep_best_n` best steps by
    `best_metric`."""

    keep_last_n: int = 2
    keep_best_n: int = 0
    best_metric: str = "ne"

    @property
    def most_steps(self) -> int:
        return max(self.keep_last_n, LATER_VERIFIED) + self.keep_best_n

    def expendable(self, metrics: Mapping[int, float | None], bases: Mapping[int, int] | None = None) -> list[int]:
        """Return the steps that can be removed. The last two chains are always kept.

        `metrics`: step -> metric (None: not measured at that step). `bases`: step -> the full step
        that it builds on; None means that all steps are full. The result has the oldest chain
        first, and in each chain the last step first.
        """
        bases = bases or {step: step for step in metrics}
        chains = sorted({bases[step] for step in metrics})
        last = set(chains[-max(self.keep_last_n, LATER_VERIFIED) :])
        sign = -1.0 if is_higher_better(self.best_metric) else 1.0
        measured = {
            step: sign * value for step, value in metrics.items() if value is not None and not math.isnan(value)
        }
        # Of steps with equal metrics the later one is better, because it was trained longer.
        ranked = sorted(
            (step for step in measured if bases[step] not in last), key=lambda step: (measured[step], -step)
        )
        kept = last | {bases[step] for step in ranked[: self.keep_best_n]}
        going = [step for step in metrics if bases[step] not in kept]
        return sorted(going, key=lambda step: (bases[step], -step))


def is_higher_better(metric: str) -> bool:
    """Return True if a higher `metric` is better. `metric` may be <label>/<metric>, or a registered
    metric."""
    name = metric_of(metric).partition(FEATURE)[0]
    if name in (registered := components("metric")):
        return bool(registered[name].higher_is_better)
    return name.startswith(HIGHER_IS_BETTER)


def metric_of(name: str) -> str:
    """Return `ne` for `ne` and also for `click/ne`, the metric `ne` of the label `click`."""
    return name.rpartition("/")[2]


def measured_metric(manifest: Mapping[str, object], name: str) -> float | None:
    """Return the metric that was measured with the step's weights. Metrics of an earlier step are ignored."""
    metrics = manifest.get("metrics")
    if manifest.get("metrics_step") != manifest.get("step") or not isinstance(metrics, Mapping):
        return None
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def best_step(folder: str, metric: str) -> tuple[int, dict[str, Any]] | None:
    """Return the step with the best `metric`, and all its metrics. If steps are equal, return the
    later step. Steps with an unreadable manifest, or without an evaluation, are not considered.
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
