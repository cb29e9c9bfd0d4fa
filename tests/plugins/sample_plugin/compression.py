"""A compression kind in one file: ids share rows by their remainder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.embeddings.compression.kind import Bags, CompressionKind, Split
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass
class ModuloOptions:
    shift: int = 0


@register("compression", "modulo")
class Modulo(CompressionKind):
    """The row of an id is (id + shift) % num_rows."""

    settings = ("num_rows",)
    Options = ModuloOptions
    id_part = "modulo"

    def parts(self) -> list[Table]:
        if self.config.num_rows is None:
            raise ConfigError(f"{self.key}: kind=modulo wants num_rows")
        return [self.part("modulo", self.config.num_rows)]

    def split(self, index: int) -> Split:
        feature = self.feature(index, "modulo")
        return lambda bags: iter([(feature, Bags(self.shared_rows(bags.ids), bags.lengths))])

    def shared_rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return (ids + self.options.shift) % self.config.num_rows
