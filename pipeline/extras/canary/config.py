"""Define the job of `canary` (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.jobs.job import Job
from pipeline.config.retraining import GateConfig
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_keys, check_within

CANARY_COMMANDS = ("status", "start", "evaluate", "promote", "stop")


@dataclass
class CanaryJob(Job):
    """Start, judge and end the canary of `registry`.

    start: `version` answers `share` of the keys; with run and artifact the version is made of them
    first. evaluate: join the pairs of `log` with `labels` by request id, apply `gate` and act.
    """

    registry: str = "???"
    command: str = "status"
    version: str = ""
    share: float = 0.05
    run: str | None = None
    artifact: str | None = None
    log: str | None = None
    labels: str | None = None
    id_column: str = "request_id"
    row_column: str = "row"
    label_column: str = "label"
    negative_after_s: float | None = None
    max_rate_fall: float = 0.05
    max_hours: float = 168.0
    act: bool = True
    reason: str = ""
    gate: GateConfig = field(default_factory=GateConfig)
    sign_key: str | None = None
    require_signature: Any = None

    def __post_init__(self) -> None:
        check_given("registry", self.registry)
        check_choice("command", self.command, CANARY_COMMANDS)
        check_within("share", self.share, 0.0, 1.0)
        check_at_least("negative_after_s", self.negative_after_s, 0.0, allow_none=True)
        check_within("max_rate_fall", self.max_rate_fall, 0.0, 1.0)
        check_at_least("max_hours", self.max_hours, 0.0)
        check_keys("require_signature", self.require_signature)
        if self.command == "evaluate" and not (self.log and self.labels):
            raise ConfigError("evaluate needs log=<folder of router.canary.log> and labels=<Parquet file or folder>")
        if self.command == "start" and bool(self.version) == bool(self.run):
            raise ConfigError("start needs a version of the registry, or run=<a run folder> and artifact=<its export>")
        if bool(self.run) != bool(self.artifact):
            raise ConfigError(
                "run and artifact belong together: the run folder, and the artifact that was exported from it"
            )
        if self.gate.slices or self.gate.held:
            raise ConfigError(
                "gate.slices and gate.held need ids and labels that live pairs do not have: leave them out"
            )
