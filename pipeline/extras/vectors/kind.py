"""Compute the row of an id from a given vector that never changes, and from a row that is trained
(stdlib only).

    row(id) = vector(id) @ projection + own_row(id), or missing + own_row(id) for an id without a vector

The vectors are a frozen table, so they are sharded, saved, exported and served like other tables,
and rows of the data set stay narrow. An additional column is 1 for each id that has a vector, so
the number of ids without a vector is known after the rows of a list are added up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import CompressionConfig, InitConfig
from pipeline.embeddings.compression.kind import CompressionKind, Split
from pipeline.embeddings.table import SHARD_WIDTH, RowUpdates, Table
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

VECTORS, OWN = "vectors", "own"


@dataclass
class VectorsOptions:
    """file, value_column, vector_column: as in init. width: numbers of a vector. project: multiply
    vectors by a trained matrix [width, embedding_dim]; false: use them unchanged. own_rows: also
    train a row for each id."""

    file: str = ""
    width: int = 0
    value_column: str = "value"
    vector_column: str = "vector"
    project: bool = True
    own_rows: bool = True


@register("compression", "vectors")
class Vectors(CompressionKind):
    """A table whose rows contain given vectors. `missing` is a trained row for ids without a vector."""

    Options = VectorsOptions
    fits_sequences = True
    id_part = VECTORS

    @classmethod
    def check(cls, config: CompressionConfig) -> None:
        options = config.read_options(VectorsOptions)
        if not options.file:
            raise ConfigError("compression.kind=vectors needs options.file=<a Parquet or .npy file of vectors>")
        check_at_least("compression.options.width", options.width, 1)

    @property
    def is_for_size(self) -> bool:
        return False

    def parts(self) -> list[Table]:
        options: VectorsOptions = self.options
        if not options.project and options.width != self.table.embedding_dim:
            raise ConfigError(
                f"{self.key}.options: project=false uses vectors as they are, but width={options.width} and "
                f"embedding_dim={self.table.embedding_dim}; set embedding_dim={options.width}, or project=true"
            )
        given = replace(
            self._part(VECTORS, -(-(options.width + 1) // SHARD_WIDTH) * SHARD_WIDTH),
            init=InitConfig("zeros", None, options.file, options.value_column, options.vector_column),
            updates=RowUpdates(frozen=True),
        )
        return [given, self._part(OWN, self.table.embedding_dim)] if options.own_rows else [given]

    def _part(self, name: str, dim: int) -> Table:
        return self.part(name, self.table.num_embeddings, dim=dim, frequencies=self.table.frequencies)

    def split(self, index: int) -> Split:
        names = [VECTORS, OWN] if self.options.own_rows else [VECTORS]
        features = [self.feature(index, name) for name in names]
        return lambda bags: ((feature, bags) for feature in features)

    def num_dense_numbers(self) -> int:
        rows = self.options.width if self.options.project else 0
        return (rows + 1) * self.table.embedding_dim

    def initial_parameters(self) -> dict[str, torch.Tensor]:
        import torch

        width, dim = self.options.width, self.table.embedding_dim
        missing = {"missing": torch.zeros(dim)}
        return missing | {"projection": torch.randn(width, dim) / math.sqrt(width)} if self.options.project else missing

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:
        from pipeline.embeddings.id_splitter import sum_of_lengths

        width, stored = self.options.width, pooled[self.feature(index, VECTORS)]
        num_ids = sum_of_lengths(features, self.id_features(index)).to(stored.dtype).unsqueeze(1)
        vectors, num_missing = stored[:, :width], num_ids - stored[:, width : width + 1]
        rows = vectors @ parameters["projection"] if self.options.project else vectors
        rows = rows + num_missing * parameters["missing"]
        return rows + pooled[self.feature(index, OWN)] if self.options.own_rows else rows

    def describe_dense(self, count: int) -> str:
        return f"{count:,} numbers of a projection and of the row of ids without a vector"
