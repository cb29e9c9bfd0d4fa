"""Define the jobs that train and plan, and how a training publishes deltas (no torch)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.config.columns import LABEL_METRICS, learnt_labels
from pipeline.config.data import DataConfig
from pipeline.config.jobs.job import Job, PathsConfig, job_of
from pipeline.config.model import ModelConfig
from pipeline.config.optimizers import OptimizerConfig
from pipeline.config.planner import HardwareConfig, PlannerConfig, TargetConfig
from pipeline.config.registry import FEATURE, find_metric
from pipeline.config.serving import PRECISIONS, CalibrationConfig
from pipeline.config.tables import TableConfig
from pipeline.config.training import (
    CheckpointConfig,
    CommsConfig,
    LoggerConfig,
    ParallelConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainerConfig,
    WarmStartConfig,
    profiled_steps,
)
from pipeline.runtime.errors import (
    ConfigError,
    check_above,
    check_at_least,
    check_choice,
    check_given,
    check_within,
    did_you_mean,
)

CADENCE = re.compile(r"every_(\d+(?:\.\d+)?_)?(seconds?|minutes?|hours?|steps?)")
SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


@dataclass
class DeltaGateConfig:
    """Limits for a delta. A delta that exceeds one is not published, and the command ends with an
    error.

    NE is measured on the first `max_rows` rows of the validation split and compared with the published model.
    The trailing limits compare the delta with the median of the last `trailing` deltas, once there are
    `min_history`: the share of changed rows, their norm, and the NE of the rows since the last save, each
    scored before it was trained on. None disables a limit.
    """

    max_rows: int = 20_000
    max_ne_increase: float = 0.01  # of a delta compared with the published model
    # Mean norm of changed rows divided by the mean norm of the same published rows, and its inverse.
    max_norm_ratio: float = 10.0
    max_rows_fraction: float = 1.0  # share of all stored rows that a delta may change
    trailing: int = 20
    min_history: int = 5
    max_rows_rise: float | None = 5.0  # as a multiple of the trailing median of the share of rows
    # as a multiple of the trailing median of the norm ratio, and its inverse
    max_norm_rise: float | None = 3.0
    max_progressive_ne_rise: float | None = 0.1  # 0.1: 10 % above the trailing median

    def __post_init__(self) -> None:
        check_at_least("delta_gate.max_rows", self.max_rows, 1)
        check_at_least("delta_gate.max_ne_increase", self.max_ne_increase, 0.0)
        check_at_least("delta_gate.max_norm_ratio", self.max_norm_ratio, 1.0)
        check_above("delta_gate.max_rows_fraction", self.max_rows_fraction, 0.0)
        check_within("delta_gate.max_rows_fraction", self.max_rows_fraction, 0.0, 1.0)
        check_at_least("delta_gate.min_history", self.min_history, 1)
        check_at_least("delta_gate.trailing", self.trailing, self.min_history)
        check_at_least("delta_gate.max_rows_rise", self.max_rows_rise, 1.0, allow_none=True)
        check_at_least("delta_gate.max_norm_rise", self.max_norm_rise, 1.0, allow_none=True)
        check_at_least("delta_gate.max_progressive_ne_rise", self.max_progressive_ne_rise, 0.0, allow_none=True)


class Cadence(NamedTuple):
    """An interval in `seconds` or in `steps`; 0 means unused."""

    seconds: float = 0.0
    steps: int = 0


def read_cadence(text: str, key: str) -> Cadence:
    """Parse `every_5_minutes`, `every_30_seconds`, `every_200_steps` or `every_hour`. Raises
    ConfigError for other text."""
    found = CADENCE.fullmatch(text)
    number = float((found[1] or "1_").rstrip("_")) if found else 0.0
    unit = found[2].rstrip("s") if found else ""
    if number <= 0 or (unit == "step" and number % 1):
        raise ConfigError(
            f"{key}={text!r} is not an interval: write every_5_minutes, every_30_seconds or every_200_steps"
        )
    return Cadence(steps=int(number)) if unit == "step" else Cadence(seconds=number * SECONDS[unit])


@dataclass
class PublishingConfig:
    """Publish deltas of an artifact during training, in a process next to rank 0. `artifact` is a
    link, which the process creates if it does not exist. If its deltas have more than `max_chain`
    times its bytes, a new artifact of the same step replaces it, and servers load that.

    A due step is saved and then published. At most one step is being published and one waits; if
    more become due, the newest waits and earlier ones are dropped. The last step of the training is
    published, with a wait of at most `finish_s`. A delta that does not pass `gate` stops
    publishing. Servers then keep the last delta until `python -m pipeline publish artifact=A
    unpin=true`; training continues.
    """

    when: str | None = None  # None: nothing is published
    # None: <run_dir>/artifacts/published; exported from the first due step if it does not exist
    artifact: str | None = None
    precision: str = "int8"  # of the exported artifact
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)  # of the exported artifact and its deltas
    # of the exported artifact: column of ids -> Parquet files with raw columns by id
    feature_tables: dict[str, str] = field(default_factory=dict)
    gate: DeltaGateConfig = field(default_factory=DeltaGateConfig)
    max_chain: float | None = 0.5
    finish_s: float = 600.0

    def __post_init__(self) -> None:
        if self.when is not None:
            read_cadence(self.when, "publishing.when")
        if self.artifact is not None:
            check_given("publishing.artifact", self.artifact)
        check_above("publishing.finish_s", self.finish_s, 0.0)
        if self.max_chain is not None:
            check_above("publishing.max_chain", self.max_chain, 0.0)

    @property
    def cadence(self) -> Cadence | None:
        return None if self.when is None else read_cadence(self.when, "publishing.when")


@dataclass
class BudgetConfig:
    """End the run when its costs reach a limit, after all its attempts. hours: of training. price:
    hours times ranks times hardware.price_per_hour. None: no limit. Needs the extra `price`."""

    hours: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for name in ("hours", "price"):
            if (limit := getattr(self, name)) is not None:
                check_above(f"budget.{name}", limit, 0.0)


@job_of("train")
@dataclass
class TrainJob(Job):
    """Train a model. torchrun sets `world_size`; without torchrun it is the number of ranks to
    validate or plan for."""

    name: str = "???"
    run_dir: str = "${paths.runs}/${name}"
    world_size: int = 1
    data: DataConfig = field(default_factory=DataConfig)
    tables: dict[str, TableConfig] = field(default_factory=dict)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    comms: CommsConfig = field(default_factory=CommsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    publishing: PublishingConfig = field(default_factory=PublishingConfig)
    warm_start: WarmStartConfig | None = None  # first weights from another run
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    # steps:50-60 writes a trace of those steps, and their times by operation, into the run folder
    profile: str | None = None
    # the run that `train from=RUN` trains again; its plan is used if it still fits
    from_run: str | None = None

    def __post_init__(self) -> None:
        check_given("name", self.name)
        check_given("run_dir", self.run_dir)
        if self.from_run is not None and os.path.realpath(self.from_run) == os.path.realpath(self.run_dir):
            raise ConfigError(f"from={self.from_run} would write to that run: choose another run_dir")
        if self.profile is not None:
            profiled_steps(self.profile)
        check_at_least("world_size", self.world_size, 1)
        if self.budget.price is not None and self.hardware.price_per_hour is None:
            raise ConfigError(
                f"budget.price={self.budget.price:g} needs the price of a rank for an hour: set hardware.price_per_hour"
            )
        self._check_metrics()
        self._check_loss()
        if self.checkpoint.differential and self.parallel.has_replicas:
            raise ConfigError(
                f"checkpoint.differential=true saves only changed rows, but parallel.embedding_sync={self.parallel.embedding_sync} "
                "averages every row over the hosts: use one without the other"
            )
        check_choice("publishing.precision", self.publishing.precision, PRECISIONS)
        if type(self) is TrainJob and "://" in self.run_dir:  # a PlanJob writes no run folder
            raise ConfigError(
                f"run_dir={self.run_dir}: run folders are local paths in this release; give a folder that every host mounts"
            )

    @property
    def early_stop_metric(self) -> str:
        """Return the metric of early stopping: the model's first metric if the config names none."""
        return self.full_name(self.trainer.early_stop.metric)

    @property
    def plateau_metric(self) -> str:
        """Return the metric of schedule.plateau: the model's first metric if the config names none."""
        return self.full_name(self.schedule.plateau.metric)

    @property
    def best_metric(self) -> str:
        """Return the metric that chooses the best checkpoints: the model's first metric if the
        config names none."""
        return self.full_name(self.checkpoint.best_metric)

    def full_name(self, metric: str | None) -> str:
        """Return the full name of a metric: the main label's if the name has no label. None is the
        model's first metric; a metric that the main label lacks is the first label's with it."""
        named = (each for each in self.metrics if metric in (None, each, each.partition("/")[2]))
        return next(named, metric or "")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that early stopping and checkpoints can use, the main label's first.
        If there are several labels, names are <label>/<metric>."""
        main, labels = self.data.columns.label, self.data.columns.learnable
        learnt = [main, *(name for name in labels if name != main)] if self.model.learns_all else [main]
        labels = learnt_labels({name: labels[name] for name in learnt if name in labels})
        learnt = list(labels) or learnt
        found: list[str] = []
        for name in learnt:
            kind = labels[name].kind if name in labels else "binary"
            metrics = self.model.metrics if kind == "binary" else LABEL_METRICS[kind]
            if name in labels and labels[name].loss:
                metrics = ("loss", *metrics)
            prefix = f"{name}/" if len(learnt) > 1 else ""
            found += [prefix + metric for metric in metrics]
            if kind != "binary" or "auc" in metrics:
                of_kind = "binary" if kind == "binary" else "number"
                named = [name for name in self.trainer.metrics if of_kind in find_metric(name, "trainer.metrics").kinds]
                found += [prefix + metric for metric in (*named, *(self._group_metrics() if kind == "binary" else ()))]
        return tuple(found)

    def _group_metrics(self) -> tuple[str, ...]:
        if self.data.group_column is None:
            return ()
        at = self.trainer.group_metrics_at
        return ("gauc", *(f"ndcg_at_{k}" for k in at), *(f"hit_rate_at_{k}" for k in at))

    def _check_loss(self) -> None:
        for name in self.trainer.loss.columns:
            labels = {each: label for each, label in self.data.columns.labels.items() if label.mask is None}
            if name not in labels or name == self.data.columns.label:
                raise ConfigError(
                    f"trainer.loss reads {name!r}: declare it as a label without a mask, next to the label that is trained: "
                    f"data.columns.labels={{{self.data.columns.label}: {{}}, {name}: {{kind: regression}}}}"
                    f"{did_you_mean(name, labels)}"
                )
        ranking = self.trainer.loss.ranking
        if ranking is None:
            return
        if self.data.group_column is None:
            raise ConfigError(f"trainer.loss.ranking={ranking} ranks within groups: set data.group_column=<column>")
        if self.data.reader.shuffle == "row_groups":
            raise ConfigError(
                f"trainer.loss.ranking={ranking} needs the rows of a group in one batch, and data.reader.shuffle=row_groups "
                "spreads them: set data.reader.shuffle=groups"
            )
        if self.trainer.micro_batch_size < 2 * self.data.reader.num_streams:
            raise ConfigError(
                f"trainer.loss.ranking={ranking} compares rows of one stream, and a batch of {self.trainer.micro_batch_size} rows has "
                f"fewer than 2 of each of data.reader.num_streams={self.data.reader.num_streams}: set fewer streams"
            )

    def _check_metrics(self) -> None:
        if len(set(self.trainer.metrics)) < len(self.trainer.metrics):
            raise ConfigError(f"trainer.metrics={self.trainer.metrics} names a metric twice: name each once")
        for name in self.trainer.metrics:
            self._check_groups(name)
        named = {name.rpartition("/")[2] for name in self.metrics}
        if absent := [name for name in self.trainer.metrics if name not in named]:
            raise ConfigError(
                f"trainer.metrics={absent} need logits of a binary label, but model={self.model.kind} is measured by "
                f"{', '.join(self.metrics)}: leave them out"
            )
        check_choice(f"trainer.early_stop.metric (model={self.model.kind})", self.early_stop_metric, self.metrics)
        check_choice(f"checkpoint.best_metric (model={self.model.kind})", self.best_metric, self.metrics)
        check_choice(f"schedule.plateau.metric (model={self.model.kind})", self.plateau_metric, self.metrics)

    def _check_groups(self, name: str) -> None:
        metric, feature = find_metric(name, "trainer.metrics"), name.partition(FEATURE)[2]
        has_groups = hasattr(metric, "sums_of_groups")
        if feature and not has_groups:
            raise ConfigError(
                f"trainer.metrics={name}: {name.partition(FEATURE)[0]} has no groups; leave :{feature} out"
            )
        if has_groups and not (feature or metric.of_all_rows or self.data.group_column):
            raise ConfigError(
                f"trainer.metrics={name} measures groups of rows: name a feature, as in {name}:user_id, or prepare the "
                "data with data.group_column"
            )


@job_of("plan")
@dataclass
class PlanJob(TrainJob):
    """The train job, planned for `world_size` ranks of `hardware` and written to planner.plan_file.

    brief: print one line about the plan instead of a line per table; the page has every table.
    scale_to: predict steps for these world sizes too; world_size=[8,16,32] is a short form.
    what_if: predict the step with single settings changed. threads: of a CPU rank; None is
    OMP_NUM_THREADS, or its share of the cores. target: if it is set, `plan` finds `hardware` and
    `world_size`.
    """

    brief: bool = False
    scale_to: list[int] = field(default_factory=list)
    what_if: bool = False
    threads: int | None = None
    target: TargetConfig = field(default_factory=TargetConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("threads", self.threads, 1, allow_none=True)
        for size in self.scale_to:
            check_at_least("scale_to", size, 1)
