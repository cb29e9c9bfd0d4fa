"""Load one tower of an artifact, which maps raw rows of users or items to vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.config.serving import SsdConfig
from pipeline.extras.retrieval.index import Vectors
from pipeline.serving.artifact.manifest import (
    COMPILED_FILE,
    COMPOSED_FILE,
    DENSE_FILE,
    ITEM_PROGRAM,
    Manifest,
    RetrievalParts,
)
from pipeline.serving.artifact.raw_schema import RawSchema
from pipeline.serving.scoring.artifact_files import ArtifactFiles, open_lookup, parts_of
from pipeline.serving.scoring.dense_program import Program, load_compiled
from pipeline.serving.scoring.lookup import TableLookup, with_empty_bags
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.raw_rows import RowEncoder

if TYPE_CHECKING:
    from pipeline.serving.artifact.composed import ComposedTables


class Tower(Predictor):
    """Maps raw rows with the tower's columns to vectors [num_rows, dim], which are returned as
    `scores`. A refused row has NaN.
    """

    def __init__(
        self,
        manifest: Manifest,
        encoder: RowEncoder,
        lookup: TableLookup,
        program: Program,
        composed: ComposedTables | None = None,
    ) -> None:
        super().__init__(manifest, encoder, lookup, program, composed)
        assert manifest.retrieval is not None
        self.dim = manifest.retrieval.dim

    def vectors_of(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> Vectors:
        """Return [batch, dim] for ids of the tower's features in the form of a KeyedJaggedTensor,
        without dense values.
        """
        batch = (len(offsets) - 1) // len(self._keys)
        return self.score_ids(torch.zeros(batch, len(self.encoder.schema.dense)), values, offsets, weights)

    @property
    def _width(self) -> tuple[int, ...]:
        return (self.dim,)

    def _scores_of(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.reshape(len(outputs), -1) if outputs.dim() > 1 else outputs.reshape(-1, self.dim)

    def _pooled(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Look up the rows.

        The rows of compressed tables are composed for the features of both towers together. So the
        features of the other tower get empty bags.
        """
        if self._composed is None:
            return self.lookup.pooled(values, offsets, weights)
        batch = (len(offsets) - 1) // len(self._keys)
        ids = with_empty_bags(values, offsets, weights, batch, self._keys, self._composed.keys)
        pooled = self._composed.pooled(self.lookup, *ids)
        return own_columns(pooled, self._composed.keys, self._composed.dims_of_keys, self._keys)


def load_tower(
    files: ArtifactFiles,
    tower: str,
    memory: str,
    cache_bytes: int | None = None,
    ssd: SsdConfig | None = None,
    compiled: bool = False,
    kind: type[Tower] = Tower,
) -> Tower:
    """Load a tower. Only its tables are read.

    tower: user or item. compiled: load the user's tower as an AOTInductor package. kind: the class
    of the result.

    Raises:
        ArtifactError: a file is damaged, or the parts do not fit each other.
    """
    manifest = files.manifest
    assert manifest.retrieval is not None
    schema = tower_schema(manifest.schema, manifest.retrieval, tower)
    is_composed = COMPOSED_FILE in manifest.files
    only = None if is_composed else manifest.retrieval.features_of(tower)
    lookup = open_lookup(files, memory, cache_bytes, ssd, only)
    if tower == "user" and compiled:
        program = load_compiled(files.checked(COMPILED_FILE))
    else:
        program = files.program(DENSE_FILE if tower == "user" else ITEM_PROGRAM)
    encoder = RowEncoder(schema, files.vocabularies(schema.features))
    with parts_of(f"the {tower}'s tower"):
        found = kind(manifest, encoder, lookup, program, files.composed())
        found.feature_tables = files.feature_tables(found.columns)
        found._try()
    return found


def tower_schema(schema: RawSchema, parts: RetrievalParts, tower: str) -> RawSchema:
    """Return the columns of one tower. Dense columns belong to the user's tower."""
    return schema.of_features(parts.features_of(tower), None if tower == "user" else ())


def own_columns(pooled: torch.Tensor, keys: list[str], dims: dict[str, int], own: list[str]) -> torch.Tensor:
    """Return the columns of the features `own`, in their order, from pooled rows [batch, sum of
    dims], whose features are `keys`.
    """
    columns = dict(zip(keys, pooled.split([dims[key] for key in keys], dim=1), strict=True))
    return torch.cat([columns[key] for key in own], dim=1) if own else pooled[:, :0]
