"""Report how long steps waited for rows of an SSD, how many rows had a slot, and what was read and
written.
"""

from __future__ import annotations

from torch import nn

from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.storage import storage
from pipeline.sharding.table_storage import TierStats
from pipeline.sharding.torchrec.sharder import ShardedTables


def tier_folder(job: TrainJob, table: str) -> str:
    """Return the folder for the rows that tables with tiers do not keep in memory.

    Raises TrainingError if it is not a local folder.
    """
    folder = job.sharding.tier_folder or f"{job.run_dir}/tiers"
    if not storage.is_local(folder):
        raise TrainingError(
            f"tables.{table}.tiers would keep rows in {folder}, which is not a local folder; set "
            "sharding.tier_folder to a folder on a local SSD"
        )
    return folder


class TierClock:
    """Count between start() and stop() on this rank. The object is False if no table has tiers."""

    def __init__(self, model: nn.Module) -> None:
        tables = [module for module in model.modules() if isinstance(module, ShardedTables)]
        self._lookups = [group.lookup for each in tables for group in each.tiered_groups]
        self.total = TierStats()
        self._began = TierStats()

    def __bool__(self) -> bool:
        return bool(self._lookups)

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self.total += self._now() - self._began

    def rates(self, since: TierStats, seconds: float, num_steps: int) -> dict[str, float]:
        return tier_rates(self.total - since, seconds, num_steps)

    def _now(self) -> TierStats:
        return sum((lookup.stats() for lookup in self._lookups), TierStats())


def tier_rates(stats: TierStats, seconds: float, num_steps: int) -> dict[str, float]:
    """Return percentages (waiting time; ids and distinct rows that had a slot), and MB read and written per step."""
    steps = max(num_steps, 1)
    return {
        "tier_stall_percent": 100 * stats.stall_seconds / seconds,
        "tier_hit_percent": 100 * (1 - stats.missed_lookups / max(stats.lookups, 1)),
        "tier_row_hit_percent": 100 * (1 - stats.missed_rows / max(stats.rows, 1)),
        "tier_read_mb_per_step": stats.read_bytes / 1e6 / steps,
        "tier_written_mb_per_step": stats.written_bytes / 1e6 / steps,
    }
