"""The job of a server (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.jobs.job import Job
from pipeline.config.server import BatchingConfig, LimitsConfig, ServerConfig, SsdConfig, check_memory
from pipeline.runtime.errors import check_at_least, check_given


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
