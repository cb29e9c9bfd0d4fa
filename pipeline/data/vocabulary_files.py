"""Find the vocabulary file of a feature, and check its bytes before they are used."""

from __future__ import annotations

import os

from pipeline.data.dataset import FILE_NAME, SparseFeature
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import path_below
from pipeline.runtime.storage.storage import Stamp, stamp_of

FIX = "copy it again, or prepare the data set again"
_intact: set[tuple[str, Stamp, str]] = set()  # files that this process has read whole
_unchecked: set[str] = set()  # folders of data sets that were reported
logger = get_logger(__name__)


def find_vocabulary(folder: str, feature: SparseFeature) -> str:
    """Return a local path of the vocabulary of a feature of the data set in `folder`.

    Its size, its SHA-256 and its number of values are compared with dataset.json, once for each
    state of the file. A data set of an earlier release has no SHA-256; a log line then says that
    its vocabularies are not checked.

    Raises:
        DataError: the file is missing or damaged.
        DamagedError: dataset.json names a file outside its folder.
    """
    assert feature.vocabulary is not None, feature.name
    path = path_below(folder, feature.vocabulary, storage.join(folder, FILE_NAME))
    if not storage.is_file(path):
        raise DataError(f"{path}, the vocabulary of feature {feature.name!r}, is missing: {FIX}")
    local = storage.local_path(path)
    problem = _problem(local, feature)
    if problem and local != path:  # a copy in iopath's cache may be older than the object
        os.remove(local)
        local = storage.local_path(path)
        problem = _problem(local, feature)
    if problem:
        raise DataError(f"{path} {problem}: {FIX}")
    if feature.vocabulary_sha256 is None and folder not in _unchecked:
        _unchecked.add(folder)
        logger.info(
            "%s/%s has no checksums of vocabularies, as an earlier release wrote it: they are read "
            "unchecked. Prepare the data set again to have them checked", folder, FILE_NAME,
        )  # fmt: skip
    return local


def _problem(path: str, feature: SparseFeature) -> str:
    """Return "" if the file is the one that `prepare` wrote, otherwise the problem."""
    wanted = feature.vocabulary_sha256
    stamp = stamp_of(path)
    if (path, stamp, str(wanted)) in _intact:
        return ""
    if wanted is not None:
        if stamp.size_bytes != feature.vocabulary_bytes:
            return f"is damaged: it has {stamp.size_bytes:,} bytes, {FILE_NAME} says {feature.vocabulary_bytes:,}"
        if (found := storage.sha256_of(path)) != wanted:
            return f"is damaged: its SHA-256 is {found}, {FILE_NAME} says {wanted}"
    if problem := _size_problem(path, feature, stamp.size_bytes):
        return problem
    _intact.add((path, stamp, str(wanted)))
    return ""


def _size_problem(path: str, feature: SparseFeature, size_bytes: int) -> str:
    """Return "" if the footer of the file states as many rows as the feature has ids, and no more
    bytes than such a file can hold. Nothing else is read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        return f"is damaged ({' '.join(str(error).split())[:200]})"
    if footer.num_rows != feature.cardinality - 1:
        return f"has {footer.num_rows:,} values, {FILE_NAME} says {feature.cardinality - 1:,}"
    unpacked = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    if unpacked > (most := storage.most_unpacked_bytes(size_bytes)):
        return f"has {size_bytes:,} bytes, which unpack to {unpacked:,} bytes; at most {most:,} are read"
    return ""
