"""Combine two or more categories into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import TEXT, TransformConfig
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

BETWEEN = "\x1f"  # ASCII's unit separator, so that different pairs of values give different texts


@register("transform", "cross")
@dataclass(frozen=True)
class Cross(TransformConfig):
    """The values of `columns` joined; missing if one of them is missing."""

    columns: list[str]

    def __post_init__(self) -> None:
        if len(self.columns) < 2 or len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"cross has columns={self.columns}: give at least two, each once")

    @property
    def inputs(self) -> dict[str, str]:
        return dict.fromkeys(self.columns, TEXT)

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import pyarrow.compute as pc

        return pc.binary_join_element_wise(*columns, BETWEEN)
