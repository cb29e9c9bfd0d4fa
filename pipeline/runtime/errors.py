"""Turn a bad value into an error that says what, with numbers, then the way out (stdlib only)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection


def did_you_mean(name: str, choices: Collection[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `choices`, else the empty string.

    A choice that `name` begins counts as nearer than any other: h100 means h100_80gb, though h200 shares more letters.
    """
    begun = [choice for choice in choices if name and choice.startswith(name)]
    near = difflib.get_close_matches(name, begun or list(choices), n=1, cutoff=0.0 if begun else 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(field: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{field}={value!r} is not one of {', '.join(sorted(choices))}{did_you_mean(value, choices)}")


def check_given(field: str, value: str) -> None:
    """Raise ValueError for empty text."""
    if not value.strip():
        raise ValueError(f"{field} is empty: give it a value, or leave it out")


def check_finite(field: str, value: float) -> None:
    """Raise ValueError for NaN and the infinities."""
    if isinstance(value, float) and not math.isfinite(value):  # math.isfinite overflows on whole numbers above 1e308
        raise ValueError(f"{field}={value} must be a finite number")


def check_at_least(field: str, value: float | None, least: float, allow_none: bool = False) -> None:
    """Raise ValueError unless `value` is finite and >= `least`."""
    if value is None and allow_none:
        return
    if value is not None:
        check_finite(field, value)
    if value is None or value < least:
        raise ValueError(f"{field}={value} must be at least {least}")


def check_above(field: str, value: float, floor: float) -> None:
    """Raise ValueError unless `value` is finite and > `floor`."""
    check_finite(field, value)
    if value <= floor:
        raise ValueError(f"{field}={value} must be above {floor}")


def check_below_one(field: str, value: float) -> None:
    """Raise ValueError unless 0 <= `value` < 1, as decay rates of running means are."""
    check_finite(field, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{field}={value} must be at least 0 and below 1")


def check_within(field: str, value: float, least: float, most: float) -> None:
    """Raise ValueError unless `value` is finite and `least` <= `value` <= `most`."""
    check_finite(field, value)
    if not least <= value <= most:
        raise ValueError(f"{field}={value} must lie within [{least}, {most}]")
