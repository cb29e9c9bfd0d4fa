"""The task that writes one shard, from the files whose rows it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from pipeline.config.splits import SPLITS
from pipeline.data.dataset import SparseFeature
from pipeline.data.prepare.buckets import BucketIds
from pipeline.data.prepare.distributed.files import DividedFile, load_blocks
from pipeline.data.prepare.distributed.recipe import Recipe, scratch_folder
from pipeline.data.prepare.splits import BlockRows, Boundaries
from pipeline.data.prepare.write_shards import ShardPlan, ShardWriter, WrittenShard, spans_of
from pipeline.data.raw.transforms import Transform


@dataclass(frozen=True)
class ShardToWrite:
    """Rows of `split` in `files` (folder, path where it was divided), from number `first_row` among them on."""

    split: int
    number: int
    files: list[tuple[str, str]]
    first_row: int
    num_rows: int
    shared: SharedByShards


@dataclass(frozen=True)
class SharedByShards:
    boundaries: Boundaries
    in_buckets: list[tuple[SparseFeature, BucketIds]] = field(default_factory=list)
    transforms: dict[str, Transform] = field(default_factory=dict)


def plan_tasks(files: Sequence[DividedFile], rows_per_shard: int, shared: SharedByShards) -> list[ShardToWrite]:
    """As plan_shards, from what the driver knows: how many rows of each split a file has."""
    tasks = []
    for split in range(len(SPLITS)):
        held = [file for file in files if file.per_split[split]]
        for number, span in enumerate(spans_of([file.per_split[split] for file in held], rows_per_shard)):
            named = [(file.folder, file.path) for file in held[span.first : span.last]]
            tasks.append(ShardToWrite(split, number, named, span.skip, span.num_rows, shared))
    return tasks


def write_shard(recipe: Recipe, item: ShardToWrite) -> WrittenShard:
    """Writes it again where it is written: the same bytes."""
    blocks = [block for folder, path in item.files for block in _blocks(folder, path) if block.per_split[item.split]]
    counts = [block.per_split[item.split] for block in blocks]
    span = next(spans_of(counts, item.num_rows, begin=item.first_row))
    plan = ShardPlan(item.split, item.number, blocks[span.first : span.last], span.skip, item.num_rows)
    config, shared = recipe.config, item.shared
    with scratch_folder(recipe) as scratch:
        writer = ShardWriter(
            recipe.features, shared.boundaries, scratch, config.path, config.rows_per_row_group, shared.in_buckets,
            shared.transforms,
        )  # fmt: skip
        return writer.write(plan)


@lru_cache(maxsize=8)
def _blocks(folder: str, path: str) -> list[BlockRows]:
    """A worker that writes several shards of a file loads its blocks once."""
    return load_blocks(folder, path)
