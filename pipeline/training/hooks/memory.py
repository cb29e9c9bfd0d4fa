"""Log each rank's peak memory after the first training step next to the prediction of its plan."""

from __future__ import annotations

from pipeline.config.registry import register
from pipeline.training.hooks.base import Hook, TrainingState


@register("hook", "memory")
class MemoryReport(Hook):
    _is_reported = False

    def on_step_end(self, state: TrainingState) -> None:
        parts = self.parts
        if not self._is_reported and parts.memory is not None and parts.plan is not None:
            parts.memory.report(parts.plan)
        self._is_reported = True
