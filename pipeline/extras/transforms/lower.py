"""Text in lower case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import TEXT, TransformConfig

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "lower")
@dataclass(frozen=True)
class Lower(TransformConfig):
    """Lower case by Unicode's simple case mapping.

    `strip` also removes white space at both ends.
    """

    column: str
    strip: bool = True

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: TEXT}

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import pyarrow.compute as pc

        lower = pc.utf8_lower(columns[0])
        return pc.utf8_trim_whitespace(lower) if self.strip else lower
