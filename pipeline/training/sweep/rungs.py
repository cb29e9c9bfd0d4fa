"""Decide which training goes on, and how far: asynchronous successive halving (Li et al. 2020, ASHA), or all to the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.config.sweep import SweepConfig
from pipeline.training.sweep.study import Trial

Task = tuple[Trial | None, int]  # a trial, or None for a new one, and the rung that it is to reach


def num_rungs(config: SweepConfig) -> int:
    return config.rungs if config.prune == "asha" else 1


def steps_at(rung: int, total_steps: int, config: SweepConfig) -> int:
    """Of a training with `total_steps`: the last rung is all of them, each one before it a reduction_factor fewer."""
    share = config.reduction_factor ** (num_rungs(config) - 1 - rung)
    return max(1, -(-total_steps // share))


def next_task(trials: Sequence[Trial], busy: Collection[int], num_wanted: int, config: SweepConfig) -> Task | None:
    """What a free place is to train; None: nothing, at least until a running trial ends. `busy`: numbers of running trials.

    A trial that was begun and has no result at its next rung goes first: the sweep was killed there. Then the best that may go
    on, from the highest rung down, then a new trial; with grid and random, which learn nothing from those that go on, new trials
    go before. Points of a grid come in order, and if they improve along it each one were the best so far, and went on.
    """
    last = num_rungs(config) - 1
    idle = [trial for trial in trials if trial.state == "running" and trial.number not in busy]
    if begun := [trial for trial in idle if trial.rung < 0]:
        return begun[0], 0
    if config.sampler != "tpe" and len(trials) < num_wanted:
        return None, 0
    for rung in range(last - 1, -1, -1):
        best = promotable(trials, rung, config.reduction_factor)
        waiting = [trial for trial in best if trial.rung == rung and trial in idle]
        if waiting:
            return waiting[0], rung + 1
    if len(trials) < num_wanted:
        return None, 0
    if not busy and idle and not any(trial.rung == last for trial in trials):
        # Too few for a last one to be among the best 1/reduction_factor of anything.
        return min(idle, key=lambda trial: (-trial.rung, trial.value, trial.number)), max(
            trial.rung for trial in idle
        ) + 1
    return None


def promotable(trials: Sequence[Trial], rung: int, reduction_factor: int) -> list[Trial]:
    """The best 1/reduction_factor of those that have a value at the rung."""
    measured = [trial for trial in trials if rung in trial.values and trial.state != "failed"]
    measured.sort(key=lambda trial: (trial.values[rung], trial.number))
    return measured[: len(measured) // reduction_factor]
