"""Define the job that lists, verifies and shows checkpoints (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.jobs.job import Job
from pipeline.runtime.errors import ConfigError, check_choice, check_given, check_keys

CHECKPOINT_COMMANDS = ("list", "verify", "show", "export")


@dataclass
class CheckpointsJob(Job):
    """`run` is a run folder. step=None: verify all steps, show or export the newest."""

    run: str = "???"
    command: str = "list"
    step: int | None = None
    table: str = ""
    output: str = ""
    optimizer_state: bool = False
    data_path: str | None = None  # of the vocabularies; None: the data set of the run
    require_signature: Any = None

    def __post_init__(self) -> None:
        check_given("run", self.run)
        check_keys("require_signature", self.require_signature)
        check_choice("command", self.command, CHECKPOINT_COMMANDS)
        if self.command == "export" and (missing := [key for key in ("table", "output") if not getattr(self, key)]):
            raise ConfigError(f"export needs {' and '.join(missing)}: table=<table> output=<file>.parquet")
