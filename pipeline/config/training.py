"""Schemas of training: optimizers, schedules, collectives, checkpoints and the trainer (stdlib only)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.optimizers import check_layer_optimizer, check_table_optimizer, find_optimizer
from pipeline.config.registry import find
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
COMM_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
PRECISIONS = ("fp32", "bf16")
TRAIN_PIPELINES = ("auto", "sparse_dist", "base")
NON_FINITE_POLICIES = ("stop", "skip", "rollback")
ROW_STATE_POLICIES = ("refuse", "average")
SAVE_FAILURE_POLICIES = ("stop", "continue")
DECAY_MODES = ("auto", "l2", "decoupled")
UPDATE_ROWS = ("touched", "all", "auto")
MAX_ROWS_OF_AUTO = 16_384
BACKENDS = ("auto", "gloo", "nccl")
LOG_FORMATS = ("text", "full", "json")


@dataclass
class SparseOptimizerConfig:
    """The tables' optimizer, fused into backward; it updates the rows that a step touches, in data_parallel tables too.

    update_rows: touched; all, as torch's dense optimizers do (on CPU, with one batch a step); auto is all for tables of at
    most MAX_ROWS_OF_AUTO rows where that can be, else touched.

    weight_decay_mode: l2 adds weight_decay * row to a row's gradient; decoupled takes lr * weight_decay of the row beside the
    update (Loshchilov and Hutter, ICLR 2019); auto is decoupled for adamw, partial_rowwise_adam and lamb, else l2.
    gradient_clip_value and gradient_clip_norm limit each number and the norm of a row's summed gradient, in this order, before
    decay and tables.<name>.l2 are added.
    """

    name: str = "rowwise_adagrad"
    lr: float = 0.02
    eps: float = 1e-8
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: str = "auto"
    update_rows: str = "touched"
    gradient_clip_value: float | None = None
    gradient_clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_table_optimizer("optimizer.sparse.name", self.name)
        _check_optimizer("optimizer.sparse", self)
        check_choice("optimizer.sparse.weight_decay_mode", self.weight_decay_mode, DECAY_MODES)
        check_choice("optimizer.sparse.update_rows", self.update_rows, UPDATE_ROWS)
        for name in ("gradient_clip_value", "gradient_clip_norm"):
            _check_limit(f"optimizer.sparse.{name}", getattr(self, name))

    def updates_all(self, num_rows: int) -> bool:
        """Whether a step updates all rows of a table of so many."""
        return self.update_rows == "all" or (self.update_rows == "auto" and num_rows <= MAX_ROWS_OF_AUTO)

    @property
    def decouples(self) -> bool:
        """Whether weight_decay acts beside the update, and not in the gradient."""
        if self.weight_decay_mode == "auto":
            return find_optimizer(self.name).decay_mode == "decoupled"
        return self.weight_decay_mode == "decoupled"


@dataclass
class DenseOptimizerConfig:
    name: str = "adam"
    lr: float = 0.001
    eps: float = 1e-8
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_layer_optimizer("optimizer.dense.name", self.name)
        _check_optimizer("optimizer.dense", self)


def _check_optimizer(prefix: str, config: SparseOptimizerConfig | DenseOptimizerConfig) -> None:
    check_above(f"{prefix}.lr", config.lr, 0.0)
    check_at_least(f"{prefix}.eps", config.eps, 0.0)
    check_at_least(f"{prefix}.weight_decay", config.weight_decay, 0.0)
    for name in ("momentum", "beta1", "beta2"):
        check_below_one(f"{prefix}.{name}", getattr(config, name))


def _check_limit(key: str, value: float | None) -> None:
    if value is not None:
        check_above(key, value, 0.0)


@dataclass
class OptimizerConfig:
    sparse: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)


@dataclass
class LRSchedule:
    """A factor on the learning rate: linear warm-up from 0, then constant until `decay_start_step`, then a decay.

    poly: (1 - t) ** power over `decay_steps`; cosine: half a wave; step: times `gamma` every `decay_steps`.
    Never below `end_factor`.
    """

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
    """Both rates times `factor` after `patience` evaluations in a row without an improvement of `min_delta`; 0 never.

    A rate stops at `min_lr`. The schedules go on below it: the factors are multiplied.
    """

    patience: int = 0
    factor: float = 0.1
    min_lr: float = 1e-6
    metric: str | None = None  # None: the model's first, ne for clicks and recall_at_<k> for retrieval
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
    """Precision of pooled embeddings forward and of their gradients backward; ids are never quantized.

    shared_memory: CPU ranks of one host exchange what is not quantized through memory, not by gloo.
    """

    forward_precision: str = "fp32"
    backward_precision: str = "fp32"
    backend: str = "auto"
    timeout_s: float = 300.0
    shared_memory: bool = True

    def __post_init__(self) -> None:
        check_choice("comms.forward_precision", self.forward_precision, COMM_PRECISIONS)
        check_choice("comms.backward_precision", self.backward_precision, COMM_PRECISIONS)
        check_choice("comms.backend", self.backend, BACKENDS)
        check_at_least("comms.timeout_s", self.timeout_s, 1)  # the process groups count whole seconds


TIER_CHOICES = ("by_table", "auto")


@dataclass
class ShardingConfig:
    """How much of TorchRec and FBGEMM is replaced, and whether versions that this was not written for may run.

    fast_cpu: on CPU, table lookups and updates, the id exchange of one rank, the exchange of ranks of one host (where
    comms.shared_memory asks for it), gradient averaging, the order of pooled features, replicated tables' updates, DLRM's
    activations and dot products, and the allocator's thresholds are this package's own. False runs all of that by TorchRec,
    FBGEMM, gloo and DDP as they are: slower, the same losses up to rounding, to tell whose fault something is.
    """

    fast_cpu: bool = True
    allow_untested_versions: bool = False  # of torch, torchrec and fbgemm: silent errors are then possible
    tiers: str = "by_table"  # which tables have tiers: as tables.*.tiers say, or auto: those that memory does not hold, by the planner
    tier_folder: str | None = None  # on a local SSD, for the rows of tables in tiers; None: run_dir/tiers

    def __post_init__(self) -> None:
        check_choice("sharding.tiers", self.tiers, TIER_CHOICES)


EMBEDDING_SYNCS = ("every_step", "every_<n>_steps", "never")


@dataclass
class ParallelConfig:
    """embedding_sync: every_step shards the tables over all ranks, so that they are one model at every step.

    every_100_steps and the like, and never: each host trains tables of its own on the rows of its ranks, sharded over them,
    and they are averaged over the hosts that often, optimizer state included. Dense layers and data_parallel tables are
    all-reduced over all ranks at every step whatever this says.
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
        """0: never. Raises AssertionError where there are no replicas."""
        assert self.has_replicas
        return 0 if self.embedding_sync == "never" else int(self.embedding_sync.split("_")[1])


@dataclass
class CheckpointConfig:
    """A step is saved every `save_every_minutes`, every `save_every_steps`, and always at the end of training.

    An old step is removed only when two later ones are known to be intact, so two stay at least.

    differential: a step holds the rows of tables that changed since the step before, and all else whole. Such steps are a chain
    that begins with a whole one; another whole one follows after max_links, or where the links hold more than half of its bytes.
    keep_last_n and keep_best_n then count chains. compress_links: their shard files are compressed, without loss; releases without it refuse
    them by name.
    """

    folder: str | None = None  # None: run_dir/checkpoints; s3://bucket/prefix for an object store
    save_every_minutes: float | None = 10.0  # of wall-clock time since the last save; None: not by time
    save_every_steps: int = 0  # 0: not by steps
    keep_last_n: int = 2
    keep_best_n: int = 0  # beside the last n, of those evaluated at the step that they save; save_best keeps 1 at least
    best_metric: str | None = None  # None: the model's first, ne for clicks and recall_at_<k> for retrieval
    save_best: bool = False  # a step is also saved where its evaluation is the best so far, and one such step is kept
    asynchronous: bool = False  # copy the state to host memory, and write it while training goes on
    differential: bool = False
    max_links: int = 100
    compress_links: bool = False
    on_failure: str = "stop"
    max_failures_in_a_row: int = 3  # on_failure=continue stops then
    resume: bool = True
    # Row-wise optimizer state of a table whose columns are now cut elsewhere: refuse, or go on with averages.
    row_state_across_columns: str = "refuse"
    sign_key: str | None = None  # a private Ed25519 key as PEM: steps, and what retrain promotes, are signed with it
    # Public Ed25519 keys, a path or a list: only what is signed by one is resumed or started from.
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
                "checkpoint.compress_links is of steps of changed rows: set checkpoint.differential=true, or leave it out"
            )
        check_choice("checkpoint.on_failure", self.on_failure, SAVE_FAILURE_POLICIES)
        check_at_least("checkpoint.max_failures_in_a_row", self.max_failures_in_a_row, 1)

    @property
    def num_best(self) -> int:
        """How many of the best steps are kept."""
        return max(self.keep_best_n, int(self.save_best))


@dataclass
class LoggerConfig:
    """What becomes of a run's numbers beside its log and metrics.jsonl, which are always written."""

    tensorboard: bool = True  # event files in <run_dir>/tensorboard
    report: bool = True  # <run_dir>/report.html at the end
    format: str = (
        "text"  # of the log on stderr; full: with date, zone, level, job, attempt and rank; json: one object a line
    )
    tracker: str = "none"  # or mlflow, wandb, one of your own: the same numbers there too
    tracker_uri: str | None = None  # of MLflow; None: as its own environment says
    project: str | None = None  # of the tracker; None: data.name
    otlp_endpoint: str | None = None  # of an OpenTelemetry collector, http://host:4318; None: nothing is sent
    otlp_every_s: float = 15.0
    heartbeat_url: str | None = None  # gets a POST as long as the training gets on; None: nothing is sent
    heartbeat_every_s: float = 60.0

    def __post_init__(self) -> None:
        check_choice("logger.format", self.format, LOG_FORMATS)
        check_above("logger.otlp_every_s", self.otlp_every_s, 0.0)
        check_above("logger.heartbeat_every_s", self.heartbeat_every_s, 0.0)
        if self.heartbeat_url == MASK:  # read from a saved job, which does not hold it
            self.heartbeat_url = None
        if self.heartbeat_url is not None and not self.heartbeat_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"logger.heartbeat_url={self.heartbeat_url} is no address over HTTP: give https://HOST/PATH of a monitor "
                "that raises an alarm when nothing comes"
            )
        if self.heartbeat_url is not None:
            hide(self.heartbeat_url)
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"logger.otlp_endpoint={self.otlp_endpoint} is no address of a collector over HTTP: give http://HOST:4318"
            )
        if self.tracker != "none":
            find("tracker", self.tracker, "logger.tracker")


@dataclass
class EarlyStopConfig:
    """Stop after `patience` evaluations in a row without an improvement of `min_delta`; patience 0 never stops."""

    patience: int = 0
    metric: str | None = None  # None: the model's first, ne for clicks and recall_at_<k> for retrieval
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("trainer.early_stop.patience", self.patience, 0)
        check_at_least("trainer.early_stop.min_delta", self.min_delta, 0.0)


@dataclass
class TrainerConfig:
    """Steps count optimizer updates of global_batch_size rows, read as gradient_accumulation_steps micro-batches.

    non_finite_loss: stop at the first; skip such batches, up to max_non_finite_steps in a row; rollback does so too, then
    goes back to the newest checkpoint once, past the batches read since, and stops the second time.
    """

    global_batch_size: int = 2048
    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    precision: str = "fp32"
    compile: bool = False  # the dense layers by torch.compile; where it fails they run as they are
    pipeline: str = "auto"  # base on one CPU rank, which has nothing to overlap; sparse_dist else
    gradient_clip_norm: float | None = None  # of all dense layers together
    gradient_clip_value: float | None = None  # of each number of the dense gradients, before the norm
    gradient_accumulation_steps: int = 1
    log_every_steps: int = 50
    overfit_batches: int = 0  # train on the first n global batches again and again; 0: on all data
    hooks: list[str] = field(default_factory=list)  # registered hooks of your own, called in this order
    metrics_port: int | None = None  # serves Prometheus metrics of the training, from rank 0; 0: any port that is free
    evaluate_every_steps: int = 0  # 0: not by steps. Training's last step is evaluated in any case
    evaluate_every_epochs: int = 0  # 0: not by epochs
    evaluate_max_batches: int | None = None
    evaluate_batch_size: int | None = None  # global; None: global_batch_size
    metrics: list[str] = field(default_factory=list)  # registered metrics that evaluations add for each binary label
    group_metrics_at: list[int] = field(default_factory=lambda: [10])  # k of ndcg_at_<k> and hit_rate_at_<k>
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    non_finite_loss: str = "stop"
    max_non_finite_steps: int = 10
    hang_timeout_s: float = 180.0  # for a step, and for a batch of an evaluation; 0: never
    startup_timeout_s: float = 900.0  # for each stage of start-up: starting, joining, loading
    save_timeout_s: float = 1800.0  # for a save, and for the metrics of a whole evaluation
    lease_ttl_s: float = 120.0  # without a heartbeat for so long, a run on another host counts as dead
    grace_s: float = 30.0  # between the scheduler's SIGTERM and its SIGKILL

    def limits(self) -> Limits:
        return Limits(self.startup_timeout_s, self.hang_timeout_s, self.save_timeout_s, self.grace_s)

    @property
    def micro_batch_size(self) -> int:
        """Rows of all ranks in one forward and backward."""
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
        check_at_least("trainer.grace_s", self.grace_s, 10.0)  # 5 of them are the launcher's
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
            find("metric", name, "trainer.metrics")
        check_choice("trainer.precision", self.precision, PRECISIONS)
        check_choice("trainer.pipeline", self.pipeline, TRAIN_PIPELINES)
        check_choice("trainer.non_finite_loss", self.non_finite_loss, NON_FINITE_POLICIES)
        _check_limit("trainer.gradient_clip_norm", self.gradient_clip_norm)
        _check_limit("trainer.gradient_clip_value", self.gradient_clip_value)


def profiled_steps(text: str) -> tuple[int, int]:
    """`steps:50-60` -> (50, 60), counted from 1. Raises ConfigError for anything else."""
    kind, _, numbers = text.partition(":")
    first, _, last = numbers.partition("-")
    if kind != "steps" or not first.isdigit() or not last.isdigit() or not 1 <= int(first) <= int(last):
        raise ConfigError(f"profile={text}: say which steps to record, as in profile=steps:50-60 (steps count from 1)")
    return int(first), int(last)
