"""Turn batches into updates: a TorchRec train pipeline, schedules, evaluation, saving and logging at their own cadence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn

from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.optim.keyed import KeyedOptimizer

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.training import CheckpointConfig, ScheduleConfig, TrainerConfig
from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from pipeline.models.tasks.guard import NonFiniteLossError
from pipeline.models.tasks.task import TaskModel
from pipeline.runtime.errors import CheckpointError
from pipeline.runtime.logs import MetricsWriter, Progress, get_logger, progress
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.distributed import DistributedContext, true_on_any_rank
from pipeline.sharding.torchrec.embedding_sync import TableReplicas
from pipeline.sharding.torchrec.sharder import ClockedSparseDist
from pipeline.training.evaluation import evaluate_model
from pipeline.training.hooks.early_stop import EarlyStop
from pipeline.training.hooks.profile import StepProfiler
from pipeline.training.hooks.rollback import Rollback
from pipeline.training.hooks.saving import Saving
from pipeline.training.hooks.throughput import StepLog
from pipeline.training.input_watch import InputWatch
from pipeline.training.step_optimizer import StepOptimizer

PIPELINES = {"sparse_dist": ClockedSparseDist, "base": TrainPipelineBase}
logger = get_logger(__name__)


@dataclass
class FitResult:
    """`throughput` is StepLog.summary(), empty when nothing was left to train; `metrics` are the last evaluation's."""

    step: int
    stopped_early: bool = False
    preempted: bool = False  # asked to stop by SIGTERM; the step is saved
    throughput: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_bad_rows: int = 0  # quarantined in training, on all ranks


class Trainer:
    """Every rank builds one and calls fit()."""

    def __init__(
        self,
        config: TrainerConfig,
        schedule: ScheduleConfig,
        checkpoint: CheckpointConfig,
        *,
        model: DistributedModelParallel,
        task: TaskModel,
        optimizer: KeyedOptimizer,
        reader: ShardReader,
        validation_reader: ShardReader | None,
        checkpointer: Checkpointer,
        writer: MetricsWriter | None,
        context: DistributedContext,
        after_first_step: Callable[[], None] | None = None,
        profiler: StepProfiler | None = None,
        replicas: TableReplicas | None = None,
    ) -> None:
        self._replicas = replicas
        self._after_first_step, self._profiler = after_first_step, profiler
        self._config, self._save_every = config, checkpoint.save_every_steps
        self._model, self._task, self._context = model, task, context
        self._reader, self._validation_reader = reader, validation_reader
        self._saving, self._writer = Saving(checkpoint, checkpointer), writer
        self._optimizer = StepOptimizer(model, optimizer, schedule, config)
        self._train_optimizer = optimizer
        self._accumulation = config.gradient_accumulation_steps
        self._input = InputWatch(reader, task.loss, context)
        self._rollback = Rollback(config, reader, checkpointer, task.loss, context)
        self._last_metrics: dict[str, float] = {}
        self._metrics_step = 0  # at which they were measured; step 0 is never evaluated
        self._early_stop = EarlyStop(config.early_stop)
        self._is_preempted = False  # the same on every rank

    @property
    def total_steps(self) -> int:
        config = self._config
        available = config.epochs * self._reader.steps_per_epoch // self._accumulation
        return min(available - self._rollback.num_skipped_steps, config.max_steps or 2**62)

    def fit(self, restored: dict[str, Any] | None = None) -> FitResult:
        """Collective: train from the restored manifest's step (None: from 0) to the last step, and save there.

        Raises:
            NonFiniteLossError: the loss is not finite, under the policy `stop` or too often in a row.
        """
        start_step = self._resume_from(restored)
        watchdog.beat(start_step)
        is_done = start_step >= self.total_steps or self._early_stop.is_exhausted
        with preemption.deferred(), watchdog.stepping("training"):
            return self._fit_from(start_step, is_done)

    def _fit_from(self, start_step: int, is_done: bool) -> FitResult:
        # SIGTERM leaves no time for an evaluation: it is made up for here.
        if self._metrics_step != start_step and (is_done or _due(start_step, self._config.evaluate_every_steps)):
            self._evaluate(start_step)
            if self._is_preempted:
                return FitResult(start_step, preempted=True, metrics=self._last_metrics)
        if is_done or self._early_stop.is_exhausted:
            logger.info("step %d of %d: nothing left to train", start_step, self.total_steps)
            return FitResult(start_step, self._early_stop.is_exhausted, metrics=self._last_metrics)
        self._saving.check_space(start_step, self.total_steps)
        window = self._config.global_batch_size * self._config.log_every_steps
        measure = self._task.task.training_measure(self._context, self._reader.batch_size, window)
        log = StepLog(self._config, self._reader, self._context, self._writer, start_step, self.total_steps, measure)
        # Where stderr is no terminal the log lines tell the progress.
        shown = self._context.is_main and sys.stderr.isatty()
        with (
            progress("training", self.total_steps - start_step, visible=shown) as bar,
            log.clocked_comms(self._task.loss),
        ):
            step = self._train(start_step, log, bar)
        stopped_early, bad_rows = self._early_stop.is_exhausted, self._task.loss.num_bad_rows
        return FitResult(step, stopped_early, self._is_preempted, log.summary(), self._last_metrics, bad_rows)

    def _train(self, start_step: int, log: StepLog, bar: Progress) -> int:
        """Collective: the last step done. It is evaluated (unless stopped) and saved, whatever the cadence."""
        batches, pipeline = self._micro_batches(start_step), self._make_pipeline()
        step = saved_step = start_step
        while step < self.total_steps and not self._early_stop.is_exhausted and not self._is_preempted:
            try:
                # The first step also compiles, and meets memory for the first time.
                first = watchdog.stage("training") if step == start_step else nullcontext()
                recorded = self._profiler.step(step + 1) if self._profiler else nullcontext()
                with recorded, log.timed_step(), first:
                    if self._replicas:
                        self._replicas.equal = False
                    for _ in range(self._accumulation):
                        # Any rank's wish is heard by all in this step's loss.
                        self._task.loss.stop_wanted |= preemption.wanted()
                        log.update(pipeline.progress(batches))
            except NonFiniteLossError as error:
                batches.close()
                with watchdog.stage("going back"):
                    step = saved_step = self._roll_back(error, pipeline)
                batches, pipeline = self._micro_batches(step), self._make_pipeline()
                continue
            if problem := self._input.problem((step + 1) * self._config.global_batch_size):
                self._end_on(problem, step, saved_step)
            step += 1
            if self._replicas:
                self._replicas.after_step(step)
            bar.advance(1)
            watchdog.beat(step)
            if step == start_step + 1 and self._after_first_step:
                self._after_first_step()
            if self._task.loss.stop_agreed:
                self._is_preempted = True
                break
            is_last = step == self.total_steps
            if _due(step, self._config.log_every_steps) or is_last:
                loss = self._task.loss
                log.write(step, {**self._learning_rates(), "num_skipped_steps": loss.num_skipped,
                                 "num_bad_rows": loss.num_bad_rows, **self._syncs(step)})  # fmt: skip
                self._input.log(step, step * self._config.global_batch_size)
            if _due(step, self._config.evaluate_every_steps) or is_last:
                try:
                    self._evaluate(step, pipeline)
                except (ValueError, OSError) as problem:  # the validation split's; the training is kept
                    self._end_on(problem, step - 1, saved_step)
            if _due(step, self._save_every) or is_last:
                self._save(step)
                saved_step = step
                # A SIGTERM that came meanwhile is not to cost another step and another save.
                self._is_preempted |= true_on_any_rank(preemption.wanted() and not is_last, self._context)
        batches.close()
        if self._profiler:
            self._profiler.close(step)
        if saved_step < step:
            self._save(step)
        with watchdog.saving():
            self._saving.finish()
        return step

    def _resume_from(self, restored: dict[str, Any] | None) -> int:
        if restored is None:
            return 0
        self._last_metrics, self._metrics_step = restored["metrics"], restored["metrics_step"]
        self._early_stop = EarlyStop(self._config.early_stop, **restored.get("early_stop", {}))
        self._optimizer.micro_step = restored["step"] * self._accumulation
        self._task.loss.num_bad_rows = restored.get("num_bad_rows", 0)
        self._rollback.ranges = [tuple(each) for each in restored.get("skipped_steps", [])]
        return int(restored["step"])

    def _roll_back(self, error: NonFiniteLossError, pipeline: Any) -> int:
        """Collective: the step gone back to. Raises NonFiniteLossError where the policy is another, or the second time."""
        with watchdog.saving("going back to a checkpoint"):
            self._saving.finish()
            manifest, skipped = self._rollback.run(error, self._optimizer.micro_step)
        if hasattr(pipeline, "detach"):
            pipeline.detach()
        step = self._resume_from(manifest)
        self._rollback.ranges.append(skipped)
        if self._writer:
            self._writer.drop_after(step)
        return step

    def _end_on(self, problem: Exception, step: int, saved_step: int) -> NoReturn:
        """Collective: save the last whole step, where it can be told from the one that met the problem; raise."""
        done = step if self._task.loss.input_failure_agreed else step + 1  # a failed reader's step updates nothing
        if done > saved_step and (done > step or self._accumulation == 1):
            if self._replicas and done > step:
                self._replicas.after_step(done)
            try:
                self._save(done)
                self._saving.finish()
            except CheckpointError as error:
                logger.error("%s", error)
        raise problem

    def _micro_batches(self, start_step: int) -> Generator[Batch, None, None]:
        return self._input.batches(self._read(start_step))

    def _read(self, start_step: int) -> Generator[Batch, None, None]:
        """All that is left to train on, epoch after epoch; the pipeline reads a few ahead of the step."""
        position = self._rollback.position(start_step) * self._accumulation
        end = self._rollback.position(self.total_steps) * self._accumulation
        while position < end:
            watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
            epoch, within = divmod(position, self._reader.steps_per_epoch)
            count = min(self._reader.steps_per_epoch - within, end - position)
            for batch in islice(self._reader.batches(epoch, start_step=within), count):
                watchdog.beat(phase="training")
                yield batch
                watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
            position += count

    def _make_pipeline(self) -> Any:
        kind = PIPELINES[self._config.pipeline_of(self._context.world_size, self._context.device.type)]
        extra = {"execute_all_batches": True} if kind is ClockedSparseDist else {}
        self._model.train()
        return kind(self._model, self._optimizer, self._context.device, **extra)

    def _evaluate(self, step: int, pipeline: Any = None) -> None:
        if self._validation_reader is None:
            return
        if hasattr(pipeline, "detach"):  # the pipeline rewrote the tables' forward for batches of its own
            pipeline.detach()
        try:
            metrics = evaluate_model(
                self._model, self._validation_reader, self._context, self._config.evaluate_max_batches, "validation"
            )
        except preemption.Preempted:  # the step is saved without; a resumed run makes up for it
            self._is_preempted = True
            return
        whose = "  (each host's own tables)" if self._replicas and not self._replicas.equal else ""
        logger.info("step %d  validation  %s%s", step, _described(metrics), whose)
        if self._writer:
            self._writer.write("validation", step, metrics)
        self._last_metrics, self._metrics_step = metrics, step
        if _due(step, self._config.evaluate_every_steps):
            self._early_stop.update(metrics)

    def _save(self, step: int) -> None:
        epoch, within = divmod(self._rollback.position(step) * self._accumulation, self._reader.steps_per_epoch)
        values = {
            "reader": {"epoch": epoch, "step": within},
            "skipped_steps": self._rollback.ranges,
            "num_bad_rows": self._task.loss.num_bad_rows,
            "metrics": self._last_metrics,
            "metrics_step": self._metrics_step,
            "early_stop": {"best": self._early_stop.best, "num_worse": self._early_stop.num_worse},
        }  # fmt: skip
        with watchdog.saving():
            self._saving.save(step, values)

    def _syncs(self, step: int) -> dict[str, float]:
        """How often, and with how many bytes, tables were averaged over the hosts since the last line."""
        if self._replicas is None:
            return {}
        values = self._replicas.report()
        if values["embedding_syncs"]:
            logger.info(
                "step %d  tables averaged %d time(s) over %d hosts, %.1f MiB on the wire a rank, %.2f s", step,
                values["embedding_syncs"], self._replicas.num_hosts, values["embedding_sync_bytes"] / 2**20,
                values["embedding_sync_s"],
            )  # fmt: skip
        return values

    def _learning_rates(self) -> dict[str, float]:
        groups = self._train_optimizer.param_groups
        return {"lr_" + str(group.get("name", index)): float(group["lr"]) for index, group in enumerate(groups)}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _described(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.4f}".replace(".0000", "") for name, value in metrics.items())
