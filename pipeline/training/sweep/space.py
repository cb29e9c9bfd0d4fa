"""Say what a knob's values are, which knobs are active together, and how a point reads as overrides of a training."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.config.sweep import KnobConfig

Point = dict[str, Any]  # key -> value, of the active knobs
Suggest = Callable[[str, KnobConfig], Any]


def walk(params: Mapping[str, KnobConfig], suggest: Suggest) -> Point:
    """A point, asked for knob by knob, so that a knob is asked for only where its condition holds."""
    point: Point = {}
    for key, knob in params.items():
        if is_active(knob, point):
            point[key] = suggest(key, knob)
    return point


def is_active(knob: KnobConfig, point: Point) -> bool:
    return all(other in point and point[other] in allowed for other, allowed in knob.when.items())


def grid(params: Mapping[str, KnobConfig]) -> list[Point]:
    """All points, the last knob changing fastest; those that differ in inactive knobs alone are one."""
    values = [grid_values(knob) for knob in params.values()]
    points: dict[str, Point] = {}
    for combination in itertools.product(*values):
        chosen = dict(zip(params, combination, strict=True))
        point = walk(params, lambda key, _, chosen=chosen: chosen[key])  # type: ignore[misc]
        points.setdefault(json.dumps(point, sort_keys=True), point)
    return list(points.values())


def grid_values(knob: KnobConfig) -> list[Any]:
    if knob.choices:
        return list(knob.choices)
    assert knob.low is not None and knob.high is not None
    step = knob.step or 1.0
    count = math.floor((knob.high - knob.low) / step + 1e-9) + 1
    found = [round(knob.low + step * index, 12) for index in range(count)]
    return [int(value) for value in found] if knob.integer else found


def as_overrides(point: Point) -> list[str]:
    return [f"{key}={_text(value)}" for key, value in point.items()]


def _text(value: Any) -> str:
    """As Hydra reads it: plain words as they are, other text quoted."""
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "\\'") + "'"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return repr(value)


def edges(params: Mapping[str, KnobConfig]) -> Iterator[Point]:
    """Points that together name every knob at its ends, or every choice: what is checked before anything is trained."""
    for key, knob in params.items():
        values = knob.choices or [
            int(edge) if knob.integer else edge for edge in (knob.low, knob.high) if edge is not None
        ]
        for value in values:
            point: Point = {}
            _require(key, value, params, point)
            yield {name: point[name] for name in params if name in point}


def _require(key: str, value: Any, params: Mapping[str, KnobConfig], point: Point) -> None:
    """Set a knob, and the knobs that its condition names so that it holds."""
    for other, allowed in params[key].when.items():
        if other not in point:
            _require(other, allowed[0], params, point)
    point[key] = value
