"""Define the schemas of generated data sets with a known teacher (stdlib only)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_within


@dataclass
class SyntheticConfig:
    """A generated data set with a known teacher, for `python -m pipeline generate`: Criteo's
    format, or tsv with a header.

    Id number r has probability ~ r^-zipf_exponent among the feature's `cardinalities`. Criteo's
    format has 26 cardinalities and 13 dense features; tsv has as many as data.columns names. The
    teacher's logits have standard deviation `teacher_scale`. `num_interactions` pairs of the
    smallest features interact.
    """

    num_rows: int = 1_000_000
    cardinalities: list[int] = field(
        default_factory=lambda: [
            3, 4, 6, 8, 10, 12, 15, 18, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 800, 1000, 2000, 5000, 10000, 20000
        ]
    )  # fmt: skip
    zipf_exponent: float = 1.2
    # effects of ids ~ rank^-this; 0: rare ids have the same effect as frequent ids
    id_effect_decay: float = 0.25
    num_dense: int = 13
    num_interactions: int = 5
    teacher_scale: float = 2.0
    positive_rate: float = 0.25
    seed: int = 0
    # A series of windows. Each window has new rows from a teacher that rotates by `drift` radians
    # per window. In each window a share `churn` of the values of large features is replaced by new
    # values.
    window: int = 0
    drift: float = 0.0
    churn: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("synthetic.num_rows", self.num_rows, 1)
        check_at_least("synthetic.window", self.window, 0)
        check_within("synthetic.drift", self.drift, 0.0, 1.6)
        check_within("synthetic.churn", self.churn, 0.0, 1.0)
        check_at_least("synthetic.num_dense", self.num_dense, 1)
        check_above("synthetic.zipf_exponent", self.zipf_exponent, 0.0)
        check_at_least("synthetic.id_effect_decay", self.id_effect_decay, 0.0)
        check_above("synthetic.teacher_scale", self.teacher_scale, 0.0)
        check_within("synthetic.positive_rate", self.positive_rate, 0.001, 0.999)
        check_within("synthetic.num_interactions", self.num_interactions, 0, len(self.cardinalities) // 2)
        if min(self.cardinalities, default=0) < 1:
            raise ConfigError(
                f"synthetic.cardinalities has {len(self.cardinalities)} values, the smallest "
                f"{min(self.cardinalities, default=0)}; name features of at least 1 id each"
            )


class GeneratorConfig(ABC):
    """Base of a registered generator: a dataclass of its settings, chosen by data.generator.kind."""

    num_rows: int

    @abstractmethod
    def write_source(self, output: str, threads: int | None = None) -> None:
        """Write the raw rows to `output`, and their true probabilities next to it. Equal settings
        give equal bytes for any number of threads."""
