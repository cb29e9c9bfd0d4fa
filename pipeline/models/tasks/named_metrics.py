"""Measure the metrics named by trainer.metrics in addition to the task's metrics, for each binary
label over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipeline.config.registry import find
from pipeline.data.quality import Floats
from pipeline.models.metrics.metric import Metric
from pipeline.runtime.process.distributed import DistributedContext


class NamedMetrics:
    """Add up the sums of registered metrics over the batches of an evaluation."""

    def __init__(self, context: DistributedContext, names: Sequence[str]) -> None:
        """Raises ConfigError if a name is not registered."""
        self._context = context
        self._metrics: dict[str, Metric] = {name: find("metric", name, "trainer.metrics")() for name in names}
        self._sums: dict[str, Floats] = {}

    def update(self, clicks: Mapping[str, Any]) -> None:
        """Local: add a batch. clicks: label's prefix -> its logits, labels, weights."""
        for prefix, prediction in clicks.items() if self._metrics else ():
            weights = prediction.sample_weights.double()
            counts = weights > 0
            predictions = torch.sigmoid(prediction.logits.double())[counts].cpu().numpy()
            labels, weights = (values[counts].cpu().numpy() for values in (prediction.labels.double(), weights))
            for name, metric in self._metrics.items():
                sums = metric.sums(predictions, labels, weights)
                self._sums[prefix + name] = self._sums.get(prefix + name, 0.0) + sums

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        found = {}
        for name, sums in self._sums.items():
            total = torch.as_tensor(sums, dtype=torch.float64).to(self._context.device)
            if self._context.world_size > 1:
                dist.all_reduce(total)
            found[name] = float(self._metrics[name.rpartition("/")[2]].value(total.cpu().numpy()))
        return found
