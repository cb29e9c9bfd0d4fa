"""Jobs about machines: check nodes, begin a project (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.jobs.job import Job, job_of
from pipeline.config.training import BACKENDS
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_given


@job_of("check_nodes")
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


@job_of("init")
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
