"""Locate the files of a split, and check that they match dataset.json and do not change while
they are read."""

from __future__ import annotations

import os
import threading

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.dataset import FILE_NAME, GROUP_COLUMN, Dataset, ShardFile, Split, weights_column
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger, progress
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.storage import Stamp, difference, stamp_of

HOW_TO_FIX = f"compare the file's checksum with {FILE_NAME}, copy it again, or remove the folder and run `python -m pipeline prepare`"
logger = get_logger(__name__)


class ShardError(DataError):
    """A shard or a row group cannot be read, or differs from dataset.json."""


class ShardFiles:
    """The files of one split, by number.

    must_be_whole: raise DataError at once if files are missing or have a wrong size. Otherwise log
    a warning, and let fetch() raise ShardError. Sizes of remote shards are checked when they are
    fetched.
    """

    def __init__(self, folder: str, split: Split, must_be_whole: bool = True) -> None:
        self._folder, self._files = folder, split.files
        self._stamps: dict[int, Stamp] = {}
        self._lock = threading.Lock()
        counted = sum(sum(shard.row_groups) for shard in split.files)
        if counted != split.num_rows:
            raise DataError(f"{FILE_NAME} counts {split.num_rows} rows, but row groups with {counted}; {HOW_TO_FIX}")
        problems = self._missing() + (self._stamp_all() if storage.is_local(folder) else [])
        if problems and must_be_whole:
            raise DataError(problems[0])
        for problem in problems:
            logger.warning("%s", problem)

    def __getitem__(self, index: int) -> ShardFile:
        return self._files[index]

    def path(self, index: int) -> str:
        return storage.join(self._folder, self._files[index].path)

    def fetch(self, index: int) -> str:
        """Return a local path of the file. A remote shard is downloaded once, into iopath's cache.

        Row groups are read in random order, and for each of them iopath's S3 handle would download
        the complete object.
        """
        path = self.path(index)
        try:
            local = storage.local_path(path)
            _check_size(path, self._files[index], os.path.getsize(local))
        except FileNotFoundError:
            raise ShardError(f"{path} is missing; {HOW_TO_FIX}") from None
        return local

    def verify_checksums(self, indices: range) -> None:
        """Read the complete files and compare their SHA-256 with dataset.json. Raises DataError for
        the first file that differs.
        """
        with progress("verifying shards", sum(self._files[index].size_bytes for index in indices)) as bar:
            for index in indices:
                self._verify(index)
                bar.advance(self._files[index].size_bytes)

    def check_unchanged(self, index: int) -> None:
        """Raise DataError if the file is no longer the same as at the start.

        The function calls stat once. A file that was only touched, or copied again, is accepted if
        its checksum is the same.
        """
        then = self._stamps.get(index)
        if then is None:  # remote, or already reported as a problem
            return
        path = self.path(index)
        try:
            now = stamp_of(path)
        except FileNotFoundError:
            raise DataError(
                f"{path} has vanished while it was read; bring it back, then run the same command again to resume"
            ) from None
        if now == then:
            return
        with self._lock:
            if self._stamps[index] == now:
                return
            if now.size_bytes != then.size_bytes or storage.sha256_of(path) != self._files[index].sha256:
                raise DataError(
                    f"{path} has changed while it was read: {difference(then, now)}, and its bytes "
                    f"are not those of {FILE_NAME}; {HOW_TO_FIX}"
                )
            logger.warning("%s was replaced while it was read, with the same content", path)
            self._stamps[index] = now

    def _missing(self) -> list[str]:
        names: dict[str, set[str]] = {}
        for shard in self._files:
            parent = os.path.dirname(shard.path)
            if parent not in names:
                names[parent] = set(storage.list_folder(storage.join(self._folder, parent)))
        missing = [s.path for s in self._files if os.path.basename(s.path) not in names[os.path.dirname(s.path)]]
        if not missing:
            return []
        return [
            f"{len(missing)} of {len(self._files)} shards are missing from {self._folder}, the first is {missing[0]}; "
            "copy them again, or remove the folder and run `python -m pipeline prepare`"
        ]

    def _stamp_all(self) -> list[str]:
        """Record the stamps of existing files. Return the problems that were found."""
        problems = []
        for index, shard in enumerate(self._files):
            try:
                stamp = stamp_of(self.path(index))
                _check_size(self.path(index), shard, stamp.size_bytes)
                self._stamps[index] = stamp
            except FileNotFoundError:
                pass  # _missing reports it
            except ShardError as error:
                problems.append(str(error))
        return problems

    def _verify(self, index: int) -> None:
        shard, path = self._files[index], self.path(index)
        found = storage.sha256_of(self.fetch(index))
        if found != shard.sha256:
            raise ShardError(f"{path} has the checksum {found}, {FILE_NAME} says {shard.sha256}; {HOW_TO_FIX}")


def _check_size(path: str, shard: ShardFile, size_bytes: int) -> None:
    if size_bytes != shard.size_bytes:
        raise ShardError(f"{path} has {size_bytes} bytes, {FILE_NAME} says {shard.size_bytes}; {HOW_TO_FIX}")


def check_layout(path: str, shard: ShardFile, file: pq.ParquetFile, dataset: Dataset) -> None:
    """Raise ShardError unless row groups and column types match dataset.json."""
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    if sizes != shard.row_groups:
        raise ShardError(
            f"{path} has {len(sizes)} row groups with {sum(sizes)} rows, {FILE_NAME} says "
            f"{len(shard.row_groups)} with {shard.num_rows} (or other sizes of single ones); {HOW_TO_FIX}"
        )
    types = {field.name: field.type for field in file.schema_arrow}
    wanted = dict.fromkeys([*dataset.label_columns, *dataset.dense_features], "a number")
    wanted |= {f.name: "a list of integers" if f.multi_hot else "an integer" for f in dataset.sparse_features}
    wanted |= {weights_column(name): "a list of numbers" for name in dataset.weighted_features}
    wanted |= {GROUP_COLUMN: "an integer"} if dataset.group_column else {}
    for side in dataset.side_tables:
        wanted = {name: kind for name, kind in wanted.items() if name not in side.columns} | {side.index: "an integer"}
    for name, kind in wanted.items():
        if name not in types:
            raise ShardError(f"{path} has no column {name!r}; {HOW_TO_FIX}")
        if not _is_a(kind, types[name]):
            raise ShardError(f"{path}: column {name!r} is {types[name]}, expected {kind}; {HOW_TO_FIX}")


def _is_a(kind: str, type_: pa.DataType) -> bool:
    if kind.startswith("a list of "):
        is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_)
        is_one = pa.types.is_integer if kind == "a list of integers" else pa.types.is_floating
        return is_list and is_one(type_.value_type)
    return pa.types.is_integer(type_) or (kind == "a number" and pa.types.is_floating(type_))
