"""A trainer hook in one file: it counts steps, also over a resume, and logs them."""

from __future__ import annotations

from typing import Any

from pipeline.config.registry import register
from pipeline.training.hooks.base import Hook, TrainingState

SAVED = "step_counter"


@register("hook", "step_counter")
class StepCounter(Hook):
    num_steps = 0

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        self.num_steps = manifest[SAVED]

    def on_step_end(self, state: TrainingState) -> None:
        self.num_steps += 1

    def log_values(self, state: TrainingState) -> dict[str, float]:
        return {"counted_steps": self.num_steps}

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        return {SAVED: self.num_steps}
