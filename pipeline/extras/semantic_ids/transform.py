"""The codes of a vector, as a multi-hot feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.config.columns import vector_features
from pipeline.config.registry import register
from pipeline.config.transforms import LIST, NUMBER, TransformConfig
from pipeline.runtime.errors import ConfigError, check_at_least
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.config.columns import ColumnsConfig
    from pipeline.extras.semantic_ids.codebooks import Codebooks


@register("transform", "semantic_id")
@dataclass(frozen=True)
class SemanticId(TransformConfig):
    """The codes of the vector in `column`, which is one of data.columns.vectors; none without a
    vector. width: the numbers of a vector.

    codebooks: the file codebooks.json that `semantic_ids` writes. dataset.json and artifacts hold
    its content in place of its name. prefixes: the feature's values are 17, 17.5 and 17.5.9, so
    that a longer value is a smaller group of items; false: 1:17, 2:5 and 3:9.
    """

    output = LIST

    column: str
    width: int
    codebooks: str
    prefixes: bool = True

    def __post_init__(self) -> None:
        check_at_least("width", self.width, 1)

    @property
    def inputs(self) -> dict[str, str]:
        return dict.fromkeys(vector_features(self.column, self.width), NUMBER)

    def check_columns(self, columns: ColumnsConfig) -> None:
        if (width := columns.vectors.get(self.column)) != self.width:
            found = "does not have it" if width is None else f"has {width} numbers"
            raise ConfigError(
                f"semantic_id reads {self.column!r} as a vector of {self.width} numbers, but data.columns.vectors {found}; set "
                f"data.columns.vectors.{self.column} and the transform's width to the length of the vectors"
            )

    def stored(self) -> dict[str, Any]:
        return super().stored() | {"codebooks": self._text()}

    def _text(self) -> str:
        """Return the content of the file. The file is read only here, so that a saved job loads without it."""
        text = self.codebooks if self.codebooks.startswith("{") else read_codebooks(self.codebooks)
        if (width := _codebooks(text).rows.shape[2]) != self.width:
            raise ConfigError(
                f"width={self.width}, but the codebooks are of vectors of {width} numbers; use codebooks that were learnt from "
                f"the vectors in {self.column!r}"
            )
        return text

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import numpy as np
        import pyarrow as pa

        numbers = np.stack([column.to_numpy(zero_copy_only=False) for column in columns], axis=1)
        is_missing = numbers[:, -1] != 0.0
        codes = _codebooks(self._text()).codes(numbers[:, :-1])
        texts = [_texts(row, self.prefixes) for row in codes.tolist()]
        return pa.array(
            [None if missing else each for each, missing in zip(texts, is_missing.tolist(), strict=True)],
            pa.list_(pa.string()),
        )


def _texts(codes: list[int], prefixes: bool) -> list[str]:
    if prefixes:
        return [".".join(map(str, codes[: level + 1])) for level in range(len(codes))]
    return [f"{level}:{code}" for level, code in enumerate(codes, start=1)]


def read_codebooks(path: str) -> str:
    if not storage.is_file(path):
        raise ConfigError(f"codebooks={path}: there is no such file; python -m pipeline semantic_ids writes it")
    try:
        return storage.read_text(path)
    except UnicodeDecodeError:
        raise ConfigError(f"codebooks={path} is not text; name the codebooks.json that semantic_ids wrote") from None


@lru_cache(maxsize=8)
def _codebooks(text: str) -> Codebooks:
    from pipeline.extras.semantic_ids.codebooks import Codebooks

    return Codebooks.of_text(text, "codebooks")
