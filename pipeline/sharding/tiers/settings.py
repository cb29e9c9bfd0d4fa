"""Say which tables are in tiers, with how many slots, and where their rows lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TierSettings:
    """slots: table -> the share of its rows that have a slot, or above 1 how many have. folder: on a local SSD."""

    slots: Mapping[str, float]
    folder: str
    io_threads: int = 16
