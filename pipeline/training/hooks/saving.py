"""Turn steps that are due into checkpoints, and failed saves into what checkpoint.on_failure asks for."""

from __future__ import annotations

import time
from typing import Any

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.training import CheckpointConfig
from pipeline.runtime.errors import CheckpointError, StepTakenError
from pipeline.runtime.logs import get_logger

logger = get_logger(__name__)


class Saving:
    """Collective. An asynchronous save is known to have failed when the next one is due, or at finish()."""

    def __init__(self, config: CheckpointConfig, checkpointer: Checkpointer) -> None:
        self._config, self._checkpointer = config, checkpointer
        self._is_pending = False  # a save was begun, and how it ended is not known
        self._failures: list[CheckpointError] = []  # in a row, the last save's included

    def check_space(self, step: int, total_steps: int) -> None:
        """Before training. Raises CheckpointError where the checkpoints to be kept do not fit."""
        every = self._config.save_every_steps
        self._checkpointer.check_free_space(1 + ((total_steps - 1) // every - step // every if every else 0))

    def save(self, step: int, values: dict[str, Any]) -> None:
        """Raises CheckpointError for a save that failed, where the policy is to stop or has been patient enough."""
        started = time.monotonic()
        self._settle()
        try:
            path = self._checkpointer.save(step, values)
        except CheckpointError as error:
            self._note(error)
            return
        self._is_pending = True
        done = "copied, it goes" if self._checkpointer.asynchronous else "saved"
        logger.info("step %d  %s to %s in %.1f s", step, done, path, time.monotonic() - started)
        if not self._checkpointer.asynchronous:
            self._settle()

    def finish(self) -> None:
        """Wait for what is in flight. Raises CheckpointError when the last save failed, whatever the policy."""
        self._settle()
        if self._failures:
            raise self._failures[-1]

    def _settle(self) -> None:
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
        count, most = len(self._failures), self._config.max_failures_in_a_row
        if self._config.on_failure == "stop" or isinstance(error, StepTakenError) or count >= most:
            raise error
        logger.warning("%s; training goes on (checkpoint.on_failure=continue, failure %d of %d)", error, count, most)
