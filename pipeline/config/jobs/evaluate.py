"""Jobs that measure a step, export it and score rows by it (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.jobs.job import Job, job_of
from pipeline.config.paths import PathsConfig
from pipeline.config.registry import find
from pipeline.config.server import SsdConfig, check_memory
from pipeline.config.serving import (
    DENSE_PRECISIONS,
    ParityConfig,
    PruningConfig,
    RetrievalConfig,
    RetrieveConfig,
    check_precisions,
)
from pipeline.config.splits import SPLITS
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
    require_signature: Any = None  # public Ed25519 keys, a path or a list: only a step signed by one is measured
    tables: str = "averaged"  # own: where hosts trained tables of their own, each host's on the rows of its ranks
    metrics: list[str] = field(default_factory=list)  # registered metrics beside the run's trainer.metrics
    importance_rows: int = 0  # on which each feature's importance is measured by permutation; 0: it is not

    def __post_init__(self) -> None:
        for name in self.metrics:
            find("metric", name, "metrics")
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
    require_signature: Any = None  # public Ed25519 keys, a path or a list: only a step signed by one is exported
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_given("run", self.run)
        check_keys("require_signature", self.require_signature)
        check_precisions(self.precision, self.tables)
        check_choice("dense", self.dense, DENSE_PRECISIONS)
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
    escape_formulas: bool = True  # of text in a .csv: =, +, - and @ at its start would run in a spreadsheet
    num_shards: int = 1  # processes that share the source's files, each with a file of its own beside output
    shard: int = 0  # which of them this is
    threads: int | None = None  # None: all cores
    temp_dir: str | None = None  # None: beside output
    require_signature: Any = None  # public Ed25519 keys, a path or a list: only an artifact signed by one scores

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_keys("require_signature", self.require_signature)
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
