"""The parts of a text, as a multi-hot feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import LIST, TEXT, TransformConfig
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "split")
@dataclass(frozen=True)
class Split(TransformConfig):
    """The parts of a text between `separator`s."""

    output = LIST

    column: str
    separator: str = " "

    def __post_init__(self) -> None:
        if not self.separator:
            raise ConfigError("split needs a separator of at least one character")

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: TEXT}

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import pyarrow.compute as pc

        return pc.split_pattern(columns[0], self.separator)
