"""Save checkpoints by steps, by minutes, at a new best step, and at the end. checkpoint.on_failure
handles a failed save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.config.training import CheckpointConfig, PlateauConfig
from pipeline.runtime.errors import CheckpointError, StepTakenError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.distributed import true_on_any_rank
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState
from pipeline.training.hooks.evaluation_hook import EarlyStop
from pipeline.training.step_sync import NonFiniteLossError

logger = get_logger(__name__)


class Saving:
    """Saves steps. Collective. A failed asynchronous save is reported when the next save is due, or
    by finish()."""

    def __init__(self, config: CheckpointConfig, checkpointer: Checkpointer) -> None:
        self._config, self._checkpointer = config, checkpointer
        self._is_pending = False  # a save was started and its result is not known yet
        # consecutive failures, including the last save's
        self._failures: list[CheckpointError] = []

    def check_space(self, step: int, total_steps: int) -> None:
        """Check before training that the checkpoints to keep fit. Raises CheckpointError if they do
        not."""
        # None: the number of saves depends on the time
        every, num_saves = self._config.save_every_steps, None
        if self._config.save_every_minutes is None:
            num_saves = 1 + ((total_steps - 1) // every - step // every if every else 0)
        self._checkpointer.check_free_space(num_saves)

    def save(self, step: int, values: dict[str, Any], files: dict[str, bytes] | None = None) -> None:
        """Save a step. Raises CheckpointError if the save failed and the policy is to stop or the
        failures are too many."""
        started = time.monotonic()
        self.await_pending()
        try:
            path = self._checkpointer.save(step, values, files)
        except CheckpointError as error:
            self._note(error)
            return
        self._is_pending = True
        done = "copied; writing" if self._checkpointer.asynchronous else "saved"
        logger.info("step %d  %s to %s in %.1f s", step, done, path, time.monotonic() - started)
        if not self._checkpointer.asynchronous:
            self.await_pending()

    def finish(self) -> None:
        """Wait for a save in progress. Raises CheckpointError if the last save failed, under any
        policy."""
        self.await_pending()
        if self._failures:
            raise self._failures[-1]

    def await_pending(self) -> None:
        """Wait for a save in progress, and apply the policy for a failure."""
        if self._is_pending:
            self._is_pending = False
            try:
                self._checkpointer.wait()
            except CheckpointError as error:
                self._note(error)
            else:
                self._failures = []

    def _note(self, error: CheckpointError) -> None:
        self._failures.append(error)
        count, limit = len(self._failures), self._config.max_failures_in_a_row
        if self._config.on_failure == "stop" or isinstance(error, StepTakenError) or count >= limit:
            raise error
        logger.warning("%s; training continues (checkpoint.on_failure=continue, failure %d of %d)", error, count, limit)


@register("hook", "saving")
class SaveCheckpoints(Hook):
    """Saves when a step is due. Rank 0's clock decides checkpoint.save_every_minutes, and ranks
    share the flag with the loss."""

    def __init__(self, job: TrainJob, parts: TrainingParts, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(job, parts)
        self._saving = Saving(job.checkpoint, parts.checkpointer)
        self._every_s = 60.0 * (job.checkpoint.save_every_minutes or math.inf)
        self._clock, self._saved_at = clock, clock()
        self._best = EarlyStop(PlateauConfig(), job.best_metric)
        self._best_step = 0

    def on_evaluation_end(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Remember the best step. A step that was saved before its evaluation is not a candidate:
        its manifest has no metrics."""
        if not self.job.checkpoint.save_best or state.saved_step == state.step:
            return
        self._best.update(metrics)
        if self._best.best is not None and self._best.num_worse == 0:
            self._best_step = state.step

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        if not self.job.checkpoint.save_best or self._best.best is None:
            return {}
        return {"best": {"metric": self.job.best_metric, "value": self._best.best, "step": self._best_step}}

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        earlier = manifest.get("best", {})
        same = earlier.get("metric") == self.job.best_metric
        self._best = EarlyStop(PlateauConfig(), self.job.best_metric, earlier["value"] if same else None)
        self._best_step = earlier["step"] if same else 0

    def on_train_start(self, state: TrainingState) -> None:
        self._saving.check_space(state.step, state.total_steps)
        self._saved_at = self._clock()

    def on_step_start(self, state: TrainingState) -> None:
        state.sync.save_wanted = self.parts.context.is_main and self._clock() - self._saved_at >= self._every_s

    def on_step_end(self, state: TrainingState) -> None:
        is_due = state.sync.save_agreed or state.is_due(self.job.checkpoint.save_every_steps)
        is_due |= self.job.checkpoint.save_best and self._best_step == state.step
        # on_fit_end saves the last step of a run that stops
        if state.preempted or not (is_due or state.is_last):
            return
        self._save(state)
        # If SIGTERM came during the save, stop here, without another step and save.
        wanted = preemption.wanted() and not state.is_last
        state.preempted |= true_on_any_rank(wanted, self.parts.context)

    def on_non_finite_loss(self, state: TrainingState, error: NonFiniteLossError) -> None:
        self._saving.finish()

    def on_failure(self, state: TrainingState) -> None:
        """Try to save the step. An error of this save is only logged, so that it does not hide the
        error that ends the run."""
        if state.step > state.saved_step:
            try:
                self._save(state)
                self._saving.finish()
            except CheckpointError as error:
                logger.error("%s", error)

    def on_input_pause(self, state: TrainingState) -> None:
        if state.saved_step < state.step:
            self._save(state)
            with watchdog.saving():
                self._saving.await_pending()

    def on_fit_end(self, state: TrainingState) -> None:
        if state.saved_step < state.step:
            self._save(state)
        with watchdog.saving():
            self._saving.finish()

    def _save(self, state: TrainingState) -> None:
        order = state.order
        epoch, within = order.locate(order.position(state.step) * order.accumulation)
        values = {"reader": {"epoch": epoch, "step": within}, "skipped_steps": order.skipped}
        values, files = values | state.hooks.saved_values(state), state.hooks.saved_files(state)
        with watchdog.saving(), state.hooks.evaluated_model(state):
            self._saving.save(state.step, values, files)
        state.saved_step, self._saved_at = state.step, self._clock()
