"""Find the ids of items' features in the item's last training row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.dataset import Dataset, SparseFeature, weights_column
from pipeline.data.read.check_rows import Lists
from pipeline.data.read.multi_hot import sample_bags
from pipeline.data.read.row_groups import row_group_reader
from pipeline.embeddings.compression.kind import Bags
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.storage import storage

NO_ITEM = -1  # the id of a row without an item


def last_rows(dataset: Dataset, data_path: str, item: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield `columns` of the last training row of each item, in the order of the files. The unknown
    item (0) has no row. `item` is the feature that names items.
    """
    feature = dataset.sparse_feature(item)
    last = np.full(feature.cardinality, -1, np.int64)
    begin = 0
    for table in _row_groups(dataset, data_path, [item]):
        ids = table[item].to_numpy()
        _check_ids(ids, feature)
        last[ids] = np.arange(begin, begin + table.num_rows)
        begin += table.num_rows
    rows, begin = np.sort(last[1:][last[1:] >= 0]), 0
    for table in _row_groups(dataset, data_path, columns):
        own = rows[np.searchsorted(rows, begin) : np.searchsorted(rows, begin + table.num_rows)] - begin
        begin += table.num_rows
        yield table.take(pa.array(own))


def _row_groups(dataset: Dataset, data_path: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    read = row_group_reader(data_path, dataset)
    for file in dataset.splits["train"].files:
        with storage.open_file(storage.join(data_path, file.path), "rb") as raw, pq.ParquetFile(raw) as opened:
            for number in range(opened.num_row_groups):
                yield read(opened, number, columns)


def lists_of(table: pa.Table, feature: str, weighted: bool) -> Lists:
    """Return the ids of each row of a column, which may have lists."""
    array = table[feature].combine_chunks()
    if not pa.types.is_list(array.type) and not pa.types.is_large_list(array.type):
        return Lists(array.to_numpy(zero_copy_only=False).astype(np.int64), np.arange(len(array) + 1))
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ids = array.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    weights = table[weights_column(feature)].combine_chunks().flatten().to_numpy() if weighted else None
    return Lists(ids, np.concatenate([[0], np.cumsum(lengths)]), weights)


class ItemBags:
    """Maps ids of items to the bags of each item feature. `features[0]` names items.

    With several features it reads the training rows once, and holds the ids of all items' features.
    """

    def __init__(self, dataset: Dataset, data_path: str, features: Sequence[str], bag_sizes: dict[str, int]) -> None:
        """bag_sizes: data.synthetic_multi_hot. Raises ConfigError if an item is a list."""
        self._item, *self._others = (dataset.sparse_feature(name) for name in features)
        self._bag_sizes = bag_sizes
        if self._item.multi_hot:
            raise ConfigError(
                f"model.item_features begins with {features[0]!r}, which is a list, so its values cannot be sampled as items; "
                "name a feature with one value per row first, or set model.negatives.kind=in_batch"
            )
        self._row_of_item = np.full(self._item.cardinality, -1, np.int64)
        self._lists: dict[str, Lists] = {}
        if self._others:
            self._read(dataset, data_path)

    def _read(self, dataset: Dataset, data_path: str) -> None:
        weights = [weights_column(feature.name) for feature in self._others if feature.weighted]
        columns = [self._item.name, *(feature.name for feature in self._others), *weights]
        rows = pa.concat_tables(last_rows(dataset, data_path, self._item.name, columns))
        self._row_of_item[rows[self._item.name].to_numpy()] = np.arange(rows.num_rows)
        for feature in self._others:
            lists = self._lists[feature.name] = lists_of(rows, feature.name, feature.weighted)
            _check_ids(lists.ids, feature)

    def __call__(self, ids: NDArray[np.int64]) -> dict[str, Bags]:
        """ids: [num_rows], NO_ITEM for a row without ids."""
        known = ids != NO_ITEM
        bags = {self._item.name: self._bags(self._item, Lists(ids[known], np.append(0, np.cumsum(known))))}
        rows = self._row_of_item[np.where(known, ids, 0)]
        for feature in self._others:
            lists = self._lists[feature.name].take(np.maximum(rows, 0), known & (rows >= 0))
            bags[feature.name] = self._bags(feature, lists)
        return bags

    def _bags(self, feature: SparseFeature, lists: Lists) -> Bags:
        ids, lengths = lists.ids.astype(np.int64), np.diff(lists.offsets)
        size = self._bag_sizes.get(feature.name, 1)
        if size > 1:
            bags = np.empty((len(ids), size), np.int64)
            sample_bags(ids, feature.name, feature.cardinality, bags)
            ids = bags.reshape(-1)
        return Bags(ids, (lengths * size).astype(np.int32), lists.weights)


def _check_ids(ids: NDArray[np.integer], feature: SparseFeature) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < feature.cardinality:
        raise DataError(
            f"training rows have ids {ids.min()} to {ids.max()} of {feature.name!r}, which has {feature.cardinality} ids: "
            "the data set is damaged; run `python -m pipeline prepare` again"
        )
