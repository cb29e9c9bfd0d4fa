"""Run one rank alone:  python -m pipeline.extras.shadow.rehearsal.rank JOB.yaml RANK FOLDER

Writes FOLDER/rank<RANK>.json. Rank 0's broadcasts go to FOLDER/broadcasts; other ranks read them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_from_yaml
from pipeline.extras import shadow
from pipeline.runtime.errors import UserError
from pipeline.runtime.logs import configure_logging

UNTOUCHED_ABOVE_BYTES = 256 << 20  # larger tensors are reserved, not filled


def run(job: TrainJob, rank: int, folder: Path) -> dict[str, Any]:
    """Train as `rank` of the job's world, and return the record."""
    local = job.hardware.ranks_per_host or job.world_size
    local = min(local, job.world_size)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local)
    )
    card = job.hardware.name if job.hardware.name in shadow.CARDS else "h100_80gb"
    shadow.activate(local, name=card, untouched_above_bytes=UNTOUCHED_ABOVE_BYTES)
    from pipeline.extras.shadow import alone, memory
    from pipeline.extras.shadow.rehearsal import hook
    from pipeline.extras.shadow.state import settings
    from pipeline.training.train import train

    alone.answer_for_all_ranks(folder / "broadcasts", rank)
    skipped = _leave_out_untouched_tables()
    _save_own_shards(rank)
    with shadow.running(rank) as found:
        train(job)
    before = hook.seen["before_training"]
    peaks = dict(found.peak_bytes)
    counts = hook.seen["counts"]
    copies = sum(value for name, value in counts.items() if name.startswith("copies_"))
    return {
        "rank": rank,
        "card_bytes": settings.total_memory_bytes,
        "peak_bytes": max(peaks.values()),
        "memory": {
            "tables, layers and their state": before,
            "batches, activations and gradients": max(0, peaks.get("training", 0) - before),
            "more in evaluation": max(0, peaks.get("evaluation", 0) - max(before, peaks.get("training", 0))),
            "more in saving": max(0, peaks.get("saving", 0) - max(before, peaks.get("training", 0))),
            "host memory, tables": memory.host_live["uvm"],
            "host memory, pinned": memory.host_live["pinned"],
        },
        "step": {
            "launches": counts["launches"],
            "syncs": counts["syncs"],
            "copies": copies,
            "copied_bytes": hook.seen["copied_bytes"],
        },
        "step_syncs": hook.seen["syncs"],
        "collectives": hook.seen["collectives"],
        # By the size of the group, because the ranks of one host exchange in a separate group.
        "order": [[each["op"], len(each["ranks"])] for each in found.collectives],
        "problems": found.as_record()["problems"],
        "not_saved_bytes": sum(skipped.values()),
    }


def _leave_out_untouched_tables() -> dict[str, int]:
    """Do not save tables whose memory is only reserved. Return key -> the bytes that a save fills in."""
    from pipeline.checkpoint.shards import ShardPlanner
    from pipeline.extras.shadow import memory
    from pipeline.sharding.torchrec import table_init

    skipped: dict[str, int] = {}
    fill, plan = table_init._fill, ShardPlanner.plan

    def fill_touched(part: Any, *arguments: Any) -> None:
        if not memory.is_untouched(getattr(part.values, "inner", part.values)):
            fill(part, *arguments)

    def touched(state: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, dict):
                kept[key] = touched(value)
            elif size := sum(each.nbytes for each in _local(value) if memory.is_untouched(each)):
                skipped[key] = size
            else:
                kept[key] = value
        return kept

    table_init._fill = fill_touched  # type: ignore[assignment]
    ShardPlanner.plan = lambda self, state: plan(self, touched(state))  # type: ignore[method-assign]
    return skipped


def _local(value: Any) -> list[Any]:
    """Return the host tensors of a value in a state dict that are on this rank."""
    if hasattr(value, "local_shards"):  # ShardedTensor, or LocalShardsWrapper within a DTensor
        value = value.local_shards()
    elif hasattr(value, "to_local"):
        return _local(value.to_local())
    values = value if isinstance(value, list) else [value]
    tensors: list[Any] = [getattr(each, "tensor", each) for each in values]
    return [each.inner for each in tensors if hasattr(each, "inner")]


def _save_own_shards(rank: int) -> None:
    """Let a rank save its shards. Rank 0 plans the save, but here it knows only its own shards."""
    from torch.distributed.checkpoint import default_planner

    from pipeline.checkpoint.shards import ShardPlan, ShardPlanner

    # Shards of one rank, W times, do not cover the tables.
    default_planner._validate_global_plan = lambda *_: []
    if rank == 0:
        return
    agree = ShardPlanner._agree
    ShardPlanner._agree = lambda self, local: ShardPlan(local.items, agree(self, local).metadata)  # type: ignore[method-assign]


def main(argv: list[str]) -> None:
    path, rank, folder = Path(argv[0]), int(argv[1]), Path(argv[2])
    record: dict[str, Any]
    try:
        configure_logging(0)
        record = run(job_from_yaml(TrainJob, path.read_text()), rank, folder)
    except UserError as error:
        record = {"user_error": str(error)}
    except Exception as error:
        traceback.print_exc()
        record = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"rank{rank}.json").write_text(json.dumps(record))
    sys.exit(bool(record.get("error") or record.get("user_error")))


if __name__ == "__main__":
    main(sys.argv[1:])
