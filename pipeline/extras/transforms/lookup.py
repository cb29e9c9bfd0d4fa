"""The value of a key in a column of maps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import NUMBER, TEXT, TransformConfig
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "lookup")
@dataclass(frozen=True)
class Lookup(TransformConfig):
    """The value of the key in `column` within `map`, which is text such as a:1,b:2 or a JSON
    object.

    The result is missing if the key is missing. number: values are numbers, and the result is one.
    """

    map: str
    column: str
    number: bool = False
    pair_separator: str = ","
    value_separator: str = ":"

    def __post_init__(self) -> None:
        if not self.pair_separator or not self.value_separator or self.pair_separator == self.value_separator:
            raise ConfigError("lookup needs two different separators, of pairs and of key and value")
        if self.map == self.column:
            raise ConfigError(f"lookup has map={self.map} and column={self.column}: the key must be in another column")

    @property
    def output(self) -> str:  # type: ignore[override]
        return NUMBER if self.number else TEXT

    @property
    def inputs(self) -> dict[str, str]:
        return {self.map: TEXT, self.column: TEXT}

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import pyarrow as pa

        maps, keys = columns[0].to_pylist(), columns[1].to_pylist()
        found = [self._value(text, key) for text, key in zip(maps, keys, strict=True)]
        return (
            pa.array([_number(value) for value in found], pa.float64()) if self.number else pa.array(found, pa.string())
        )

    def _value(self, text: str | None, key: str | None) -> str | None:
        if text is None or key is None:
            return None
        if text.lstrip().startswith("{"):
            return _from_json(text, key)
        for pair in text.split(self.pair_separator):
            name, is_pair, value = pair.partition(self.value_separator)
            if is_pair and name.strip() == key:
                return value.strip() or None
        return None


def _from_json(text: str, key: str) -> str | None:
    try:
        value = json.loads(text).get(key)
    except (ValueError, RecursionError):
        return None
    if value is None or isinstance(value, dict | list):
        return None
    return value if isinstance(value, str) else json.dumps(value)


def _number(text: str | None) -> float | None:
    """Return the number, None if it is not a finite 32-bit number."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and abs(value) <= 3.4028234663852886e38 else None
