"""Make values that JSON can hold, and check the types of values that were read from JSON."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from pipeline.runtime.errors import DamagedError

Kind = TypeVar("Kind")


def checked(values: object, kind: type[Kind], source: str) -> Kind:
    """Return the values as a `kind`, such as a dataclass; unknown keys are left out.

    Raises DamagedError for a missing value or another type; it names `source` and the key.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise DamagedError(f"{source} is damaged: {error}") from None


def finite(value: object) -> object:
    """Return the value with None instead of each number that is not finite, including nested values."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
