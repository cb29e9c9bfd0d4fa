"""Define a trainer hook, and the moments at which the trainer calls it.

    @register("hook", "gradient_norm")
    class GradientNorm(Hook):
        norm = 0.0

        def on_step_end(self, state: TrainingState) -> None:
            self.norm = sum(float(p.grad.norm()) for p in self.parts.task.parameters() if p.grad is not None)

        def log_values(self, state: TrainingState) -> dict[str, float]:
            return {"gradient_norm": self.norm}

`plugins=[my_package] trainer.hooks=[gradient_norm]` runs it, after this release's own hooks and before saving: a step's log
line is written before, so it holds the value of the step before it. At each moment
hooks are called in that order. Every rank has hooks of its own and reaches a collective moment at the same step, so a hook
may communicate there, as long as it does so on every rank. A local moment comes on each rank at its own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.replicas import Replicas
from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import TrainerConfig
from pipeline.data.read.batches import BatchReader
from pipeline.data.read.endless import ENDLESS_STEPS
from pipeline.data.read.reader import ShardReader
from pipeline.planner.plan_record import PlanRecord
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import MetricsWriter
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.agreement import NonFiniteLossError, StepAgreement
from pipeline.training.batch_order import BatchOrder

if TYPE_CHECKING:
    from pipeline.training.hooks.memory import MemoryWatch


@dataclass(frozen=True)
class TrainingParts:
    """What a training works on. `task` is the module inside `model`: forward(batch) -> (loss, prediction)."""

    model: DistributedModelParallel
    task: nn.Module
    optimizer: KeyedOptimizer
    reader: BatchReader
    checkpointer: Checkpointer
    context: DistributedContext
    validation_reader: ShardReader | None = None
    writer: MetricsWriter | None = None  # on rank 0
    plan: PlanRecord | None = None
    memory: MemoryWatch | None = None
    replicas: Replicas | None = None  # where hosts train tables of their own


@dataclass
class TrainingState:
    """Where a training stands, the same on every rank. A hook may set `stopped_early`, alike on every rank."""

    order: BatchOrder
    agreement: StepAgreement
    hooks: HookList
    start_step: int = 0
    step: int = 0  # the last whole step
    micro_step: int = 0  # the micro-batch in progress, over all steps
    saved_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    metrics_step: int = 0  # at which they were measured; step 0 is never evaluated
    stopped_early: bool = False
    lr_factor: float = 1.0  # on both rates, of the steps to come; the plateau hook's
    preempted: bool = False  # asked to stop by SIGTERM or Ctrl-C
    input_ended: bool = False  # a stream gives no more rows
    goes_on_larger: bool = (
        False  # so it has ended, for tables are full: another training goes on from the last step with larger ones
    )
    throughput: dict[str, float] = field(default_factory=dict)  # over all steps but the first; set at the end
    of_ranks: list[dict[str, float]] = field(default_factory=list)  # at the last log line, where they are watched
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
        """Whether it follows a stream without a last step."""
        return self.total_steps >= ENDLESS_STEPS

    def is_due(self, every_steps: int, ahead: int = 0) -> bool:
        """ahead: for a step that many steps after this one."""
        return every_steps > 0 and (self.step + ahead) % every_steps == 0

    def is_evaluation_due(self, config: TrainerConfig, ahead: int = 0) -> bool:
        """By steps or by epochs; the last step is evaluated besides."""
        if self.is_due(config.evaluate_every_steps, ahead):
            return True
        step, every = self.step + ahead, config.evaluate_every_epochs
        if not every or not step:
            return False
        return self.order.epochs_done(step) // every > self.order.epochs_done(step - 1) // every

    def detach(self) -> None:
        """Give the model its own forward back: TorchRec's pipeline rewrites that of the tables, for its own batches."""
        if hasattr(self.pipeline, "detach"):
            self.pipeline.detach()


class Hook:
    """Something that happens around training steps. Every moment does nothing unless it is overridden."""

    name = ""  # as it is registered
    runs_after: ClassVar[str] = ""  # of an extra: it is part of every training, after this hook
    reads_every_step: ClassVar[bool] = False  # its on_step_end must know whether the step was skipped, on a GPU too

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        self.job, self.parts = job, parts

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        """Local. A checkpoint was restored, at the start or by a rollback; `manifest` holds all hooks' saved values."""

    def on_fit_start(self, state: TrainingState) -> None:
        """Collective. Also where no step remains to be trained; `state.step` is the restored step, else 0."""

    def on_train_start(self, state: TrainingState) -> None:
        """Collective. Steps remain, and the first batch is about to be read."""

    def on_step_start(self, state: TrainingState) -> None:
        """Collective. Before the micro-batches of a step; it may be followed by on_rollback instead of on_step_end."""

    def on_batch_end(self, state: TrainingState, prediction: Any) -> None:
        """Local. After a micro-batch's backward; the prediction is None where the batch has updated nothing.

        On a GPU the prediction may be that of the batch before; none is missing when a step is logged, evaluated or saved.
        """

    def on_step_end(self, state: TrainingState) -> None:
        """Collective. `state.step` is the step that has just been trained."""

    def log_values(self, state: TrainingState) -> dict[str, float]:
        """Collective. What this hook adds to the line of metrics.jsonl that is about to be written."""
        return {}

    def on_evaluation_end(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Collective. The model of `state.step` was measured on the validation split."""

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        """Collective. What goes into the manifest of a checkpoint that is about to be saved, as JSON can hold it."""
        return {}

    def saved_files(self, state: TrainingState) -> dict[str, bytes]:
        """Local. Files by name that this rank writes into a checkpoint that is about to be saved; Checkpointer.read_file reads them."""
        return {}

    def on_non_finite_loss(self, state: TrainingState, error: NonFiniteLossError) -> dict[str, Any] | None:
        """Collective. The manifest of the checkpoint that was restored; None leaves that to later hooks."""

    def on_rollback(self, state: TrainingState) -> None:
        """Collective. `state.step` is the step gone back to; on_restore has been called."""

    def on_failure(self, state: TrainingState) -> None:
        """Collective. The run ends with an error, and `state.step` is whole: rows cannot be read, say."""

    def on_fit_end(self, state: TrainingState) -> None:
        """Collective. All steps are trained, or the run was asked to stop."""

    def close(self) -> None:
        """Local. Always called, after an error too."""


def _overrides(hook: Hook, moment: str) -> bool:
    return getattr(type(hook), moment) is not getattr(Hook, moment) or moment in vars(hook)


class HookList:
    """Calls each hook in order."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = list(hooks)
        self._with_something_to_do: dict[str, list[Hook]] = {}

    def call(self, moment: str, *arguments: Any) -> None:
        """`moment` is the name of a method of Hook that returns None."""
        if moment not in self._with_something_to_do:
            self._with_something_to_do[moment] = [hook for hook in self.hooks if _overrides(hook, moment)]
        for hook in self._with_something_to_do[moment]:
            getattr(hook, moment)(*arguments)

    def log_values(self, state: TrainingState) -> dict[str, float]:
        return {name: value for hook in self.hooks for name, value in hook.log_values(state).items()}

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        """Raises TrainingError where two hooks save under one name."""
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

    def on_non_finite_loss(self, state: TrainingState, error: NonFiniteLossError) -> dict[str, Any]:
        """Collective: the first hook's manifest. Raises `error` where no hook restores a checkpoint."""
        for hook in self.hooks:
            manifest = hook.on_non_finite_loss(state, error)
            if manifest is not None:
                return manifest
        raise error

    def close(self) -> None:
        for hook in reversed(self.hooks):
            hook.close()
