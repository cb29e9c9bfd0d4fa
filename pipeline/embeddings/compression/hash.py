"""Store a table as a smaller table, whose rows are shared by ids with the same seeded hash (stdlib only)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.embeddings.compression.kind import CompressionKind, Split
from pipeline.embeddings.row_frequencies import hashed_frequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@register("compression", "hash")
class Hash(CompressionKind):
    """The row of an id is a hash of the id, in a table of `num_rows` rows."""

    fits_sequences = True
    carries_weights = True
    settings = ("ratio", "num_rows", "seed")
    id_part = "hash"

    def parts(self) -> list[Table]:
        num_rows = self.num_rows()
        return [self.part("hash", num_rows, frequencies=hashed_frequencies(self.table.frequencies, num_rows))]

    def split(self, index: int) -> Split:
        feature = self.feature(index, "hash")
        return lambda bags: iter([(feature, bags._replace(ids=self.shared_rows(bags.ids)))])

    def shared_rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        from pipeline.embeddings.id_splitter import hashed_to

        return hashed_to(self.num_rows(), self.config.seed, ids)

    def num_rows(self) -> int:
        config, num_ids = self.config, self.table.num_embeddings
        if (config.num_rows is None) == (config.ratio is None):
            raise ConfigError(
                f"{self.key}: kind=hash needs one of num_rows (of the hashed table) and ratio (full size / hashed size)"
            )
        num_rows = config.num_rows or max(1, int(num_ids / (config.ratio or 1)))
        if num_rows > num_ids:
            raise ConfigError(
                f"{self.key}.num_rows={num_rows:,}, but the table has {num_ids:,} ids: hashed into more rows they would "
                "still collide and take more memory; use fewer, or kind=none"
            )
        return num_rows
