"""Order the batches of a training run: epoch after epoch, without the batches that a rollback
skips.

A position counts steps in the order of the reader. Without a rollback the position equals the step.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice

from pipeline.config.training import TrainerConfig
from pipeline.data.read.batch import Batch
from pipeline.data.read.batches import BatchReader
from pipeline.runtime.process import watchdog


class BatchOrder:
    """The order of batches. `skipped` holds (step, n): at `step` the run went back and skipped the
    batches of n steps.

    Every manifest stores `skipped`.
    """

    def __init__(self, config: TrainerConfig, reader: BatchReader) -> None:
        self.skipped: list[tuple[int, int]] = []
        self._config, self._reader = config, reader
        self.accumulation = config.gradient_accumulation_steps
        # Micro-batches until the reader starts again from its beginning.
        self._round = (config.overfit_batches * self.accumulation) or reader.steps_per_epoch

    @property
    def total_steps(self) -> int:
        available = self._config.epochs * self._reader.steps_per_epoch // self.accumulation
        num_skipped = sum(count for _, count in self.skipped)
        return min(available - num_skipped, self._config.max_steps or 2**62)

    def position(self, step: int) -> int:
        return step + sum(count for at, count in self.skipped if at <= step)

    def epochs_done(self, step: int) -> int:
        """Return the number of epochs that are complete at the end of `step`. overfit_batches has
        shorter rounds."""
        return self.position(step) * self.accumulation // self._round

    def locate(self, micro_position: int) -> tuple[int, int]:
        """Return (epoch, batch within that epoch) of a position.

        The position counts micro-batches.
        """
        epoch, within = divmod(micro_position, self._round)
        return (0 if self._config.overfit_batches else epoch), within

    def batches(self, start_step: int) -> Generator[Batch, None, None]:
        """Yield all batches after `start_step`.

        The train pipeline reads a few batches ahead of the step.
        """
        position = self.position(start_step) * self.accumulation
        end = self.position(self.total_steps) * self.accumulation
        while position < end:
            watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
            epoch, within = self.locate(position)
            count = min(self._round - within, end - position)
            for batch in islice(self._reader.batches(epoch, start_step=within), count):
                watchdog.beat(phase="training")
                yield batch
                watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
            position += count
