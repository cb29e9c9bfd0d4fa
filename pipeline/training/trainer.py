"""Train a model: one loop over steps, which calls hooks at named moments (pipeline.training.hooks.base)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.types import ShardedModule

from pipeline import devices
from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import TrainerConfig
from pipeline.data.read.batch import Batch
from pipeline.data.read.endless import EndOfInputError, InputPausedError, TablesFullError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process import preemption, watchdog
from pipeline.sharding.torchrec.sharder import ShardedTables, TimedTrainPipeline
from pipeline.training.hooks.base import Hook, HookList, TrainingParts, TrainingState
from pipeline.training.optimizer import StepOptimizer, TrainingOptimizer
from pipeline.training.readers import BatchOrder, InputWatch
from pipeline.training.step_sync import LateStepSync, NonFiniteLossError, StepSync


class PlainPipeline:
    """The computation of TorchRec's TrainPipelineBase in training; it also reads one batch ahead.
    It leaves out the copies to a device and six profiler ranges per step, which take about as long
    as the step of a small model."""

    def __init__(self, model: nn.Module, optimizer: StepOptimizer, device: torch.device) -> None:
        self._model, self._optimizer = model, optimizer
        self._next: Batch | None = None
        self._is_started = False
        self._tiered = [each for each in model.modules() if isinstance(each, ShardedTables) and each.tiered_groups]

    def progress(self, batches: Iterator[Batch]) -> object:
        """Train on the next batch and return its prediction. Raises StopIteration after the last
        batch."""
        if not self._is_started:
            self._next, self._is_started = next(batches, None), True
        batch = self._next
        if batch is None:
            raise StopIteration
        self._next = next(batches, None)
        if self._next is not None:
            for tables in self._tiered:
                tables.prefetch_rows(self._next.sparse_features)  # runs at the same time as this step
        self._optimizer.zero_grad()
        loss, prediction = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return prediction


PIPELINES = {"sparse_dist": TimedTrainPipeline, "base": TrainPipelineBase, "plain": PlainPipeline}
logger = get_logger(__name__)


@dataclass
class FitResult:
    """The result of fit(). `throughput` is empty if no step was left to train; `metrics` are of the
    last evaluation."""

    step: int
    stopped_early: bool = False
    preempted: bool = False  # stopped by SIGTERM or Ctrl-C; the step is saved
    interrupted: bool = False  # stopped by Ctrl-C
    throughput: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_bad_rows: int = 0  # quarantined in training, on all ranks


class Trainer:
    """The training loop. Every rank builds one and calls fit()."""

    def __init__(self, job: TrainJob, parts: TrainingParts, hooks: Sequence[Hook]) -> None:
        config = job.trainer
        self._config, self._parts, self._hooks = config, parts, HookList(hooks)
        self._optimizer = StepOptimizer(parts.model, parts.optimizer, job.schedule, config)
        self._save_every = job.checkpoint.save_every_steps
        self._held: Any = None  # a prediction, until it is known whether its batch was skipped
        sync = _make_sync(config, parts, hooks)
        self._input = InputWatch(parts.reader, sync, parts.context)
        self._state = TrainingState(BatchOrder(config, parts.reader), sync, self._hooks)

    def fit(self, restored: dict[str, Any] | None = None) -> FitResult:
        """Train from the restored manifest's step (None: from 0) to the last step, and save there.
        Collective. Raises NonFiniteLossError if the loss is not finite, under the policy `stop` or
        too often in a row."""
        state = self._state
        if restored is not None:
            self._restore(restored)
        state.start_step = state.saved_step = state.step
        watchdog.beat(state.step)
        with preemption.deferred(interrupts=True), watchdog.stepping("training"):
            try:
                self._hooks.call("on_fit_start", state)
                if not state.is_over:
                    with state.sync.guarding(self._parts.task):
                        self._train()
                elif not state.preempted:
                    logger.info("step %d of %d: nothing left to train", state.step, state.total_steps)
            finally:
                self._hooks.close()
            interrupted = preemption.interrupted()
        return FitResult(
            state.step,
            state.stopped_early,
            state.preempted,
            interrupted,
            state.throughput,
            state.metrics,
            state.sync.num_bad_rows,
        )

    def _train(self) -> None:
        """Train to the last step. The last step is evaluated (unless the run was asked to stop) and
        saved. Collective."""
        state, hooks = self._state, self._hooks
        hooks.call("on_train_start", state)
        batches = self._begin()
        while not state.is_over:
            try:
                hooks.call("on_step_start", state)
                self._step(batches)
            except NonFiniteLossError as error:
                batches.close()
                self._step_back()
                with watchdog.stage("going back"):
                    self._roll_back(error)
                batches = self._begin()
                continue
            if self._input_stopped():
                if state.is_over:
                    break
                batches.close()
                batches = self._begin()
                continue
            state.step += 1
            watchdog.beat(state.step)
            state.preempted = state.sync.stop_agreed
            hooks.call("on_step_end", state)
        batches.close()
        state.pipeline = None
        hooks.call("on_fit_end", state)

    def _begin(self) -> Generator[Batch, None, None]:
        """Make a new pipeline, and return the batches for it from the current step on."""
        self._held = None
        self._state.pipeline = self._make_pipeline()
        return self._input.batches(self._state.order.batches(self._state.step))

    def _step(self, batches: Generator[Batch, None, None]) -> None:
        state, accumulation = self._state, self._config.gradient_accumulation_steps
        self._optimizer.lr_factor = state.lr_factor
        # The first step also compiles and allocates memory.
        with watchdog.stage("training") if state.step == state.start_step else nullcontext():
            for index in range(accumulation):
                state.micro_step = state.step * accumulation + index
                state.sync.stop_wanted |= preemption.wanted()
                self._hand_on(state.pipeline.progress(batches))

    def _hand_on(self, prediction: Any) -> None:
        """Give hooks each prediction as soon as it is known whether its batch was skipped."""
        state, sync = self._state, self._state.sync
        if sync.is_late:
            self._held, prediction = prediction, self._held
        self._hooks.call("on_batch_end", state, None if sync.was_skipped else prediction)
        if sync.is_late and self._must_settle():
            sync.settle()
            prediction, self._held = self._held, None
            self._hooks.call("on_batch_end", state, None if sync.was_skipped else prediction)

    def _must_settle(self) -> bool:
        """Return True if hooks act on this step: it is logged, evaluated, saved or the last."""
        state, sync = self._state, self._state.sync
        if sync.input_failure_agreed:
            return False
        return (
            sync.stop_agreed
            or sync.save_agreed
            or state.step + 1 >= state.total_steps
            or state.is_due(self._config.log_every_steps, ahead=1)
            or state.is_due(self._save_every, ahead=1)
            or state.is_evaluation_due(self._config, ahead=1)
        )

    def _step_back(self) -> None:
        """Go back to the batch that the flags are about. It may have updated nothing although a
        step was counted."""
        late = self._state.sync.num_batches_late
        self._state.micro_step -= late
        self._state.step -= late

    def _input_stopped(self) -> bool:
        """Return True if a stream has ended, or pauses, after hooks have saved the step. Collective
        after a failure of a reader, which it raises on all ranks. Hooks save the last complete step
        before the failure is raised, if that step is known."""
        if failure := self._input.failure():
            self._step_back()
            if isinstance(failure, InputPausedError):
                self._state.sync.forget()
                self._state.detach()
                self._hooks.call("on_input_pause", self._state)
                return True
            if isinstance(failure, EndOfInputError):
                logger.info("step %d  %s", self._state.step, failure)
                self._state.preempted, self._state.input_ended = preemption.wanted(), True
                self._state.grow_tables = isinstance(failure, TablesFullError) and not self._state.preempted
                return True
            # The step of a failed reader updates nothing, but the micro-batches before it have updated the tables.
            if self._config.gradient_accumulation_steps == 1:
                self._hooks.call("on_failure", self._state)
            raise failure
        return False

    def _roll_back(self, error: NonFiniteLossError) -> None:
        """Restore the step to which a hook goes back. Raises NonFiniteLossError if no hook does.
        Collective."""
        state = self._state
        with watchdog.saving("going back to a checkpoint"):
            manifest = self._hooks.on_non_finite_loss(state, error)
        state.detach()
        self._restore(manifest)
        state.saved_step = state.step
        self._hooks.call("on_rollback", state)

    def _restore(self, manifest: dict[str, Any]) -> None:
        state = self._state
        state.step = int(manifest["step"])
        self._optimizer.micro_step = state.step * self._config.gradient_accumulation_steps
        state.order.skipped = [(step, count) for step, count in manifest.get("skipped_steps", [])]
        self._hooks.call("on_restore", state, manifest)

    def _make_pipeline(self) -> Any:
        context = self._parts.context
        has_tables = any(isinstance(module, ShardedModule) for module in self._parts.model.modules())
        # A model without tables has no exchange to overlap, and TorchRec's pipeline would trace its
        # layers.
        asked = self._config.pipeline if has_tables else "base"
        kind = PIPELINES[devices.current().pipeline(asked, context.world_size)]
        extra = {"execute_all_batches": True} if kind is TimedTrainPipeline else {}
        self._parts.model.train()
        return kind(self._parts.model, self._optimizer, context.device, **extra)


def _make_sync(config: TrainerConfig, parts: TrainingParts, hooks: Sequence[Hook]) -> StepSync:
    """Build the step's sync. On a GPU use the one that does not make the host wait, if optimizers
    can skip an update there."""
    allowed = config.max_non_finite_steps if config.non_finite_loss != "stop" else 0
    if (
        devices.current().is_asynchronous
        and isinstance(parts.optimizer, TrainingOptimizer)
        and parts.optimizer.can_skip_on_device
        and config.gradient_accumulation_steps == 1
        and not any(hook.reads_every_step for hook in hooks)
    ):
        return LateStepSync(parts.model, parts.optimizer, parts.context.device, allowed)
    return StepSync(allowed, loss_scale=1.0 / config.gradient_accumulation_steps)
