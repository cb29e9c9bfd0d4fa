"""Load a two-tower's artifact for scoring files. Each row gets its best items, or its vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from pipeline.config.columns import ColumnsConfig
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.extras.retrieval.queries import Found, Wish
from pipeline.extras.retrieval.retriever import Items, Retriever, open_retrieval
from pipeline.extras.retrieval.tower import Tower, load_tower
from pipeline.runtime.errors import ServingError
from pipeline.serving.scoring.predictor import Scored
from pipeline.serving.scoring.scorer import Rows


class VectorOutput:
    """Writes a vector of `dim` numbers for each row."""

    def __init__(self, dim: int) -> None:
        self.dim, self.fields = dim, [pa.field("vector", pa.list_(pa.float32()))]

    def empty(self, num_rows: int) -> np.ndarray:
        return np.full((num_rows, self.dim), np.nan, np.float32)

    def arrays(self, scores: np.ndarray, without: np.ndarray) -> Sequence[pa.Array]:
        ends = np.arange(len(scores) + 1, dtype=np.int32) * self.dim
        offsets = pa.array(ends, mask=np.append(without, False))
        return [pa.ListArray.from_arrays(offsets, pa.array(scores.reshape(-1)))]


class ItemsOutput:
    """Writes the best items of each row, and their scores."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self.fields = [pa.field("items", pa.list_(pa.string())), pa.field("scores", pa.list_(pa.float32()))]

    def empty(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, None, object)

    def arrays(self, scores: np.ndarray, without: np.ndarray) -> Sequence[pa.Array]:
        found: list[Found | None] = list(scores)
        lengths = [0 if each is None else len(each.positions) for each in found]
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        offsets = pa.array(ends, mask=np.append(without, False))
        positions = np.concatenate([np.zeros(0, np.int64), *(each.positions for each in found if each is not None)])
        numbers = np.concatenate([np.zeros(0, np.float32), *(each.scores for each in found if each is not None)])
        texts = self._items.values_at(positions).cast(pa.string())
        return [pa.ListArray.from_arrays(offsets, texts), pa.ListArray.from_arrays(offsets, pa.array(numbers))]


class BestItems:
    """Scores rows. A score is an object with the `k` best items of the row."""

    def __init__(self, retriever: Retriever, k: int) -> None:
        self._retriever, self._wish = retriever, Wish(k)
        self.version, self.tasks = retriever.version, retriever.tasks
        self.output, self.feature_tables = ItemsOutput(retriever.items), retriever.feature_tables

    @property
    def columns(self) -> ColumnsConfig:
        return self._retriever.columns

    def score(self, rows: Rows) -> Scored:
        return self._retriever.retrieve(rows, [(rows.num_rows, self._wish)])

    def unusual(self, row_zero: Mapping[str, Sequence[int]]) -> str:
        return self._retriever.unusual(row_zero)


class RowVectors(Tower):
    """A tower whose vectors are written unchanged."""

    @property
    def output(self) -> VectorOutput:
        return VectorOutput(self.dim)


def load_for_files(job: PredictJob, path: str) -> BestItems | RowVectors:
    """Load the artifact.

    Raises ServingError if it is damaged, or if the output format cannot store lists.
    """
    if not job.output.endswith(".parquet"):
        raise ServingError(
            f"output={job.output} cannot store lists of items or vectors: give it a name that ends in .parquet"
        )
    cache_bytes = None if job.ssd.cache_gb is None else int(job.ssd.cache_gb * 2**30)
    if not job.retrieve.vectors:
        retriever = Retriever.load(path, memory=job.memory, cache_bytes=cache_bytes, ssd=job.ssd, compiled=job.compiled)
        return BestItems(retriever, job.retrieve.k)
    files, _ = open_retrieval(path)
    if job.compiled and not files.manifest.dense.get("compiled"):
        raise ServingError(f"{path} has no compiled layers; export with compiled=true, or remove compiled here")
    tower = load_tower(files, job.retrieve.tower, job.memory, cache_bytes, job.ssd, job.compiled, RowVectors)
    assert isinstance(tower, RowVectors)
    return tower
