"""Define the job of a server (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.jobs.job import Job, job_of
from pipeline.config.server import BatchingConfig, LimitsConfig, ServerConfig, SsdConfig, check_memory
from pipeline.runtime.errors import ConfigError, check_at_least, check_given, check_keys


@job_of("serve")
@dataclass
class ServeJob(Job):
    """Serve `artifact`: an exported folder, a link to it, or a registry whose champion is followed."""

    artifact: str = "???"
    memory: str = "ram"
    ssd: SsdConfig = field(default_factory=SsdConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    # run the layers' AOTInductor package of an artifact exported with compiled=true
    compiled: bool = False
    threads: int | None = None  # of torch; None: all cores
    # public Ed25519 keys, a path or a list: artifacts must be signed by one of them
    require_signature: Any = None
    # a local file of the newest signed pointers; after a restart older pointers are refused
    accepted: str | None = None

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        check_keys("require_signature", self.require_signature)
        check_memory(self.memory)
        if self.accepted is not None and self.require_signature is None:
            raise ConfigError(f"accepted={self.accepted} keeps numbers of signed pointers: set require_signature too")
        check_at_least("threads", self.threads, 1, allow_none=True)
