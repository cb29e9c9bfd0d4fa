"""Define a trainer hook, and the moments at which the trainer calls it.

    @register("hook", "gradient_norm")
    class GradientNorm(Hook):
        norm = 0.0

        def on_step_end(self, state: TrainingState) -> None:
            self.norm = sum(float(p.grad.norm()) for p in self.parts.task.parameters() if p.grad is not None)

        def log_values(self, state: TrainingState) -> dict[str, float]:
            return {"gradient_norm": self.norm}

`plugins=[my_package] trainer.hooks=[gradient_norm]` runs this hook, after the core's hooks and before
saving. The log line of a step is written earlier, so it holds the norm of the step before. Hooks are
called in the same order at each moment. Every rank builds its own hooks and reaches a collective
moment at the same step, so a hook may communicate there if it does so on every rank. A local moment
comes on each rank at a different time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.tables import Replicas
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import components, find
from pipeline.config.training import TrainerConfig
from pipeline.data.read.batches import BatchReader
from pipeline.data.read.endless import ENDLESS_STEPS
from pipeline.data.read.reader import ShardReader
from pipeline.planner.plan_record import PlanRecord
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.runtime.logs import MetricsWriter
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.memory_watch import MemoryWatch
from pipeline.training.readers import BatchOrder
from pipeline.training.step_sync import NonFiniteLossError, StepSync


@dataclass(frozen=True)
class TrainingParts:
    """The parts of a training run. `task` is the module inside `model`: forward(batch) -> (loss,
    prediction)."""

    model: DistributedModelParallel
    task: nn.Module
    optimizer: KeyedOptimizer
    reader: BatchReader
    checkpointer: Checkpointer
    context: DistributedContext
    validation_reader: ShardReader | None = None
    writer: MetricsWriter | None = None  # only on rank 0
    plan: PlanRecord | None = None
    memory: MemoryWatch | None = None
    replicas: Replicas | None = None  # set if each host trains separate tables


@dataclass
class TrainingState:
    """The progress of a training run, equal on every rank. A hook may set `stopped_early` if it
    does so on every rank."""

    order: BatchOrder
    sync: StepSync
    hooks: HookList
    start_step: int = 0
    step: int = 0  # the last complete step
    micro_step: int = 0  # the current micro-batch, counted over all steps
    saved_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    metrics_step: int = 0  # the step of `metrics`; step 0 is never evaluated
    logged: dict[str, float] = field(default_factory=dict)  # training metrics of the last log line
    stopped_early: bool = False
    lr_factor: float = 1.0  # multiplies both learning rates of later steps; set by the plateau hook
    preempted: bool = False  # stopped by SIGTERM or Ctrl-C
    input_ended: bool = False  # a stream gives no more rows
    # The stream has ended because tables are full: the next training run grows them and continues.
    grow_tables: bool = False
    # over all steps except the first; set at the end
    throughput: dict[str, float] = field(default_factory=dict)
    # at the last log line, if monitoring needs them
    of_ranks: list[dict[str, float]] = field(default_factory=list)
    pipeline: Any = None  # TorchRec's train pipeline, while steps are trained

    @property
    def total_steps(self) -> int:
        return self.order.total_steps

    @property
    def is_last(self) -> bool:
        return self.step >= self.total_steps

    @property
    def is_over(self) -> bool:
        return self.is_last or self.stopped_early or self.preempted or self.input_ended

    @property
    def is_endless(self) -> bool:
        """Return True if the run follows a stream without a last step."""
        return self.total_steps >= ENDLESS_STEPS

    def is_due(self, every_steps: int, ahead: int = 0) -> bool:
        """Return True every `every_steps` steps. `ahead` asks for a later step."""
        return every_steps > 0 and (self.step + ahead) % every_steps == 0

    def is_evaluation_due(self, config: TrainerConfig, ahead: int = 0) -> bool:
        """Return True if an evaluation is due by steps or by epochs. The last step is evaluated in
        any case."""
        if self.is_due(config.evaluate_every_steps, ahead):
            return True
        step, every = self.step + ahead, config.evaluate_every_epochs
        if not every or not step:
            return False
        return self.order.epochs_done(step) // every > self.order.epochs_done(step - 1) // every

    def detach(self) -> None:
        """Restore the forward of the tables, which TorchRec's pipeline replaces for its own
        batches."""
        if hasattr(self.pipeline, "detach"):
            self.pipeline.detach()


class Hook:
    """Base class of hooks. Each method does nothing unless a hook overrides it."""

    name = ""  # the registered name
    # for a hook of an extra: it runs in every training, after the named hook
    runs_after: ClassVar[str] = ""
    # on_step_end must know whether the step was skipped, also on a GPU
    reads_every_step: ClassVar[bool] = False

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        self.job, self.parts = job, parts

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        """A checkpoint was restored, at the start or by a rollback. `manifest` holds the saved
        values of all hooks. Local."""

    def on_fit_start(self, state: TrainingState) -> None:
        """The run starts, even if no step is left to train. `state.step` is the restored step, or
        0. Collective."""

    def on_train_start(self, state: TrainingState) -> None:
        """There are steps to train, and the first batch is read next. Collective."""

    def on_step_start(self, state: TrainingState) -> None:
        """A step is about to train its micro-batches. on_step_end, on_rollback or
        on_input_pause follows. Collective."""

    def on_batch_end(self, state: TrainingState, prediction: Any) -> None:
        """The backward of a micro-batch is done. The prediction is None if the batch has updated
        nothing. Local. On a GPU the prediction may belong to the batch before. When a step is
        logged, evaluated or saved, hooks have got all predictions up to it."""

    def on_step_end(self, state: TrainingState) -> None:
        """The step `state.step` was trained. Collective."""

    def log_values(self, state: TrainingState) -> dict[str, float]:
        """Return values to add to the next line of metrics.jsonl. Collective."""
        return {}

    def evaluated_model(self, state: TrainingState) -> AbstractContextManager[None]:
        """Return a context around each evaluation and each save. In it a hook may give the model
        other weights, for example an average; afterwards the trained weights must be back.
        Collective."""
        return nullcontext()

    def on_evaluation_end(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """The model of `state.step` was measured on the validation split. Collective."""

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        """Return JSON values for the manifest of a checkpoint that is about to be saved.
        Collective."""
        return {}

    def saved_files(self, state: TrainingState) -> dict[str, bytes]:
        """Return name -> content of files that this rank adds to a checkpoint.
        Checkpointer.read_file reads them. Local."""
        return {}

    def on_non_finite_loss(self, state: TrainingState, error: NonFiniteLossError) -> dict[str, Any] | None:
        """Restore a checkpoint and return its manifest, or return None to leave this to later
        hooks. Collective."""

    def on_rollback(self, state: TrainingState) -> None:
        """The run went back to `state.step`. on_restore was called before. Collective."""

    def on_input_pause(self, state: TrainingState) -> None:
        """A stream has no row for now, and `state.step` is complete. Training reads on.
        Collective."""

    def on_failure(self, state: TrainingState) -> None:
        """The run ends with an error, but `state.step` is complete. Example: rows cannot be read.
        Collective."""

    def on_fit_end(self, state: TrainingState) -> None:
        """All steps are trained, or the run was asked to stop. Collective."""

    def close(self) -> None:
        """Release resources. Always called, also after an error. Local."""


def _overrides(hook: Hook, moment: str) -> bool:
    return getattr(type(hook), moment) is not getattr(Hook, moment) or moment in vars(hook)


class HookList:
    """Calls each hook in order."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = list(hooks)
        self._with_something_to_do: dict[str, list[Hook]] = {}

    def call(self, moment: str, *arguments: Any) -> None:
        """Call one moment of all hooks. `moment` is the name of a method of Hook that returns
        None."""
        if moment not in self._with_something_to_do:
            self._with_something_to_do[moment] = [hook for hook in self.hooks if _overrides(hook, moment)]
        for hook in self._with_something_to_do[moment]:
            getattr(hook, moment)(*arguments)

    def log_values(self, state: TrainingState) -> dict[str, float]:
        return {name: value for hook in self.hooks for name, value in hook.log_values(state).items()}

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        """Collect the values of all hooks. Raises TrainingError if two hooks save under one
        name."""
        values: dict[str, Any] = {}
        for hook in self.hooks:
            own = hook.saved_values(state)
            if twice := sorted(values.keys() & own.keys()):
                raise TrainingError(
                    f"hook {hook.name!r} saves {twice[0]!r}, as another hook does; give it another name"
                )
            values |= own
        return values

    def saved_files(self, state: TrainingState) -> dict[str, bytes]:
        return {name: content for hook in self.hooks for name, content in hook.saved_files(state).items()}

    @contextmanager
    def evaluated_model(self, state: TrainingState) -> Iterator[None]:
        """Enter the contexts of all hooks, in order."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.evaluated_model(state))
            yield

    def on_non_finite_loss(self, state: TrainingState, error: NonFiniteLossError) -> dict[str, Any]:
        """Return the manifest of the first hook that restores a checkpoint. Raises `error` if no
        hook does. Collective."""
        for hook in self.hooks:
            manifest = hook.on_non_finite_loss(state, error)
            if manifest is not None:
                return manifest
        raise error

    def close(self) -> None:
        for hook in reversed(self.hooks):
            hook.close()


# The record is checked first, before anything is written.
BEFORE = (
    "record",
    "bad_rows",
    "progress",
    "memory",
    "throughput",
    "evaluation",
    "early_stop",
    "plateau",
)
# A checkpoint holds the counts of all hooks up to its step. A rollback waits for a save in
# progress.
AFTER = ("saving", "rollback")

# Key -> the hook of an extra that reads it. The values None and "none" need no hook.
SETTINGS_OF_EXTRAS = {
    "profile": "profile",
    "publishing.when": "publishing",
    "trainer.metrics_port": "monitor",
    "logger.otlp_endpoint": "monitor",
    "logger.heartbeat_url": "heartbeat",
    "logger.tracker": "tracker",
    "trainer.average.kind": "average",
    "budget.hours": "price",
    "budget.price": "price",
}


def hook_names(job: TrainJob) -> list[str]:
    """Return the names of all hooks in the order in which they are called.

    Raises:
        ConfigError: trainer.hooks names a hook that is not registered.
        TrainingError: trainer.hooks names a hook of the core, or a hook twice; or a patience counts
            evaluations, but no evaluation is made during training.
    """
    patience = {
        "trainer.early_stop.patience": job.trainer.early_stop.patience,
        "schedule.plateau.patience": job.schedule.plateau.patience,
    }
    if not (job.trainer.evaluate_every_steps or job.trainer.evaluate_every_epochs):
        for key, count in patience.items():
            if count:
                raise TrainingError(
                    f"{key}={count} counts evaluations, but none is made during training: set "
                    "trainer.evaluate_every_epochs=1, or trainer.evaluate_every_steps=<steps>"
                )
    own = [*BEFORE, *job.trainer.hooks, *AFTER]
    # By name, because the order in which modules were imported must not change the order of hooks.
    for name, kind in sorted(components("hook").items(), reverse=True):
        if after := getattr(kind, "runs_after", ""):  # a plugin's hook may have another base
            own.insert(own.index(after) + 1, name)
    for key, name in SETTINGS_OF_EXTRAS.items():
        if name not in own and (value := attrgetter(key)(job)) not in (None, "none"):
            raise ConfigError(f"{key}={value} needs an extra that is not installed: the hook {name!r} is absent")
    for name in job.trainer.hooks:
        find("hook", name, "trainer.hooks")
        if own.count(name) > 1:
            raise TrainingError(
                f"trainer.hooks: {name!r} is already a hook of this run; name each of your own hooks once"
            )
    return own


def build_hooks(job: TrainJob, parts: TrainingParts) -> list[Hook]:
    """Build the hooks in the order of hook_names, and raise the same errors."""
    hooks: list[Hook] = []
    for name in hook_names(job):
        hook: Hook = find("hook", name)(job, parts)
        hook.name = name
        hooks.append(hook)
    return hooks
