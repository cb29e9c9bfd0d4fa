"""Schemas of jobs: one dataclass a verb, made of the schemas of its parts (stdlib and OmegaConf only)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pipeline.config.data import SPLITS, BaseVocabularyConfig, DataConfig
from pipeline.config.labels import LABEL_METRICS
from pipeline.config.model import ModelConfig
from pipeline.config.paths import PathsConfig
from pipeline.config.planner import HardwareConfig, PlannerConfig, TargetConfig
from pipeline.config.publish import DeltaGateConfig, PublishingConfig
from pipeline.config.registry import find
from pipeline.config.retraining import (
    REGISTRY_COMMANDS,
    DataChecksConfig,
    GateConfig,
    GrowthConfig,
    RegistryConfig,
    WindowsConfig,
)
from pipeline.config.server import BatchingConfig, LimitsConfig, ServerConfig, SsdConfig, check_memory
from pipeline.config.serving import (
    DENSE_PRECISIONS,
    PRECISIONS,
    ParityConfig,
    PruningConfig,
    RetrievalConfig,
    RetrieveConfig,
    check_precisions,
)
from pipeline.config.stream import StreamConfig
from pipeline.config.sweep import SweepConfig
from pipeline.config.tables import TableConfig
from pipeline.config.training import (
    BACKENDS,
    CheckpointConfig,
    CommsConfig,
    LoggerConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainerConfig,
    profiled_steps,
)
from pipeline.config.warm_start import WarmStartConfig
from pipeline.runtime.errors import (
    ConfigError,
    check_above,
    check_at_least,
    check_choice,
    check_given,
    check_within,
    did_you_mean,
)


@dataclass
class Job:
    """What every job has. plugins: packages whose import registers components, given on the command line alone.

    A saved job tells by them what it needs; reading it imports none of them.
    """

    plugins: list[str] = field(default_factory=list, kw_only=True)


ENGINES = ("embedded", "ray")


@dataclass
class RayConfig:
    """Of engine=ray. num_partitions: of the values that are counted; it leaves no trace in the data set."""

    address: str | None = None
    num_partitions: int | None = None
    max_retries: int = 8
    scratch: str | None = None

    def __post_init__(self) -> None:
        check_at_least("ray.num_partitions", self.num_partitions, 1, allow_none=True)
        check_at_least("ray.max_retries", self.max_retries, 0)


@dataclass
class PrepareJob(Job):
    """source: a file, a folder or a glob; the shards and dataset.json go to data.path.

    With data.split.kind=given the splits name their sources, and `source` is left out. vocabularies: begin with those of another data set, or keep to them.
    """

    data: DataConfig = field(default_factory=DataConfig)
    source: str | None = None
    memory_limit_gb: float = 2.0
    threads: int | None = None  # None: all cores
    temp_dir: str | None = None  # None: beside data.path
    vocabularies: BaseVocabularyConfig | None = None
    engine: str = "embedded"
    ray: RayConfig = field(default_factory=RayConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        if self.engine == "ray" and self.vocabularies is not None:
            raise ConfigError(
                f"engine=ray does not go on from the vocabularies of another data set ({self.vocabularies.path}): leave engine "
                "out, or leave vocabularies out"
            )
        check_at_least("memory_limit_gb", self.memory_limit_gb, 0.5)  # 0.3 go to the libraries alone
        check_at_least("threads", self.threads, 1, allow_none=True)
        split = self.data.split
        if split.kind != "given" and self.source is None:
            raise ConfigError("source is missing: set source=<file, folder or glob> of the raw rows")
        if split.kind == "given" and split.train is None:
            raise ConfigError(
                "data.split.kind=given needs data.split.train=<file, folder or glob>, and validation and test likewise"
            )
        if split.kind == "given" and self.source is not None:
            raise ConfigError(
                f"source={self.source} and data.split.train={split.train} both name rows: with data.split.kind=given leave "
                "source out"
            )


@dataclass
class GenerateJob(Job):
    """data.synthetic, user_item, conversions, histories or tags says what is generated; `output` is the text that prepare then takes for its source."""

    data: DataConfig = field(default_factory=DataConfig)
    output: str = "${paths.raw}/${data.name}.tsv"
    threads: int | None = None  # None: all cores
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_at_least("threads", self.threads, 1, allow_none=True)
        sections = ("synthetic", "user_item", "conversions", "histories", "tags")
        if all(getattr(self.data, section) is None for section in sections):
            raise ConfigError(
                f"data={self.data.name} has no section to generate from ({', '.join(sections)}); data=quickstart, data=user_item, "
                "data=conversions, data=histories and data=tags have one"
            )


@dataclass
class TrainJob(Job):
    """`world_size` is set by torchrun; elsewhere it says for how many ranks to validate or plan."""

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
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    profile: str | None = (
        None  # steps:50-60 writes a trace of those steps, and where their time went, into the run folder
    )

    def __post_init__(self) -> None:
        check_given("name", self.name)
        check_given("run_dir", self.run_dir)
        if self.profile is not None:
            profiled_steps(self.profile)
        check_at_least("world_size", self.world_size, 1)
        self._check_metrics()
        if self.checkpoint.differential and self.parallel.has_replicas:
            raise ConfigError(
                f"checkpoint.differential=true saves the rows that changed, and parallel.embedding_sync={self.parallel.embedding_sync} "
                "averages every row over the hosts: use one without the other"
            )
        check_choice("publishing.precision", self.publishing.precision, PRECISIONS)
        if type(self) is TrainJob and "://" in self.run_dir:  # a PlanJob writes no run folder
            raise ConfigError(
                f"run_dir={self.run_dir}: run folders are local paths in this release; give a folder that every host mounts"
            )

    @property
    def early_stop_metric(self) -> str:
        """The model's first metric where the config names none."""
        return self._full_name(self.trainer.early_stop.metric)

    @property
    def plateau_metric(self) -> str:
        """That of schedule.plateau; the model's first metric where the config names none."""
        return self._full_name(self.schedule.plateau.metric)

    @property
    def best_metric(self) -> str:
        """That of the checkpoints to be kept; the model's first metric where the config names none."""
        return self._full_name(self.checkpoint.best_metric)

    def _full_name(self, metric: str | None) -> str:
        """The first metric for None; of several labels, one without a label is the first label's that has it."""
        named = (each for each in self.metrics if metric in (None, each, each.partition("/")[2]))
        return next(named, metric or "")

    @property
    def metrics(self) -> tuple[str, ...]:
        """What an evaluation measures that early stopping and checkpoints can go by, the main label's first.

        Of several labels they are <label>/<metric>.
        """
        main, labels = self.data.columns.label, self.data.columns.all_labels
        learnt = [main, *(name for name in labels if name != main)] if self.model.learns_all else [main]
        found: list[str] = []
        for name in learnt:
            kind = labels[name].kind if name in labels else "binary"
            metrics = self.model.metrics if kind == "binary" else LABEL_METRICS[kind]
            prefix = f"{name}/" if len(learnt) > 1 else ""
            found += [prefix + metric for metric in metrics]
            found += [prefix + metric for metric in self._group_metrics() if kind == "binary"]
        return tuple(found)

    def _group_metrics(self) -> tuple[str, ...]:
        if self.data.group_column is None or "auc" not in self.model.metrics:
            return ()
        at = self.trainer.group_metrics_at
        return ("gauc", *(f"ndcg_at_{k}" for k in at), *(f"hit_rate_at_{k}" for k in at))

    def _check_metrics(self) -> None:
        check_choice(f"trainer.early_stop.metric (model={self.model.kind})", self.early_stop_metric, self.metrics)
        check_choice(f"checkpoint.best_metric (model={self.model.kind})", self.best_metric, self.metrics)
        check_choice(f"schedule.plateau.metric (model={self.model.kind})", self.plateau_metric, self.metrics)


@dataclass
class PlanJob(TrainJob):
    """The train job, planned for `world_size` ranks of `hardware` and written to planner.plan_file.

    brief: print one line of the plan in place of every table's; its page has them all. scale_to: further world sizes whose
    steps are predicted too, world_size=[8,16,32] is short for the first and these. what_if: predict the step with each of
    some settings changed. threads: of a CPU rank, None: OMP_NUM_THREADS, or its share of the cores. target: where it is set,
    `hardware` and `world_size` are found, not given.
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


@dataclass
class RetrainJob(TrainJob):
    """The train job, repeated for every window of `source`; run_dir is the local folder for what is in progress.

    One tick works on `max_catchup` windows at most, the oldest first. `retry` names rejected or skipped windows that are
    to be judged again. strict: a tick that rejects a window ends with exit code 3.
    """

    run_dir: str = "${paths.retraining}/${name}"
    source: str = "???"
    windows: WindowsConfig = field(default_factory=WindowsConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    checks: DataChecksConfig = field(default_factory=DataChecksConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    follow: bool = False  # one training that goes on, by `stream`, in the place of windows
    stream: StreamConfig = field(default_factory=StreamConfig)
    max_catchup: int = 3
    retry: list[str] = field(default_factory=list)
    strict: bool = False
    memory_limit_gb: float = 2.0  # of the preparation, as are threads
    threads: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_given("source", self.source)
        if self.data.split.kind == "given":
            raise ConfigError(
                "data.split.kind=given names the rows of one data set, and retrain prepares one of each window of `source`: "
                "use data.split.kind=row_range or time"
            )
        if self.windows.kind == "timestamps" and (self.data.delimiter is not None or self.data.header):
            raise ConfigError(
                "windows.kind=timestamps reads files with a header and their format's own delimiter: leave data.delimiter and "
                "data.header out, or bring a file a window"
            )
        check_at_least("max_catchup", self.max_catchup, 1)
        check_at_least("memory_limit_gb", self.memory_limit_gb, 0.5)
        check_at_least("threads", self.threads, 1, allow_none=True)
        self._check_gate_tasks()
        if self.follow:
            self._check_follow()
        elif self.publishing.when is not None:
            raise ConfigError(
                f"publishing.when={self.publishing.when} publishes deltas of a training that goes on, and retrain promotes whole artifacts of "
                "windows: set follow=true, or leave it out"
            )
        if self.warm_start is not None:
            raise ConfigError(
                "retrain starts from the champion; leave warm_start out (growth.* says what becomes of tables)"
            )
        if "://" in self.run_dir:
            raise ConfigError(f"run_dir={self.run_dir}: give a local folder; registry.path may be s3://...")
        if self.checkpoint.differential and not self.follow:
            raise ConfigError(
                "retrain promotes a step by copying it, and one of checkpoint.differential=true builds on others: set it to false"
            )
        if self.checkpoint.folder is not None:
            raise ConfigError(
                "retrain keeps a run's checkpoints below run_dir until they are promoted: leave checkpoint.folder out"
            )

    def _check_follow(self) -> None:
        self.stream.check_kind()
        for name in ("gradient_accumulation_steps", "overfit_batches"):
            if (value := getattr(self.trainer, name)) > (name == "gradient_accumulation_steps"):
                raise ConfigError(
                    f"follow=true takes a stream's rows once, a batch a step: leave trainer.{name}={value} out"
                )

    def _check_gate_tasks(self) -> None:
        """The gate goes by a binary label that the model learns, and holds others."""
        if "ne" not in self.model.metrics:
            raise ConfigError(
                f"retrain's gate goes by NE, and model={self.model.kind} is measured by {', '.join(self.model.metrics)}: train, export "
                "and switch the artifact without retrain, or choose a model of clicks"
            )
        main, labels = self.data.columns.label, self.data.columns.all_labels
        learnt = labels if self.model.learns_all else {name: label for name, label in labels.items() if name == main}
        if learnt and (self.gate.task or main) not in learnt:
            raise ConfigError(
                f"gate.task={self.gate.task!r} is no label that model={self.model.kind} learns; choose among {', '.join(learnt)}"
            )
        if learnt and learnt[self.gate.task or main].kind != "binary":
            raise ConfigError(
                f"the gate goes by label {self.gate.task or main!r}, of kind {learnt[self.gate.task or main].kind}: name a "
                "binary one by gate.task"
            )
        for name in self.gate.held:
            if name not in learnt or name == (self.gate.task or main):
                raise ConfigError(
                    f"gate.held names {name!r}, which is no other label that model={self.model.kind} learns"
                    f"{did_you_mean(name, learnt)}; it learns {', '.join(learnt)}"
                )


@dataclass
class SweepJob(TrainJob):
    """The train job, repeated with the values of sweep.params; run_dir holds the study, and a run folder a trial in trials/."""

    run_dir: str = "${paths.runs}/${name}_sweep"
    sweep: SweepConfig = field(default_factory=SweepConfig)


@dataclass
class RegistryJob(Job):
    """registry: the folder that retrain promotes into; version None: all to verify, the one before to roll back to."""

    registry: str = "???"
    command: str = "list"
    version: str | None = None
    reason: str = ""
    run: str = ""  # the run folder that `add` takes its first version from
    num: int = 20  # records that history shows
    html: str | None = None  # history: a page to write besides
    sign_key: str | None = None  # a private Ed25519 key as PEM: the version that `add` makes is signed with it
    require_signature: str | None = None  # a public one: only steps and versions that it vouches for are taken

    def __post_init__(self) -> None:
        check_given("registry", self.registry)
        check_choice("command", self.command, REGISTRY_COMMANDS)
        check_at_least("num", self.num, 1)
        if self.html is not None and not self.html.endswith(".html"):
            raise ConfigError(f"html={self.html} must end in .html")
        if self.command == "add":
            check_given("run", self.run)
            if self.require_signature is not None and self.sign_key is None:
                raise ConfigError(
                    f"require_signature={self.require_signature} would not take the version that add makes: set sign_key=<its private key>"
                )


EVALUATED_TABLES = ("averaged", "own")
CHOSEN_STEPS = ("auto", "best", "last")


def _check_chosen(which: str, step: int | None) -> None:
    check_choice("which", which, CHOSEN_STEPS)
    if step is not None and which != "auto":
        raise ConfigError(f"step={step} and which={which} both choose a checkpoint: leave one of them out")


@dataclass
class EvaluateJob(Job):
    """run: a run folder; batch size None takes the training one.

    which: where `step` names none, best takes the checkpoint with the best checkpoint.best_metric of those that were
    evaluated, last the newest one, auto the best of a run that keeps it and else the newest.
    """

    run: str = "???"
    split: str = "test"
    step: int | None = None
    which: str = "auto"
    global_batch_size: int | None = None
    max_batches: int | None = None
    world_size: int = 1
    data_path: str | None = None  # None: the data set the run was trained on
    other_data: bool = False  # evaluate though data_path holds another data set
    require_signature: str | None = None  # a public Ed25519 key as PEM: only a step that it vouches for is measured
    tables: str = "averaged"  # own: where hosts trained tables of their own, each host's on the rows of its ranks
    importance_rows: int = 0  # on which each feature's importance is measured by permutation; 0: it is not

    def __post_init__(self) -> None:
        check_at_least("importance_rows", self.importance_rows, 0)
        check_choice("split", self.split, SPLITS)
        _check_chosen(self.which, self.step)
        check_choice("tables", self.tables, EVALUATED_TABLES)
        check_at_least("global_batch_size", self.global_batch_size, 1, allow_none=True)
        check_at_least("max_batches", self.max_batches, 1, allow_none=True)


@dataclass
class CheckNodesJob(Job):
    """folder: one that all nodes share; empty: none is checked. megabytes: of a message between two nodes.

    min_gb_per_s: of every link; None: a link at under half the median is a problem, no other. output: a JSON file of all
    that was measured.
    """

    folder: str = ""
    megabytes: float = 64.0
    min_gb_per_s: float | None = None
    max_clock_skew_s: float = 1.0
    backend: str = "auto"
    timeout_s: float = 300.0
    output: str = ""

    def __post_init__(self) -> None:
        check_above("megabytes", self.megabytes, 0.0)
        check_at_least("min_gb_per_s", self.min_gb_per_s, 0.0, allow_none=True)
        check_above("max_clock_skew_s", self.max_clock_skew_s, 0.0)
        check_above("timeout_s", self.timeout_s, 0.0)
        check_choice("backend", self.backend, BACKENDS)
        for name in ("folder", "output"):
            if "://" in getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} is no path: what is checked is a file system of the nodes"
                )


@dataclass
class ExportJob(Job):
    """run: a run folder; output None: a folder of its own in <run>/artifacts.

    `step` and `which` choose a checkpoint as they do for evaluate. `precision` is that of all tables but those that `tables` names; `auto` finds the smallest mix whose NE on the
    validation split is at most `ne_budget` above the trained model's.
    """

    run: str = "???"
    step: int | None = None
    which: str = "auto"
    output: str | None = None
    precision: str = "int8"
    tables: dict[str, str] = field(default_factory=dict)  # table -> fp32, fp16, int8, int4 or int2
    ne_budget: float = 0.0005
    dense: str = "fp32"  # of the layers: fp32, bf16 or int8
    compiled: bool = False  # the layers as an AOTInductor package besides; needs a C++ compiler
    pruning: PruningConfig = field(default_factory=PruningConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    data_path: str | None = None  # None: the data set that the run was trained on
    sign_key: str | None = None  # a private Ed25519 key as PEM: the artifact is signed with it
    require_signature: str | None = None  # a public one: only a step that it vouches for is exported
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_given("run", self.run)
        check_precisions(self.precision, self.tables)
        check_choice("dense", self.dense, DENSE_PRECISIONS)
        check_at_least("step", self.step, 0, allow_none=True)
        _check_chosen(self.which, self.step)
        check_at_least("ne_budget", self.ne_budget, 0.0)
        if self.output is not None:
            check_given("output", self.output)
            if "://" in self.output:
                raise ConfigError(
                    f"output={self.output}: artifacts are written to local paths; copy the folder from there"
                )


CHECKPOINT_COMMANDS = ("list", "verify", "show", "export")


@dataclass
class CheckpointsJob(Job):
    """run: a run folder; step None: all of them to verify, the newest to show or export."""

    run: str = "???"
    command: str = "list"
    step: int | None = None
    table: str = ""
    output: str = ""
    optimizer_state: bool = False
    data_path: str | None = None  # of the vocabularies; None: the data set that the run was trained on

    def __post_init__(self) -> None:
        check_given("run", self.run)
        check_choice("command", self.command, CHECKPOINT_COMMANDS)
        if self.command == "export" and (missing := [key for key in ("table", "output") if not getattr(self, key)]):
            raise ConfigError(f"export needs {' and '.join(missing)}: table=<table> output=<file>.parquet")


@dataclass
class InspectJob(Job):
    """source: one raw file; output: the data config that is written."""

    source: str = "???"
    label: str | None = None  # None: by values and name
    data_name: str | None = None  # None: the file's
    output: str | None = None  # None: <data_name>.yaml
    max_rows: int = 1_000_000

    def __post_init__(self) -> None:
        check_given("source", self.source)
        check_at_least("max_rows", self.max_rows, 100)
        if self.output is not None and not self.output.endswith(".yaml"):
            raise ConfigError(f"output={self.output} must end in .yaml")


@dataclass
class CalibrateJob(Job):
    """output: the hardware config that is written; the table of measurements goes beside it, as .json in place of .yaml.

    setups: <ranks>x<threads> that are measured; None: one rank on one core and on all, and a rank a core. clock=cpu counts the
    process's own CPU seconds, for a machine that others use; that tells of one rank with one thread alone.
    """

    name: str = "measured"
    output: str | None = None  # None: conf/hardware/<name>.yaml
    seconds: float = 240.0
    setups: list[str] | None = None
    seed: int = 0
    clock: str = "wall"
    force: bool = False

    def __post_init__(self) -> None:
        check_choice("clock", self.clock, ("wall", "cpu"))
        if self.clock == "cpu" and self.setups not in (None, ["1x1"]):
            raise ConfigError(
                f"clock=cpu measures one rank with one thread, and setups={self.setups} has others, which wait for each other: "
                "leave setups out, or take clock=wall on an idle machine"
            )
        check_within("seconds", self.seconds, 1.0, 300.0)
        if self.output is not None and not self.output.endswith(".yaml"):
            raise ConfigError(f"output={self.output} must end in .yaml")
        if not self.name.isidentifier():
            raise ConfigError(
                f"name={self.name} must be letters, digits and underscores: it is chosen by hardware={self.name}"
            )
        for setup in self.setups or []:
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", setup):
                raise ConfigError(f"setups has {setup!r}; a setup is <ranks>x<threads>, such as 2x1")


@dataclass
class InitJob(Job):
    """folder: that is made; data: a data config to copy into it, as `inspect` writes one; source: the raw rows."""

    folder: str = "???"
    data: str = "???"
    source: str = "???"
    command: str = "make"  # the only one, so that the folder may stand as a word

    def __post_init__(self) -> None:
        check_choice("command", self.command, ("make",))
        for name in ("folder", "data", "source"):
            check_given(name, getattr(self, name))


RUNS_COMMANDS = ("list", "compare", "show", "tag", "clean", "remove")


@dataclass
class RunsJob(Job):
    """root: the folder below which runs are listed; run, runs: run folders; output: a .parquet file beside the text.

    compare takes `runs`, the first of which is the baseline; show, tag, clean and remove take `run`. Tags with a leading - are
    taken away. confidence: of the intervals.
    """

    command: str = "list"
    root: str = "${paths.runs}"
    runs: list[str] = field(default_factory=list)
    run: str = ""
    tags: list[str] = field(default_factory=list)
    note: str | None = None  # None: as it is
    sort: str = "time"  # or a metric
    split: str | None = None  # None: test where all were measured on it, else validation
    confidence: float = 0.98
    output: str | None = None
    html: str | None = None  # compare: a page to write besides
    force: bool = False  # remove a run that has tags
    keep_days: float = 30.0  # clean: what is younger stays
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_choice("command", self.command, RUNS_COMMANDS)
        check_within("confidence", self.confidence, 0.5, 0.9999)
        if self.split is not None:
            check_choice("split", self.split, SPLITS)
        if self.output is not None and not self.output.endswith(".parquet"):
            raise ConfigError(f"output={self.output} must end in .parquet")
        if self.html is not None and not self.html.endswith(".html"):
            raise ConfigError(f"html={self.html} must end in .html")
        check_at_least("keep_days", self.keep_days, 0)
        if self.command in ("show", "tag", "clean", "remove"):
            check_given("run", self.run)
        if self.command == "compare" and len(self.runs) < 2:
            raise ConfigError("compare takes two runs at least: python -m pipeline.runs compare RUN RUN")
        if self.command == "tag" and not self.tags and self.note is None:
            raise ConfigError("tag takes tags, or a note: python -m pipeline.runs tag RUN TAG..., or note='...'")


@dataclass
class ReportJob(Job):
    """run: a run folder; output None: report.html in it."""

    run: str = "???"
    output: str | None = None

    def __post_init__(self) -> None:
        check_given("run", self.run)
        if self.output is not None and not self.output.endswith(".html"):
            raise ConfigError(f"output={self.output} must end in .html")


@dataclass
class PredictJob(Job):
    """artifact: what `export` wrote, a link to it, or a registry; source: a file, a folder or a glob of raw rows.

    output: a .parquet or .csv file with a row for each source row: its file (where there are several) and number,
    `id_columns` as they were, and its score, null where the row could not be read. A two-tower's artifact gives items or
    vectors in the place of a score, as `retrieve` says, and wants .parquet.
    """

    artifact: str = "???"
    source: str = "???"
    output: str = "???"
    format: str | None = None  # None: by the files' names
    delimiter: str | None = None  # of csv (a comma) and tsv (a tab)
    id_columns: list[str] = field(default_factory=list)
    memory: str = "ram"
    ssd: SsdConfig = field(default_factory=SsdConfig)
    retrieve: RetrieveConfig = field(default_factory=RetrieveConfig)
    compiled: bool = False  # run the layers' AOTInductor package, of an artifact exported with compiled=true
    batch_rows: int = 8192  # scored at once
    rows_per_part: int = 1_000_000  # what a killed run loses at most
    max_quarantined_fraction: float = 0.01
    overwrite: bool = False
    num_shards: int = 1  # processes that share the source's files, each with a file of its own beside output
    shard: int = 0  # which of them this is
    threads: int | None = None  # None: all cores
    temp_dir: str | None = None  # None: beside output
    require_signature: str | None = None  # a public Ed25519 key as PEM: only an artifact that it vouches for scores

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_given("output", self.output)
        check_at_least("num_shards", self.num_shards, 1)
        check_within("shard", self.shard, 0, self.num_shards - 1)
        check_memory(self.memory)
        if self.format is not None:
            find("format", self.format)
        if not self.output.endswith((".parquet", ".csv")) and self.output != "???":
            raise ConfigError(f"output={self.output} must end in .parquet or .csv")
        check_at_least("batch_rows", self.batch_rows, 1)
        check_at_least("rows_per_part", self.rows_per_part, 1)
        check_within("max_quarantined_fraction", self.max_quarantined_fraction, 0.0, 1.0)
        check_at_least("threads", self.threads, 1, allow_none=True)


@dataclass
class ServeJob(Job):
    """artifact: what `export` wrote, a link to it, or a registry whose champion is followed."""

    artifact: str = "???"
    memory: str = "ram"
    ssd: SsdConfig = field(default_factory=SsdConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    compiled: bool = False  # run the layers' AOTInductor package, of an artifact exported with compiled=true
    threads: int | None = None  # of torch; None: all cores
    require_signature: str | None = None  # a public Ed25519 key as PEM: only artifacts that it vouches for are served

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_memory(self.memory)
        check_at_least("threads", self.threads, 1, allow_none=True)


@dataclass
class PublishJob(Job):
    """A delta of `artifact`: what has changed since in the newest step of the run that it was exported from.

    follow: go on, and publish every new step. pin: publish nothing, and let servers go to this delta and stay there; unpin
    lets them follow the newest again.
    """

    artifact: str = "???"
    run: str | None = None  # None: the run that the artifact names
    step: int | None = None  # None: the newest
    follow: bool = False
    every_s: float = 10.0  # between two looks for a new step, where it follows
    pin: int | None = None
    unpin: bool = False
    delta_gate: DeltaGateConfig = field(default_factory=DeltaGateConfig)
    data_path: str | None = None  # None: the data set that the run was trained on
    sign_key: str | None = None  # a private Ed25519 key as PEM: deltas are signed with it
    require_signature: str | None = None  # a public one: only an artifact and steps that it vouches for are taken

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_at_least("step", self.step, 0, allow_none=True)
        check_at_least("every_s", self.every_s, 0.1)
        check_at_least("pin", self.pin, 0, allow_none=True)
        if self.follow and self.step is not None:
            raise ConfigError(
                f"follow=true publishes every new step, and step={self.step} names one: leave one of them out"
            )
        if self.pin is not None and (self.unpin or self.follow):
            raise ConfigError(f"pin={self.pin} publishes nothing: leave unpin and follow out")


# Job -> conf/<name>.yaml, and the verb.
CONFIG_NAMES: dict[type, str] = {
    GenerateJob: "generate", PrepareJob: "prepare", PlanJob: "plan", TrainJob: "train", EvaluateJob: "evaluate",
    CheckpointsJob: "checkpoints", ExportJob: "export",
    RetrainJob: "retrain", RegistryJob: "registry",
    PredictJob: "predict", ServeJob: "serve", RunsJob: "runs",
    ReportJob: "report", SweepJob: "sweep", PublishJob: "publish",
    InspectJob: "inspect", InitJob: "init", CheckNodesJob: "check_nodes",
}  # fmt: skip
