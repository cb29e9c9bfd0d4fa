"""Measure the model on the validation split by steps or epochs (trainer.evaluate_every_*), and at the end."""

from __future__ import annotations

import math
from typing import Any

from pipeline.config.registry import from_extra, register
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process import preemption
from pipeline.training.evaluation import evaluate_model, open_stats
from pipeline.training.hooks.base import Hook, TrainingState

logger = get_logger("pipeline.training.trainer")


@register("hook", "evaluation")
class Evaluation(Hook):
    def on_fit_start(self, state: TrainingState) -> None:
        """Evaluate a restored step whose evaluation was skipped because of SIGTERM."""
        is_due = state.is_over or state.is_evaluation_due(self.job.trainer)
        if state.metrics_step != state.step and is_due:
            self._evaluate(state)

    def on_step_end(self, state: TrainingState) -> None:
        if state.preempted or not (state.is_evaluation_due(self.job.trainer) or state.is_last):
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
            metrics = evaluate_model(
                parts.model,
                parts.validation_reader,
                parts.context,
                self.job.trainer.evaluate_max_batches,
                "validation",
                self.job.trainer.group_metrics_at,
                collector,
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
