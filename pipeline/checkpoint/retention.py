"""Say which steps a checkpoint folder has no more need of: all but the last few and the best few.

Steps that build on one another are a chain, which goes or stays as one; a whole step that nothing builds on is a chain of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.registry import components

HIGHER_IS_BETTER = ("auc", "gauc", "ndcg_at_", "hit_rate_at_", "recall_at_", "mrr", "r2")
LATER_VERIFIED = 2  # a step goes only when as many later ones are known to be intact


@dataclass(frozen=True)
class Retention:
    """The last `keep_last_n` chains stay, and beside them those of the `keep_best_n` best steps by `best_metric`."""

    keep_last_n: int = 2
    keep_best_n: int = 0
    best_metric: str = "ne"

    @property
    def most_steps(self) -> int:
        return max(self.keep_last_n, LATER_VERIFIED) + self.keep_best_n

    def expendable(self, metrics: Mapping[int, float | None], bases: Mapping[int, int] | None = None) -> list[int]:
        """Of step -> metric (None: not measured at that step), never one of the last two chains: the steps that can go.

        `bases`: the whole step that each builds on; None: each is whole. Ascending by chains, in a chain the last step first.
        """
        bases = bases or {step: step for step in metrics}
        chains = sorted({bases[step] for step in metrics})
        last = set(chains[-max(self.keep_last_n, LATER_VERIFIED) :])
        sign = -1.0 if is_higher_better(self.best_metric) else 1.0
        measured = {
            step: sign * value for step, value in metrics.items() if value is not None and not math.isnan(value)
        }
        # Of equal ones the later is better: it has seen more.
        ranked = sorted(
            (step for step in measured if bases[step] not in last), key=lambda step: (measured[step], -step)
        )
        kept = last | {bases[step] for step in ranked[: self.keep_best_n]}
        going = [step for step in metrics if bases[step] not in kept]
        return sorted(going, key=lambda step: (bases[step], -step))


def is_higher_better(metric: str) -> bool:
    """`metric` may be one of several labels': <label>/<metric>. One that trainer.metrics named says it itself."""
    name = metric_of(metric)
    if name in (registered := components("metric")):
        return bool(registered[name].higher_is_better)
    return name.startswith(HIGHER_IS_BETTER)


def metric_of(name: str) -> str:
    """`ne` of `ne`, and of `click/ne`, as a metric of one of several labels is called."""
    return name.rpartition("/")[2]


def measured_metric(manifest: Mapping[str, object], name: str) -> float | None:
    """Of the weights that the step holds: metrics of an earlier step say nothing of them."""
    metrics = manifest.get("metrics")
    if manifest.get("metrics_step") != manifest.get("step") or not isinstance(metrics, Mapping):
        return None
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) else None
