"""Choose the model and the batch size of a new project by its data."""

from __future__ import annotations

import math
from typing import Any

from pipeline.data.raw.source import TextReader, find_sources
from pipeline.runtime.errors import UserError
from pipeline.runtime.storage import storage

STEPS = 180  # of one epoch at least, as far as the batch sizes allow
MIN_BATCH, MAX_BATCH = 64, 1024
TRAINED = 0.8  # of the rows are in the training split that inspect proposes
SAMPLE_BYTES = 4 << 20
# DLRM reads dense columns by an MLP of ReLU units, which can all be 0 if few columns feed them. DCNv2 reads each column
# as a vector. Dropout and batch norm are tuned for many epochs, and one epoch is the default.
FEW_DENSE = 3
DCNV2: tuple[str, dict[str, Any]] = "dcnv2", {"dropout": 0.0, "batch_norm": False}


def choose_model(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a model and its settings: DLRM with crosses; DCNv2 if there are few dense columns; AutoInt
    if there are numbers only.
    """
    columns = data.get("columns", {})
    if data["format"] == "criteo_tsv":
        return "dlrm_dcn", {}
    if not any(columns.get(key) for key in ("sparse", "multi_hot", "sequence")):
        return "autoint", {}
    return DCNV2 if 0 < len(columns.get("dense", [])) <= FEW_DENSE else ("dlrm_dcn", {})


def choose_batch_size(num_rows: float | None) -> int:
    """Return a power of two that gives STEPS steps, or 256 if the number of rows is unknown."""
    if not num_rows:
        return 256
    return min(MAX_BATCH, max(MIN_BATCH, 2 ** math.floor(math.log2(max(1.0, num_rows * TRAINED / STEPS)))))


def estimate_rows(source: str, data: dict[str, Any]) -> float | None:
    """Estimate the rows of all files by the first file: for Parquet by its number of rows, otherwise by the bytes
    of a row in its first 4 MiB. None if it cannot be read.
    """
    try:
        first, *rest = find_sources(source)
        if data["format"] == "parquet":
            import pyarrow.parquet as pq

            with storage.open_file(first.path, "rb") as file:
                rows, read = float(pq.read_metadata(file).num_rows), first.size_bytes
        else:
            rows, text = 0.0, 0
            with TextReader(first, SAMPLE_BYTES, data.get("encoding", "utf-8")) as reader:
                for block in reader.blocks():
                    rows, text = rows + block.num_rows, text + len(block.text)
                    if text >= SAMPLE_BYTES:
                        break
                read = reader.position if first.name.endswith(".gz") else text
    except (UserError, OSError, ValueError):
        return None
    return rows * sum(each.size_bytes for each in (first, *rest)) / max(read, 1)
