"""Define the jobs that check nodes and create a project (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.jobs.job import Job, job_of
from pipeline.config.training import BACKENDS
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_given


@job_of("check_nodes")
@dataclass
class CheckNodesJob(Job):
    """Check nodes. `folder` must be shared by all nodes; empty means no folder is checked.

    megabytes: size of a message between two nodes. min_gb_per_s: minimum of every link; None: a
    link with less than half of the median is a problem. output: a JSON file for all measurements.
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
                    f"{name}={getattr(self, name)} is not a local path: the check is for a file system of the nodes"
                )


@job_of("init")
@dataclass
class InitJob(Job):
    """Create `folder` with a copy of the data config `data`, as `inspect` writes it; `source` are
    the raw rows."""

    folder: str = "???"
    data: str = "???"
    source: str = "???"
    command: str = "make"  # the only command; with it the folder can be a positional argument

    def __post_init__(self) -> None:
        check_choice("command", self.command, ("make",))
        for name in ("folder", "data", "source"):
            check_given(name, getattr(self, name))
