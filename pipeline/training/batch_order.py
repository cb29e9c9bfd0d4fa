"""Order the batches of a training: epoch after epoch, without those that a rollback leaves out.

A position counts steps in the reader's order; without a rollback it is the step itself.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice

from pipeline.config.training import TrainerConfig
from pipeline.data.read.batch import Batch
from pipeline.data.read.batches import BatchReader
from pipeline.runtime.process import watchdog


class BatchOrder:
    """`skipped`: (step, n) where training went back to `step` and read on n steps' batches later; in every manifest."""

    def __init__(self, config: TrainerConfig, reader: BatchReader) -> None:
        self.skipped: list[tuple[int, int]] = []
        self._config, self._reader = config, reader
        self.accumulation = config.gradient_accumulation_steps
        # Micro-batches before the reader begins again.
        self._round = (config.overfit_batches * self.accumulation) or reader.steps_per_epoch

    @property
    def total_steps(self) -> int:
        available = self._config.epochs * self._reader.steps_per_epoch // self.accumulation
        num_skipped = sum(count for _, count in self.skipped)
        return min(available - num_skipped, self._config.max_steps or 2**62)

    def position(self, step: int) -> int:
        return step + sum(count for at, count in self.skipped if at <= step)

    def epochs_done(self, step: int) -> int:
        """Whole epochs that are read at the end of `step`; with overfit_batches, rounds of them."""
        return self.position(step) * self.accumulation // self._round

    def locate(self, micro_position: int) -> tuple[int, int]:
        """(epoch, batch of that epoch) of a position counted in micro-batches."""
        epoch, within = divmod(micro_position, self._round)
        return (0 if self._config.overfit_batches else epoch), within

    def batches(self, start_step: int) -> Generator[Batch, None, None]:
        """All that remain after `start_step`; the train pipeline reads a few ahead of the step."""
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
