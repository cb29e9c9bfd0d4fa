"""Run a sweep: ask the study for points, train them by rungs, and remember each result. Killed, it goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.checkpoint.retention import is_higher_better
from pipeline.config.jobs.train import SweepJob, TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.read.streams import num_steps
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.lease import take_lease
from pipeline.training.runs.folder import Run
from pipeline.training.sweep.pool import Pool, Training, launcher_of
from pipeline.training.sweep.rungs import next_task, num_rungs, steps_at
from pipeline.training.sweep.space import Point, as_overrides, edges
from pipeline.training.sweep.study import Study, Trial

Compose = Callable[[list[str]], TrainJob]  # overrides -> the training's job, checked
logger = get_logger("pipeline.sweep")


@dataclass
class SweepResult:
    """trials: all, in order. words: the overrides that all trials share. steps: trained, and those of all trials to the end."""

    run_dir: str
    metric: str
    sign: float
    trials: list[Trial]
    words: list[str]
    steps_trained: int = 0
    steps_of_all: int = 0
    finalists: list[list[str]] = field(default_factory=list)  # run folders of each, a seed each

    @property
    def ranked(self) -> list[Trial]:
        """Best first: by the rung reached, then by the metric there."""
        measured = [trial for trial in self.trials if trial.values and trial.state != "failed"]
        return sorted(measured, key=lambda trial: (-trial.rung, trial.value, trial.number))


def sweep(job: SweepJob, words: list[str], compose: Compose) -> SweepResult:
    """`words`: the overrides of every training. Resumes the sweep that job.run_dir holds.

    Raises:
        ConfigError: no knob, a knob that no training has, or a folder that holds another sweep.
        TrainingError: every training has failed.
    """
    if not job.sweep.params:
        raise ConfigError(
            "sweep.params names no knob: choose sweep=<option>, or write a file of your own in conf/sweep"
        )
    metric = job.sweep.metric or job.model.metrics[0]
    for point in edges(job.sweep.params):
        compose([*words, *as_overrides(point)])
    lease = take_lease(job.run_dir, job.trainer.lease_ttl_s)
    try:
        study = Study(job.run_dir, job.sweep, words, -1.0 if is_higher_better(metric) else 1.0)
        runner = _Runner(job, words, compose, study, metric)
        try:
            runner.search()
            finalists = runner.confirm() if job.sweep.seeds > 1 else []
        finally:
            runner.pool.close()
    finally:
        lease.release()
    result = SweepResult(job.run_dir, metric, study.sign, study.trials(), words, finalists=finalists)
    if not result.ranked:
        raise TrainingError(f"every training of {job.run_dir} has failed; {job.run_dir}/trials/*.log say why")
    totals = [runner.total_steps(trial.point) for trial in result.trials]
    reached = [trial.rung for trial in result.trials]
    result.steps_of_all = sum(totals)
    result.steps_trained = sum(
        steps_at(rung, total, job.sweep) for rung, total in zip(reached, totals, strict=True) if rung >= 0
    )
    return result


class _Runner:
    def __init__(self, job: SweepJob, words: list[str], compose: Compose, study: Study, metric: str) -> None:
        self.job, self.words, self.compose, self.study, self.metric = job, words, compose, study, metric
        self.pool = Pool(job.sweep.parallel, launcher_of(job.sweep, job.name))
        self._steps: dict[tuple[str, int], int] = {}

    def search(self) -> None:
        """Until no trial is left to begin or to go on."""
        config, busy = self.job.sweep, self._take_up()
        while True:
            while self.pool.has_room:
                task = next_task(self.study.trials(), busy, self.study.num_wanted, config)
                if task is None:
                    break
                trial, rung = task[0] or self.study.ask(), task[1]
                busy[trial.number] = (self._begin(trial, rung), rung)
            if not busy:
                break
            ended = self.pool.wait()
            number = next(number for number, (training, _) in busy.items() if training is ended)
            if self._take(number, busy[number][1], ended):
                del busy[number]
        for trial in self.study.trials():
            if trial.state == "running":
                self.study.end(trial, "pruned")

    def _take_up(self) -> dict[int, tuple[Training, int]]:
        """Number -> training and rung, of those that an earlier sweep submitted and that are not over. What ended since is recorded."""
        found = {}
        for trial in self.study.trials():
            rung = trial.rung + 1
            if trial.state != "running" or rung >= num_rungs(self.job.sweep):
                continue
            training = self._training_to(trial, rung)
            training.attempts = 1
            if self.pool.take_up(training):
                found[trial.number] = (training, rung)
            elif (value := self._result(training.run_dir, self._steps_to(trial.point, rung))) is not None:
                self._record(trial, rung, value)
        return found

    def _begin(self, trial: Trial, rung: int) -> Training:
        training = self._training_to(trial, rung)
        is_last = rung == num_rungs(self.job.sweep) - 1
        where = "" if is_last else f", to step {self._steps_to(trial.point, rung)}"
        logger.info("trial %d%s  %s", trial.number, where, "  ".join(as_overrides(trial.point)))
        self.pool.start(training)
        return training

    def _training_to(self, trial: Trial, rung: int) -> Training:
        is_last = rung == num_rungs(self.job.sweep) - 1
        limit = [] if is_last else [f"trainer.max_steps={self._steps_to(trial.point, rung)}"]
        return self._training(self.trial_dir(trial.number), [*as_overrides(trial.point), *limit])

    def trial_dir(self, number: int, seed: int | None = None) -> str:
        name = f"{number:04d}" + ("" if seed is None else f"_seed{seed}")
        return storage.join(self.job.run_dir, "trials", name)

    def _training(self, run_dir: str, words: list[str]) -> Training:
        words = [*self.words, *words, f"run_dir={run_dir}"]
        return Training(run_dir, words, f"{run_dir}.log", self.job.trainer.lease_ttl_s)

    def _take(self, number: int, rung: int, ended: Training) -> bool:
        """Whether the trial has left the pool: with a result, or as failed. Else it was started again."""
        trial = next(trial for trial in self.study.trials() if trial.number == number)
        value = self._result(ended.run_dir, self._steps_to(trial.point, rung))
        if value is None:
            if not ended.is_mistake and ended.attempts <= self.job.sweep.retries:
                logger.warning(
                    "trial %d ended without a result (%s), and is started again; %s", number, ended.ended, ended.log
                )
                self.pool.start(ended)
                return False
            logger.warning("trial %d has failed (%s): %s", number, ended.ended, _last_line(ended.log))
            self.study.end(trial, "failed")
            return True
        self._record(trial, rung, value)
        return True

    def _record(self, trial: Trial, rung: int, value: float) -> None:
        self.study.report(trial.number, rung, value)
        trial.values[rung] = self.study.sign * value if math.isfinite(value) else math.inf
        logger.info("trial %d  %s %.5f", trial.number, self.metric, value)
        if rung == num_rungs(self.job.sweep) - 1:
            self.study.end(trial, "complete")

    def _result(self, run_dir: str, steps: int) -> float | None:
        """The metric where the training has come as far as it was to; None where it has not, NaN where it was not a number."""
        run = Run(run_dir)
        if not run.summary or (run.summary["step"] < steps and not run.summary.get("stopped_early")):
            return None
        step, metrics = run.metrics("validation")
        value = metrics.get(self.metric)
        return math.nan if value is None and step else value

    def total_steps(self, point: Point) -> int:
        return self._steps_to(point, num_rungs(self.job.sweep) - 1)

    def _steps_to(self, point: Point, rung: int) -> int:
        """Of a training of its own with the point's values, up to the rung."""
        key = (repr(point), rung)
        if key not in self._steps:
            job = self.compose([*self.words, *as_overrides(point)])
            rows = load_dataset(job.data.path).splits["train"].num_rows
            epoch = num_steps(rows, job.trainer.micro_batch_size, job.data.reader.num_streams, drop_last=True)
            total = job.trainer.epochs * epoch // job.trainer.gradient_accumulation_steps
            self._steps[key] = steps_at(rung, min(total, job.trainer.max_steps or total), self.job.sweep)
        return self._steps[key]

    def confirm(self) -> list[list[str]]:
        """The best trials trained with further seeds; their run folders, a list a trial."""
        result = SweepResult(self.job.run_dir, self.metric, self.study.sign, self.study.trials(), self.words)
        last = num_rungs(self.job.sweep) - 1
        best = [trial for trial in result.ranked if trial.rung == last][: self.job.sweep.finalists]
        first = self.job.trainer.seed
        waiting = [
            self._training(self.trial_dir(trial.number, seed), [*as_overrides(trial.point), f"trainer.seed={seed}"])
            for trial in best
            for seed in range(first + 1, first + self.job.sweep.seeds)
        ]
        num_running = 0
        while waiting or num_running:
            while waiting and self.pool.has_room:
                logger.info("finalist %s", waiting[0].run_dir)
                self.pool.start(waiting.pop(0))
                num_running += 1
            ended = self.pool.wait()
            num_running -= 1
            if not Run(ended.run_dir).summary and ended.attempts <= self.job.sweep.retries:
                waiting.insert(0, ended)
        folders = [
            [
                self.trial_dir(trial.number),
                *(self.trial_dir(trial.number, first + more) for more in range(1, self.job.sweep.seeds)),
            ]
            for trial in best
        ]
        return [[folder for folder in each if Run(folder).summary] for each in folders]


def _last_line(log: str) -> str:
    lines = storage.read_text(log).split("\n") if storage.is_file(log) else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
