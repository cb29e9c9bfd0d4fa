"""Define what a checkpoint needs to know of hosts that train tables of their own. An extra implements it.

model.*  optimizer.*               the tables' mean over the hosts, and the dense layers: what every reader loads
replica_<host>.model.*  .optimizer.*   each host's own tables, if they differ, so that training resumes exactly
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

PREFIX = "replica_"


class Replicas(Protocol):
    """The tables of each host. `equal`: all hosts hold the same rows."""

    equal: bool

    def describe(self) -> dict[str, Any]:
        """For the manifest; `apart`: the step holds each host's own tables in addition to their mean."""

    def state_to_save(self, state: dict[str, Any], *, average: bool = True) -> dict[str, Any]:
        """Collective unless `average` is False, which is for counting bytes."""

    def state_to_load(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under the keys of this host's own tables."""

    def holds_own_tables(self, manifest: Mapping[str, Any]) -> bool:
        """Whether the step holds the tables of each of these hosts."""


def is_replica_key(key: str) -> bool:
    return key.startswith(PREFIX)
