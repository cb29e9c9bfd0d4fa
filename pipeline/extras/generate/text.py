"""Write the sampled rows of a generator as a TSV with a header."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv

from pipeline.data.generate.synthetic import ROWS_PER_CHUNK, TEACHER_COLUMN, write_chunks

# (random, number of rows) -> (values of each column, true probabilities [rows] or [rows, labels])
Sample = Callable[[np.random.Generator, int], tuple[Sequence[Any], np.ndarray]]


class Settings(Protocol):
    num_rows: int
    seed: int


def write_tsv(
    config: Settings,
    sample: Sample,
    columns: Sequence[str],
    output: str,
    threads: int | None,
    labels: Sequence[str] = (TEACHER_COLUMN,),
) -> None:
    """Write `output`, and the true probabilities next to it. Equal configs give equal bytes."""

    def chunk_text(chunk: int) -> tuple[bytes, np.ndarray]:
        random = np.random.default_rng([config.seed, 2, chunk])
        values, probabilities = sample(random, min(ROWS_PER_CHUNK, config.num_rows - chunk * ROWS_PER_CHUNK))
        sink = pa.BufferOutputStream()
        if chunk == 0:  # pyarrow would quote the names
            sink.write("\t".join(columns).encode() + b"\n")
        options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        table = pa.table([pa.array(column) for column in values], names=list(columns))
        pa.csv.write_csv(table, sink, options)
        return sink.getvalue().to_pybytes(), probabilities

    write_chunks(chunk_text, config.num_rows, output, threads or os.cpu_count() or 1, labels)
