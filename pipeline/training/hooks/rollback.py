"""Turn a loss that stays non-finite into a step back, past the batches read since, or into an error that names rows.

Going over the same batches again would lead to the same weights bit for bit, and so to the same loss: the way out is
to leave out the batches from the checkpoint to the last bad one, as in PaLM (https://arxiv.org/abs/2204.02311, 5.1).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import list_steps
from pipeline.config.training import TrainerConfig
from pipeline.data.read.reader import ShardReader
from pipeline.models.tasks.guard import GuardedLoss, NonFiniteLossError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext

MAX_NAMED = 10
logger = get_logger(__name__)


class Rollback:
    """`ranges`: (step, n) where training went back to `step` and read on n steps' batches later; in every manifest."""

    def __init__(
        self, config: TrainerConfig, reader: ShardReader, checkpointer: Checkpointer, loss: GuardedLoss,
        context: DistributedContext,
    ) -> None:  # fmt: skip
        self.ranges: list[tuple[int, int]] = []
        self._config, self._reader, self._checkpointer = config, reader, checkpointer
        self._loss, self._context = loss, context

    @property
    def num_skipped_steps(self) -> int:
        return sum(count for _, count in self.ranges)

    def position(self, step: int) -> int:
        """Where the batches of a step lie in the reader's order, counted in steps."""
        return step + sum(count for at, count in self.ranges if at <= step)

    def run(self, error: NonFiniteLossError, micro_step: int) -> tuple[dict[str, Any], tuple[int, int]]:
        """Collective: restore the newest step before the bad ones; its manifest, and what to append to `ranges`.

        micro_step: the micro-batch whose loss is not finite.

        Raises:
            NonFiniteLossError: the policy is not rollback, it has happened before, or there is nothing to go back to.
        """
        accumulation = self._config.gradient_accumulation_steps
        first, last = (micro_step - error.num_in_a_row + 1) // accumulation, micro_step // accumulation
        rows = self._name_rows(error, self.position(last) * accumulation + micro_step % accumulation)
        steps = [step for step in list_steps(self._checkpointer.folder) if step <= first]
        why_not = self._why_not(first, steps)
        if why_not is not None:
            error.args = (f"after step {last}: {error}{why_not}. {rows}",)
            raise error
        manifest = self._checkpointer.restore(steps[-1])
        self._checkpointer.clear_after(steps[-1])
        self._loss.in_a_row = 0
        skipped = (steps[-1], last + 1 - steps[-1])
        logger.warning(
            "the loss was not finite %d times in a row (steps %d to %d): back to step %d, past the batches of %d steps. %s",
            error.num_in_a_row, first + 1, last + 1, *skipped, rows,
        )  # fmt: skip
        return manifest, skipped

    def _why_not(self, first: int, steps: list[int]) -> str | None:
        """None where going back is due and possible; else what to add to the error."""
        if self._config.non_finite_loss != "rollback":
            return ""
        if self.ranges:
            back_to, count = self.ranges[0]
            return f"; the run has already gone back to step {back_to} and past the batches of {count} steps"
        if not steps:
            return f"; there is no checkpoint up to step {first} to go back to (checkpoint.save_every_steps says how often one is made)"
        return None

    def _name_rows(self, error: NonFiniteLossError, micro_position: int) -> str:
        """Collective: the rows at fault over all ranks; where no row's own loss is at fault, those with the largest."""
        epoch, step = divmod(micro_position, self._reader.steps_per_epoch)
        places = self._reader.locate(epoch, step, error.rows)
        mine = (error.num_at_fault, [(*place, loss) for place, loss in zip(places, error.losses, strict=True)])
        found: list[Any] = [mine]
        if self._context.world_size > 1:
            found = [None] * self._context.world_size
            dist.all_gather_object(found, mine)
        num_at_fault = sum(count for count, _ in found)
        if num_at_fault:
            rows = [row for count, rows in found if count for row in rows]
            text = f"Rows whose loss is not finite, {num_at_fault:,} of {self._config.micro_batch_size:,}"
        else:
            rows = sorted((row for _, rows in found for row in rows), key=lambda row: -row[2])
            text = "Rows with the largest loss"
        named = ", ".join(f"{file} row {row} ({loss:g})" for file, row, loss in rows[:MAX_NAMED])
        return f"{text}: {named}"
