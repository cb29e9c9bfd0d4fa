"""Define the job that erases a value (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.jobs.job import Job, job_of
from pipeline.runtime.errors import ConfigError, check_given, check_keys


@job_of("erase")
@dataclass
class EraseJob(Job):
    """Erase `value` of `feature` from the versions of `registry` and from everything in `folders`."""

    feature: str = "???"
    value: str = "???"
    registry: str = ""
    folders: list[str] = field(default_factory=list)
    sign_key: str | None = None  # a private Ed25519 key as PEM
    require_signature: Any = None  # public Ed25519 keys, a path or a list

    def __post_init__(self) -> None:
        check_given("feature", self.feature)
        check_given("value", self.value)
        self.value = str(self.value)
        check_keys("require_signature", self.require_signature)
        if not self.value:
            raise ConfigError("value is empty: an empty value has no id, so there is nothing to erase")
        if not self.places:
            raise ConfigError("give registry=<folder>, or folders=[<runs, data sets, artifacts, logs>]")
        if remote := [path for path in self.places if "://" in path]:
            raise ConfigError(
                f"{remote[0]} is an object store: copy it to a local folder, erase there, and copy it back"
            )

    @property
    def places(self) -> list[str]:
        return [*([self.registry] if self.registry else []), *self.folders]
