"""Define the config of `calibrate`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.config.jobs.job import Job
from pipeline.runtime.errors import ConfigError, check_choice, check_within


@dataclass
class CalibrateJob(Job):
    """Configure `calibrate`. output: path of the hardware config. The measurements are written next
    to this file, as .json.

    setups: the <ranks>x<threads> to measure; None: one rank on one core, one rank on all cores, and
    one rank per core. clock=cpu counts CPU seconds of the process instead of wall seconds, for a
    shared machine; it measures only one rank with one thread.
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
                f"clock=cpu measures one rank with one thread, but setups={self.setups} has ranks or "
                "threads that wait for each other: omit setups, or use clock=wall on an idle machine"
            )
        check_within("seconds", self.seconds, 1.0, 300.0)
        if self.output is not None and not self.output.endswith(".yaml"):
            raise ConfigError(f"output={self.output} must end in .yaml")
        if not self.name.isidentifier():
            raise ConfigError(
                f"name={self.name} must be letters, digits and underscores, because hardware={self.name} selects it"
            )
        for setup in self.setups or []:
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", setup):
                raise ConfigError(f"setups has {setup!r}; a setup is <ranks>x<threads>, such as 2x1")
