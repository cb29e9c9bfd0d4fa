"""Make values that JSON can hold: it has no NaN and no infinity."""

from __future__ import annotations

import math


def finite(value: object) -> object:
    """The same, in nested dicts, lists and tuples, with None for every number that is not finite."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
