"""Choose the tensors of a checkpoint for a model whose hosts train separate tables.

Only sharded tensors belong to a host's tables. Tensors that every rank has are equal on all hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.distributed._shard.sharded_tensor import ShardedTensor

from pipeline.checkpoint.tables import PREFIX


class HostTables(Protocol):
    num_hosts: int
    host: int
    embedding_sync: str
    equal: bool

    def averaged(self, tensor: ShardedTensor) -> ShardedTensor:
        """Collective: return a copy with the mean over the hosts."""


def describe_replicas(replicas: HostTables) -> dict[str, Any]:
    """Return values for the manifest.

    `apart`: the checkpoint has the tables of each host in addition to their mean.
    """
    return {
        "num_hosts": replicas.num_hosts,
        "embedding_sync": replicas.embedding_sync,
        "apart": not replicas.equal,
    }


def state_to_save(state: dict[str, Any], replicas: HostTables, *, average: bool = True) -> dict[str, Any]:
    """Collective, unless `average` is False, which is for counting bytes."""
    if replicas.equal and average:
        return state
    means = _mapped(state, replicas.averaged) if average else state
    return {**means, f"{PREFIX}{replicas.host}": _sharded_only(state)}


def state_to_load(state: dict[str, Any], replicas: HostTables) -> dict[str, Any]:
    """Return the same tensors under the keys of this host's tables."""
    return {**_without_sharded(state), f"{PREFIX}{replicas.host}": _sharded_only(state)}


def holds_own_tables(manifest: Mapping[str, Any], replicas: HostTables) -> bool:
    """Return whether the checkpoint has separate tables for each of these hosts."""
    stored = manifest.get("replicas") or {}
    return bool(stored.get("apart")) and stored["num_hosts"] == replicas.num_hosts


def _mapped(state: Mapping[str, Any], change: Callable[[ShardedTensor], ShardedTensor]) -> dict[str, Any]:
    return {
        name: _mapped(value, change)
        if isinstance(value, Mapping)
        else change(value)
        if isinstance(value, ShardedTensor)
        else value
        for name, value in state.items()
    }


def _sharded_only(state: Mapping[str, Any]) -> dict[str, Any]:
    return _kept(state, sharded=True)


def _without_sharded(state: Mapping[str, Any]) -> dict[str, Any]:
    return _kept(state, sharded=False)


def _kept(state: Mapping[str, Any], sharded: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            if inner := _kept(value, sharded):  # DCP treats an empty dict as a pickled value
                kept[name] = inner
        elif isinstance(value, ShardedTensor) == sharded:
            kept[name] = value
    return kept
