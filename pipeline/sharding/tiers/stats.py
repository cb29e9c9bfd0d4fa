"""Count what lookups of tables in tiers found in their slots, and what they had to read and write."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class TierStats:
    """Since the start, of training but for reads and writes.

    rows: distinct rows of a batch; missed: of lookups and rows, those without a slot when first resolved. stall_seconds: that the
    training thread waited for rows.
    """

    lookups: int = 0
    missed_lookups: int = 0
    rows: int = 0
    missed_rows: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    written_rows: int = 0
    stall_seconds: float = 0.0

    def __add__(self, other: TierStats) -> TierStats:
        return TierStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: TierStats) -> TierStats:
        return TierStats(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))
