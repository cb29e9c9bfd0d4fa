"""Measure how far features and scores have moved from the training split, as PSI.

A dense column is divided at the deciles of the training rows. The ids of a vocabulary, which are
in the order of frequency, are divided at powers of two, and hashed ids by their last bits. PSI is
the sum of (p - q) ln(p / q) over the bins; two samples of one distribution have about
(bins - 1) (1 / n + 1 / m), which is subtracted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from pipeline.data.dataset import load_dataset
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage
from pipeline.serving.scoring.predictor import Predictor

HASHED_BINS = 16
DECILES = 10
FORMAT_VERSION = 1
SCORE = "score"


@dataclass(frozen=True)
class Bins:
    """edges: ascending ends of the bins, value x is in bin (edges <= x). modulo: ids are divided by
    their remainder instead. counts: of the training rows.
    """

    edges: list[float]
    counts: list[int]
    modulo: int = 0

    def count(self, values: NDArray[Any]) -> NDArray[np.int64]:
        if self.modulo:
            return np.bincount(values % self.modulo, minlength=self.modulo)
        return np.bincount(np.searchsorted(self.edges, values, side="right"), minlength=len(self.edges) + 1)

    def psi(self, counts: NDArray[np.int64]) -> float:
        """Return the PSI of the counted values against the training rows, less what chance gives; at least 0."""
        total, of_training = int(counts.sum()), sum(self.counts)
        if not total or not of_training:
            return 0.0
        p = (counts + 0.5) / (total + 0.5 * len(counts))
        q = (np.array(self.counts) + 0.5) / (of_training + 0.5 * len(counts))
        by_chance = (len(counts) - 1) * (1 / total + 1 / of_training)
        return max(0.0, float(((p - q) * np.log(p / q)).sum()) - by_chance)


def _bins(values: NDArray[Any], edges: Sequence[float], modulo: int = 0) -> Bins:
    bins = Bins([float(edge) for edge in edges], [], modulo)
    return Bins(bins.edges, bins.count(values).tolist(), modulo)


def bins_of_numbers(values: NDArray[np.float32]) -> Bins:
    return _bins(
        values, np.unique(np.quantile(values, np.arange(1, DECILES) / DECILES)).tolist() if len(values) else []
    )


def bins_of_ids(values: NDArray[np.int64], cardinality: int, hashed: bool) -> Bins:
    if hashed:
        return _bins(values, [], HASHED_BINS)
    return _bins(values, [2**power for power in range(max(1, int(cardinality).bit_length()))])


@dataclass(frozen=True)
class Reference:
    """The bins of the training split: of each feature and dense column, and of the scores that
    `version` gives its rows. label_rate: share of positives of the training split.
    """

    version: str
    rows: int
    features: dict[str, Bins]
    scores: Bins | None
    label_rate: float
    format_version: int = FORMAT_VERSION

    def write(self, path: str) -> None:
        storage.publish_text(path, json.dumps(asdict(self), indent=1) + "\n")


def read_reference(path: str) -> Reference:
    """Read a file of Reference.write. Raises DataError if it is another file."""
    try:
        values = json.loads(storage.read_text(path))
        bins = {name: Bins(**each) for name, each in values.pop("features").items()}
        scores = values.pop("scores")
        found = Reference(**values, features=bins, scores=scores and Bins(**scores))
        if found.format_version != FORMAT_VERSION:
            raise ValueError(f"format {found.format_version}")
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is no reference of a training split ({' '.join(str(error).split())[:100]}): write one by "
            "python -m pipeline skew artifact=<artifact> reference=<this path>"
        ) from None


def measure_reference(predictor: Predictor, data_path: str, max_rows: int) -> Reference:
    """Measure the training split of a prepared data set, on row groups spread over it, about max_rows rows."""
    dataset, schema = load_dataset(data_path), predictor.encoder.schema
    names = [*schema.dense, *(feature.name for feature in schema.features)]
    known = [*dataset.dense_features, *(feature.name for feature in dataset.sparse_features)]
    if missing := [name for name in names if name not in known]:
        raise DataError(f"data_path={data_path} has no feature {missing[0]!r}: give the data set of the artifact's run")
    table = _sample(data_path, dataset.splits["train"].files, names, max_rows)
    bins = {name: bins_of_numbers(table[name].to_numpy().astype(np.float32)) for name in schema.dense}
    ids: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for feature in schema.features:
        column = table[feature.name].combine_chunks()
        is_list = pa.types.is_list(column.type)
        ids.append(np.asarray(column.flatten() if is_list else column, np.int64))
        lengths.append(np.asarray(column.value_lengths(), np.int64) if is_list else np.ones(table.num_rows, np.int64))
        if feature.bag_size == 1:
            bins[feature.name] = bins_of_ids(ids[-1], feature.cardinality, feature.hash_size is not None)
    scores = None
    if not any(feature.weighted or feature.bag_size > 1 for feature in schema.features):
        dense = torch.from_numpy(
            np.stack([table[name].to_numpy().astype(np.float32) for name in schema.dense], axis=1)
            if schema.dense
            else np.zeros((table.num_rows, 0), np.float32)
        )
        offsets = torch.from_numpy(np.concatenate([[0], *lengths]).cumsum())
        values = predictor.score_ids(dense, torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *ids])), offsets)
        scores = bins_of_numbers(values.reshape(len(values), -1)[:, 0])
    return Reference(predictor.version, table.num_rows, bins, scores, dataset.splits["train"].label_rate)


def _sample(data_path: str, files: Sequence[Any], names: list[str], max_rows: int) -> pa.Table:
    groups = [(file.path, number, rows) for file in files for number, rows in enumerate(file.row_groups)]
    total = sum(rows for *_, rows in groups)
    if not total:
        raise DataError(f"{data_path} has no training rows")
    step = max(1, round(total / max_rows))
    tables = []
    for path, number, _ in groups[::step]:
        with storage.open_file(storage.join(data_path, path), "rb") as raw, pq.ParquetFile(raw) as file:
            tables.append(file.read_row_group(number, columns=names))
    return pa.concat_tables(tables).combine_chunks()


class Counts:
    """Counts values in the bins of a reference."""

    def __init__(self, bins: Mapping[str, Bins]) -> None:
        self._bins = dict(bins)
        self.counts = {name: np.zeros(len(each.counts), np.int64) for name, each in bins.items()}

    def add(self, name: str, values: NDArray[Any]) -> None:
        if name in self._bins:
            self.counts[name] += self._bins[name].count(values)

    def psi(self) -> dict[str, float]:
        return {name: self._bins[name].psi(counts) for name, counts in self.counts.items()}

    def fade(self, share: float) -> None:
        """Keep a share of all counts, so that old values count less."""
        for counts in self.counts.values():
            counts[:] = np.floor(counts * share)
