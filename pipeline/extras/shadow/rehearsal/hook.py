"""Record memory and counts during a training, for the record of a rehearsed rank."""

from __future__ import annotations

from typing import Any

from pipeline.config.registry import register
from pipeline.extras.shadow import memory, report
from pipeline.training.hooks.base import Hook, TrainingState

seen: dict[str, Any] = {}  # the hook's records in this process


@register("hook", "rehearsal")
class RehearsalNotes(Hook):
    """Record notes, after the hook that evaluates and before the hook that saves."""

    def on_train_start(self, state: TrainingState) -> None:
        seen["before_training"] = max([0, *memory.live.values()])
        memory.enter_phase("training")

    def on_step_start(self, state: TrainingState) -> None:
        memory.enter_phase("training")
        now = report.current()
        seen["step"] = (now.counts(), sum(now.copied_bytes.values()), dict(now.syncs), len(now.collectives))

    def on_batch_end(self, state: TrainingState, prediction: Any) -> None:
        now = report.current()
        counts, copied, syncs, collectives = seen["step"]
        seen["counts"] = {name: value - counts.get(name, 0) for name, value in now.counts().items()}
        seen["copied_bytes"] = sum(now.copied_bytes.values()) - copied
        seen["syncs"] = {
            place: count - syncs.get(place, 0) for place, count in now.syncs.items() if count > syncs.get(place, 0)
        }
        seen["collectives"] = now.collectives[collectives:]
        memory.enter_phase("evaluation")

    def on_step_end(self, state: TrainingState) -> None:
        memory.enter_phase("saving")
