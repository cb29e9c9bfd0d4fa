"""Count quarantined rows, and end the run if they exceed data.reader.max_bad_fraction."""

from __future__ import annotations

from typing import Any

from pipeline.config.registry import register
from pipeline.runtime.logs import get_logger
from pipeline.training.hooks.base import Hook, TrainingState
from pipeline.training.input_watch import too_many_bad

logger = get_logger(__name__)


@register("hook", "bad_rows")
class BadRows(Hook):
    _num_logged = 0

    def on_step_end(self, state: TrainingState) -> None:
        """Raise TrainingError on every rank if too many rows are bad.

        The step is saved before that.
        """
        bad, num_rows = state.sync.num_bad_rows, state.step * self.job.trainer.global_batch_size
        if problem := too_many_bad(self.parts.reader, bad, num_rows):
            state.hooks.call("on_failure", state)
            raise problem
        if not state.preempted and (state.is_due(self.job.trainer.log_every_steps) or state.is_last):
            if bad > self._num_logged and self.parts.context.is_main:
                logger.warning(
                    "step %d  %s of %s rows quarantined (%.3f %%)",
                    state.step,
                    f"{bad:,}",
                    f"{num_rows:,}",
                    100 * bad / num_rows,
                )
            self._num_logged = bad

    def log_values(self, state: TrainingState) -> dict[str, float]:
        return {"num_skipped_steps": state.sync.num_skipped, "num_bad_rows": state.sync.num_bad_rows}

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        return {"num_bad_rows": state.sync.num_bad_rows}

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        state.sync.num_bad_rows = manifest.get("num_bad_rows", 0)
