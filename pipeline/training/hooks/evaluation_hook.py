"""Measure the model on the validation split (trainer.evaluate_every_*), stop early, and lower the learning rates."""

from __future__ import annotations

import math
from typing import Any

from pipeline.checkpoint.retention import is_higher_better
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import from_extra, register
from pipeline.config.training import EarlyStopConfig, PlateauConfig
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process import preemption
from pipeline.training.evaluation import evaluate_model, open_stats
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

logger = get_logger("pipeline.training.trainer")


class EarlyStop:
    """Counts consecutive evaluations without an improvement. All ranks see the same metrics and
    decide the same. `best` is negated if a higher metric is better."""

    def __init__(
        self, config: EarlyStopConfig | PlateauConfig, metric: str = "ne", best: float | None = None, num_worse: int = 0
    ) -> None:
        self._config, self._metric = config, metric
        self.best, self.num_worse = best, num_worse

    @property
    def is_exhausted(self) -> bool:
        return 0 < self._config.patience <= self.num_worse

    def update(self, metrics: dict[str, float]) -> None:
        value = metrics[self._metric]
        if math.isnan(value):  # the AUC of a split with one class is undefined and not counted
            return
        value = -value if is_higher_better(self._metric) else value
        if self.best is None or value < self.best - self._config.min_delta:
            self.best, self.num_worse = value, 0
        else:
            self.num_worse += 1


@register("hook", "early_stop")
class StopEarly(Hook):
    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._progress = EarlyStop(job.trainer.early_stop, job.early_stop_metric)

    def on_evaluation_end(self, state: TrainingState, metrics: dict[str, float]) -> None:
        if state.is_evaluation_due(self.job.trainer):
            self._progress.update(metrics)
            state.stopped_early = self._progress.is_exhausted

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        return {"early_stop": {"best": self._progress.best, "num_worse": self._progress.num_worse}}

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        earlier = manifest.get("early_stop", {})
        self._progress = EarlyStop(self.job.trainer.early_stop, self.job.early_stop_metric, **earlier)
        state.stopped_early = self._progress.is_exhausted


@register("hook", "evaluation")
class Evaluation(Hook):
    def on_fit_start(self, state: TrainingState) -> None:
        """Evaluate a restored step whose evaluation was skipped because of SIGTERM."""
        is_due = state.is_over or state.is_evaluation_due(self.job.trainer)
        if state.metrics_step != state.step and is_due:
            self._evaluate(state)

    def on_step_end(self, state: TrainingState) -> None:
        if state.preempted or not (state.is_evaluation_due(self.job.trainer) or state.is_over):
            return
        try:
            self._evaluate(state)
        except (ValueError, OSError):  # only the validation split failed: save the training
            state.hooks.call("on_failure", state)
            raise

    def _evaluate(self, state: TrainingState) -> None:
        parts = self.parts
        if parts.validation_reader is None:
            return
        state.detach()
        collector = open_stats(parts.validation_reader, parts.context)
        try:
            with state.hooks.evaluated_model(state):
                metrics = evaluate_model(
                    parts.model,
                    parts.validation_reader,
                    parts.context,
                    self.job.trainer.evaluate_max_batches,
                    "validation",
                    self.job.trainer.group_metrics_at,
                    [collector] if collector else [],
                    self.job.trainer.metrics,
                )
        # the step is saved without metrics; a resumed run evaluates it
        except preemption.Preempted:
            state.preempted = True
            return
        whose = "  (each host's own tables)" if parts.replicas and not parts.replicas.equal else ""
        logger.info("step %d  validation  %s%s", state.step, _described(metrics), whose)
        stats = collector.compute("validation", state.step, metrics) if collector else None
        if parts.writer:
            parts.writer.write("validation", state.step, metrics)
            if stats is not None:
                from_extra("keep_stats", "evaluation")(self.job.run_dir, stats, self.job.best_metric)
        state.metrics, state.metrics_step = metrics, state.step
        state.hooks.call("on_evaluation_end", state, metrics)

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        return {"metrics": state.metrics, "metrics_step": state.metrics_step}

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        state.metrics_step = manifest["metrics_step"]
        state.metrics = {name: math.nan if value is None else value for name, value in manifest["metrics"].items()}


def _described(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.4f}".replace(".0000", "") for name, value in metrics.items())


@register("hook", "plateau")
class ReduceOnPlateau(Hook):
    """Multiplies `state.lr_factor`. A checkpoint holds the factor and the count, so a resume is
    exact."""

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._config = job.schedule.plateau
        self._progress = EarlyStop(self._config, job.plateau_metric)

    def on_evaluation_end(self, state: TrainingState, metrics: dict[str, float]) -> None:
        if not self._config.patience or not state.is_evaluation_due(self.job.trainer):
            return
        self._progress.update(metrics)
        if self._progress.is_exhausted:
            self._progress.num_worse = 0
            state.lr_factor *= self._config.factor
            logger.info(
                "step %d  no better %s: learning rates x %g", state.step, self.job.plateau_metric, state.lr_factor
            )

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        if not self._config.patience:
            return {}
        best, num_worse = self._progress.best, self._progress.num_worse
        return {"plateau": {"factor": state.lr_factor, "best": best, "num_worse": num_worse}}

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        earlier = dict(manifest.get("plateau", {}))
        state.lr_factor = earlier.pop("factor", 1.0)
        self._progress = EarlyStop(self._config, self.job.plateau_metric, **earlier)
