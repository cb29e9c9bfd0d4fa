"""Prepare logged rows again with the functions of prepare, score them with the artifact and delta of
each row, and compare ids and scores with the log, bit by bit.

A product of matrices may round otherwise for another number of rows. So the rows that were scored
together are scored together again: a row has its place in a batch of as many rows, and the
places of rows that were not logged hold copies of a logged row.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipeline.extras.serving_log import log_files
from pipeline.extras.serving_log.log_files import IDS, About, raw_columns, score_names
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.registry import POINTER, Registry
from pipeline.runtime.errors import DamagedError, ServingError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST
from pipeline.serving.artifact.deltas import stage_delta
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.raw_rows import EncodedRows, RowEncoder

ERASED_VERSIONS = "erased_versions"  # of an artifact's lineage; the verb erase writes it
Bools = NDArray[np.bool_]


class Artifacts:
    """The artifacts that `artifact=` names: one, all versions of a registry, or all in a folder."""

    def __init__(self, artifact: str) -> None:
        self._artifact, self.paths = artifact, dict(_artifacts_of(artifact))
        self._loaded: Predictor | None = None
        self._path = ""

    def load(self, version: str, delta: int) -> Predictor:
        """Return the artifact with its deltas up to `delta`. Raises ServingError if it is not there."""
        if version not in self.paths:
            raise ServingError(
                f"the log has rows of artifact {version}, and artifact={self._artifact} has "
                f"{', '.join(self.paths) or 'none'}: give the registry, or the folder that has all artifacts of the log"
            )
        loaded = self._loaded
        if loaded is None or self._path != self.paths[version] or loaded.sequence > delta:
            self._path = self.paths[version]
            loaded = self._loaded = Predictor.load(self._path)
        for sequence in range(loaded.sequence + 1, delta + 1):
            loaded.apply(stage_delta(self.paths[version], loaded.manifest, sequence))
        return loaded


def _artifacts_of(artifact: str) -> Iterator[tuple[str, str]]:
    """Yield version and path of each artifact, also the versions that it had before values were erased from it: the
    scores of all other values are the same."""
    if storage.is_file(storage.join(artifact, POINTER)):
        found = [version.artifact for version in Registry(artifact).versions() if version.artifact]
    elif storage.is_file(storage.join(artifact, MANIFEST)) or not os.path.isdir(artifact):
        found = [find_artifact(artifact).path]
    else:
        folders = sorted(storage.join(artifact, name) for name in os.listdir(artifact))
        found = [path for path in folders if storage.is_file(storage.join(path, MANIFEST))]
    for path in found:
        try:
            manifest = read_manifest(path)
            yield from ((version, path) for version in [*manifest.lineage.get(ERASED_VERSIONS, []), manifest.version])
        except DamagedError:
            if len(found) == 1:
                raise


@dataclass
class Compared:
    """Counts of rows that were computed again. differing: dense column or feature -> rows whose ids or
    values differ. examples: of the first rows that differ.
    """

    rows: int = 0
    scores: int = 0
    equal_scores: int = 0
    equal_rows: int = 0  # all ids and dense values are equal
    refused_otherwise: int = 0
    largest_difference: float = 0.0
    differing: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)


MAX_EXAMPLES = 20


def replay(predictor: Predictor, about: About, table: pa.Table, compared: Compared) -> EncodedRows:
    """Compute the rows of one artifact and delta again, and count what differs. Return what they became."""
    was_kept, is_kept, rows, chosen = encode_again(predictor.encoder, about, table, raw_columns(table))
    compared.rows += table.num_rows
    compared.refused_otherwise += int((was_kept != is_kept).sum())
    equal = np.ones(rows.num_rows, np.bool_)
    for name, differs in differing_features(about, rows, chosen).items():
        equal &= ~differs
        _note(compared, name, differs, rows)
    compared.equal_rows += int(equal.sum())
    _compare_scores(predictor, about, rows, chosen, compared)
    return chosen


def _note(compared: Compared, name: str, differs: Bools, rows: pa.Table) -> None:
    if not differs.any():
        return
    compared.differing[name] = compared.differing.get(name, 0) + int(differs.sum())
    if len(compared.examples) < MAX_EXAMPLES:
        row = rows.slice(int(np.flatnonzero(differs)[0]), 1)
        raw = {column: row[column][0].as_py() for column in row.column_names if column == name}
        request = {key: row[key][0].as_py() for key in (log_files.REQUEST_ID, log_files.ROW)}
        compared.examples.append({"feature": name, **request, **raw})


def encode_again(
    encoder: RowEncoder, about: About, logged: pa.Table, raw: pa.Table
) -> tuple[Bools, Bools, pa.Table, EncodedRows]:
    """Encode raw rows as prepare does. Return which rows the server could read, which are read here, and the rows of both:
    as logged, and as encoded here.
    """
    encoded = encoder.encode_as_prepare(raw)
    was_kept, is_kept = logged[log_files.BATCH_ROWS].is_valid().to_numpy(), np.zeros(logged.num_rows, np.bool_)
    is_kept[encoded.kept] = True
    both = was_kept & is_kept
    chosen = pick_rows(encoded, len(about.features), (np.cumsum(is_kept) - 1)[both])
    return was_kept, is_kept, logged.filter(pa.array(both)), chosen


def pick_rows(encoded: EncodedRows, num_features: int, rows: NDArray[np.int64]) -> EncodedRows:
    """Return chosen encoded rows, in this order; a row may be chosen several times."""
    at = pa.array((np.arange(num_features)[:, None] * len(encoded.kept) + rows).reshape(-1))
    lists = [
        pa.LargeListArray.from_arrays(encoded.offsets.numpy(), each.numpy()).take(at)
        for each in (encoded.values, encoded.weights)
        if each is not None
    ]
    values, *weights = (torch.tensor(np.asarray(each.flatten())) for each in lists)
    ends = np.asarray(lists[0].value_lengths()).cumsum()
    own, dense = torch.tensor(np.concatenate([[0], ends])), encoded.dense[torch.from_numpy(rows)]
    return EncodedRows(dense, values, own, np.arange(len(rows)), [], *weights)


def differing_features(about: About, rows: pa.Table, encoded: EncodedRows) -> dict[str, Bools]:
    """Return feature or dense column -> [rows] True if the log has other ids or another value."""
    found: dict[str, Bools] = {}
    num_rows = rows.num_rows
    dense = rows[log_files.DENSE].combine_chunks()
    logged = np.asarray(dense.flatten(), np.float32).reshape(num_rows, len(about.dense))
    for number, name in enumerate(about.dense):
        own = np.ascontiguousarray(encoded.dense[:, number].numpy())
        found[name] = np.ascontiguousarray(logged[:, number]).view(np.uint32) != own.view(np.uint32)
    values, offsets = encoded.values.numpy(), encoded.offsets.numpy()
    for number, name in enumerate(about.features):
        ends = offsets[number * num_rows : (number + 1) * num_rows + 1]
        column = rows[IDS + name].combine_chunks()
        lengths, own_lengths = np.asarray(column.value_lengths(), np.int64), np.diff(ends)
        differs = lengths != own_lengths
        ids, own = np.asarray(column.flatten(), np.int64), values[ends[0] : ends[-1]]
        if differs.any():  # only bags of equal lengths are compared id by id
            ids, own = ids[np.repeat(~differs, lengths)], own[np.repeat(~differs, own_lengths)]
        of_row = np.repeat(np.flatnonzero(~differs), lengths[~differs])
        differs[of_row[ids != own]] = True
        found[name] = differs
    return found


def _compare_scores(
    predictor: Predictor, about: About, rows: pa.Table, encoded: EncodedRows, compared: Compared
) -> None:
    logged = np.stack([rows[name].to_numpy() for name in score_names(about.scores)], axis=1).astype(np.float32)
    again = np.full_like(logged, np.nan)
    num_features, threads = len(about.features), torch.get_num_threads()
    torch.set_num_threads(about.threads)
    try:
        for order, places, numbers in batches(
            rows[log_files.BATCH_ROWS].to_numpy(), rows[log_files.BATCH_ROW].to_numpy()
        ):
            batch = pick_rows(encoded, num_features, order)
            scores = predictor.score_ids(batch.dense, *batch.ids).reshape(len(order), -1)
            again[numbers] = scores[places]
    finally:
        torch.set_num_threads(threads)
    again[~np.isfinite(again)] = np.nan
    equal = (again.view(np.uint32) == logged.view(np.uint32)) | (np.isnan(again) & np.isnan(logged))
    compared.scores += len(logged)
    compared.equal_scores += int(equal.all(axis=1).sum())
    if not equal.all():
        compared.largest_difference = max(compared.largest_difference, float(np.nanmax(np.abs(again - logged))))
        _note(compared, "score", ~equal.all(axis=1), rows)


def batches(
    batch_rows: NDArray[np.int32], batch_row: NDArray[np.int32]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield batches in which each row has its place: the row at each place, and the places and
    numbers of the rows that the batch is for.
    """
    taken: Counter[tuple[int, int]] = Counter()
    found: dict[tuple[int, int], list[int]] = {}
    for number, place in enumerate(zip(batch_rows.tolist(), batch_row.tolist(), strict=True)):
        found.setdefault((place[0], taken[place]), []).append(number)  # the n-th row of a place is in the n-th batch
        taken[place] += 1
    for (size, _), numbers in found.items():
        rows = np.array(numbers)
        arranged, places = np.full(size, rows[0]), batch_row[rows].astype(np.int64)
        arranged[places] = rows
        yield arranged, places, rows
