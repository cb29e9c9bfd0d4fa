"""Define the jobs that list, compare and report runs (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.data import SPLITS
from pipeline.config.jobs.job import Job, PathsConfig
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_within

RUNS_COMMANDS = ("list", "compare", "show", "tag", "clean", "remove")


@dataclass
class RunsJob(Job):
    """The job. root: the folder of the runs to list; run, runs: run folders; output: a .parquet
    file in addition to the text.

    compare uses `runs`, of which the first is the baseline. show, tag, clean and remove use `run`.
    A leading - removes a tag. confidence: the confidence of the intervals.
    """

    command: str = "list"
    root: str = "${paths.runs}"
    runs: list[str] = field(default_factory=list)
    run: str = ""
    tags: list[str] = field(default_factory=list)
    note: str | None = None  # None: no change
    sort: str = "time"  # or a metric
    split: str | None = None  # None: test if all were measured on it, otherwise validation
    confidence: float = 0.98
    output: str | None = None
    html: str | None = None  # compare: also write this page
    force: bool = False  # remove a run that has tags
    keep_days: float = 30.0  # clean: keep younger files
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
            raise ConfigError("compare needs at least two runs: python -m pipeline runs compare RUN RUN")
        if self.command == "tag" and not self.tags and self.note is None:
            raise ConfigError("tag needs tags, or a note: python -m pipeline runs tag RUN TAG..., or note='...'")


@dataclass
class ReportJob(Job):
    """Write a report of run folder `run`. output=None: write report.html in that folder."""

    run: str = "???"
    output: str | None = None

    def __post_init__(self) -> None:
        check_given("run", self.run)
        if self.output is not None and not self.output.endswith(".html"):
            raise ConfigError(f"output={self.output} must end in .html")
