"""Show a progress bar of the training on a terminal.

Without a terminal the log lines show progress.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from pipeline.config.registry import register
from pipeline.runtime.logs import Progress, progress
from pipeline.training.hooks.base import Hook, TrainingState


@register("hook", "progress")
class ProgressBar(Hook):
    _bar: Progress | None = None
    _step = 0  # the step that the bar shows

    def on_train_start(self, state: TrainingState) -> None:
        self._open, self._step = ExitStack(), state.step
        visible = self.parts.context.is_main and sys.stderr.isatty()
        self._bar = self._open.enter_context(progress("training", state.total_steps - state.step, visible=visible))

    def on_step_end(self, state: TrainingState) -> None:
        self._show(state.step)

    def on_rollback(self, state: TrainingState) -> None:
        self._show(state.step)

    def _show(self, step: int) -> None:
        if self._bar is not None:
            self._bar.advance(step - self._step)  # negative after a rollback
            self._step = step

    def close(self) -> None:
        if self._bar is not None:
            self._bar = None
            self._open.close()
