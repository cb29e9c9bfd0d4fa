"""Define the job of `card` (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.jobs.job import Job
from pipeline.runtime.errors import ConfigError, check_choice

FORMATS = ("markdown", "json", "schema")


@dataclass
class ShowCardJob(Job):
    """Show the card of `artifact`: an exported folder, a link to one, or a registry's champion."""

    artifact: str | None = None
    format: str = "markdown"
    output: str | None = None  # a file; None: print

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)
        if self.format != "schema" and not self.artifact:
            raise ConfigError("card shows an artifact: artifact=<folder or registry>; only format=schema needs none")
