"""Decide whether a delta may be published, by its effect on the serving model and by comparison
with earlier deltas.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from pipeline.config.jobs.train import DeltaGateConfig
from pipeline.runtime.errors import ServingError

Stats = Mapping[str, float]  # as Delta.stats
# of the rows since the last save, each scored before it was trained on
PROGRESSIVE_NE = "progressive_ne"


class DeltaRefusedError(ServingError):
    """A delta does not pass its gate: nothing is published, and servers do not change."""


def problems_of(gate: DeltaGateConfig, stats: Stats, history: Sequence[Stats]) -> list[str]:
    """Return why a delta with these `stats` must not be served; empty if it may be served. history:
    the earlier deltas of the chain, oldest first.
    """
    found = []
    if stats["not_finite"]:
        found.append(f"{int(stats['not_finite']):,} rows or layers have numbers that are not finite")
    increase, ratio = stats["ne"] - stats["ne_before"], stats["norm_ratio"]
    if not increase <= gate.max_ne_increase:
        found.append(
            f"NE {stats['ne']:.5f} is {increase:+.5f} of what is published (delta_gate.max_ne_increase={gate.max_ne_increase:g})"
        )
    if not 1 / gate.max_norm_ratio <= ratio <= gate.max_norm_ratio:
        found.append(f"changed rows are {ratio:.3g} times as long (delta_gate.max_norm_ratio={gate.max_norm_ratio:g})")
    if stats["rows_fraction"] > gate.max_rows_fraction:
        found.append(
            f"{stats['rows_fraction']:.3f} of all rows change (delta_gate.max_rows_fraction={gate.max_rows_fraction:g})"
        )
    return [*found, *_unlike(gate, stats, history[-gate.trailing :])]


def _unlike(gate: DeltaGateConfig, stats: Stats, history: Sequence[Stats]) -> list[str]:
    """Return the names of `stats` that are far from the median of earlier deltas."""
    found = []

    def hold(name: str, what: str, key: str, low: float | None, high: float | None) -> None:
        before = [each[name] for each in history if math.isfinite(each.get(name, math.nan))]
        if name not in stats or len(before) < gate.min_history or high is None:
            return
        middle = statistics.median(before)
        if not (low or 0.0) * middle <= stats[name] <= high * middle:
            found.append(
                f"{what} {stats[name]:.4g}, and that of {len(before)} deltas before at the median {middle:.4g} "
                f"(delta_gate.{key}={getattr(gate, key):g})"
            )

    norm, rise = gate.max_norm_rise, gate.max_progressive_ne_rise
    hold("rows_fraction", "the share of rows that change is", "max_rows_rise", None, gate.max_rows_rise)
    hold("norm_ratio", "the norm ratio of changed rows is", "max_norm_rise", norm and 1 / norm, norm)
    ne_limit = None if rise is None else 1.0 + rise
    hold(
        PROGRESSIVE_NE,
        "NE of the rows since the last save, before they were trained on, is",
        "max_progressive_ne_rise",
        None,
        ne_limit,
    )
    return found
