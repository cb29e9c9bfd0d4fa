"""Step the optimizers around a train pipeline's backward: schedules, gradient accumulation and clipping."""

from __future__ import annotations

from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.config.training import ScheduleConfig, TrainerConfig
from pipeline.sharding.torchrec.cpu_tables import fast_lookups
from pipeline.training.lr_schedule import apply_schedule
from pipeline.training.optimizer import TrainingOptimizer, clip_dense_gradients, clip_dense_numbers


class StepOptimizer:
    """The optimizer that the train pipeline calls around backward. One step is `accumulation`
    micro-batches.

    Dense gradients add up over the micro-batches. Fused tables update in each backward, with the
    loss scaled by 1/accumulation. For SGD this equals one larger batch if no row recurs; otherwise
    it is an approximation.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: TrainingOptimizer,
        schedule: ScheduleConfig,
        trainer: TrainerConfig,
    ) -> None:
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        self._clip_norm, self._clip_value = trainer.gradient_clip_norm, trainer.gradient_clip_value
        self._accumulation = trainer.gradient_accumulation_steps
        self._lookups = fast_lookups(model)
        self.micro_step = 0
        self.lr_factor = 1.0  # multiplies both learning rates, in addition to the schedule

    @property
    def step_count(self) -> int:
        return self.micro_step // self._accumulation

    def zero_grad(self, set_to_none: bool = True) -> None:
        for lookup in self._lookups:
            lookup.step = self.micro_step
        if self.micro_step % self._accumulation == 0:
            apply_schedule(self._optimizer, self._schedule, self.step_count, self.lr_factor)
            # also passes the new rate to the fused tables
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.micro_step += 1
        if self.micro_step % self._accumulation == 0:
            if self._clip_value is not None:
                clip_dense_numbers(self._model, self._clip_value)
            if self._clip_norm is not None:
                clip_dense_gradients(self._model, self._clip_norm)
            self._optimizer.update()
