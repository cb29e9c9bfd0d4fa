"""Use the vocabularies of an earlier data set: unchanged (frozen), or extended by the new rows.

Frozen vocabularies give rows the ids that a trained model knows. In extended vocabularies a value's
count continues from its earlier count, so a table's hot rows stay its first rows while new values
are added and rare ones disappear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.data import BaseVocabularyConfig, IdsConfig
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.prepare.encode import Features
from pipeline.data.sql import parquet
from pipeline.data.vocabulary_files import FIX, find_vocabulary
from pipeline.runtime.errors import DataError

# next to dataset.json, for data sets that were prepared from a base
BUCKETS_FILE = "value_buckets.json"
NUM_BUCKETS = 64
DESCENDING_COUNT = "SELECT value, count FROM counted ORDER BY count DESC, value"


@dataclass(frozen=True)
class BaseVocabulary:
    """An earlier data set.

    `files`: feature -> local Parquet file of (value, count, id), for features that are not hashed.
    """

    dataset: Dataset
    files: dict[str, str]
    frozen: bool
    count_decay: float

    def describe(self) -> dict[str, Any]:
        """Return everything that the ids depend on, except the rows."""
        about: dict[str, Any] = {"base": self.dataset.fingerprint(), "frozen": self.frozen}
        return about if self.frozen else about | {"count_decay": self.count_decay}

    def check(self, features: Features) -> None:
        """Raise DataError if a feature's ids cannot continue from the base."""
        known = {feature.name: feature for feature in self.dataset.sparse_features}
        for name in features.sparse:
            if name not in known:
                continue  # a new feature begins its vocabulary with these rows
            ids, base = features.ids[name], known[name]
            size, seed = (ids.hash_size, ids.hash_seed) if ids.kind == "hash" else (None, 0)
            if (size, seed) != (base.hash_size, base.hash_seed if base.hash_size else 0):
                raise DataError(
                    f"vocabularies.path: the ids of {name!r} were given "
                    f"{f'by hash to {base.hash_size} rows' if base.hash_size else 'by vocabulary'}, and are now "
                    f"{f'by hash to {size} rows' if size else 'by vocabulary'}; keep data.ids as it was"
                )

    def num_lookups(self, name: str) -> int:
        """Return the number of lookups in the earlier counts. Earlier counts of rare values are unknown."""
        if name not in self.files:
            return 0
        counts = pq.read_table(self.files[name], columns=["count"])["count"].to_numpy()
        return int((counts * (1.0 if self.frozen else self.count_decay)).sum())

    def settings(self, name: str, ids: IdsConfig) -> IdsConfig:
        """Return the settings for giving ids. With a frozen vocabulary they keep all of its values."""
        return IdsConfig() if self.frozen and name in self.files else ids

    def order(self, name: str) -> str:
        """Return a SQL query for (value, count) of the values that get ids, in the order of their
        ids. The table `counted` must hold the values of the new rows.
        """
        if name not in self.files:
            return DESCENDING_COUNT
        known = parquet(self.files[name])
        if self.frozen:
            return f"SELECT value, count FROM {known} ORDER BY id"
        carried = f"SELECT value, floor(count * {self.count_decay})::BIGINT AS count FROM {known}"
        return (
            f"SELECT value, sum(count)::BIGINT AS count FROM ({carried} UNION ALL FROM counted) "
            "GROUP BY value HAVING sum(count) > 0 ORDER BY count DESC, value"
        )

    def count_buckets(self, engine: duckdb.DuckDBPyConnection) -> list[int]:
        """Count how often values of each bucket occurred, including values that are not in a vocabulary."""
        found = [0] * NUM_BUCKETS
        query = f"SELECT md5_number_lower(value) % {NUM_BUCKETS}, sum(count)::BIGINT FROM counted GROUP BY 1"
        for bucket, count in engine.execute(query).fetchall():
            found[bucket] = int(count)
        return found


def load_base(config: BaseVocabularyConfig) -> BaseVocabulary:
    """Load the base data set. Raises DataError if it or a vocabulary is missing, or a vocabulary is damaged."""
    dataset = load_dataset(config.path)
    features = [feature for feature in dataset.sparse_features if feature.vocabulary]
    files = {feature.name: find_vocabulary(config.path, feature) for feature in features}
    for path in files.values():
        if problem := _columns_problem(path):
            raise DataError(f"{path} {problem}: {FIX}")
    return BaseVocabulary(dataset, files, config.frozen, config.count_decay)


def _columns_problem(path: str) -> str:
    """Return "" if the Parquet file has the columns of a vocabulary, otherwise the problem."""
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return f"is damaged ({' '.join(str(error).split())[:200]})"
    kinds = {field.name: str(field.type) for field in schema}
    for name, wanted in (("value", "string"), ("count", "int64"), ("id", "int32")):
        if kinds.get(name) != wanted:
            return f"is not a vocabulary: column {name!r} has type {kinds.get(name, 'none')}, and not {wanted}"
    return ""
