"""Save stream offsets and new vocabulary with each checkpoint, and report lag."""

from __future__ import annotations

from typing import Any

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.data.read.endless import FILE, Known, StreamReading, from_bytes, to_bytes
from pipeline.runtime.errors import TrainingError
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

PLACE = "stream"  # the key in a manifest


@register("hook", "stream")
class StreamOffsets(Hook):
    """Save the offsets. Does nothing if a prepared split is read."""

    runs_after = "record"

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._reader = parts.reader if isinstance(parts.reader, StreamReading) else None

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        place = manifest.get(PLACE)
        if self._reader is not None and place is None:
            raise TrainingError(
                f"{self.job.run_dir} has step {manifest['step']} of a training without a stream: choose another run_dir"
            )
        if self._reader is None and place is not None:
            raise TrainingError(
                f"{self.job.run_dir} has step {manifest['step']} of a training that followed "
                f"{place['name']}: resume it with python -m pipeline retrain ... follow=true, or "
                "choose another run_dir"
            )
        if self._reader is not None and place is not None:
            self._reader.go_to(int(place["batch"]), place)
            content = self.parts.checkpointer.read_file(int(manifest["step"]), FILE)
            known = Known({}, {}) if content is None else from_bytes(content)
            self._reader.restore_values(int(place["batch"]), known)

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        return {} if self._reader is None else {PLACE: self._reader.place(state.order.position(state.step))}

    def saved_files(self, state: TrainingState) -> dict[str, bytes]:
        if self._reader is None or not self.parts.context.is_main:
            return {}
        known = self._reader.values_of(state.order.position(state.step))
        return {FILE: to_bytes(known)} if known.values or known.waiting else {}

    def log_values(self, state: TrainingState) -> dict[str, float]:
        return {} if self._reader is None else self._reader.progress(state.order.position(state.step))
