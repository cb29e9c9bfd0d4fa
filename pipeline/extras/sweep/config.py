"""Define the schema of a sweep: the keys and values to try, how to search them, and how many trials run at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.jobs.job import job_of
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "asha")


@dataclass
class KnobConfig:
    """A key of the training and its values: `low` to `high`, or `choices`, also options of a group.

    when: key of another knob -> values; only with these values this knob is searched, otherwise the
    key is not set.
    """

    low: float | None = None
    high: float | None = None
    log: bool = False
    integer: bool = False
    step: float | None = None  # between values; a grid over a range needs it
    choices: list[Any] = field(default_factory=list)
    when: dict[str, list[Any]] = field(default_factory=dict)

    def check(self, key: str) -> None:
        """Raise ConfigError if the knob `key` is invalid."""
        has_range = self.low is not None and self.high is not None
        if bool(self.choices) == has_range or (self.low is None) != (self.high is None):
            raise ConfigError(f"sweep.params.{key} needs either choices=[...], or low and high")
        if self.low is not None and self.high is not None:
            check_above(f"sweep.params.{key}.high", self.high, self.low)
            if self.log:
                check_above(f"sweep.params.{key}.low (log=true)", self.low, 0.0)
            if self.log and self.step is not None:
                raise ConfigError(f"sweep.params.{key}: log and step exclude each other")
        if self.step is not None:
            check_above(f"sweep.params.{key}.step", self.step, 0.0)


@dataclass
class SweepConfig:
    """The sweep. params: key of the training -> its values. metric: the validation metric; None:
    the model's default.

    prune=asha: a training continues from a rung (1/9, 1/3 and all of its steps with
    reduction_factor=3) only while it is among the best 1/reduction_factor there (Li et al. 2020).
    launch: the words before a trial's overrides; None: this Python. scheduler_args, job_args: what
    `torchx run` takes as -cfg, and pipeline.train's arguments before `--`.
    """

    params: dict[str, KnobConfig] = field(default_factory=dict)
    sampler: str = "tpe"
    trials: int = 20  # the maximum; a grid has as many as it has points
    parallel: int = 1  # trainings at a time
    seed: int = 0  # of the sampler
    metric: str | None = None
    prune: str = "none"
    reduction_factor: int = 3
    rungs: int = 3
    retries: int = 2  # of a training that ends without a result
    finalists: int = 2  # trained with all seeds at the end, and compared
    seeds: int = 1  # 1: no such comparison
    launch: list[str] | None = None
    # TorchX's: slurm, kubernetes, ...; None: processes of this machine
    scheduler: str | None = None
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    job_args: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("sweep.sampler", self.sampler, SAMPLERS)
        check_choice("sweep.prune", self.prune, PRUNERS)
        for name in ("trials", "parallel", "seeds", "finalists"):
            check_at_least(f"sweep.{name}", getattr(self, name), 1)
        check_at_least("sweep.retries", self.retries, 0)
        check_at_least("sweep.reduction_factor", self.reduction_factor, 2)
        check_at_least("sweep.rungs", self.rungs, 2)
        if self.scheduler is None and (self.scheduler_args or self.job_args):
            raise ConfigError(
                "sweep.scheduler_args and sweep.job_args are for jobs: set sweep.scheduler too, for instance slurm"
            )
        if self.scheduler is not None and self.launch is not None:
            raise ConfigError(
                "sweep.launch starts processes of this machine, but sweep.scheduler starts jobs: set one of the two"
            )
        for key, knob in self.params.items():
            knob.check(key)
            for other in knob.when:
                if other not in self.params or list(self.params).index(other) >= list(self.params).index(key):
                    raise ConfigError(
                        f"sweep.params.{key}.when names {other!r}, which is not a knob before it: "
                        "declare that knob first"
                    )
            if self.sampler == "grid" and not knob.choices and knob.step is None and not knob.integer:
                raise ConfigError(f"sweep.params.{key}: a grid needs choices, or a step between low and high")


@job_of("sweep")
@dataclass
class SweepJob(TrainJob):
    """A train job repeated with the values of sweep.params. run_dir has the study and runs."""

    run_dir: str = "${paths.runs}/${name}_sweep"
    sweep: SweepConfig = field(default_factory=SweepConfig)
