"""Set learning rates by schedule.

The factor depends on the step only, so a resumed run is exact.
"""

from __future__ import annotations

import math

from pipeline.config.training import LRSchedule, ScheduleConfig
from pipeline.training.optimizer import TrainingOptimizer


def lr_factor(schedule: LRSchedule, step: int) -> float:
    """Return the factor of update `step`, counted from 0.

    Warm-up: (step + 1) / warmup_steps, so the first step trains and the last warm-up step has
    factor 1. Decay: t = (step - decay_start_step) / decay_steps, at most 1 (`step` schedules
    continue to decay).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant" or step < schedule.decay_start_step:
        return 1.0
    decayed = step - schedule.decay_start_step
    t = min(1.0, decayed / schedule.decay_steps)
    if schedule.kind == "poly":
        factor = (1.0 - t) ** schedule.power
    elif schedule.kind == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * t))
    else:
        factor = schedule.gamma ** (decayed // schedule.decay_steps)
    return max(schedule.end_factor, factor)


def apply_schedule(optimizer: TrainingOptimizer, schedule: ScheduleConfig, step: int, plateau: float = 1.0) -> None:
    """Set the learning rates of update `step`. Call it before that step's backward, which updates
    the tables.

    `plateau` is the current factor of schedule.plateau.
    """
    factors = [
        reduced(lr_factor(own, step), plateau, schedule.plateau.min_lr / lr)
        for own, lr in zip((schedule.sparse, schedule.dense), optimizer.configured_rates, strict=True)
    ]
    optimizer.scale_learning_rates(*factors)


def reduced(factor: float, plateau: float, least: float) -> float:
    """Return `factor` times `plateau`, but at least `least`, and at most `factor`."""
    return factor if plateau == 1.0 else max(factor * plateau, min(factor, least))
