"""Learn codebooks by k-means on what earlier levels left over, and report the items that share all codes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2

from pipeline.config.tables import InitConfig
from pipeline.extras.semantic_ids.codebooks import MAX_NUMBERS, Codebooks, nearest
from pipeline.extras.semantic_ids.config import SemanticIdsJob
from pipeline.extras.semantic_ids.transform import read_codebooks
from pipeline.extras.table_files.vectors import read_vectors
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.logs import to_json
from pipeline.runtime.storage import storage

FIRST_ROWS = 2048  # at least so many vectors are a sample for the first means of a codebook (k-means++)
NUM_STARTS = 5
FILES = CODEBOOKS, CODES, REPORT = "codebooks.json", "codes.parquet", "report.json"


def learn(job: SemanticIdsJob) -> str:
    """Write the three files, and return the report as text. Raises UserError."""
    source = InitConfig("zeros", None, job.vectors, job.value_column, job.vector_column)
    parts = list(read_vectors(source, "vectors"))
    if not parts:
        raise DataError(f"vectors={job.vectors} has no vector; name a file with a vector for each item")
    values = pa.concat_arrays([pa.array(each) for each, _ in parts])
    vectors = np.concatenate([each for _, each in parts])
    if (num_values := len(values.unique())) < len(values):
        raise DataError(
            f"vectors={job.vectors} has {len(values):,} vectors of {num_values:,} values; keep one vector for each value"
        )
    books = _learn(job, vectors) if job.codebooks is None else _given(job.codebooks, vectors)
    codes = books.codes(vectors)
    report = _report(vectors, codes, books)
    storage.make_folder(job.output)
    storage.publish_text(storage.join(job.output, CODEBOOKS), books.to_text())
    columns = {f"code_{level + 1}": codes[:, level] for level in range(codes.shape[1])}
    with storage.open_file(storage.join(job.output, CODES), "wb") as file:
        pq.write_table(pa.table({"value": values, **columns}), file)
    storage.publish_text(storage.join(job.output, REPORT), to_json(report, indent=1))
    return _as_text(report, job.output)


def _given(path: str, vectors: NDArray[np.float32]) -> Codebooks:
    books = Codebooks.of_text(read_codebooks(path), f"codebooks={path}")
    if books.rows.shape[2] != vectors.shape[1]:
        raise ConfigError(
            f"codebooks={path} are of vectors of {books.rows.shape[2]} numbers, but the file has vectors of "
            f"{vectors.shape[1]}; use vectors of the same model"
        )
    return books


def _learn(job: SemanticIdsJob, vectors: NDArray[np.float32]) -> Codebooks:
    count, width = vectors.shape
    if job.num_levels * job.num_codes * width > MAX_NUMBERS:
        raise ConfigError(
            f"num_levels={job.num_levels} x num_codes={job.num_codes} x {width} numbers of a vector are more than {MAX_NUMBERS:,}, "
            "and the codebooks are a part of the data set; lower one of them"
        )
    if count < job.num_codes:
        raise DataError(f"num_codes={job.num_codes}, but there are only {count:,} vectors; lower num_codes")
    random, levels = np.random.default_rng(job.seed), []
    chosen = random.choice(count, min(count, job.max_vectors), replace=False)
    rest = vectors[np.sort(chosen)].astype(np.float64)
    for _ in range(job.num_levels):
        rows = _means(rest, job, random)
        if np.abs(rows).max() > np.finfo(np.float16).max:
            raise DataError(f"the vectors have numbers up to {np.abs(rows).max():g}; scale them to below 65,504")
        rows = rows.astype(np.float16).astype(np.float64)
        rest = rest - rows[nearest(rest, rows)]
        levels.append(rows)
    return Codebooks(np.stack(levels))


def _means(vectors: NDArray[np.float64], job: SemanticIdsJob, random: np.random.Generator) -> NDArray[np.float64]:
    """Return the means of num_codes groups by k-means; all distinct vectors if there are no more."""
    distinct = np.unique(vectors, axis=0)
    if len(distinct) <= job.num_codes:
        return np.concatenate([distinct, distinct[:1].repeat(job.num_codes - len(distinct), axis=0)])
    count = min(len(distinct), max(FIRST_ROWS, 4 * job.num_codes))
    # A sample for the first means, because k-means++ takes the square of num_codes. K-means stays near
    # the means that it starts from, so the best of several starts is used.
    sample = distinct[random.choice(len(distinct), count, replace=False)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an empty group; the report has the codes in use
        starts = [kmeans2(sample, job.num_codes, minit="++", rng=random)[0] for _ in range(NUM_STARTS)]
        first = min(starts, key=lambda means: float(((sample - means[nearest(sample, means)]) ** 2).sum()))
        means, _ = kmeans2(vectors, first, iter=job.iterations, minit="matrix")
    return means


def _report(vectors: NDArray[np.float32], codes: NDArray[np.int64], books: Codebooks) -> dict[str, Any]:
    """Return counts of items with the same codes, and for each level the codes in use, the distinct
    prefixes, and the share of the vectors' variance that is explained."""
    _, sizes = np.unique(codes, axis=0, return_counts=True)
    rest, levels = vectors.astype(np.float64), []
    total = ((rest - rest.mean(axis=0)) ** 2).sum() or 1.0
    for level, rows in enumerate(books.rows):
        rest = rest - rows[codes[:, level]]
        levels.append(
            {
                "codes_in_use": len(np.unique(codes[:, level])),
                "distinct_prefixes": len(np.unique(codes[:, : level + 1], axis=0)),
                "explained_variance": float(1.0 - (rest**2).sum() / total),
            }
        )
    return {
        "num_items": len(codes),
        "distinct_ids": len(sizes),
        "items_that_share_their_id": int(sizes[sizes > 1].sum()),
        "largest_group": int(sizes.max()),
        "num_codes": books.rows.shape[1],
        "levels": levels,
    }


def _as_text(report: dict[str, Any], output: str) -> str:
    shared, count = report["items_that_share_their_id"], report["num_items"]
    lines = [
        f"items       {count:,} with {report['distinct_ids']:,} different ids",
        f"collisions  {shared:,} items ({100 * shared / count:.1f} %) share their id; at most {report['largest_group']:,} have one id",
    ]
    for number, level in enumerate(report["levels"], start=1):
        lines.append(
            f"level {number}     {level['codes_in_use']:,} of {report['num_codes']:,} codes in use, {level['distinct_prefixes']:,} different "
            f"prefixes, {100 * level['explained_variance']:.1f} % of the variance"
        )
    return "\n".join([*lines, f"written to  {', '.join(storage.join(output, name) for name in FILES)}"])
