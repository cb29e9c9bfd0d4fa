"""Register what launch renders: kinds of Kubernetes objects, targets of chains and of schedules.

The core finds launch/extras, which registers more, by its name and works without the folder.
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
    """A kind of objects on Kubernetes. again: the effect of exit code REQUEUE, if any."""

    render: Callable[[Any, Any], list[dict[str, Any]]]
    again: str = ""


@dataclass(frozen=True)
class Target:
    """A target of a chain or of a schedule: the dataclass of its options, and its renderer."""

    options: type
    render: Callable[..., str]


_registered: dict[str, dict[str, Any]] = {"kind": {}, "chain": {}, "schedule": {}}


def register(place: str, name: str, target: Kind | Target) -> None:
    _registered[place][name] = target


def registered(place: str) -> Mapping[str, Any]:
    """Return name -> Kind (place "kind") or Target ("chain", "schedule"), with those of the extras."""
    importlib.import_module("launch.kubernetes")
    if importlib.util.find_spec(EXTRAS):
        importlib.import_module(EXTRAS)
    return _registered[place]
