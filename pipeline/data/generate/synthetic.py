"""Generate clicks from a teacher with known probabilities: Criteo's TSV format, or named columns
with a header.

Ids follow a power law. The teacher is a logistic model: a nonlinear effect of each count, an effect
of each id, and dot products of latent id vectors for some pairs of features, which DLRM, DCN and
DeepFM can learn. The true probability of every row is written to `<output>.teacher.parquet`. It
gives the best possible AUC.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pipeline.config.columns import ColumnsConfig
from pipeline.config.generated import SyntheticConfig
from pipeline.data.generate.drift import renewed, rotated_effects, rotated_vectors
from pipeline.data.prepare.parallel import map_ordered
from pipeline.data.raw.source import TEACHER_COLUMN, TEACHER_SUFFIX
from pipeline.runtime.logs import progress
from pipeline.runtime.storage import storage

ROWS_PER_CHUNK = 50_000
MAX_EFFECTS = 1 << 16  # ids beyond share effects, so ten million ids need no table of that size
LATENT_DIM = 4
# Two 16-bit halves make an id two look-ups.
HEX_DIGITS = np.frombuffer("".join(f"{half:04x}" for half in range(1 << 16)).encode(), dtype=np.uint32)


@dataclass(frozen=True)
class Teacher:
    """Effects and vectors are [feature][effect row]; row 0 is the missing id. `pairs` of features interact."""

    dense_effects: np.ndarray
    id_effects: list[np.ndarray]
    id_vectors: dict[int, np.ndarray]
    pairs: list[tuple[int, int]]
    gain: float = 1.0
    bias: float = 0.0

    def logits(self, dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return [rows] logits from prepared dense [rows, num_dense] (log1p, missing 0) and ids
        [num_sparse, rows] (0 missing)."""
        rows = np.where(ids > 0, 1 + (ids - 1) % MAX_EFFECTS, 0)
        # One effect rises and saturates, one oscillates, so a linear model fits neither.
        score = np.tanh(dense - 1.0) @ self.dense_effects[0] + np.sin(0.7 * dense) @ self.dense_effects[1]
        for feature, effects in enumerate(self.id_effects):
            score += effects[rows[feature]]
        for left, right in self.pairs:
            score += np.einsum("rd,rd->r", self.id_vectors[left][rows[left]], self.id_vectors[right][rows[right]])
        return self.gain * score + self.bias


def make_teacher(config: SyntheticConfig) -> Teacher:
    """Return a teacher with std config.teacher_scale of logits and mean probability
    config.positive_rate."""
    random = np.random.default_rng([config.seed, 0])
    rows = [min(size, MAX_EFFECTS) + 1 for size in config.cardinalities]
    # Only vectors of frequent ids can be learned, so the smaller features interact.
    learnable = np.argsort(config.cardinalities, kind="stable")[: 2 * config.num_interactions]
    pairs = [(int(left), int(right)) for left, right in random.permutation(learnable).reshape(-1, 2)]
    teacher = Teacher(
        dense_effects=random.normal(0, 1, (2, config.num_dense)) * [[0.24], [0.12]],
        # Rare ids differ less than frequent ones: by default a tenth at rank 10,000.
        id_effects=[random.normal(0, 0.36, size) * np.arange(1, size + 1) ** -config.id_effect_decay for size in rows],
        id_vectors={int(f): random.normal(0, 0.7, (rows[f], LATENT_DIM)) for f in learnable},
        pairs=pairs,
    )
    counts, missing, ids = sample_features(config, np.random.default_rng([config.seed, 1]), ROWS_PER_CHUNK)
    score = teacher.logits(prepared_dense(counts, missing), ids)
    gain = config.teacher_scale / float(score.std())
    return replace(teacher, gain=gain, bias=fit_bias(gain * score, config.positive_rate))


def fit_bias(logits: np.ndarray, positive_rate: float) -> float:
    """Return the number that, added to the logits, gives the mean probability `positive_rate`."""
    low, high = -50.0, 50.0
    for _ in range(60):
        bias = (low + high) / 2
        low, high = (low, bias) if sigmoid(logits + bias).mean() > positive_rate else (bias, high)
    return bias


def sample_features(
    config: SyntheticConfig, random: np.random.Generator, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return counts [num_dense, rows], a mask of missing counts, and ids [num_sparse, rows], which
    are 0 if missing.
    """
    num_dense, num_sparse = config.num_dense, len(config.cardinalities)
    scale = np.linspace(0.5, 5.0, num_dense)[:, None]
    # Counts start at -1, as in Criteo's data.
    counts = np.exp(random.normal(0, 1.2, (num_dense, num_rows)) + scale).astype(np.int64) - 1
    missing = random.random((num_dense, num_rows)) < np.linspace(0, 0.4, num_dense)[:, None]
    ids = np.stack([power_law(random.random(num_rows), size, config.zipf_exponent) for size in config.cardinalities])
    ids[random.random((num_sparse, num_rows)) < np.linspace(0, 0.2, num_sparse)[:, None]] = 0
    return counts, missing, ids


def power_law(uniform: np.ndarray, size: int, exponent: float) -> np.ndarray:
    """Return ranks 1..size with probability ~ rank^-exponent.

    The function inverts the integral of x^-exponent, so it needs no table of probabilities.
    """
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        ranks = (size + 1.0) ** uniform
    else:
        ranks = (1.0 + ((size + 1.0) ** power - 1.0) * uniform) ** (1.0 / power)
    return np.minimum(ranks.astype(np.int64), size)


def prepared_dense(counts: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Return [rows, num_dense] with the same values that `prepare` computes from Criteo's counts."""
    return np.log1p(np.where(missing | (counts < 0), 0, counts)).T


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


def sample_rows(
    config: SyntheticConfig, teacher: Teacher, chunk: int, names: ColumnsConfig | None = None
) -> tuple[bytes, np.ndarray]:
    """Return the TSV text of the chunk with number `chunk`, and the true probability of each row in it."""
    random = np.random.default_rng([config.seed, 2, chunk, *([config.window] if config.window else [])])
    num_rows = min(ROWS_PER_CHUNK, config.num_rows - chunk * ROWS_PER_CHUNK)
    counts, missing, ids = sample_features(config, random, num_rows)
    probabilities = sigmoid(teacher.logits(prepared_dense(counts, missing), ids))
    columns = [pa.array((random.random(num_rows) < probabilities).astype(np.int8))]
    columns += [pa.array(counts[feature], mask=missing[feature]) for feature in range(config.num_dense)]
    columns += [
        hex_strings(feature, renewed(config, feature, ids[feature])) for feature in range(len(config.cardinalities))
    ]
    sink = pa.BufferOutputStream()
    if names is not None and chunk == 0:  # pyarrow would quote them
        sink.write("\t".join([names.label, *names.dense, *names.sparse]).encode() + b"\n")
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pa.csv.write_csv(pa.table(columns, names=[str(i) for i in range(len(columns))]), sink, options)
    return sink.getvalue().to_pybytes(), probabilities


def hex_strings(feature: int, ids: np.ndarray) -> pa.Array:
    """Return eight hex digits per id, and null for id 0. Different ids of a feature get different
    digits, in scrambled order.
    """
    scrambled = (ids.astype(np.uint64) * np.uint64(0x9E3779B1) + np.uint64(feature * 0x85EBCA6B)).astype(np.uint32)
    scrambled ^= scrambled >> np.uint32(16)
    text = np.stack([HEX_DIGITS[scrambled >> np.uint32(16)], HEX_DIGITS[scrambled & np.uint32(0xFFFF)]], axis=1)
    offsets = np.arange(0, 8 * len(ids) + 8, 8, dtype=np.int32)
    valid = pa.array(ids > 0).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(ids), [valid, pa.py_buffer(offsets), pa.py_buffer(text)])


def write_source(
    config: SyntheticConfig, output: str, threads: int | None = None, names: ColumnsConfig | None = None
) -> None:
    """Write `output` (TSV) and its file of true probabilities.

    Equal configs give equal bytes. `names`: column names for a header line.
    """
    teacher = make_teacher(config)
    if config.window:
        effects = rotated_effects(config, teacher.id_effects)
        teacher = replace(teacher, id_effects=effects, id_vectors=rotated_vectors(config, teacher.id_vectors))
    write_chunks(
        lambda chunk: sample_rows(config, teacher, chunk, names),
        config.num_rows,
        output,
        threads or os.cpu_count() or 1,
    )


def write_chunks(
    sample_chunk: Callable[[int], tuple[bytes, np.ndarray]],
    num_rows: int,
    output: str,
    threads: int,
    labels: Sequence[str] = (TEACHER_COLUMN,),
) -> None:
    """Write the text of every chunk to `output`, in order, and its rows' true probabilities to the
    file next to it.

    Probabilities are [rows] for one label, or [rows, labels] for the columns that `labels` names.
    """
    chunks = range(-(-num_rows // ROWS_PER_CHUNK))
    schema = pa.schema([(name, pa.float64()) for name in labels])
    folder = storage.dirname(output)
    storage.make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder if storage.is_local(folder) else None) as staging:
        text_path, truth_path = os.path.join(staging, "text"), os.path.join(staging, "truth")
        with (
            open(text_path, "wb") as text,
            pq.ParquetWriter(truth_path, schema) as truth,
            progress("generating rows", num_rows) as bar,
        ):
            for rows, probabilities in map_ordered(sample_chunk, chunks, threads):
                text.write(rows)
                columns = list(probabilities.reshape(len(probabilities), -1).T.copy())
                truth.write_table(pa.table(columns, schema=schema))
                bar.advance(len(probabilities))
        storage.move_file(truth_path, output + TEACHER_SUFFIX)
        storage.move_file(text_path, output)  # last, so an existing file is complete
