"""Write what the run has cost so far, and end it when its budget is used up."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.extras.price.cost import FILE, SUMMED, cost_of_run, priced
from pipeline.extras.price.meter import Meter
from pipeline.runtime.logs import get_logger, to_json
from pipeline.runtime.storage import storage
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

logger = get_logger("pipeline.training")


@register("hook", "price")
class Price(Hook):
    """Adds up the costs of all ranks at each log line, so a killed run loses the costs since its last line.

    A restored run continues from the file: it has all attempts, including steps that were trained
    again. The budget is checked at log lines. The step is then evaluated and saved, as the last one.
    """

    runs_after = "memory"

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._meter = Meter(of_host=parts.context.local_rank == 0)
        self._earlier: dict[str, float | None] | None = None
        self._ended_by = ""

    def on_fit_start(self, state: TrainingState) -> None:
        self._earlier = cost_of_run(self.job.run_dir) if state.step and self.parts.context.is_main else {}
        if state.step and (self.job.budget.hours or self.job.budget.price):
            self._check(state)  # a run that has used up its budget before

    def log_values(self, state: TrainingState) -> dict[str, float]:
        self._check(state)
        return {}

    def on_fit_end(self, state: TrainingState) -> None:
        self._check(state)

    def _check(self, state: TrainingState) -> None:
        """Write the costs, and end the run if they are above the budget. Collective."""
        cost = priced(self._totals(), self.parts.context.world_size, self.job.hardware.price_per_hour)
        budget, hours = self.job.budget, (cost["seconds"] or 0.0) / 3600
        for key, limit, value in (("hours", budget.hours, hours), ("price", budget.price, cost["price"])):
            if limit is not None and value is not None and value >= limit and not (self._ended_by or state.is_over):
                self._ended_by = f"budget.{key}={limit:g} is used up ({value:.4g}) at step {state.step}"
                state.stopped_early = True
                logger.info("%s: the run ends; raise it and run the same command again to continue", self._ended_by)
        if self.parts.context.is_main:
            shown = {"step": state.step, **cost, "ended_by": self._ended_by}
            storage.publish_text(storage.join(self.job.run_dir, FILE), to_json(shown, indent=1))

    def _totals(self) -> dict[str, float | None]:
        """Return the costs of all ranks and attempts, equal on all ranks. Collective."""
        context, own, earlier = self.parts.context, self._meter.read(), self._earlier or {}
        if not context.is_main:
            own["seconds"] = 0.0  # a rank-hour is the time of rank 0 times the ranks
        values = [_number(own[name]) + _number(earlier.get(name, 0.0)) for name in SUMMED]
        total = torch.tensor(values, dtype=torch.float64, device=context.device)
        if context.world_size > 1:
            dist.all_reduce(total)
        return {name: None if math.isnan(value) else value for name, value in zip(SUMMED, total.tolist(), strict=True)}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
