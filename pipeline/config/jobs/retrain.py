"""Define the jobs of a tick: retrain, and the registry of versions (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.columns import learnt_labels
from pipeline.config.jobs.job import Job, job_of
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import from_extra
from pipeline.config.retraining import (
    REGISTRY_COMMANDS,
    DataChecksConfig,
    GateConfig,
    GrowthConfig,
    RegistryConfig,
    StreamConfig,
    WindowsConfig,
)
from pipeline.config.tables import is_pattern
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_keys, did_you_mean


@job_of("retrain")
@dataclass
class RetrainJob(TrainJob):
    """The train job, repeated for every window of `source`. run_dir is the local folder of the work
    in progress.

    One tick processes at most `max_catchup` windows, oldest first. `retry` names rejected or
    skipped windows to judge again. strict: a tick that rejects a window ends with exit code 3.
    """

    run_dir: str = "${paths.retraining}/${name}"
    source: str = "???"
    windows: WindowsConfig = field(default_factory=WindowsConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    checks: DataChecksConfig = field(default_factory=DataChecksConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    follow: bool = False  # train continuously on `stream` instead of windows
    stream: StreamConfig = field(default_factory=StreamConfig)
    max_catchup: int = 3
    retry: list[str] = field(default_factory=list)
    strict: bool = False
    memory_limit_gb: float = 2.0  # memory of the preparation, as threads are its threads
    threads: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_given("source", self.source)
        if self.registry.canary_share is not None and not self.gate.export.enabled:
            raise ConfigError(
                f"registry.canary_share={self.registry.canary_share:g} serves a challenger, which needs an artifact: leave out "
                "gate.export.enabled=false"
            )
        if patterns := [name for name in self.data.columns.dense if is_pattern(name)]:
            raise ConfigError(
                f"data.columns.dense has the pattern {patterns[0]!r}, and the files of two windows may have other columns: "
                "retrain needs the names of the columns"
            )
        if self.data.split.kind == "given":
            raise ConfigError(
                "data.split.kind=given names the rows of one data set, but retrain prepares a data set for each window of `source`: "
                "use data.split.kind=row_range or time"
            )
        if self.windows.kind == "timestamps" and (self.data.delimiter is not None or self.data.header):
            raise ConfigError(
                "windows.kind=timestamps reads files with a header and the default delimiter of their format: leave data.delimiter and "
                "data.header out, or provide one file per window"
            )
        check_at_least("max_catchup", self.max_catchup, 1)
        check_at_least("memory_limit_gb", self.memory_limit_gb, 0.5)
        check_at_least("threads", self.threads, 1, allow_none=True)
        self._check_gate_tasks()
        if self.gate.policy:
            columns, group = self.data.columns, self.data.group_column
            from_extra("check_policy", "gate.policy")(self.gate.policy, "gate.policy", columns.propensity, group)
        if self.follow:
            self._check_follow()
        elif self.publishing.when is not None:
            raise ConfigError(
                f"publishing.when={self.publishing.when} publishes deltas during one training, but retrain promotes complete artifacts of "
                "windows: set follow=true, or leave it out"
            )
        if self.warm_start is not None:
            raise ConfigError(
                "retrain starts from the champion; leave warm_start out (growth.* sets how tables change)"
            )
        if "://" in self.run_dir:
            raise ConfigError(f"run_dir={self.run_dir}: give a local folder; registry.path may be s3://...")
        if self.checkpoint.differential and not self.follow:
            raise ConfigError(
                "retrain promotes a step by copying it, but a step of checkpoint.differential=true depends on other steps: set it to false"
            )
        if self.checkpoint.folder is not None:
            raise ConfigError(
                "retrain keeps a run's checkpoints below run_dir until they are promoted: leave checkpoint.folder out"
            )

    def _check_follow(self) -> None:
        self.stream.check_kind()
        if self.stream.join and not self.data.joins:
            raise ConfigError(
                "stream.join=true joins the tables of data.joins, but data.joins is empty: name them there"
            )
        for name in ("gradient_accumulation_steps", "overfit_batches"):
            if (value := getattr(self.trainer, name)) > (name == "gradient_accumulation_steps"):
                raise ConfigError(
                    f"follow=true reads a stream's rows once, one batch per step: leave trainer.{name}={value} out"
                )

    def _check_gate_tasks(self) -> None:
        """Check that the gate uses a binary label and other labels that the model learns."""
        if "ne" not in self.model.metrics:
            raise ConfigError(
                f"retrain's gate compares NE, but model={self.model.kind} is measured by {', '.join(self.model.metrics)}: train, export "
                "and switch the artifact without retrain, or choose a model of clicks"
            )
        main, labels = self.data.columns.label, self.data.columns.learnable
        learnt = labels if self.model.learns_all else {name: label for name, label in labels.items() if name == main}
        learnt = learnt_labels(learnt)
        if learnt and (self.gate.task or main) not in learnt:
            raise ConfigError(
                f"gate.task={self.gate.task!r} is not a label that model={self.model.kind} learns; choose among {', '.join(learnt)}"
            )
        if learnt and learnt[self.gate.task or main].kind != "binary":
            raise ConfigError(
                f"the gate uses label {self.gate.task or main!r}, of kind {learnt[self.gate.task or main].kind}: name a "
                "binary label with gate.task"
            )
        for name in self.gate.held:
            if name not in learnt or name == (self.gate.task or main):
                raise ConfigError(
                    f"gate.held names {name!r}, which is not another label that model={self.model.kind} learns"
                    f"{did_you_mean(name, learnt)}; it learns {', '.join(learnt)}"
                )


@job_of("registry")
@dataclass
class RegistryJob(Job):
    """Commands on `registry`, the folder that retrain promotes into. version=None: verify all, roll
    back to the one before."""

    registry: str = "???"
    command: str = "list"
    version: str | None = None
    reason: str = ""
    run: str = ""  # the run folder that `add` takes its version from
    num: int = 20  # records that history shows
    html: str | None = None  # history: also write a page
    # a private Ed25519 key as PEM that signs versions and the champion's pointer
    sign_key: str | None = None
    # public Ed25519 keys, a path or a list: only steps and versions signed by one are accepted
    require_signature: Any = None

    def __post_init__(self) -> None:
        check_given("registry", self.registry)
        check_keys("require_signature", self.require_signature)
        check_choice("command", self.command, REGISTRY_COMMANDS)
        check_at_least("num", self.num, 1)
        if self.html is not None and not self.html.endswith(".html"):
            raise ConfigError(f"html={self.html} must end in .html")
        if self.command == "add":
            check_given("run", self.run)
        if self.command in ("add", "rollback", "unpin") and self.require_signature and not self.sign_key:
            raise ConfigError(
                f"require_signature={self.require_signature} would refuse what {self.command} writes: "
                "set sign_key=<its private key>"
            )
