"""Define training: optimizers, schedules, collectives, checkpoints and the trainer (stdlib only)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from pipeline.config.registry import find, find_metric
from pipeline.runtime.errors import (
    ConfigError,
    check_above,
    check_at_least,
    check_below_one,
    check_choice,
    check_keys,
    check_within,
    did_you_mean,
)
from pipeline.runtime.masking import MASK, hide
from pipeline.runtime.process.watchdog import Limits

SCHEDULES = ("constant", "poly", "cosine", "step")
AVERAGES = ("none", "ema", "swa")
COMM_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
PRECISIONS = ("fp32", "tf32", "bf16")
TRAIN_PIPELINES = ("auto", "sparse_dist", "base")
NON_FINITE_POLICIES = ("stop", "skip", "rollback")
ROW_STATE_POLICIES = ("refuse", "average")
SAVE_FAILURE_POLICIES = ("stop", "continue")
RANKINGS = ("pairwise", "listwise", "jrc")
BACKENDS = ("auto", "gloo", "nccl")
LOG_FORMATS = ("text", "full", "json")


def _check_limit(key: str, value: float | None) -> None:
    if value is not None:
        check_above(key, value, 0.0)


@dataclass
class LRSchedule:
    """A factor of the learning rate: linear warm-up, then constant until `decay_start_step`, then a
    decay. poly: (1 - t) ** power over `decay_steps`; cosine: half a wave; step: times `gamma` every
    `decay_steps`. The factor is at least `end_factor`."""

    kind: str = "constant"
    warmup_steps: int = 0
    decay_start_step: int = 0
    decay_steps: int = 0
    power: float = 2.0
    gamma: float = 0.1
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        check_choice("schedule.kind", self.kind, SCHEDULES)
        for name in ("warmup_steps", "decay_start_step", "decay_steps"):
            check_at_least(f"schedule.{name}", getattr(self, name), 0)
        if self.kind != "constant":
            check_at_least(f"schedule.decay_steps (kind={self.kind})", self.decay_steps, 1)
            check_at_least("schedule.decay_start_step", self.decay_start_step, self.warmup_steps)
        check_above("schedule.power", self.power, 0.0)
        check_above("schedule.gamma", self.gamma, 0.0)
        check_within("schedule.gamma", self.gamma, 0.0, 1.0)
        check_within("schedule.end_factor", self.end_factor, 0.0, 1.0)


@dataclass
class PlateauConfig:
    """Multiply both rates by `factor` after `patience` evaluations in a row without an improvement
    of `min_delta`. patience=0 disables it. A rate does not fall below `min_lr`. The schedules
    continue: factors are multiplied."""

    patience: int = 0
    factor: float = 0.1
    min_lr: float = 1e-6
    # None: the model's first metric, ne for clicks and recall_at_<k> for retrieval
    metric: str | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("schedule.plateau.patience", self.patience, 0)
        check_above("schedule.plateau.factor", self.factor, 0.0)
        check_below_one("schedule.plateau.factor", self.factor)
        check_at_least("schedule.plateau.min_lr", self.min_lr, 0.0)
        check_at_least("schedule.plateau.min_delta", self.min_delta, 0.0)


@dataclass
class ScheduleConfig:
    sparse: LRSchedule = field(default_factory=LRSchedule)
    dense: LRSchedule = field(default_factory=LRSchedule)
    plateau: PlateauConfig = field(default_factory=PlateauConfig)


@dataclass
class CommsConfig:
    """Precision of pooled embeddings in forward and of their gradients in backward. Ids are never
    quantized. shared_memory: CPU ranks of one host exchange data that is not quantized through
    memory, not by gloo."""

    forward_precision: str = "fp32"
    backward_precision: str = "fp32"
    backend: str = "auto"
    timeout_s: float = 300.0
    shared_memory: bool = True

    def __post_init__(self) -> None:
        check_choice("comms.forward_precision", self.forward_precision, COMM_PRECISIONS)
        check_choice("comms.backward_precision", self.backward_precision, COMM_PRECISIONS)
        check_choice("comms.backend", self.backend, BACKENDS)
        # the process groups count full seconds
        check_at_least("comms.timeout_s", self.timeout_s, 1)


TIER_CHOICES = ("by_table", "auto")


@dataclass
class ShardingConfig:
    """How much of TorchRec and FBGEMM is replaced, and whether untested versions may run.

    fast_cpu: on CPU this package's own code does table lookups and updates, the id exchange of one
    rank, the exchange between ranks of one host (if comms.shared_memory is set), gradient
    averaging, the order of pooled features, updates of replicated tables, DLRM's activations and
    dot products, and the allocator's thresholds. False uses TorchRec, FBGEMM, gloo and DDP
    unchanged: slower, with the same losses up to rounding. Use it to find the cause of a fault.
    """

    fast_cpu: bool = True
    # of torch, torchrec and fbgemm; errors may then be silent
    allow_untested_versions: bool = False
    # by_table: tables.*.tiers; auto: the planner chooses the tables that do not fit into memory
    tiers: str = "by_table"
    # on a local SSD, for rows of tables in tiers; None: run_dir/tiers
    tier_folder: str | None = None

    def __post_init__(self) -> None:
        check_choice("sharding.tiers", self.tiers, TIER_CHOICES)


EMBEDDING_SYNCS = ("every_step", "every_<n>_steps", "never")


@dataclass
class ParallelConfig:
    """embedding_sync: every_step shards the tables over all ranks, so all ranks train one model at
    every step.

    every_100_steps (or another number) and never: each host trains separate tables on the rows of
    its ranks, sharded over these ranks. The tables with their optimizer state are averaged over the
    hosts at that interval. Dense layers and data_parallel tables are all-reduced over all ranks at
    every step in any case.
    """

    embedding_sync: str = "every_step"

    def __post_init__(self) -> None:
        match = re.fullmatch(r"every_([1-9]\d*)_steps?", self.embedding_sync)
        if not match and self.embedding_sync not in EMBEDDING_SYNCS:
            raise ConfigError(
                f"parallel.embedding_sync={self.embedding_sync!r} is not one of {', '.join(EMBEDDING_SYNCS)}"
                f"{did_you_mean(self.embedding_sync, ('every_step', 'never', 'every_100_steps'))}"
            )

    @property
    def has_replicas(self) -> bool:
        return self.embedding_sync != "every_step"

    @property
    def sync_every_steps(self) -> int:
        """Return the interval, 0 for never. Raises AssertionError without replicas."""
        assert self.has_replicas
        return 0 if self.embedding_sync == "never" else int(self.embedding_sync.split("_")[1])


@dataclass
class CheckpointConfig:
    """Save every `save_every_minutes`, every `save_every_steps`, and always at the end of training.
    An old step is removed only if two later steps are known to be intact, so at least two steps
    stay.

    differential: a step holds only the table rows that changed since the step before, and all other
    state. Such steps form a chain that begins with a full step. A new full step follows after
    max_links steps, or if the links hold more than half of its bytes. keep_last_n and keep_best_n
    then count chains. compress_links: shard files of links are compressed without loss; older
    releases refuse them.
    """

    folder: str | None = None  # None: run_dir/checkpoints; s3://bucket/prefix for an object store
    # wall-clock minutes since the last save; None: not by time
    save_every_minutes: float | None = 10.0
    save_every_steps: int = 0  # 0: not by steps
    keep_last_n: int = 2
    # in addition to the last n, of the steps that were evaluated when saved; save_best keeps at
    # least 1
    keep_best_n: int = 0
    # None: the model's first metric, ne for clicks and recall_at_<k> for retrieval
    best_metric: str | None = None
    # also save a step whose evaluation is the best so far, and keep one such step
    save_best: bool = False
    # copy the state to host memory and write it while training continues
    asynchronous: bool = False
    differential: bool = False
    max_links: int = 100
    compress_links: bool = False
    on_failure: str = "stop"
    max_failures_in_a_row: int = 3  # with on_failure=continue the run stops after this many
    resume: bool = True
    # Row-wise optimizer state of a table whose columns are now split differently: refuse, or use
    # averages.
    row_state_across_columns: str = "refuse"
    # a private Ed25519 key as PEM: it signs steps, and versions that retrain promotes
    sign_key: str | None = None
    # public Ed25519 keys, a path or a list: only steps signed by one are resumed or used as a start
    require_signature: Any = None

    def __post_init__(self) -> None:
        check_keys("checkpoint.require_signature", self.require_signature)
        check_choice("checkpoint.row_state_across_columns", self.row_state_across_columns, ROW_STATE_POLICIES)
        if self.save_every_minutes is not None:
            check_above("checkpoint.save_every_minutes", self.save_every_minutes, 0.0)
        check_at_least("checkpoint.save_every_steps", self.save_every_steps, 0)
        check_at_least("checkpoint.keep_last_n", self.keep_last_n, 2)
        check_at_least("checkpoint.keep_best_n", self.keep_best_n, 0)
        check_at_least("checkpoint.max_links", self.max_links, 1)
        if self.compress_links and not self.differential:
            raise ConfigError(
                "checkpoint.compress_links compresses steps of changed rows: set checkpoint.differential=true, or leave it out"
            )
        check_choice("checkpoint.on_failure", self.on_failure, SAVE_FAILURE_POLICIES)
        check_at_least("checkpoint.max_failures_in_a_row", self.max_failures_in_a_row, 1)

    @property
    def num_best(self) -> int:
        """Return how many of the best steps are kept."""
        return max(self.keep_best_n, int(self.save_best))


@dataclass
class LoggerConfig:
    """Where a run's metrics go in addition to its log and metrics.jsonl, which are always written."""

    tensorboard: bool = True  # event files in <run_dir>/tensorboard
    report: bool = True  # <run_dir>/report.html at the end
    # of the log on stderr. full: with date, zone, level, job, attempt, rank; json: one object per line
    format: str = "text"
    tracker: str = "none"  # or mlflow, wandb, or a registered tracker, which gets the same metrics
    tracker_uri: str | None = None  # of MLflow; None: as MLflow's environment variables say
    project: str | None = None  # of the tracker; None: data.name
    otlp_endpoint: str | None = None  # of an OpenTelemetry collector, http://host:4318; None: nothing is sent
    otlp_every_s: float = 15.0
    # gets a POST while training makes progress; None: nothing is sent
    heartbeat_url: str | None = None
    heartbeat_every_s: float = 60.0

    def __post_init__(self) -> None:
        check_choice("logger.format", self.format, LOG_FORMATS)
        check_above("logger.otlp_every_s", self.otlp_every_s, 0.0)
        check_above("logger.heartbeat_every_s", self.heartbeat_every_s, 0.0)
        if self.heartbeat_url == MASK:  # read from a saved job, which does not hold it
            self.heartbeat_url = None
        if self.heartbeat_url is not None and not self.heartbeat_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"logger.heartbeat_url={self.heartbeat_url} is not an HTTP address: give https://HOST/PATH of a monitor "
                "that raises an alarm when no request comes"
            )
        if self.heartbeat_url is not None:
            hide(self.heartbeat_url)
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"logger.otlp_endpoint={self.otlp_endpoint} is not an HTTP address of a collector: give http://HOST:4318"
            )
        if self.tracker != "none":
            find("tracker", self.tracker, "logger.tracker")


@dataclass
class EarlyStopConfig:
    """Stop after `patience` evaluations in a row without an improvement of `min_delta`. patience=0
    never stops."""

    patience: int = 0
    # None: the model's first metric, ne for clicks and recall_at_<k> for retrieval
    metric: str | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("trainer.early_stop.patience", self.patience, 0)
        check_at_least("trainer.early_stop.min_delta", self.min_delta, 0.0)


@dataclass
class LossConfig:
    """Change the training loss of one binary label y. All metrics stay those of the plain log loss.

    The loss of a row is  weight * c(y) * (1 - p(y)) ** focal_gamma * cross_entropy(logit, t)  with
    the target t = (1 - label_smoothing) * y + label_smoothing / 2, and p(y) the probability that
    the model gives to y. c(1) = pos_weight and c(0) = 1; with focal_alpha they are focal_alpha and
    1 - focal_alpha (focal loss: arXiv 1708.02002).

    ranking: a loss within groups, which counts ranking_weight, and the loss above 1 - ranking_weight
    (extras/models/tasks/ranking.py).

    position: the column with the place where a row was shown (data.columns.position), from 0 or 1. Training and
    evaluation add a learnt number to the logit for each place, 0 for reference_position. Serving
    does not, so it scores rows as if shown there. Later places count as num_positions - 1.

    teacher: a label of the data set with the probability that another model gives to the row. In
    training the target is (1 - teacher_weight) * t + teacher_weight * teacher (arXiv 1503.02531). A row
    whose teacher is not a probability has no finite loss.

    fake_negatives: each positive row is also in the data as a negative row, from before the delayed
    label was known. In training positive rows count 1 + p, negative rows (1 - p) * (1 + p), with the
    predicted p: the importance weights of Ktena et al. (RecSys 2019, arXiv 1907.06558).
    """

    label_smoothing: float = 0.0
    pos_weight: float = 1.0
    focal_gamma: float = 0.0
    focal_alpha: float | None = None
    ranking: str | None = None
    ranking_weight: float = 0.5
    position: str | None = None
    num_positions: int = 100
    reference_position: int = 0
    teacher: str | None = None
    teacher_weight: float = 0.5
    fake_negatives: bool = False

    def __post_init__(self) -> None:
        if self.ranking is not None:
            check_choice("trainer.loss.ranking", self.ranking, RANKINGS)
        check_above("trainer.loss.ranking_weight", self.ranking_weight, 0.0)
        check_within("trainer.loss.ranking_weight", self.ranking_weight, 0.0, 1.0)
        check_above("trainer.loss.teacher_weight", self.teacher_weight, 0.0)
        check_within("trainer.loss.teacher_weight", self.teacher_weight, 0.0, 1.0)
        check_at_least("trainer.loss.num_positions", self.num_positions, 2)
        check_within("trainer.loss.reference_position", self.reference_position, 0, self.num_positions - 1)
        check_below_one("trainer.loss.label_smoothing", self.label_smoothing)
        check_above("trainer.loss.pos_weight", self.pos_weight, 0.0)
        check_at_least("trainer.loss.focal_gamma", self.focal_gamma, 0.0)
        if self.focal_alpha is None:
            return
        check_above("trainer.loss.focal_alpha", self.focal_alpha, 0.0)
        check_below_one("trainer.loss.focal_alpha", self.focal_alpha)
        if self.pos_weight != 1.0:
            raise ConfigError(
                f"trainer.loss.pos_weight={self.pos_weight} and trainer.loss.focal_alpha={self.focal_alpha} "
                "both weight the positive rows: choose one"
            )

    @property
    def columns(self) -> list[str]:
        """Return the labels of the data set that the loss reads, in addition to the label that it trains."""
        return [name for name in (self.position, self.teacher) if name is not None]

    @property
    def changes(self) -> str:
        """Return the keys that change the loss, with their values; empty for the plain log loss."""
        changed = (
            (each.name, getattr(self, each.name)) for each in fields(self) if getattr(self, each.name) != each.default
        )
        told = (
            (name, "true" if value is True else f"{value:g}" if isinstance(value, float) else value)
            for name, value in changed
        )
        return ", ".join(f"trainer.loss.{name}={value}" for name, value in told)


@dataclass
class AverageConfig:
    """Average the dense layers over steps; tables are not averaged. The average is evaluated,
    saved and exported. Training continues with the trained layers.

    Each `every_steps` steps from `start_step` on, after n averaged steps,
    average += (1 - d) * (layers - average)  with d = min(decay, (1 + n) / (10 + n)) for ema, so that
    the first layers do not stay in the average of a short run, and d = n / (n + 1) for swa, which is
    the mean.
    """

    kind: str = "none"
    decay: float = 0.999  # of ema
    start_step: int = 0
    every_steps: int = 1

    def __post_init__(self) -> None:
        check_choice("trainer.average.kind", self.kind, AVERAGES)
        check_at_least("trainer.average.decay", self.decay, 0.0)
        check_below_one("trainer.average.decay", self.decay)
        check_at_least("trainer.average.start_step", self.start_step, 0)
        check_at_least("trainer.average.every_steps", self.every_steps, 1)

    def decay_after(self, num_averaged: int) -> float:
        """Return the decay d of ema after so many averaged steps."""
        return min(self.decay, (1 + num_averaged) / (10 + num_averaged))


@dataclass
class TrainerConfig:
    """Configure the training loop. One step is one optimizer update with global_batch_size rows,
    which are read in gradient_accumulation_steps micro-batches.

    non_finite_loss: stop ends the run at the first such loss. skip skips such batches, up to
    max_non_finite_steps in a row. rollback also skips, then goes back once to the newest checkpoint
    and skips the batches read since; the second time the run ends.
    """

    global_batch_size: int = 2048
    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    loss: LossConfig = field(default_factory=LossConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    precision: str = "fp32"
    # the dense layers by torch.compile; if compiling fails they run uncompiled
    compile: bool = False
    # base on one CPU rank, which has nothing to overlap; otherwise sparse_dist
    pipeline: str = "auto"
    gradient_clip_norm: float | None = None  # of all dense layers together
    gradient_clip_value: float | None = None  # of each number of the dense gradients, before the norm
    gradient_accumulation_steps: int = 1
    log_every_steps: int = 50
    overfit_batches: int = 0  # train repeatedly on the first n global batches; 0: on all data
    # registered hooks of your own, called in this order
    hooks: list[str] = field(default_factory=list)
    metrics_port: int | None = None  # port of Prometheus metrics on rank 0; 0: any free port
    # 0: not by steps. The last step of a training is always evaluated
    evaluate_every_steps: int = 0
    evaluate_every_epochs: int = 0  # 0: not by epochs
    evaluate_max_batches: int | None = None
    evaluate_batch_size: int | None = None  # global; None: global_batch_size
    metrics: list[str] = field(default_factory=list)  # registered metrics that evaluations add for each binary label
    group_metrics_at: list[int] = field(default_factory=lambda: [10])  # k of ndcg_at_<k> and hit_rate_at_<k>
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    non_finite_loss: str = "stop"
    max_non_finite_steps: int = 10
    hang_timeout_s: float = 180.0  # for a step, and for a batch of an evaluation; 0: no limit
    startup_timeout_s: float = 900.0  # for each stage of start-up: starting, joining, loading
    save_timeout_s: float = 1800.0  # for a save, and for the metrics of a complete evaluation
    # without a heartbeat for this time, a run on another host counts as dead
    lease_ttl_s: float = 120.0
    grace_s: float = 30.0  # between the scheduler's SIGTERM and its SIGKILL

    def limits(self) -> Limits:
        return Limits(self.startup_timeout_s, self.hang_timeout_s, self.save_timeout_s, self.grace_s)

    @property
    def micro_batch_size(self) -> int:
        """Return the number of rows of all ranks in one forward and backward."""
        return self.global_batch_size // self.gradient_accumulation_steps

    def __post_init__(self) -> None:
        for name in (
            "global_batch_size",
            "epochs",
            "gradient_accumulation_steps",
            "log_every_steps",
            "max_non_finite_steps",
        ):
            check_at_least(f"trainer.{name}", getattr(self, name), 1)
        if self.metrics_port is not None:
            check_within("trainer.metrics_port", self.metrics_port, 0, 65535)
        for name in ("max_steps", "evaluate_batch_size", "evaluate_max_batches"):
            check_at_least(f"trainer.{name}", getattr(self, name), 1, allow_none=True)
        for name in ("hang_timeout_s", "startup_timeout_s", "save_timeout_s"):
            check_at_least(f"trainer.{name}", getattr(self, name), 0.0)
        check_at_least("trainer.lease_ttl_s", self.lease_ttl_s, 1.0)
        check_at_least("trainer.grace_s", self.grace_s, 10.0)  # the launcher uses 5 s of them
        check_within("trainer.seed", self.seed, 0, 2**63 - 1)
        check_at_least("trainer.overfit_batches", self.overfit_batches, 0)
        check_at_least("trainer.evaluate_every_steps", self.evaluate_every_steps, 0)
        check_at_least("trainer.evaluate_every_epochs", self.evaluate_every_epochs, 0)
        for k in self.group_metrics_at:
            check_at_least("trainer.group_metrics_at", k, 1)
        if self.global_batch_size % self.gradient_accumulation_steps:
            steps = self.gradient_accumulation_steps
            nearest = max(round(self.global_batch_size / steps), 1) * steps
            raise ConfigError(
                f"trainer.global_batch_size={self.global_batch_size} does not divide into "
                f"trainer.gradient_accumulation_steps={steps} micro-batches; {nearest} does"
            )
        for name in self.metrics:
            find_metric(name, "trainer.metrics")
        check_choice("trainer.precision", self.precision, PRECISIONS)
        check_choice("trainer.pipeline", self.pipeline, TRAIN_PIPELINES)
        check_choice("trainer.non_finite_loss", self.non_finite_loss, NON_FINITE_POLICIES)
        _check_limit("trainer.gradient_clip_norm", self.gradient_clip_norm)
        _check_limit("trainer.gradient_clip_value", self.gradient_clip_value)


def profiled_steps(text: str) -> tuple[int, int]:
    """Parse `steps:50-60` as (50, 60), counted from 1. Raises ConfigError for other text."""
    kind, _, numbers = text.partition(":")
    first, _, last = numbers.partition("-")
    if kind != "steps" or not first.isdigit() or not last.isdigit() or not 1 <= int(first) <= int(last):
        raise ConfigError(
            f"profile={text}: name the steps to record, for example profile=steps:50-60 (steps count from 1)"
        )
    return int(first), int(last)


@dataclass
class WarmStartConfig:
    """Start at step 0 with the weights of another run, under any plan. A run folder that has a step
    is resumed instead.

    `run` is a run folder, whose newest valid step is used unless `step` names one. `checkpoint` is the folder
    of one step instead. A table is looked up by its own name, or by its old name in `renames` {old: new}.
    """

    run: str | None = None
    checkpoint: str | None = None
    step: int | None = None
    renames: dict[str, str] = field(default_factory=dict)
    # Policies for tables that only the job has, that only the checkpoint has, or that have more
    # rows, fewer rows, another dtype or another embedding_dim. `fresh`: initialized as from
    # scratch.
    new_tables: str = "fresh"
    dropped_tables: str = "drop"
    grown_tables: str = "extend"
    shrunk_tables: str = "cut"
    retyped_tables: str = "cast"
    reshaped_tables: str = "refuse"
    # Policy for a compressed table whose settings or vocabulary differ: ids share its rows, so no
    # row can move with its value to another id.
    composed_tables: str = "refuse"
    # remap: a row moves to the new id of its value; keep: ids have the same meaning as before.
    ids: str = "remap"
    data_path: str | None = None  # of the data set of the checkpoint; None: its path at that time
    # `matching`: load layers with the same name and shape, initialize all other layers
    dense: str = "load"
    optimizer: str = "keep"

    def __post_init__(self) -> None:
        if (self.run is None) == (self.checkpoint is None):
            raise ConfigError("warm_start needs one of run=<a run folder> and checkpoint=<the folder of a step>")
        if self.checkpoint is not None and self.step is not None:
            raise ConfigError("warm_start.step belongs to warm_start.run; warm_start.checkpoint already names a step")
        check_at_least("warm_start.step", self.step, 0, allow_none=True)
        for name, choices in POLICIES.items():
            check_choice(f"warm_start.{name}", getattr(self, name), choices)
        if len(set(self.renames.values())) < len(self.renames):
            raise ConfigError(
                f"warm_start.renames={self.renames} maps two tables to one name; give each a different name"
            )


POLICIES = {
    "new_tables": ("fresh", "refuse"),
    "dropped_tables": ("drop", "refuse"),
    "grown_tables": ("extend", "fresh", "refuse"),
    "shrunk_tables": ("cut", "fresh", "refuse"),
    "retyped_tables": ("cast", "fresh", "refuse"),
    "reshaped_tables": ("refuse", "fresh"),
    "composed_tables": ("refuse", "fresh"),
    "ids": ("remap", "keep"),
    "dense": ("load", "fresh", "matching"),
    "optimizer": ("keep", "reset"),
}
