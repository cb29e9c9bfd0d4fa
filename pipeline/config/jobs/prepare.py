"""Define the jobs for data sets (generate, inspect, prepare) and for nodes (no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.columns import LabelConfig
from pipeline.config.data import BaseVocabularyConfig, DataConfig
from pipeline.config.jobs.job import Job, PathsConfig, job_of
from pipeline.config.registry import components
from pipeline.config.training import BACKENDS
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_given

ENGINES = ("embedded", "ray")


@dataclass
class RayConfig:
    """Settings of engine=ray. dashboard: start one on a cluster that the job starts; a running
    cluster has its own. min_nodes: wait up to two minutes until the cluster has so many nodes."""

    address: str | None = None
    max_retries: int = 8
    scratch: str | None = None
    dashboard: bool = False
    min_nodes: int = 1

    def __post_init__(self) -> None:
        check_at_least("ray.max_retries", self.max_retries, 0)
        check_at_least("ray.min_nodes", self.min_nodes, 1)


@job_of("prepare")
@dataclass
class PrepareJob(Job):
    """Prepare `source`, a file, folder or glob. Shards and dataset.json are written to data.path.
    With data.split.kind=given the splits name their sources, and `source` is left out.
    `vocabularies` extends or reuses the vocabularies of another data set. `verify_sources` compares
    all bytes of the sources with a finished data set."""

    data: DataConfig = field(default_factory=DataConfig)
    source: str | None = None
    memory_limit_gb: float = 2.0
    threads: int | None = None  # None: all cores
    temp_dir: str | None = None  # None: next to data.path
    vocabularies: BaseVocabularyConfig | None = None
    verify_sources: bool = False
    engine: str = "embedded"
    ray: RayConfig = field(default_factory=RayConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        if self.engine == "ray" and self.vocabularies is not None:
            raise ConfigError(
                f"engine=ray cannot extend the vocabularies of another data set ({self.vocabularies.path}): leave engine "
                "out, or leave vocabularies out"
            )
        # the libraries need 0.3 of them
        check_at_least("memory_limit_gb", self.memory_limit_gb, 0.5)
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


@job_of("generate")
@dataclass
class GenerateJob(Job):
    """Generate raw rows as data.synthetic or data.generator says. `output` is a text file, which
    prepare reads."""

    data: DataConfig = field(default_factory=DataConfig)
    output: str = "${paths.raw}/${data.name}.tsv"
    threads: int | None = None  # None: all cores
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        check_at_least("threads", self.threads, 1, allow_none=True)
        if self.data.synthetic is None and not self.data.generator:
            raise ConfigError(
                f"data={self.data.name} has nothing to generate: set data.generator={{kind: {next(iter(components('generator')), '...')}}}, "
                "or choose a data set that has it, such as data=quickstart"
            )


@job_of("inspect")
@dataclass
class InspectJob(Job):
    """Inspect one raw file `source` and write a data config to `output`."""

    source: str = "???"
    label: str | None = None  # None: chosen by values and name
    label_values: dict[str, int] = field(default_factory=dict)  # if the label is text
    label_threshold: float | None = None  # if the label has other numbers
    data_name: str | None = None  # None: the name of the file
    output: str | None = None  # None: <data_name>.yaml
    max_rows: int = 1_000_000

    def __post_init__(self) -> None:
        check_given("source", self.source)
        check_at_least("max_rows", self.max_rows, 100)
        LabelConfig(values=self.label_values, threshold=self.label_threshold)  # checks them
        if self.output is not None and not self.output.endswith(".yaml"):
            raise ConfigError(f"output={self.output} must end in .yaml")


@job_of("check_nodes")
@dataclass
class CheckNodesJob(Job):
    """Check nodes. `folder` must be shared by all nodes; empty means no folder is checked.
    megabytes: size of a message between two nodes. min_gb_per_s: minimum of every link; None: a
    link with less than half of the median is a problem. output: a JSON file for all measurements."""

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
                    f"{name}={getattr(self, name)} is not a local path: the check is for a file system of the nodes"
                )
