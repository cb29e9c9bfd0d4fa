"""Define the interface of hosts that train separate replicas of the tables. An extra implements it.

model.*  optimizer.*               the mean of the tables over the hosts, and the dense layers; readers use these
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
        """Return the entry of the manifest.

        `apart`: the step holds each host's own tables in addition to their mean.
        """

    def state_to_save(self, state: dict[str, Any], *, average: bool = True) -> dict[str, Any]:
        """Return the state with the tables' mean.

        Collective unless `average` is False, which is for counting bytes.
        """

    def state_to_load(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under the keys of this host's own tables."""

    def holds_own_tables(self, manifest: Mapping[str, Any]) -> bool:
        """Return True if the step holds the tables of each of these hosts."""


def is_replica_key(key: str) -> bool:
    return key.startswith(PREFIX)
