"""Register what launch renders: kinds of Kubernetes objects, targets of chains and of schedules.

launch/extras registers more. The core imports it by name, and works without it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

START_AGAIN = "restart a pod without counting"
EXTRAS = "launch.extras"


@dataclass(frozen=True)
class Kind:
    """A kind of objects on Kubernetes. `again` says what exit code REQUEUE does; it may be None."""

    render: Callable[[Any, Any], list[dict[str, Any]]]
    again: str = ""


@dataclass(frozen=True)
class Target:
    """A target of a chain or of a schedule. It has the dataclass of its options, and its renderer."""

    options: type
    render: Callable[..., str]


_registered: dict[str, dict[str, Any]] = {"kind": {}, "chain": {}, "schedule": {}}


def register(place: str, name: str, target: Kind | Target) -> None:
    _registered[place][name] = target


def registered(place: str) -> Mapping[str, Any]:
    """Return the mapping name -> Kind (place "kind") or Target ("chain", "schedule"), including the extras."""
    importlib.import_module("launch.kubernetes")
    if importlib.util.find_spec(EXTRAS):
        importlib.import_module(EXTRAS)
    return _registered[place]
