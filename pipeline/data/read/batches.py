"""Define the reader of batches that training needs: of a prepared split, or of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pipeline.config.data import ReaderConfig
from pipeline.data.read.batch import Batch


class BatchReader(Protocol):
    """A reader of one rank's batches. Local."""

    config: ReaderConfig
    batch_size: int  # rows of this rank
    num_rows: int
    steps_per_epoch: int
    stall_seconds: float  # time that next() has waited

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Return batches start_step .. steps_per_epoch - 1 of an epoch."""

    def locate(self, epoch: int, step: int, rows: list[int]) -> list[tuple[str, int]]:
        """Return the origin of rows of this rank's batch: for each row a name, and the row's number
        there.
        """

    def empty_batch(self) -> Batch:
        """Return a batch in which no row counts, for a rank that has nothing to read while other
        ranks continue."""
