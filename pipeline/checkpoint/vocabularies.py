"""Find what the rows of a table mean (values of a vocabulary, or hashes) from the data set of its
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.tables import entry_name
from pipeline.data.dataset import FILE_NAME, Dataset, load_dataset
from pipeline.data.vocabulary_files import find_vocabulary
from pipeline.runtime.errors import CheckpointError
from pipeline.runtime.storage import storage


@dataclass(frozen=True)
class IdSpace:
    """The meaning of ids. `vocabulary` is the path of a file of (value, count, id), sorted by id;
    `hashed` is (size, seed). Both are None if rows mean different values for different features,
    or the meaning is unknown; `reason` then says why.
    """

    vocabulary: str | None = None
    hashed: tuple[int, int] | None = None
    reason: str = ""


def id_space(dataset: Dataset, data_path: str, feature_names: Iterable[str]) -> IdSpace:
    """Return the id space of a table that embeds these features. Raises DataError for a damaged vocabulary."""
    names = list(feature_names)
    known = {feature.name: feature for feature in dataset.sparse_features}
    if missing := [name for name in names if name not in known]:
        return IdSpace(reason=f"data set {dataset.name!r} in {data_path} has no feature {missing[0]!r}")
    features = [known[name] for name in names]
    hashes = {(feature.hash_size, feature.hash_seed) for feature in features if feature.hash_size is not None}
    if len(hashes) == 1 and all(feature.hash_size is not None for feature in features):
        ((size, seed),) = hashes
        return IdSpace(hashed=(int(size or 0), seed))
    owners = {(feature.sequence and feature.sequence.shares) or feature.name for feature in features}
    if len(owners) > 1 or hashes:
        return IdSpace(
            reason=f"its features {', '.join(names)} have vocabularies of their own, so a row has several values"
        )
    if features[0].vocabulary is None:
        return IdSpace(reason=f"data set {dataset.name!r} in {data_path} keeps no vocabulary of {names[0]!r}")
    path = storage.join(data_path, features[0].vocabulary)
    if not storage.is_file(path):
        return IdSpace(reason=f"{path} is missing")
    return IdSpace(vocabulary=find_vocabulary(data_path, features[0]))


def trained_dataset(manifest: dict[str, Any], data_path: str | None = None) -> tuple[Dataset | None, str]:
    """Return the data set that a step was trained on, and its path; or None and the reason why not."""
    path = data_path or str(manifest["config"]["data"]["path"])
    if not storage.is_file(storage.join(path, FILE_NAME)):
        return None, f"the data set that it was trained on is not at {path}"
    dataset = load_dataset(path)
    if dataset.fingerprint() != manifest["data_order"]["dataset"]:
        return None, f"{path} is not the data set that it was trained on (another fingerprint)"
    return dataset, path


def features_of(config: dict[str, Any], table: str) -> list[str]:
    """Return the features that a saved job's table embeds. A table without feature_names embeds the
    feature of the same name.
    """
    entry = entry_name(table)
    section = config.get("tables", {}).get(entry) or {}
    return list(section.get("feature_names") or [entry])


def read_values(path: str, batch_rows: int = 1 << 16) -> Iterator[tuple[int, list[str]]]:
    """Yield (id of the first value, values) of a vocabulary in batches. Raises CheckpointError if
    the file is not a vocabulary.
    """
    expected = 1
    try:
        # Dictionaries are kept: one long value of a few bytes a row could stand for gigabytes.
        with storage.open_file(path, "rb") as raw, pq.ParquetFile(raw, read_dictionary=["value"]) as file:
            for batch in file.iter_batches(batch_size=batch_rows, columns=["value", "id"]):
                values = batch["value"]
                ids = batch["id"].to_numpy()
                if not np.array_equal(ids, np.arange(expected, expected + len(ids))):
                    raise CheckpointError(f"the ids of {path} are not 1, 2, 3, ...: prepare the data set again")
                if not isinstance(values, pa.DictionaryArray):
                    raise CheckpointError(f"{path} is no vocabulary: column 'value' has type {values.type}")
                if len(values.indices.unique()) < len(values):
                    raise CheckpointError(f"{path} has a value twice: prepare the data set again")
                yield expected, values.dictionary_decode().to_pylist()
                expected += len(ids)
    except CheckpointError:
        raise
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is no vocabulary ({error}): prepare the data set again") from None
