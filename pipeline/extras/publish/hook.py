"""Publish deltas of an artifact while a run trains (publishing.when), by a separate process next to
rank 0.

A due step is saved, and the process reads the saved step, so training waits only for the save. At
most one step is being published and one step waits. If more steps come, only the newest step waits.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.models.tasks.click_metrics import Prediction
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process import watchdog
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

WORKER = "pipeline.extras.publish.worker"
LOG = "publish.log"
FOLDER = "artifacts/published"
STOP_S = 15.0  # for the last delta of a run that SIGTERM ends; schedulers kill it after 30 s
END_S = 20.0  # for the process to end when it has nothing to do
logger = get_logger("pipeline.train")

Answer = dict[str, Any]


class StepPublisher(Protocol):
    def send(self, step: int) -> None:
        """Send a step to the process without waiting."""

    def answer(self, timeout_s: float = 0.0) -> Answer | None:
        """Return the next answer of the process, or None if none comes within that time."""

    def end(self, at_once: bool = False) -> None:
        """End the process. at_once: abandon the step in progress."""


class PublishingProcess:
    """Run pipeline.extras.publish.worker in a separate process, so that predictions and exports do
    not delay steps.
    """

    def __init__(self, job: TrainJob) -> None:
        settings = job.publishing
        order = {
            "run": job.run_dir, "artifact": artifact_of(job), "precision": settings.precision, "calibration": asdict(settings.calibration),
            "feature_tables": dict(settings.feature_tables), "max_chain": settings.max_chain, "gate": asdict(settings.gate),
            "sign_key": job.checkpoint.sign_key, "require_signature": job.checkpoint.require_signature,
        }  # fmt: skip
        alone = (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
        )
        environment = {key: value for key, value in os.environ.items() if key not in alone}
        with open(os.path.join(job.run_dir, LOG), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="publishing", daemon=True).start()
        self._write(order)

    def send(self, step: int) -> None:
        self._write({"step": step})

    def _write(self, values: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died, which _read reports
            self._process.stdin.write(json.dumps(values) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        code = self._process.wait()
        self._answers.put(
            {"stopped": f"the publishing process ended with exit code {code}; {LOG} of the run folder says why"}
        )

    def answer(self, timeout_s: float = 0.0) -> Answer | None:
        try:
            return self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get_nowait()
        except queue.Empty:
            return None

    def end(self, at_once: bool = False) -> None:
        assert self._process.stdin is not None
        if at_once:  # uncommitted work does not count
            self._process.kill()
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _describe(answer: Answer) -> str:
    values = f"{answer['new_values']:,} new values, " if answer.get("new_values") else ""
    return f"{answer['rows']:,} rows, {values}{answer['bytes']:,} bytes"


def artifact_of(job: TrainJob) -> str:
    return job.publishing.artifact or f"{job.run_dir}/{FOLDER}"


@register("hook", "publishing")
class PublishDeltas(Hook):
    """Publish on rank 0.

    Rank 0's clock decides when a step is due. The ranks learn of the save in the same exchange as
    the loss.
    """

    runs_after = "saving"

    def __init__(
        self,
        job: TrainJob,
        parts: TrainingParts,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[TrainJob], StepPublisher] = PublishingProcess,
    ) -> None:
        super().__init__(job, parts)
        self._cadence, self._clock, self._start = job.publishing.cadence, clock, start
        self._publisher: StepPublisher | None = None
        self._due_since = clock()
        self._is_due = False
        self._in_work: int | None = None
        self._waiting: int | None = None
        self._sequence = self._step = self._num_failed = 0
        self._stopped = ""

    def on_train_start(self, state: TrainingState) -> None:
        if self._cadence is not None and self.parts.context.is_main:
            self._publisher = self._start(self.job)
            self._due_since = self._clock()

    def on_step_start(self, state: TrainingState) -> None:
        """Runs after the hook that saves, and may also request a save."""
        if self._publisher is None or self._cadence is None or self._stopped:
            return
        if self._cadence.steps:
            self._is_due |= (state.step + 1) % self._cadence.steps == 0
        else:
            self._is_due |= self._clock() - self._due_since >= self._cadence.seconds
        state.sync.save_wanted |= self._is_due

    def on_step_end(self, state: TrainingState) -> None:
        if self._publisher is None:
            return
        while (answer := self._publisher.answer()) is not None:
            self._note(answer)
        if self._is_due and state.saved_step == state.step:
            self._is_due, self._due_since = False, self._clock()
            self._submit(state.step)

    def _submit(self, step: int) -> None:
        assert self._publisher is not None
        if self._stopped:
            return
        if self._in_work is not None:
            self._waiting = step
            return
        self._in_work = step
        self._publisher.send(step)

    def _note(self, answer: Answer) -> None:
        self._in_work = None
        if "stopped" in answer:
            if not self._stopped:
                logger.error("nothing more is published: %s", answer["stopped"])
            self._stopped, self._waiting = answer["stopped"], None
        elif "failed" in answer:
            self._num_failed += 1
            logger.warning("step %d is not published: %s", answer["step"], answer["failed"])
        elif answer["sequence"] is not None:
            self._sequence, self._step = answer["sequence"], answer["step"]
            whole = [answer["artifact"]] if "artifact" in answer else []
            delta = [f"delta {self._sequence}: {_describe(answer)}"] if self._sequence else []
            logger.info("step %d  published as %s", self._step, " and as complete artifact ".join([*delta, *whole]))
        if self._waiting is not None:
            step, self._waiting = self._waiting, None
            self._submit(step)

    def log_values(self, state: TrainingState) -> dict[str, float]:
        if self._publisher is None:
            return {}
        return {
            "published_sequence": self._sequence,
            "published_step": self._step,
            "publish_failures": self._num_failed,
            "publish_stopped": float(bool(self._stopped)),
        }

    def on_input_pause(self, state: TrainingState) -> None:
        """Publish what was trained. While there are no rows no step is due, so wait here until an
        earlier step in work is published.
        """
        if self._publisher is not None and state.saved_step == state.step:
            self._is_due, self._due_since = False, self._clock()
            self._submit(state.step)
            if self._waiting is not None:
                self._await(self.job.publishing.finish_s, lambda: self._waiting is None)

    def _await(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """Take answers until is_done(), for so many seconds at most."""
        assert self._publisher is not None
        until = time.monotonic() + seconds
        with watchdog.unwatched("publishing a step"):
            while not is_done() and (left := until - time.monotonic()) > 0:
                if (answer := self._publisher.answer(left)) is not None:
                    self._note(answer)

    def on_fit_end(self, state: TrainingState) -> None:
        """Publish the last step and wait for it, unless the run continues with larger tables.

        A run that was asked to stop waits for STOP_S at most.
        """
        if self._publisher is not None and state.grow_tables:
            self._publisher.end(at_once=True)
            self._publisher = None
        if self._publisher is None or state.saved_step != state.step:
            return
        self._submit(state.step)
        seconds = min(self.job.publishing.finish_s, STOP_S) if state.preempted else self.job.publishing.finish_s
        self._await(seconds, lambda: self._in_work is None)
        if self._in_work is not None:
            logger.warning(
                "step %d is still being published after %g s (publishing.finish_s)",
                self._in_work,
                seconds,
            )

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.end()
            self._publisher = None


@register("hook", "progressive")
class ProgressiveValidation(Hook):
    """Measures NE of the main label, if it is binary, on each batch before training on it.

    The hook does nothing unless deltas are published or differential checkpoints are saved.
    """

    runs_after = "plateau"

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._wanted = job.publishing.when is not None or job.checkpoint.differential
        # sums of loss, labels and weights
        self._sums = torch.zeros(3, dtype=torch.float64, device=parts.context.device)
        self._last: dict[str, float] = {}

    def on_batch_end(self, state: TrainingState, prediction: Any) -> None:
        click = self._click(prediction) if self._wanted and prediction is not None else None
        if click is None:
            return
        weights = click.sample_weights
        loss = F.binary_cross_entropy_with_logits(click.logits, click.labels, weight=weights, reduction="sum")
        self._sums += torch.stack([loss, (click.labels * weights).sum(), weights.sum()]).double()

    def _click(self, prediction: Any) -> Prediction | None:
        if hasattr(prediction, "logits"):
            click: Prediction = prediction
            return click
        task = getattr(self.parts.task, "task", None)
        clicks = getattr(task, "clicks", None)
        if clicks is None or task.targets[0].kind != "binary":  # type: ignore[union-attr]
            return None
        return next(iter(clicks(prediction).values()))

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        """Return the NE since the last save, to store it in the manifest. Collective."""
        if not self._wanted:
            return {}
        sums = self._sums.clone()
        if self.parts.context.world_size > 1:
            dist.all_reduce(sums)
        self._sums.zero_()
        ne = normalized_entropy(*sums.tolist())
        self._last = {} if ne is None else {"ne": ne, "weight": float(sums[2])}
        return {"progressive": self._last}

    def log_values(self, state: TrainingState) -> dict[str, float]:
        return {"progressive_ne": self._last["ne"]} if self._last else {}

    def on_rollback(self, state: TrainingState) -> None:
        self._sums.zero_()


def normalized_entropy(loss: float, labels: float, weights: float) -> float | None:
    """Return NE, or None if there are no rows or all labels are equal."""
    rate = labels / weights if weights else 0.0
    if not 0.0 < rate < 1.0:
        return None
    return loss / (-weights * (rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))
