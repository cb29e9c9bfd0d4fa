"""Find the items of a two-tower's artifact: their ids, raw values and the ids of their other
features.

They come from the data set, where other features are those of an item's last training row, or from
a file of raw rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.checkpoint.vocabularies import read_values
from pipeline.data.dataset import Dataset, weights_column
from pipeline.data.raw.rows import open_source, parse_block
from pipeline.data.raw.source import find_sources, unchanged
from pipeline.extras.erase.target import TOMBSTONE
from pipeline.extras.models.tasks.item_rows import last_rows, lists_of
from pipeline.extras.retrieval.index import Vectors
from pipeline.extras.retrieval.tower import Tower
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.manifest import RetrievalParts
from pipeline.serving.artifact.quantize import KeptRows
from pipeline.serving.artifact.raw_schema import RawFeature
from pipeline.serving.artifact.writer import vocabulary_path
from pipeline.serving.scoring.raw_rows import Bag, EncodedRows, bag_of, join_bags
from pipeline.serving.scoring.score_files import format_of, layout_of_file

ITEMS_AT_ONCE = 8192
BLOCK_BYTES = 1 << 20
logger = get_logger("pipeline.export")


@dataclass(frozen=True)
class Catalogue:
    """The items. `ids` [num_items], ascending, are ids of the feature that names items; `vectors`
    are [num_items, dim].
    """

    ids: NDArray[np.int64]
    values: pa.Array
    vectors: Vectors


def make_catalogue(
    tower: Tower, parts: RetrievalParts, dataset: Dataset, data_path: str, source: str | None, kept: KeptRows | None
) -> Catalogue:
    """Make the catalogue. `tower` is the items' tower; `kept` are the rows of items to keep.

    source: raw rows of items; None: all items of the data set.

    Raises:
        ServingError: the item has no vocabulary or is a list, a row of `source` cannot be read, or there is no item.
    """
    named = dataset.sparse_feature(parts.item_feature)
    if named.hash_size is not None or named.multi_hot:
        how = "hashed" if named.hash_size is not None else "a list"
        raise ServingError(
            f"the answer names items by raw value, but {parts.item_feature!r} is {how}: prepare "
            "it as one value per row with "
            f"data.ids.{parts.item_feature}.kind=vocabulary"
        )
    features = tower.encoder.schema.features
    blocks = _from_file(tower, parts, source) if source else _from_dataset(features, parts, dataset, data_path)
    ids, vectors = [np.zeros(0, np.int64)], [np.zeros((0, tower.dim), np.float32)]
    unknown = 0
    for block_ids, bags in blocks:
        stays = block_ids > 0 if kept is None else (block_ids > 0) & kept.contains(block_ids)
        unknown += int((~stays).sum())
        made = tower.vectors_of(*join_bags(bags))
        ids.append(block_ids[stays])
        vectors.append(made[stays])
    return _whole(np.concatenate(ids), np.concatenate(vectors), unknown, vocabulary_path(named, data_path))


def _whole(ids: NDArray[np.int64], vectors: Vectors, unknown: int, vocabulary: str) -> Catalogue:
    """Sort by ascending id. If an item has several rows, the last one counts. Erased items are left out."""
    ids, last = np.unique(ids[::-1], return_index=True)
    vectors = np.ascontiguousarray(vectors[::-1][last])
    if not len(ids):
        raise ServingError(
            f"the model knows none of the {unknown:,} items; check that retrieval.catalogue lists "
            "the items of the data set"
        )
    if unknown:
        logger.warning("%s items are excluded, because the model does not know them", f"{unknown:,}")
    if not np.isfinite(vectors).all():
        raise ServingError("an item's vector contains NaN or infinity: export an earlier step (step=<number>)")
    texts, wanted = [pa.array([], pa.large_string())], ids
    for first, batch in read_values(vocabulary):
        count = int(np.searchsorted(wanted, first + len(batch)))
        texts.append(pa.array(batch, pa.large_string()).take(pa.array(wanted[:count] - first)))
        wanted = wanted[count:]
    values = pa.concat_arrays(texts)
    is_item = np.asarray(pc.invert(pc.match_substring_regex(values, f"^{TOMBSTONE.pattern}$")))
    if is_item.all():
        return Catalogue(ids, values, vectors)
    return Catalogue(ids[is_item], values.filter(pa.array(is_item)), vectors[is_item])


def _from_dataset(
    features: list[RawFeature], parts: RetrievalParts, dataset: Dataset, data_path: str
) -> Iterator[tuple[NDArray[np.int64], list[Bag]]]:
    named = dataset.sparse_feature(parts.item_feature)
    if len(features) == 1:
        for first in range(1, named.cardinality, ITEMS_AT_ONCE):
            ids = np.arange(first, min(first + ITEMS_AT_ONCE, named.cardinality))
            yield ids, [bag_of(features[0], ids, None)]
        return
    names = [feature.name for feature in features]
    columns = [*names, *(weights_column(feature.name) for feature in features if feature.weighted)]
    for table in last_rows(dataset, data_path, parts.item_feature, columns):
        for first in range(0, table.num_rows, ITEMS_AT_ONCE):
            chosen = table.slice(first, ITEMS_AT_ONCE)
            bags = [_column_bag(feature, chosen) for feature in features]
            yield bags[names.index(parts.item_feature)].ids, bags


def _column_bag(feature: RawFeature, table: pa.Table) -> Bag:
    lists = lists_of(table, feature.name, feature.weighted)
    return bag_of(
        feature, lists.ids.astype(np.int64), np.diff(lists.offsets) if feature.multi_hot else None, lists.weights
    )


def _from_file(tower: Tower, parts: RetrievalParts, source: str) -> Iterator[tuple[NDArray[np.int64], list[Bag]]]:
    """Iterate over raw rows with the item's columns."""
    sources = find_sources(source)
    kind = format_of(sources, tower.columns)
    position = [feature.name for feature in tower.encoder.schema.features].index(parts.item_feature)
    for each in sources:
        layout = layout_of_file(each, kind, tower.columns, [])
        reader, names = open_source(layout, each, BLOCK_BYTES)
        with unchanged(each), reader:
            for block in reader.blocks():
                parsed = parse_block(layout, names, block)
                wanted = [name for name in tower.encoder.schema.columns if name in parsed.table.column_names]
                encoded = tower.encoder.encode(parsed.table.select(wanted))
                if bad := [*parsed.quarantined, *encoded.bad_rows]:
                    where = os.path.basename(each.path)
                    raise ServingError(
                        f"retrieval.catalogue: {where}, line {bad[0].line} cannot be read: {bad[0].reason}"
                    )
                bags = _bags(encoded, len(encoded.kept))
                yield bags[position].ids, bags


def _bags(encoded: EncodedRows, batch: int) -> list[Bag]:
    values, offsets = encoded.values.numpy(), encoded.offsets.numpy()
    weights = None if encoded.weights is None else encoded.weights.numpy()
    num_features = (len(offsets) - 1) // batch if batch else 0
    ends = offsets[:: max(1, batch)]
    lengths = np.diff(offsets).reshape(num_features, batch)
    spans = [slice(ends[number], ends[number + 1]) for number in range(num_features)]
    return [
        Bag(values[span], lengths[number], None if weights is None else weights[span])
        for number, span in enumerate(spans)
    ]
