"""Open an artifact's tables on SSD, with a cache of the size that the latency target needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.serving import SsdConfig
from pipeline.data.dataset import FrequencyCurve
from pipeline.extras.ssd_serving.cache_plan import (
    CachePlan,
    TableHeat,
    joined,
    misses_allowed,
    plan_for_bytes,
    plan_for_misses,
)
from pipeline.extras.ssd_serving.lookup import SsdLookup, forget_pages, read_latency_us
from pipeline.runtime.logs import get_logger
from pipeline.serving.scoring.lookup import ServedFeature, ServedTable

logger = get_logger(__name__)


def open_on_ssd(
    tables: list[ServedTable],
    features: list[ServedFeature],
    lookups: Mapping[str, Mapping[str, Any]],
    cache_bytes: int | None,
    config: SsdConfig,
) -> SsdLookup:
    """Open the tables. cache_bytes=None: choose the size by config.p99_target_ms.

    lookups: from package.lookups_of.
    """
    heats = heats_of(tables, features, lookups)
    total = sum(table.size_bytes for table in tables)
    if cache_bytes is not None:
        plan, why = plan_for_bytes(heats, cache_bytes), "as asked for"
    else:
        read_us = read_latency_us([table.path for table in tables])
        allowed = misses_allowed(config.p99_target_ms, config.request_rows, config.io_threads, read_us)
        plan = plan_for_misses(heats, allowed)
        why = f"for reads of {read_us:.0f} us and a p99 of {config.p99_target_ms:g} ms"
    opened = SsdLookup(tables, features, plan.heads, config.io_threads)
    for table in tables:
        forget_pages(table.path)
    logger.info("%s", _describe(plan, total, why))
    return opened


def _describe(plan: CachePlan, total: int, why: str) -> str:
    return (
        f"tables     {total / 2**20:,.1f} MiB on SSD, {plan.cache_bytes / 2**20:,.1f} MiB of hot rows in memory "
        f"({100 * plan.cache_bytes / max(total, 1):.1f} %, {why}): {plan.misses_per_row:.3f} reads a row expected"
    )


def heats_of(
    tables: Sequence[ServedTable], features: Sequence[ServedFeature], lookups: Mapping[str, Mapping[str, Any]]
) -> list[TableHeat]:
    """Return how tables are looked up.

    For an unknown feature, assume one lookup per row, uniform over the ids.
    """
    heats = []
    for number, table in enumerate(tables):
        known = [_curve(lookups.get(feature.name), table.rows) for feature in features if feature.table == number]
        curve = stored_curve(table, joined(known)) if known else FrequencyCurve([], [])
        heats.append(TableHeat(table.stored_rows, table.row_bytes, sum(count for count, _ in known), curve))
    return heats


def _curve(about: Mapping[str, Any] | None, rows: int) -> tuple[float, FrequencyCurve]:
    if about is None or not about["ranks"]:
        return 1.0, FrequencyCurve([rows], [1.0])
    return float(about["per_row"]), FrequencyCurve(list(about["ranks"]), list(about["shares"]))


def stored_curve(table: ServedTable, curve: FrequencyCurve) -> FrequencyCurve:
    """Return the curve over stored rows. A pruned row is read as row 0, which is in memory."""
    if table.kept is None:
        return curve
    ranks: list[int] = []
    shares: list[float] = []
    for rank, share in zip(curve.ranks, curve.shares, strict=True):
        stored = table.kept.num_kept_below(min(rank + 1, table.rows)) - 1  # without row 0
        if stored > (ranks[-1] if ranks else 0):
            ranks.append(stored)
            shares.append(share)
    return FrequencyCurve(ranks, shares)
