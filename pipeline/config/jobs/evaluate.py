"""Define the jobs that measure a step, export it, and score rows with it (no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.data import QUOTES, SPLITS, check_encoding, checked_delimiter
from pipeline.config.jobs.job import Job, PathsConfig, job_of
from pipeline.config.registry import find, find_metric, read_settings
from pipeline.config.serving import (
    DENSE_PRECISIONS,
    BatchingConfig,
    CalibrationConfig,
    CardConfig,
    LimitsConfig,
    ParityConfig,
    PruningConfig,
    RetrievalConfig,
    RetrieveConfig,
    ServerConfig,
    SsdConfig,
    check_memory,
    check_onnx,
    check_precisions,
)
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_keys, check_within

EVALUATED_TABLES = ("averaged", "own")
CHOSEN_STEPS = ("auto", "best", "last")


def check_chosen(which: str, step: int | None) -> None:
    check_choice("which", which, CHOSEN_STEPS)
    if step is not None and which != "auto":
        raise ConfigError(f"step={step} and which={which} both choose a checkpoint: leave one of them out")


@job_of("evaluate")
@dataclass
class EvaluateJob(Job):
    """Measure a step of run folder `run`. Batch size None is the training batch size.

    which chooses the step if `step` is not set. best: the evaluated checkpoint with the best
    checkpoint.best_metric. last: the newest. auto: the best if the run keeps it, otherwise the
    newest.
    """

    run: str = "???"
    split: str = "test"
    step: int | None = None
    which: str = "auto"
    global_batch_size: int | None = None
    max_batches: int | None = None
    world_size: int = 1
    data_path: str | None = None  # None: the data set of the run
    other_data: bool = False  # allow that data_path holds another data set
    # public Ed25519 keys, a path or a list: the step must be signed by one of them
    require_signature: Any = None
    # own: if hosts trained separate tables, measure each host's tables on the rows of its ranks
    tables: str = "averaged"
    # registered metrics in addition to the run's trainer.metrics
    metrics: list[str] = field(default_factory=list)
    # rows on which each feature's importance is measured by permutation; 0: none
    importance_rows: int = 0
    predictions: str | None = None  # a .parquet file that gets a row for each row that is measured
    # features, or crosses of features (a*b), by whose values the metrics are also measured
    slices: list[str] = field(default_factory=list)
    # {kind: greedy, action: [item]}: estimate the value of serving by the model (extras/off_policy)
    policy: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.predictions is not None and not self.predictions.endswith(".parquet"):
            raise ConfigError(f"predictions={self.predictions} must end in .parquet")
        for name in self.metrics:
            find_metric(name, "metrics")
        if twice := [name for name in self.slices if self.slices.count(name) > 1]:
            raise ConfigError(f"slices={self.slices} names {twice[0]} twice: name each once")
        check_at_least("importance_rows", self.importance_rows, 0)
        check_keys("require_signature", self.require_signature)
        check_choice("split", self.split, SPLITS)
        check_chosen(self.which, self.step)
        check_choice("tables", self.tables, EVALUATED_TABLES)
        check_at_least("global_batch_size", self.global_batch_size, 1, allow_none=True)
        check_at_least("max_batches", self.max_batches, 1, allow_none=True)


@job_of("export")
@dataclass
class ExportJob(Job):
    """Export a step of run folder `run`. output=None: a new folder in <run>/artifacts.

    `step` and `which` choose a checkpoint as in EvaluateJob. `precision` applies to all tables that `tables`
    does not name. `auto` finds the smallest mix whose NE on the validation split is at most `ne_budget` above
    the trained model's.
    """

    run: str = "???"
    step: int | None = None
    which: str = "auto"
    output: str | None = None
    precision: str = "int8"
    tables: dict[str, str] = field(default_factory=dict)  # table -> fp32, fp16, int8, int4 or int2
    ne_budget: float = 0.0005
    dense: str = "fp32"  # of the layers: fp32, bf16 or int8
    compiled: bool = False  # also write the layers as an AOTInductor package; needs a C++ compiler
    onnx: bool = False  # also write the layers as ONNX
    pruning: PruningConfig = field(default_factory=PruningConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    card: CardConfig = field(default_factory=CardConfig)
    # column of ids -> Parquet files with raw columns by id, which rows to score may leave out
    feature_tables: dict[str, str] = field(default_factory=dict)
    data_path: str | None = None  # None: the data set of the run
    sign_key: str | None = None  # a private Ed25519 key as PEM that signs the artifact
    # public Ed25519 keys, a path or a list: the step must be signed by one of them
    require_signature: Any = None
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_given("run", self.run)
        check_keys("require_signature", self.require_signature)
        check_precisions(self.precision, self.tables)
        check_choice("dense", self.dense, DENSE_PRECISIONS)
        check_onnx("", self.onnx, self.dense)
        check_at_least("step", self.step, 0, allow_none=True)
        check_chosen(self.which, self.step)
        check_at_least("ne_budget", self.ne_budget, 0.0)
        if self.output is not None:
            check_given("output", self.output)
            if "://" in self.output:
                raise ConfigError(
                    f"output={self.output}: artifacts are written to local paths; copy the folder from there"
                )


@job_of("predict")
@dataclass
class PredictJob(Job):
    """Score raw rows. `artifact` is an exported folder, a link to it, or a registry; `source` is a
    file, folder or glob.

    `output` is a .parquet or .csv file with one row per source row: its file (if there are several), its number,
    `id_columns` unchanged, and its score, null if the row could not be read. A two-tower's artifact writes
    items or vectors instead of scores, as `retrieve` says, and needs .parquet.
    """

    artifact: str = "???"
    source: str = "???"
    output: str = "???"
    format: str | None = None  # None: by the names of the files
    delimiter: str | None = None  # of csv (a comma) and tsv (a tab)
    encoding: str = "utf-8"  # of text files
    quotes: str = "doubled"  # a quote inside a quoted cell of csv: "" or, as Spark writes it, \"
    id_columns: list[str] = field(default_factory=list)
    # true: apply the artifact's deltas, as a server does; a number: those up to this number
    deltas: bool | int = False
    memory: str = "ram"
    ssd: SsdConfig = field(default_factory=SsdConfig)
    retrieve: RetrieveConfig = field(default_factory=RetrieveConfig)
    # run the layers' AOTInductor package of an artifact exported with compiled=true
    compiled: bool = False
    batch_rows: int = 8192  # rows scored in one batch
    rows_per_part: int = 1_000_000  # a killed run loses at most this many rows
    max_quarantined_fraction: float = 0.01
    overwrite: bool = False
    # quote text in a .csv that starts with =, +, - or @, which a spreadsheet would run
    escape_formulas: bool = True
    # processes that share the source's files; each writes its own file next to output
    num_shards: int = 1
    shard: int = 0  # the number of this process
    threads: int | None = None  # None: all cores
    temp_dir: str | None = None  # None: next to output
    # public Ed25519 keys, a path or a list: the artifact must be signed by one of them
    require_signature: Any = None

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_keys("require_signature", self.require_signature)
        check_given("output", self.output)
        check_at_least("num_shards", self.num_shards, 1)
        check_within("shard", self.shard, 0, self.num_shards - 1)
        if type(self.deltas) is not bool and self.deltas < 1:
            raise ConfigError(f"deltas={self.deltas} must be true, false, or the number of the last delta to apply")
        check_memory(self.memory)
        if self.format is not None:
            find("format", self.format)
        self.delimiter = checked_delimiter("delimiter", self.delimiter)
        check_encoding("encoding", self.encoding)
        check_choice("quotes", self.quotes, QUOTES)
        if not self.output.endswith((".parquet", ".csv")) and self.output != "???":
            raise ConfigError(f"output={self.output} must end in .parquet or .csv")
        check_at_least("batch_rows", self.batch_rows, 1)
        check_at_least("rows_per_part", self.rows_per_part, 1)
        check_within("max_quarantined_fraction", self.max_quarantined_fraction, 0.0, 1.0)
        check_at_least("threads", self.threads, 1, allow_none=True)


@job_of("serve")
@dataclass
class ServeJob(Job):
    """Serve `artifact`: an exported folder, a link to it, or a registry whose champion is followed."""

    artifact: str = "???"
    memory: str = "ram"
    ssd: SsdConfig = field(default_factory=SsdConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    # run the layers' AOTInductor package of an artifact exported with compiled=true
    compiled: bool = False
    threads: int | None = None  # of torch; None: all cores
    # public Ed25519 keys, a path or a list: artifacts must be signed by one of them
    require_signature: Any = None
    # a local file of the newest signed pointers; after a restart older pointers are refused
    accepted: str | None = None
    # registered observer of answered requests -> its settings
    observers: dict[str, dict[str, Any]] = field(default_factory=dict)
    # a registered router, which chooses the model of each request -> its settings
    router: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_keys("require_signature", self.require_signature)
        check_memory(self.memory)
        if self.accepted is not None and self.require_signature is None:
            raise ConfigError(f"accepted={self.accepted} keeps numbers of signed pointers: set require_signature too")
        check_at_least("threads", self.threads, 1, allow_none=True)
        self.read_observers()
        if len(self.read_router()) > 1:
            raise ConfigError(f"router has {', '.join(self.router)}: one router chooses the model, so give one")

    def read_observers(self) -> dict[str, Any]:
        """Return name -> settings of each observer, as the dataclass that is registered. Raises
        ConfigError for an unknown observer, unknown keys and wrong types."""
        return _read("observer", self.observers, "observers")

    def read_router(self) -> dict[str, Any]:
        """Return name -> settings of the router; empty without one. Raises ConfigError as read_observers."""
        return _read("router", self.router, "router")


def _read(kind: str, given: dict[str, dict[str, Any]], key: str) -> dict[str, Any]:
    return {
        name: read_settings(find(kind, name, key), values or {}, f"{key}.{name}", f"{kind} {name}")
        for name, values in given.items()
    }
