"""The job of the verb publish (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.jobs.job import Job, job_of
from pipeline.config.jobs.train import DeltaGateConfig
from pipeline.runtime.errors import ConfigError, check_at_least, check_given, check_keys


@job_of("publish")
@dataclass
class PublishJob(Job):
    """Publish a delta of `artifact` with the changes up to the newest step of its run. follow:
    continue to run, and publish every new step. pin: publish nothing, and let servers go to this
    delta and stay there. unpin: let servers follow the newest delta again.
    """

    artifact: str = "???"
    run: str | None = None  # None: the run that the artifact names
    step: int | None = None  # None: the newest
    follow: bool = False
    every_s: float = 10.0  # follow: between two searches for a new step
    pin: int | None = None
    unpin: bool = False
    delta_gate: DeltaGateConfig = field(default_factory=DeltaGateConfig)
    data_path: str | None = None  # None: the data set that the run was trained on
    sign_key: str | None = None  # a private Ed25519 key as PEM: deltas are signed with it
    # Public Ed25519 keys, a path or a list: only an artifact and steps signed by one are used.
    require_signature: Any = None

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_keys("require_signature", self.require_signature)
        check_at_least("step", self.step, 0, allow_none=True)
        check_at_least("every_s", self.every_s, 0.1)
        check_at_least("pin", self.pin, 0, allow_none=True)
        if self.follow and self.step is not None:
            raise ConfigError(
                f"follow=true publishes every new step, but step={self.step} names one: remove one of the two"
            )
        if self.pin is not None and (self.unpin or self.follow):
            raise ConfigError(f"pin={self.pin} publishes nothing: remove unpin and follow")
