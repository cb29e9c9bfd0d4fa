"""Convert values to values that JSON supports. JSON has no NaN and no infinity."""

from __future__ import annotations

import math


def finite(value: object) -> object:
    """Return the value with None instead of every number that is not finite, also in nested dicts,
    lists and tuples.
    """
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
