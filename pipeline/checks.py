"""Turn a bad value into an error that says what, with numbers, then the way out (stdlib only)."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def did_you_mean(name: str, choices: Collection[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `choices`, else the empty string."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(field: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{field}={value!r} is not one of {', '.join(sorted(choices))}{did_you_mean(value, choices)}")


def check_at_least(field: str, value: float | None, least: float, allow_none: bool = False) -> None:
    """Raise ValueError unless `value` >= `least`."""
    if value is None and allow_none:
        return
    if value is None or not value >= least:
        raise ValueError(f"{field}={value} must be at least {least}")


def check_above(field: str, value: float, floor: float) -> None:
    """Raise ValueError unless `value` > `floor`."""
    if not value > floor:
        raise ValueError(f"{field}={value} must be above {floor}")


def check_within(field: str, value: float, least: float, most: float) -> None:
    """Raise ValueError unless `least` <= `value` <= `most`."""
    if not least <= value <= most:
        raise ValueError(f"{field}={value} must lie within [{least}, {most}]")
