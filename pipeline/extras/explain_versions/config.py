"""Define the job that explains the difference of two versions (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.jobs.job import Job, job_of
from pipeline.runtime.errors import ConfigError, check_at_least, check_given


@job_of("explain")
@dataclass
class ExplainJob(Job):
    """Explain why `old` and `new` score the rows of `source` differently."""

    old: str = "???"
    new: str = "???"
    source: str = "???"
    registry: str = ""
    label: str | None = None
    source_before: str | None = None
    max_rows: int = 20_000
    max_parts: int = 20
    html: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        for name in ("old", "new", "source"):
            check_given(name, getattr(self, name))
        check_at_least("max_rows", self.max_rows, 1)
        check_at_least("max_parts", self.max_parts, 1)
        if self.html is not None and not self.html.endswith(".html"):
            raise ConfigError(f"html={self.html} must end in .html")
        if self.output is not None and not self.output.endswith(".json"):
            raise ConfigError(f"output={self.output} must end in .json")
