"""Declare columns that are computed from others: data.transforms.<column> = {kind: <transform>, ...} (stdlib only).

    @register("transform", "my_transform")
    @dataclass(frozen=True)
    class MyTransform(TransformConfig): ...

prepare, predict and serve share the code of a transform. dataset.json and artifacts store its settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from pipeline.config.registry import find
from pipeline.runtime.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.config.columns import ColumnsConfig

NUMBER, TEXT, LIST, TIME, VECTOR = "number", "text", "list", "time", "vector"  # what a column is read as


@dataclass(frozen=True)
class TransformConfig:
    """Base of all transforms. Its fields are its settings. output: the content of the new column:
    number (a dense column), text (a categorical one) or list (multi-hot)."""

    output = TEXT

    @property
    def inputs(self) -> dict[str, str]:
        """Return input column -> how it is read: number, text or time."""
        raise NotImplementedError(f"{type(self).__name__} has no inputs")

    @property
    def num_buckets(self) -> int | None:
        """Return the number of buckets that are learnt from the training rows, None if the result
        is not bucketed so."""
        return None

    @property
    def boundaries(self) -> list[float] | None:
        """Return the boundaries of the result's buckets if the config gives them, otherwise None."""
        return None

    @property
    def is_standardized(self) -> bool:
        """Return True if the result is standardized by the training rows."""
        return False

    def check_columns(self, columns: ColumnsConfig) -> None:
        """Raise ConfigError if the transform cannot read these columns of the source."""

    def stored(self) -> dict[str, Any]:
        """Return the settings as dataset.json and artifacts store them: without names of files."""
        return asdict(self)

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Compute the new column. `columns` are the inputs, [rows] each: float64, text or times as
        read; null if missing. Return [rows] of float64, string or list of string; null if the value
        is missing."""
        raise NotImplementedError(f"{type(self).__name__} has no apply()")


def make_transform(column: str, values: Mapping[str, Any]) -> TransformConfig:
    """Return the transform that data.transforms.<column> declares. Raises ConfigError if the
    transform or one of its settings is unknown; the message has the nearest name."""
    key = f"data.transforms.{column}"
    if not isinstance(values, Mapping) or "kind" not in values:
        raise ConfigError(f"{key} needs a kind: {key}={{kind: clip, column: price, low: 0}}")
    kind: type[TransformConfig] = find("transform", str(values["kind"]), f"{key}.kind")
    given = {name: value for name, value in values.items() if name != "kind"}
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(
            f"{key}.{unknown[0]}: {values['kind']} has {', '.join(known)}{did_you_mean(unknown[0], known)}"
        )
    required = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in given]:
        raise ConfigError(f"{key}.{missing[0]} is missing: {values['kind']} needs {', '.join(required)}")
    for field in fields(kind):
        if field.name in given:
            _check_type(f"{key}.{field.name}", str(field.type), given[field.name])
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _check_type(key: str, declared: str, value: object) -> None:
    """Check a value against `declared`, the annotation of a setting as text: str, float | None,
    list[str]."""
    choices = [choice.strip() for choice in declared.split("|")]
    for choice in choices:
        if choice == "None" and value is None:
            return
        if choice.startswith("list[") and isinstance(value, list):
            if all(_is(choice[5:-1], each) for each in value):
                return
        elif _is(choice, value):
            return
    raise ConfigError(f"{key}={value!r} must be {declared}")


def _is(kind: str, value: object) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and value == value and abs(value) != float("inf")
    return isinstance(value, {"int": int, "str": str}.get(kind, ()))


def make_transforms(declared: Mapping[str, Mapping[str, Any]]) -> dict[str, TransformConfig]:
    """Return the transforms in their order. A transform may read the result of an earlier one.
    Raises ConfigError."""
    made = {column: make_transform(column, values) for column, values in declared.items()}
    for position, (column, transform) in enumerate(made.items()):
        for name, wanted in transform.inputs.items():
            if name == column or name in list(made)[position + 1 :]:
                raise ConfigError(
                    f"data.transforms.{column} reads {name!r}, which is made after it: declare {name!r} first"
                )
            if name in made and made[name].output != wanted and not (made[name].output == TEXT and wanted == TIME):
                raise ConfigError(
                    f"data.transforms.{column} reads {name!r} as {wanted}, but {name!r} is made as {made[name].output}: use another "
                    "column, or a kind that reads {made[name].output}"
                )
    return made


def described(transforms: Mapping[str, TransformConfig], kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the transforms as dataset.json and artifacts store them. `kinds` are their names."""
    return [{"column": column, "kind": kinds[column], "settings": each.stored()} for column, each in transforms.items()]


def restore(described: Sequence[Mapping[str, Any]]) -> dict[str, TransformConfig]:
    """Return the transforms that `described` has stored. Raises ConfigError, also if a plugin is
    missing."""
    return make_transforms({each["column"]: {"kind": each["kind"], **each["settings"]} for each in described})


def raw_inputs(transforms: Mapping[str, TransformConfig]) -> dict[str, str]:
    """Return source column -> number, text or time. Raises ConfigError if two transforms read a
    column differently."""
    found: dict[str, str] = {}
    for column, transform in transforms.items():
        for name, kind in transform.inputs.items():
            if name in transforms:
                continue
            if found.setdefault(name, kind) != kind and {found[name], kind} != {TEXT, TIME}:
                raise ConfigError(
                    f"data.transforms.{column} reads {name!r} as {kind}, but another transform as {found[name]}: read a column in "
                    "one way only"
                )
    return found
