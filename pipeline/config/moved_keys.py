"""Suggest the new key for a key of an earlier release, and read jobs that it saved."""

from __future__ import annotations

from typing import Any

GENERATORS = ("user_item", "conversions", "histories", "tags")
# Key of an earlier release -> the key that replaces it.
MOVED = {f"data.{name}": f"data.generator (its kind is {name})" for name in GENERATORS}


def moved_hint(key: str) -> str:
    """Return a hint with the new key, "" if the key has not moved."""
    return next((f"it is {new} now" for old, new in MOVED.items() if f"{key}.".startswith(f"{old}.")), "")


def with_moved_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a saved job under the keys of this release."""
    data = values.get("data")
    if not isinstance(data, dict):
        return values
    generated = {"kind": name, **data[name]} if (name := next(filter(data.get, GENERATORS), None)) else {}
    kept = {name: value for name, value in data.items() if name not in GENERATORS}
    return {**values, "data": {**kept, "generator": generated} if generated else kept}
