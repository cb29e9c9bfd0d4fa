"""Turn a batch's ids into the ids of its tables' parts, vectorised, before they go to the ranks that hold the rows.

The reader's thread does it in training, and the same code in serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.read.batch import keyed_jagged_tensor
from pipeline.data.read.streams import mix
from pipeline.embeddings.compression.frequency_split import HOT, cold_part, head_rows
from pipeline.embeddings.compression.managed_collision import IDS_A_BUCKET, MANAGED, managed_rows
from pipeline.embeddings.compression.partitions import Digit, Hashed, Partition, partitions_of
from pipeline.embeddings.compression.physical import composes_each_id, feature_of, leaves, places_of
from pipeline.embeddings.compression.sizes import blocks_of, paths_of
from pipeline.embeddings.empty_bags import leave_out_empty_bags
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError


class Bags(NamedTuple):
    """Of one feature: ids [sum of lengths] int64, one sample after the other, and lengths [batch] int32."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]


# The bags of one feature -> (physical feature, its bags) for each of its parts.
Split = Callable[[Bags], Iterator[tuple[str, Bags]]]


class IdSplitter:
    """KeyedJaggedTensor by the data set's features -> KeyedJaggedTensor by the parts' features.

    On the CPU. Features of tables that are not compressed go through as they are; keys come in the same order in every
    batch. Beside the features that the collection looks up there are those of ids that dense parameters turn into rows.
    skip_empty_bags: leave out the tails' bags without ids, for ranks that would send them to each other.
    """

    def __init__(self, tables: Iterable[Table], *, skip_empty_bags: bool = False) -> None:
        tables = list(tables)
        self._splits = {
            feature: split_of(table, index)
            for table in tables
            if table.compression is not None
            for index, feature in enumerate(table.feature_names)
        }
        self._skipped = {name for table in tables for name in often_empty(table)} if skip_empty_bags else set()

    def __bool__(self) -> bool:
        """Whether there is anything to split."""
        return bool(self._splits)

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Raises ConfigError for a bag longer than the table's compression says."""
        if not self._splits:
            return features
        keys: list[str] = []
        parts: list[Bags] = []
        values, batch_size = features.values().numpy(), features.stride()
        lengths = features.lengths().numpy().reshape(-1, batch_size)
        begin = 0
        for index, (key, count) in enumerate(zip(features.keys(), features.length_per_key(), strict=True)):
            bags, begin = Bags(values[begin : begin + count], lengths[index]), begin + count
            for name, part in self._splits[key](bags) if key in self._splits else ((key, bags),):
                keys.append(name)
                parts.append(part)
        split = keyed_jagged_tensor(
            keys,
            torch.from_numpy(np.concatenate([part.ids for part in parts])),
            torch.from_numpy(np.concatenate([part.lengths for part in parts])),
            batch_size,
            [len(part.ids) for part in parts],
        )
        return leave_out_empty_bags(split, self._skipped) if self._skipped else split


def split_of(table: Table, index: int) -> Split:
    """Of the table's feature number `index`; a plain table's bags stay as they are."""
    if table.compression is None:
        feature = table.feature_names[index]
        return lambda bags: iter([(feature, bags)])
    return SPLITS[table.compression.kind](table, index)


def classes_of(partition: Partition, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class of each id."""
    if isinstance(partition, Digit):
        digits = ids // partition.stride if partition.stride > 1 else ids
        return digits % partition.num_classes
    if isinstance(partition, Hashed):
        # The seed is mixed too, or seeds 0 and 1 would swap neighbouring ids.
        words = mix(ids.view(np.uint64) ^ mix(np.array([partition.seed], np.uint64)))
        # The upper half scaled: no class is more likely than another by more than 2**-32.
        return ((words >> np.uint64(32)) * np.uint64(partition.num_classes) >> np.uint64(32)).view(np.int64)
    return np.asarray(partition.classes).astype(np.int64, copy=False)[ids]


def by_place(bags: Bags, places: list[int], what: str) -> Iterator[tuple[int, Bags]]:
    """The first ids of all bags, the second ones, and so on; a bag that has ended is empty.

    Raises:
        ConfigError: a bag has more ids than there are places.
    """
    if (longest := int(bags.lengths.max(initial=0))) > len(places):
        raise ConfigError(
            f"{what} has a list of {longest} ids, and compression.max_ids_per_bag={len(places)}; raise it, or use "
            "operation=add or concatenate, which pool first"
        )
    begins = np.cumsum(bags.lengths, dtype=np.int64) - bags.lengths
    for place in places:
        present = bags.lengths > place
        yield place, Bags(bags.ids[begins[present] + place], present.astype(np.int32))


def _split_by_partitions(table: Table, index: int) -> Split:
    partitions, feature = partitions_of(table), table.feature_names[index]
    places = places_of(table, index) if composes_each_id(table) else [None]
    what = f"feature {feature!r} of table {table.name!r}"

    def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
        for partition in partitions:
            classes = Bags(classes_of(partition, bags.ids), bags.lengths)
            if places == [None]:
                yield feature_of(feature, partition.part), classes
            else:
                for place, part in by_place(classes, [each for each in places if each is not None], what):
                    yield feature_of(feature, partition.part, place), part

    return split


def _split_by_paths(table: Table, index: int) -> Split:
    """The rows of the base table, by their places in the bag, and all buckets of the bag in one feature."""
    feature, num_rows, places = table.feature_names[index], paths_of(table).num_rows, places_of(table, index)
    what = f"feature {feature!r} of table {table.name!r}"

    def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
        rows = Bags(bags.ids % num_rows, bags.lengths)
        if places == [None]:
            yield feature_of(feature, "remainder"), rows
        else:
            for place, part in by_place(rows, [each for each in places if each is not None], what):
                yield feature_of(feature, "remainder", place), part
        yield feature_of(feature, "bucket"), Bags(bags.ids // num_rows, bags.lengths)

    return split


def in_range(bags: Bags, first: int, end: int) -> Bags:
    """Of each bag the ids first .. end - 1, counted from `first`."""
    inside = (bags.ids >= first) & (bags.ids < end)
    if len(bags.ids) == len(bags.lengths) and (bags.lengths == 1).all():
        return Bags(bags.ids[inside] - first, inside.astype(np.int32))
    samples = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    lengths = np.bincount(samples[inside], minlength=len(bags.lengths))
    return Bags(bags.ids[inside] - first, lengths.astype(np.int32))


def _split_by_blocks(table: Table, index: int) -> Split:
    blocks, feature = blocks_of(table), table.feature_names[index]

    def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
        for number, block in enumerate(blocks):
            yield feature_of(feature, f"block_{number}"), in_range(bags, block.first, block.end)

    return split


def _keep_for_cores(table: Table, index: int) -> Split:
    feature = table.feature_names[index]
    return lambda bags: iter([(feature_of(feature, "cores"), bags)])


def often_empty(table: Table) -> set[str]:
    """Features of a table's cold tail, of which many a bag has no id."""
    config = table.compression
    if config is None or config.kind != "frequency_split" or not config.skip_empty_bags or not head_rows(table):
        return set()
    cold = cold_part(table)
    return set() if cold is None else {feature for part in leaves(cold) for feature in part.feature_names}


def _split_by_frequency(table: Table, index: int) -> Split:
    hot, end, cold, feature = head_rows(table), table.num_embeddings, cold_part(table), table.feature_names[index]
    split_cold = split_of(cold, index) if cold is not None else None

    def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
        if hot:
            yield feature_of(feature, HOT), in_range(bags, 0, hot)
        if split_cold is not None:
            yield from split_cold(in_range(bags, hot, end))

    return split


def _hash_to_buckets(table: Table, index: int) -> Split:
    """bucket * IDS_A_BUCKET + a hash within it, of 48 bits; seeded."""
    feature, config = table.feature_names[index], table.compression
    assert config is not None
    buckets = np.uint64(managed_rows(table).num_buckets)
    key = mix(np.array([config.seed], np.uint64))

    def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
        words = mix(bags.ids.view(np.uint64) ^ key)
        bucket = (words >> np.uint64(32)) * buckets >> np.uint64(32)
        # Mixed again, or the bits that chose the bucket would be the same ones within it.
        within = mix(words) & np.uint64(IDS_A_BUCKET - 1)
        hashed = (bucket * np.uint64(IDS_A_BUCKET) + within).view(np.int64)
        yield feature_of(feature, MANAGED), Bags(hashed, bags.lengths)

    return split


SPLITS: dict[str, Callable[[Table, int], Split]] = {
    "hash": _split_by_partitions,
    "quotient_remainder": _split_by_partitions,
    "path_based": _split_by_paths,
    "mixed_dimension": _split_by_blocks,
    "tensor_train": _keep_for_cores,
    "frequency_split": _split_by_frequency,
    "managed_collision": _hash_to_buckets,
}
