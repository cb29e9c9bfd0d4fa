"""What a training needs of a reader of its batches: that of a prepared split, or one that follows a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pipeline.config.reader import ReaderConfig
from pipeline.data.read.batch import Batch


class BatchReader(Protocol):
    """Local to one rank."""

    config: ReaderConfig
    batch_size: int  # of this rank
    num_rows: int
    steps_per_epoch: int
    stall_seconds: float  # that next() has waited

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Batches start_step .. steps_per_epoch - 1 of an epoch."""

    def locate(self, epoch: int, step: int, rows: list[int]) -> list[tuple[str, int]]:
        """Where rows of this rank's batch were read: a name, and the row there."""

    def empty_batch(self) -> Batch:
        """A batch in which no row counts, for a rank that has nothing to read where the others go on."""
