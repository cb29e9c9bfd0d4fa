"""Schemas of publishing deltas of an artifact while a run trains (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.runtime.errors import check_above, check_at_least, check_within


@dataclass
class DeltaGateConfig:
    """What a delta must pass; one that does not is not published, and the command ends with an error.

    NE is that of the first `max_rows` rows of the validation split, on which the delta is held against what is published.
    """

    max_rows: int = 20_000
    max_ne_increase: float = 0.01  # of a delta over what is published
    max_norm_ratio: float = (
        10.0  # of changed rows' mean norm over the same rows' as they are published, and its inverse
    )
    max_rows_fraction: float = 1.0  # of all stored rows, that a delta may change

    def __post_init__(self) -> None:
        check_at_least("delta_gate.max_rows", self.max_rows, 1)
        check_at_least("delta_gate.max_ne_increase", self.max_ne_increase, 0.0)
        check_at_least("delta_gate.max_norm_ratio", self.max_norm_ratio, 1.0)
        check_above("delta_gate.max_rows_fraction", self.max_rows_fraction, 0.0)
        check_within("delta_gate.max_rows_fraction", self.max_rows_fraction, 0.0, 1.0)
