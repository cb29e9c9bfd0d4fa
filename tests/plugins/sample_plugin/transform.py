"""A transform of columns in one file: the last characters of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.registry import register
from pipeline.config.transforms import TEXT, TransformConfig


@register("transform", "last_characters")
@dataclass(frozen=True)
class LastCharacters(TransformConfig):
    column: str
    count: int = 1

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: TEXT}

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        return pc.utf8_slice_codeunits(columns[0], -self.count)
