"""Jobs about machines: check nodes, calibrate, begin a project (stdlib and OmegaConf only)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.config.jobs.job import Job
from pipeline.config.training import BACKENDS
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_given, check_within


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
class CalibrateJob(Job):
    """output: the hardware config that is written; the table of measurements goes beside it, as .json in place of .yaml.

    setups: <ranks>x<threads> that are measured; None: one rank on one core and on all, and a rank a core. clock=cpu counts the
    process's own CPU seconds, for a machine that others use; that tells of one rank with one thread alone.
    """

    name: str = "measured"
    output: str | None = None  # None: conf/hardware/<name>.yaml
    seconds: float = 250.0
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
