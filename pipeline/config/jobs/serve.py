"""Jobs of servers: serve, and publish deltas to them (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.jobs.job import Job
from pipeline.config.publish import DeltaGateConfig
from pipeline.config.server import BatchingConfig, LimitsConfig, ServerConfig, SsdConfig, check_memory
from pipeline.runtime.errors import ConfigError, check_at_least, check_given


@dataclass
class ServeJob(Job):
    """artifact: what `export` wrote, a link to it, or a registry whose champion is followed."""

    artifact: str = "???"
    memory: str = "ram"
    ssd: SsdConfig = field(default_factory=SsdConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    compiled: bool = False  # run the layers' AOTInductor package, of an artifact exported with compiled=true
    threads: int | None = None  # of torch; None: all cores
    require_signature: str | None = None  # a public Ed25519 key as PEM: only artifacts that it vouches for are served

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_memory(self.memory)
        check_at_least("threads", self.threads, 1, allow_none=True)


@dataclass
class PublishJob(Job):
    """A delta of `artifact`: what has changed since in the newest step of the run that it was exported from.

    follow: go on, and publish every new step. pin: publish nothing, and let servers go to this delta and stay there; unpin
    lets them follow the newest again.
    """

    artifact: str = "???"
    run: str | None = None  # None: the run that the artifact names
    step: int | None = None  # None: the newest
    follow: bool = False
    every_s: float = 10.0  # between two looks for a new step, where it follows
    pin: int | None = None
    unpin: bool = False
    delta_gate: DeltaGateConfig = field(default_factory=DeltaGateConfig)
    data_path: str | None = None  # None: the data set that the run was trained on
    sign_key: str | None = None  # a private Ed25519 key as PEM: deltas are signed with it
    require_signature: str | None = None  # a public one: only an artifact and steps that it vouches for are taken

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_at_least("step", self.step, 0, allow_none=True)
        check_at_least("every_s", self.every_s, 0.1)
        check_at_least("pin", self.pin, 0, allow_none=True)
        if self.follow and self.step is not None:
            raise ConfigError(
                f"follow=true publishes every new step, and step={self.step} names one: leave one of them out"
            )
        if self.pin is not None and (self.unpin or self.follow):
            raise ConfigError(f"pin={self.pin} publishes nothing: leave unpin and follow out")
