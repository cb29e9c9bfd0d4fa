"""Sample points of the knobs of a sweep, and convert a point to overrides of a training."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.extras.sweep.config import KnobConfig

if TYPE_CHECKING:
    import optuna

Point = dict[str, Any]  # key -> value, of the active knobs


def suggest(trial: optuna.Trial, params: Mapping[str, KnobConfig]) -> Point:
    """Ask Optuna for the value of each knob whose condition holds."""

    def value_of(key: str, knob: KnobConfig) -> Any:
        if knob.choices:
            return trial.suggest_categorical(key, knob.choices)
        assert knob.low is not None and knob.high is not None
        if knob.integer:
            return trial.suggest_int(key, int(knob.low), int(knob.high), log=knob.log, step=int(knob.step or 1))
        return trial.suggest_float(key, knob.low, knob.high, log=knob.log, step=knob.step)

    return _walk(params, value_of)


def _walk(params: Mapping[str, KnobConfig], value_of: Callable[[str, KnobConfig], Any]) -> Point:
    point: Point = {}
    for key, knob in params.items():
        if all(other in point and point[other] in allowed for other, allowed in knob.when.items()):
            point[key] = value_of(key, knob)
    return point


def grid(params: Mapping[str, KnobConfig]) -> list[Point]:
    """Return all points; the last knob changes fastest.

    Points that differ only in inactive knobs count once.
    """
    points: dict[str, Point] = {}
    for combination in itertools.product(*map(_grid_values, params.values())):
        chosen = dict(zip(params, combination, strict=True))
        point = _walk(params, lambda key, _, chosen=chosen: chosen[key])  # type: ignore[misc]
        points.setdefault(json.dumps(point, sort_keys=True), point)
    return list(points.values())


def _grid_values(knob: KnobConfig) -> list[Any]:
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
    """Return the value in Hydra's syntax: plain words unquoted, other text quoted."""
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "\\'") + "'"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return repr(value)


def edges(params: Mapping[str, KnobConfig]) -> Iterator[Point]:
    """Return points that together have both ends or every choice of each knob, to check them before
    training.
    """
    for key, knob in params.items():
        ends = [edge for edge in (knob.low, knob.high) if edge is not None]
        for value in knob.choices or [int(end) if knob.integer else end for end in ends]:
            point: Point = {}
            _require(key, value, params, point)
            yield {name: point[name] for name in params if name in point}


def _require(key: str, value: Any, params: Mapping[str, KnobConfig], point: Point) -> None:
    """Set a knob, and the knobs in its condition so that the condition is true."""
    for other, allowed in params[key].when.items():
        if other not in point:
            _require(other, allowed[0], params, point)
    point[key] = value
