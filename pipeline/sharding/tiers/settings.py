"""Say which tables are in tiers, with how many slots, and where their rows lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TierSettings:
    """slots: table -> the share of its rows that have a slot, or above 1 how many have. folder: on a local SSD.

    heads: table -> the share of a shard's slots that its first rows keep; a table that is not named has none.
    """

    slots: Mapping[str, float]
    folder: str
    heads: Mapping[str, float] = field(default_factory=dict)
