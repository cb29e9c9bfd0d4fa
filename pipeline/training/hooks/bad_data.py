"""Count quarantined rows, and end the run, or go back to a checkpoint, for bad rows and losses that are not finite.

The same batches would give the same weights and therefore the same loss. So the batches from the checkpoint to the
last bad one are skipped, as in PaLM (https://arxiv.org/abs/2204.02311, section 5.1).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipeline.checkpoint.steps import list_steps
from pipeline.config.registry import register
from pipeline.runtime.logs import get_logger
from pipeline.training.hooks.base import Hook, TrainingState
from pipeline.training.readers import too_many_bad
from pipeline.training.step_sync import NonFiniteLossError

logger = get_logger(__name__)

MAX_NAMED = 10


@register("hook", "rollback")
class Rollback(Hook):
    """Rolls back once under trainer.non_finite_loss=rollback. The second time the run stops."""

    _skipped = (0, 0)  # of the rollback in progress: the entry to add to state.order.skipped

    def on_non_finite_loss(self, state: TrainingState, error: NonFiniteLossError) -> dict[str, Any]:
        """Restore the newest checkpoint before the bad steps and return its manifest. Collective.
        Raises NonFiniteLossError if the policy is not rollback, the run has rolled back before, or
        there is no earlier checkpoint."""
        accumulation, checkpointer = state.order.accumulation, self.parts.checkpointer
        micro_step = state.micro_step  # the micro-batch whose loss is not finite
        first, last = (micro_step - error.num_in_a_row + 1) // accumulation, micro_step // accumulation
        rows = self._name_rows(state, error, state.order.position(last) * accumulation + micro_step % accumulation)
        steps = [step for step in list_steps(checkpointer.folder) if step <= first]
        why_not = self._why_not(state, first, steps)
        if why_not is not None:
            error.args = (f"after step {last}: {error}{why_not}. {rows}",)
            raise error
        manifest: dict[str, Any] = checkpointer.restore(steps[-1])
        checkpointer.clear_after(steps[-1])
        state.sync.forget()
        self._skipped = (steps[-1], last + 1 - steps[-1])
        logger.warning(
            "the loss was not finite %d times in a row (steps %d to %d): back to step %d, past the batches of %d steps. %s",
            error.num_in_a_row,
            first + 1,
            last + 1,
            *self._skipped,
            rows,
        )
        return manifest

    def on_rollback(self, state: TrainingState) -> None:
        state.order.skipped.append(self._skipped)

    def _why_not(self, state: TrainingState, first: int, steps: list[int]) -> str | None:
        """Return None if a rollback is due and possible, otherwise a text to add to the error."""
        if self.job.trainer.non_finite_loss != "rollback":
            return ""
        if state.order.skipped:
            back_to, count = state.order.skipped[0]
            return f"; the run has already gone back to step {back_to} and past the batches of {count} steps"
        if not steps:
            return f"; there is no checkpoint up to step {first} to go back to (checkpoint.save_every_steps says how often one is made)"
        return None

    def _name_rows(self, state: TrainingState, error: NonFiniteLossError, micro_position: int) -> str:
        """Return a text that names the rows with a non-finite loss over all ranks, or with the
        largest loss. Collective."""
        context = self.parts.context
        places = self.parts.reader.locate(*state.order.locate(micro_position), error.rows)
        local = (error.num_at_fault, [(*place, loss) for place, loss in zip(places, error.losses, strict=True)])
        gathered: list[Any] = [local]
        if context.world_size > 1:
            gathered = [None] * context.world_size
            dist.all_gather_object(gathered, local)
        num_at_fault = sum(count for count, _ in gathered)
        if num_at_fault:
            rows = [row for count, rows in gathered if count for row in rows]
            text = f"Rows whose loss is not finite, {num_at_fault:,} of {self.job.trainer.micro_batch_size:,}"
        else:
            rows = sorted((row for _, rows in gathered for row in rows), key=lambda row: -row[2])
            text = "Rows with the largest loss" if rows else "The task has no `losses`, and no row can be named"
        named = ", ".join(f"{file} row {row} ({loss:g})" for file, row, loss in rows[:MAX_NAMED])
        return f"{text}: {named}" if named else text


@register("hook", "bad_rows")
class BadRows(Hook):
    _num_logged = 0

    def on_step_end(self, state: TrainingState) -> None:
        """Raise TrainingError on every rank if too many rows are bad. The step is saved before
        that."""
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
