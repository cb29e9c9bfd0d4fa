"""Write the vocabulary of a feature: its partitions' values, each in the order of ids, merged into that order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.dataset import FrequencyCurve
from pipeline.data.prepare.distributed.partitions import VALUES_FILE
from pipeline.data.prepare.distributed.recipe import Json, Recipe, once
from pipeline.data.prepare.distributed.runs import owners_of
from pipeline.data.prepare.vocabulary import RankedFeature, rank_values
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.arrow_files import open_input

MERGED_ROWS = 1 << 20  # in memory at once, of all partitions together
VOCABULARY_FILE = "vocabulary.parquet"


@dataclass(frozen=True)
class FeatureToRank:
    """`num_lookups`: in training rows; `counted`: the folders of all partitions."""

    number: int
    num_lookups: int
    counted: list[str]


@dataclass(frozen=True)
class RankedFile:
    """`path` is that of the vocabulary; None where ids are hashed."""

    ranked: RankedFeature
    path: str | None


def rank_feature(recipe: Recipe, item: FeatureToRank) -> RankedFile:
    features = recipe.features
    ids = features.ids[features.sparse[item.number]]
    path = recipe.path(f"vocabulary-{recipe.key}-{item.number:05d}")
    is_hashed = ids.kind == "hash"

    def write(attempt: str) -> Json:
        values = merged_values(item.counted, owners_of(features)[item.number])
        target = None if is_hashed else os.path.join(attempt, VOCABULARY_FILE)
        return asdict(rank_values(values, ids, item.num_lookups, target))

    found = cast(dict[str, Any], once(recipe, path, write))
    curve = FrequencyCurve(**found.pop("frequency_curve"))
    ranked = RankedFeature(**found, frequency_curve=curve)
    return RankedFile(ranked, None if is_hashed else storage.join(path, VOCABULARY_FILE))


def merged_values(counted: list[str], feature: int) -> Iterator[tuple[pa.Array, np.ndarray]]:
    """Batches of a feature's values and counts, by descending count, ties by value.

    Partitions hold ascending ranges of values, so those of one count follow one another by the number of their partition.
    """
    with ExitStack() as stack:
        streams = [_Stream(stack, folder, feature, max(1_024, MERGED_ROWS // len(counted))) for folder in counted]
        while held := [stream for stream in streams if stream.fill()]:
            # Counts above this are all in memory; those equal to it may go on in the batches to come.
            bound = (
                max(stream.last_count for stream in held if not stream.is_last)
                if any(not stream.is_last for stream in held)
                else 0
            )
            parts = [stream.take_above(bound) for stream in held]
            table = pa.concat_tables(parts).combine_chunks()
            if not len(table):
                yield from _equal(held, bound)
                continue
            order = np.argsort(-table["count"].to_numpy(), kind="stable")  # ties: by partition, then by value
            table = table.take(pa.array(order)).combine_chunks()
            yield table["value"].combine_chunks(), table["count"].to_numpy()


def _equal(streams: list[_Stream], count: int) -> Iterator[tuple[pa.Array, np.ndarray]]:
    """All values of one count, which are the greatest left: of one partition after another."""
    for stream in streams:
        while stream.fill() and stream.first_count == count:
            table = stream.take_from(count)
            yield table["value"].combine_chunks(), table["count"].to_numpy()


class _Stream:
    """The values of a feature in one partition; some are held in memory."""

    def __init__(self, stack: ExitStack, folder: str, feature: int, batch_rows: int) -> None:
        stream = stack.enter_context(open_input(storage.join(folder, VALUES_FILE)))
        self._file = stack.enter_context(pq.ParquetFile(stream, pre_buffer=False))
        groups = [index for index in range(self._file.num_row_groups) if self._holds(index, feature)]
        self._batches = self._file.iter_batches(batch_rows, row_groups=groups) if groups else iter(())
        self._feature = feature
        self._held: pa.Table | None = None
        self.is_last = False  # whether all that is left is held

    def _holds(self, index: int, feature: int) -> bool:
        statistics = self._file.metadata.row_group(index).column(0).statistics
        return statistics is None or not statistics.has_min_max or statistics.min <= feature <= statistics.max

    def fill(self) -> bool:
        """Whether a value is left; if so, one is held."""
        while not self.is_last and (self._held is None or not len(self._held)):
            batch = next(self._batches, None)
            if batch is None:
                self.is_last = True
                break
            table = pa.Table.from_batches([batch])
            self._held = table.filter(pc.equal(table["feature"], self._feature)).select(["value", "count"])
        return self._held is not None and len(self._held) > 0

    @property
    def _counts(self) -> np.ndarray:
        assert self._held is not None
        counts: np.ndarray = self._held["count"].to_numpy()
        return counts

    @property
    def first_count(self) -> int:
        return int(self._counts[0])

    @property
    def last_count(self) -> int:
        return int(self._counts[-1])

    def take_above(self, count: int) -> pa.Table:
        return self._take(int(np.searchsorted(-self._counts, -count, side="left")))

    def take_from(self, count: int) -> pa.Table:
        """Those of that count or more."""
        return self._take(int(np.searchsorted(-self._counts, -count, side="right")))

    def _take(self, num: int) -> pa.Table:
        assert self._held is not None
        taken, self._held = self._held.slice(0, num), self._held.slice(num)
        return taken
