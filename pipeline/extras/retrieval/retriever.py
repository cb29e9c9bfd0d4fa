"""Load the artifact of a two-tower, and find the items that score highest for raw rows of users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.config.columns import ColumnsConfig
from pipeline.config.serving import LimitsConfig, SsdConfig
from pipeline.data.read.value_index import ValueIndex, index_values
from pipeline.extras.retrieval.index import NO_ITEM, ItemIndex, Vectors, index_class
from pipeline.extras.retrieval.queries import Found, Queries, Wish
from pipeline.extras.retrieval.tower import Tower, load_tower
from pipeline.runtime.errors import ConfigError, ServingError
from pipeline.serving.artifact.manifest import (
    ITEM_INDEX,
    ITEM_VALUES,
    ITEM_VECTORS,
    ArtifactError,
    Manifest,
    RetrievalParts,
    read_manifest,
)
from pipeline.serving.artifact.task_quality import ServedTask
from pipeline.serving.scoring.artifact_files import ArtifactFiles
from pipeline.serving.scoring.predictor import Scored
from pipeline.serving.scoring.scorer import FeatureTables, Rows, has_scores, schema_of

if TYPE_CHECKING:
    from starlette.responses import Response

    from pipeline.serving.http.batching import Scores
    from pipeline.serving.http.request_rows import RequestReader

COLUMN = "item"


class Items:
    """The raw values of items: `values` [num_items] text, all different."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        self._index = ValueIndex([index_values([(1, values.to_pylist())])])

    @classmethod
    def from_table(cls, table: pa.Table, num_items: int) -> Items:
        """Make Items. Raises ArtifactError if the table is not a list of `num_items` items."""
        kinds = (pa.string(), pa.large_string())
        if table.column_names != [COLUMN] or table[COLUMN].type not in kinds or table[COLUMN].null_count:
            raise ArtifactError(
                f"the items are a column {COLUMN!r} of text, but the file has {table.schema.names}; export again"
            )
        if table.num_rows != num_items:
            raise ArtifactError(f"it names {table.num_rows:,} items but has {num_items:,}; export again")
        return cls(table[COLUMN].combine_chunks())

    def __len__(self) -> int:
        return len(self._values)

    def values_at(self, positions: NDArray[np.int64]) -> pa.Array:
        return self._values.take(pa.array(positions))

    def positions_of(self, values: Iterable[str]) -> NDArray[np.int64]:
        """Return the positions of the values without repetition, ascending. Unknown items are ignored."""
        texts: Sequence[str] = list(values)
        found = self._index.ids(np.zeros(len(texts), np.int64), pa.array(texts, pa.large_string()))
        return np.unique(found[found > 0] - 1)


class Retriever:
    """Finds items for users. Only one thread may call it."""

    retrieves_items = True

    def __init__(self, manifest: Manifest, user: Tower, index: ItemIndex, items: Items) -> None:
        self.manifest, self.user, self._index, self.items = manifest, user, index, items

    @classmethod
    def load(
        cls,
        artifact: str,
        *,
        memory: str = "ram",
        cache_bytes: int | None = None,
        ssd: SsdConfig | None = None,
        compiled: bool = False,
    ) -> Retriever:
        """Load the user's tower, the index and the items' values. The item's tower is not loaded.

        Raises:
            ArtifactError: the artifact is missing, damaged, of another release, or not a two-tower's.
            ServingError: the index needs a library that is missing.
        """
        files, parts = open_retrieval(artifact)
        if compiled and not files.manifest.dense.get("compiled"):
            raise ArtifactError(
                f"{artifact} has no compiled layers; export with compiled=true, or remove compiled here"
            )
        user = load_tower(files, "user", memory, cache_bytes, ssd, compiled)
        return cls(files.manifest, user, _load_index(files, parts), load_items(files, parts))

    @property
    def version(self) -> str:
        """Return the version of the artifact. Equal versions give equal responses."""
        return self.manifest.version

    @property
    def columns(self) -> ColumnsConfig:
        """Return the user's raw columns."""
        return self.user.columns

    @property
    def tasks(self) -> list[ServedTask]:
        return []

    @property
    def feature_tables(self) -> FeatureTables | None:
        return self.user.feature_tables

    @property
    def lookup(self) -> object:
        """Return the user's tables, for counting lookups."""
        return self.user.lookup

    def unusual(self, row_zero: Mapping[str, Sequence[int]]) -> str:
        return self.user.unusual(row_zero)

    def try_out(self) -> None:
        """Retrieve items for an empty row, which the first request may have. Raises ServingError if
        no item is found.
        """
        schema = schema_of(self.columns)
        rows = pa.table([pa.nulls(1, field.type) for field in schema], schema=schema)
        answer = self.retrieve(rows, [(1, Wish(10))])
        found = answer.scores[0]
        if found is None or not len(found.positions) or not np.isfinite(found.scores).all():
            raise ServingError(f"artifact {self.version} finds no items for an empty row")

    def request_reader(self, limits: LimitsConfig) -> RequestReader:
        """Return a reader of requests to /retrieve."""
        from pipeline.extras.retrieval.http import RetrieveReader

        return RetrieveReader(self.columns, limits, self.feature_tables)

    def answer(self, scored: Scores) -> tuple[Response, int]:
        """Return the server's response, and the number of items in it."""
        from pipeline.extras.retrieval.http import retrieved

        return retrieved(self, scored)

    def score(self, rows: Rows | Queries) -> Scored:
        """Return the results for Queries (see retrieve)."""
        assert isinstance(rows, Queries), "rows without a wish"
        return self.retrieve(rows.rows, rows.wishes)

    def retrieve(self, rows: Rows, wishes: Sequence[tuple[int, Wish]]) -> Scored:
        """Retrieve items for the rows of Queries.

        `scores` [num_rows] are objects: Found, or None if a row was refused.
        """
        scored = self.user.score(rows)
        vectors = scored.scores
        is_read = has_scores(vectors)
        found = np.full(len(vectors), None, object)
        begin = 0
        for count, wish in wishes:
            which = begin + np.flatnonzero(is_read[begin : begin + count])
            if len(which):
                found[which] = self._find(vectors[which], wish)
            begin += count
        return Scored(found, scored.bad_rows, scored.row_zero)

    def _find(self, users: Vectors, wish: Wish) -> NDArray[np.object_]:
        """Return the Found of each user, [users]."""
        if wish.allowed is not None:
            return self._find_among(users, wish)
        excluded = self.items.positions_of(wish.excluded)
        k = min(wish.k + len(excluded), len(self.items))
        scores, positions = self._index.search(users, k)
        stays = (positions != NO_ITEM) & ~np.isin(positions, excluded)
        rows = zip(positions, scores, stays, strict=True)
        return _objects([Found(row[stay][: wish.k], score[stay][: wish.k]) for row, score, stay in rows])

    def _find_among(self, users: Vectors, wish: Wish) -> NDArray[np.object_]:
        """Search only the allowed items, exactly, whatever the index is."""
        positions = np.setdiff1d(self.items.positions_of(wish.allowed or ()), self.items.positions_of(wish.excluded))
        if not len(positions):
            return _objects([Found(positions, np.zeros(0, np.float32))] * len(users))
        scores = self._index.scores_of(users, positions)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : wish.k]
        return _objects([Found(positions[best], row[best]) for best, row in zip(order, scores, strict=True)])


def open_retrieval(artifact: str) -> tuple[ArtifactFiles, RetrievalParts]:
    """Open the artifact. Raises ArtifactError if it is not a two-tower's."""
    manifest = read_manifest(artifact)
    if manifest.retrieval is None:
        raise ArtifactError(f"{artifact} scores rows and cannot retrieve, because its model is not a two-tower")
    return ArtifactFiles(artifact, manifest, verify=True), manifest.retrieval


def load_items(files: ArtifactFiles, parts: RetrievalParts) -> Items:
    return Items.from_table(files.vocabulary(ITEM_VALUES), parts.num_items)


def _load_index(files: ArtifactFiles, parts: RetrievalParts) -> ItemIndex:
    try:
        chosen = index_class(parts.index)
    except ConfigError as error:
        raise ArtifactError(f"its index is {parts.index!r}: {error}") from None
    if chosen.has_file and ITEM_INDEX not in files.manifest.files:
        raise ArtifactError(f"it has no {ITEM_INDEX}, which index {parts.index} needs; export again")
    path = files.checked(ITEM_INDEX if chosen.has_file else ITEM_VECTORS)
    return chosen.load(path, parts.num_items, parts.dim, parts.search)


def _objects(found: Sequence[Found]) -> NDArray[np.object_]:
    array = np.empty(len(found), object)
    for number, each in enumerate(found):
        array[number] = each
    return array
