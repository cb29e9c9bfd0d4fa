"""Run a sweep: train the points of its study rung by rung, then the best trials with more seeds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.retention import is_higher_better
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.read.streams import num_steps
from pipeline.extras.price.cost import cost_of_run
from pipeline.extras.runs.folder import Run
from pipeline.extras.sweep.config import SweepJob
from pipeline.extras.sweep.launchers import LocalProcesses, SchedulerJobs, Training
from pipeline.extras.sweep.study import Point, Search, as_overrides, edges, num_rungs, open_study, steps_at
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.lease import take_lease

if TYPE_CHECKING:
    import optuna

Compose = Callable[[list[str]], TrainJob]  # overrides -> the training's job, checked
logger = get_logger("pipeline.sweep")


class BudgetUsed(Exception):
    """The sweep may start no further training."""


@dataclass
class SweepResult:
    """The result of a sweep. words: overrides of all trials. steps_of_all: steps if no trial had ended early."""

    run_dir: str
    metric: str
    study: optuna.Study
    words: list[str]
    steps_trained: int = 0
    steps_of_all: int = 0
    # for each finalist its run folders, one per seed
    finalists: list[list[str]] = field(default_factory=list)
    # of all trainings: hours, price and rank_hours so far; and the budget that ended the sweep
    cost: dict[str, float] = field(default_factory=dict)
    ended_by: str = ""

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that have begun, in order."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name != "WAITING"]

    @property
    def ranked(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials, best first: by the rung reached, then by the metric there."""
        sign = -1.0 if self.study.direction.name == "MAXIMIZE" else 1.0
        measured = [trial for trial in self.trials if trial.intermediate_values and trial.state.name != "FAIL"]
        return sorted(measured, key=lambda trial: (-(trial.last_step or 0), sign * value_of(trial), trial.number))


def cost_of_trial(run_dir: str, number: int) -> dict[str, Any]:
    """Return the cost of a trial's training; empty if it was not measured."""
    return cost_of_run(storage.join(run_dir, "trials", f"{number:04d}"))


def value_of(trial: optuna.trial.FrozenTrial) -> float:
    """Return the metric at the last rung that the trial reached."""
    return trial.intermediate_values[trial.last_step] if trial.last_step is not None else math.nan


def sweep(job: SweepJob, words: list[str], compose: Compose) -> SweepResult:
    """Run or continue the sweep in job.run_dir. words: the overrides of every training.

    Raises:
        ConfigError: there is no knob, a knob is not a key of the training, or the folder has another sweep.
        TrainingError: every training has failed.
    """
    if not job.sweep.params:
        raise ConfigError("sweep.params has no knob: choose sweep=<option>, or add a file to conf/sweep")
    metric = job.full_name(job.sweep.metric)
    for point in edges(job.sweep.params):
        compose([*words, *as_overrides(point), _checked_in(job.run_dir)])
    lease = take_lease(job.run_dir, job.trainer.lease_ttl_s)
    try:
        study = open_study(job.run_dir, job.sweep, words, is_higher_better(metric))
        result = SweepResult(job.run_dir, metric, study, words)
        trials = _Trials(job, words, compose, metric)
        asyncio.run(trials.search(study))
        if not result.ranked and trials.ended_by:
            raise TrainingError(f"{trials.ended_by}, before any trial had a result: raise it")
        if not result.ranked:
            raise TrainingError(f"every training of {job.run_dir} has failed; {job.run_dir}/trials/*.log say why")
        if job.sweep.seeds > 1 and not trials.ended_by:
            result.finalists = asyncio.run(trials.confirm(result.ranked))
    finally:
        lease.release()
    result.cost, result.ended_by = trials.spent(), trials.ended_by
    last = num_rungs(job.sweep) - 1
    for trial in result.trials:
        result.steps_of_all += trials.steps_to(trial.params, last)
        if rungs := len(trial.intermediate_values):
            result.steps_trained += trials.steps_to(trial.params, rungs - 1)
    return result


def _checked_in(run_dir: str) -> str:
    """Return a run folder for a job that is only checked. No training uses a folder of this name."""
    return f"run_dir={storage.join(run_dir, 'trials', 'unused')}"


class _Trials:
    """Train the trials in <run_dir>/trials."""

    def __init__(self, job: SweepJob, words: list[str], compose: Compose, metric: str) -> None:
        self.job, self.words, self.compose, self.metric = job, words, compose, metric
        config = job.sweep
        self._launcher: LocalProcesses | SchedulerJobs = LocalProcesses(config.parallel, config.launch)
        if config.scheduler is not None:
            self._launcher = SchedulerJobs(config.scheduler, config.scheduler_args, config.job_args, job.name)
        self._steps: dict[str, int] = {}  # of a complete training, by point
        self.ended_by = ""  # the budget that is used up

    def spent(self) -> dict[str, float]:
        """Return what all trainings of the sweep have cost so far, running ones included."""
        folder = storage.join(self.job.run_dir, "trials")
        names = storage.list_folder(folder) if storage.is_folder(folder) else []
        costs = [cost for name in names if (cost := cost_of_run(storage.join(folder, name)))]
        found = {"hours": sum(cost["seconds"] for cost in costs) / 3600}
        found |= {key: sum(cost[key] or 0.0 for cost in costs) for key in ("rank_hours", "price")}
        return found

    def _left(self, run_dir: str) -> list[str]:
        """Return the budget that is left as overrides of a training. A budget counts all attempts of
        the training. Raises BudgetUsed."""
        words, spent, own = [], self.spent(), cost_of_run(run_dir)
        own = {"hours": own.get("seconds", 0.0) / 3600, "price": own.get("price") or 0.0}
        for key in ("hours", "price"):
            if (limit := getattr(self.job.budget, key)) is None:
                continue
            if spent[key] >= limit:
                self.ended_by = self.ended_by or f"budget.{key}={limit:g} is used up ({spent[key]:.4g})"
                logger.info("%s: no further training is started", self.ended_by)
                raise BudgetUsed
            words.append(f"budget.{key}={limit - spent[key] + own[key]}")
        return words

    async def search(self, study: optuna.Study) -> None:
        search = Search(study, self.job.sweep, self._measure)

        async def run() -> None:
            with suppress(BudgetUsed):  # the trial is begun again if the sweep gets a larger budget
                await search.run()

        await asyncio.gather(*(run() for _ in range(self.job.sweep.parallel)))

    async def _measure(self, number: int, point: Point, rung: int) -> float | None:
        is_last, steps = rung == num_rungs(self.job.sweep) - 1, self.steps_to(point, rung)
        limit = [] if is_last else [f"trainer.max_steps={steps}"]
        logger.info("trial %d to step %d  %s", number, steps, "  ".join(as_overrides(point)))
        value = await self._train(self._folder(number), [*as_overrides(point), *limit], steps)
        if value is not None:
            logger.info("trial %d  %s %.5f", number, self.metric, value)
        return value

    def _folder(self, number: int, seed: int | None = None) -> str:
        name = f"{number:04d}" + ("" if seed is None else f"_seed{seed}")
        return storage.join(self.job.run_dir, "trials", name)

    async def _train(self, run_dir: str, words: list[str], steps: int) -> float | None:
        """Return the metric after `steps` steps, or None if every start of the run failed."""
        training = Training(run_dir, [*self.words, *words, f"run_dir={run_dir}"], self.job.trainer.lease_ttl_s)
        starts = self.job.sweep.retries + 1
        while (value := self._result(run_dir, steps)) is None and starts:
            words_of_budget = self._left(run_dir)
            ended = await self._launcher.run(replace(training, words=[*training.words, *words_of_budget]))
            starts = 0 if ended.is_mistake else starts - 1
            if (value := self._result(run_dir, steps)) is None:
                again = "is started again" if starts else f"has failed: {_last_line(training.log)}"
                logger.warning(
                    "%s ended without a result (%s) and %s; see %s", run_dir, ended.reason, again, training.log
                )
        return value

    def _result(self, run_dir: str, steps: int) -> float | None:
        """Return the metric (NaN if it is not a number) if the run has reached `steps`, otherwise None."""
        run = Run(run_dir)
        if not run.summary or (run.summary["step"] < steps and not run.summary.get("stopped_early")):
            return None
        step, metrics = run.metrics("validation")
        value = metrics.get(self.metric)
        return math.nan if value is None and step else value

    def steps_to(self, point: Point, rung: int) -> int:
        """Return the number of steps up to a rung of a training with the point's values."""
        if (key := repr(point)) not in self._steps:
            job = self.compose([*self.words, *as_overrides(point), _checked_in(self.job.run_dir)])
            rows = load_dataset(job.data.path).splits["train"].num_rows
            epoch = num_steps(rows, job.trainer.micro_batch_size, job.data.reader.num_streams, drop_last=True)
            total = job.trainer.epochs * epoch // job.trainer.gradient_accumulation_steps
            self._steps[key] = min(total, job.trainer.max_steps or total)
        return steps_at(rung, self._steps[key], self.job.sweep)

    async def confirm(self, ranked: list[optuna.trial.FrozenTrial]) -> list[list[str]]:
        """Train the best trials with more seeds. Return a list of run folders for each trial."""
        config, seed = self.job.sweep, self.job.trainer.seed
        best = [trial for trial in ranked if trial.state.name == "COMPLETE"][: config.finalists]
        free = asyncio.Semaphore(config.parallel)

        async def train(trial: optuna.trial.FrozenTrial, seed: int) -> None:
            async with free:
                words = [*as_overrides(trial.params), f"trainer.seed={seed}"]
                steps = self.steps_to(trial.params, num_rungs(config) - 1)
                with suppress(BudgetUsed):
                    await self._train(self._folder(trial.number, seed), words, steps)

        seeds = range(seed + 1, seed + config.seeds)
        await asyncio.gather(*(train(trial, each) for trial in best for each in seeds))
        folders = [[self._folder(each.number), *(self._folder(each.number, more) for more in seeds)] for each in best]
        return [[folder for folder in each if Run(folder).summary] for each in folders]


def _last_line(log: str) -> str:
    lines = storage.read_text(log).split("\n") if storage.is_file(log) else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
