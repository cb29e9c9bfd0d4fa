"""Turn `format: criteo_tsv` into columns: a label, 13 counts, 26 hashed ids; TAB between, no header, missing empty."""

from __future__ import annotations

from pipeline.config.data import ColumnsConfig

NUM_DENSE = 13
NUM_SPARSE = 26
# A generated source carries its true probabilities beside it, one a row.
TEACHER_SUFFIX = ".teacher.parquet"
TEACHER_COLUMN = "probability"


def criteo_columns() -> ColumnsConfig:
    """The names that TorchRec uses (torchrec.datasets.criteo), in file order: label, int_0..12, cat_0..25."""
    return ColumnsConfig(
        label="label",
        dense=[f"int_{i}" for i in range(NUM_DENSE)],
        sparse=[f"cat_{i}" for i in range(NUM_SPARSE)],
    )
