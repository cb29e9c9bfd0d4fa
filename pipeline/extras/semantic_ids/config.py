"""Define the job that learns semantic ids (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.jobs.job import Job
from pipeline.runtime.errors import ConfigError, check_at_least, check_given, check_within


@dataclass
class SemanticIdsJob(Job):
    """Learn codebooks from the vectors of items, and write them with the codes of all items.

    codebooks: use these codebooks instead of learning new ones, so that codes keep their meaning.
    max_vectors: learn from a random sample if there are more vectors.
    """

    vectors: str = "???"
    output: str = "???"
    value_column: str = "value"
    vector_column: str = "vector"
    num_levels: int = 3
    num_codes: int = 256
    iterations: int = 25
    max_vectors: int = 200_000
    seed: int = 0
    codebooks: str | None = None

    def __post_init__(self) -> None:
        for name in ("vectors", "output"):
            check_given(name, getattr(self, name))
        check_within("num_levels", self.num_levels, 1, 16)
        check_within("num_codes", self.num_codes, 2, 65_536)
        check_at_least("iterations", self.iterations, 1)
        check_at_least("seed", self.seed, 0)
        if self.max_vectors < self.num_codes:
            raise ConfigError(f"max_vectors={self.max_vectors} is less than num_codes={self.num_codes}; raise it")
