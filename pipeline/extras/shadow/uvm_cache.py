"""Implement FBGEMM's cache of UVM rows (fused_uvm_caching), which evicts and writes back rows.

Tables are in host memory. lxu_cache_weights [sets x ways, D] holds some of their rows, and
lxu_cache_state [sets, ways] their numbers over all cached tables, or -1. FBGEMM's hash chooses the
set of a row. So code that writes a table without the cache gets wrong numbers here, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.extras.shadow.rules import named


class _Tables:
    """The cached tables of a call: maps a row's number over all tables to its weights on the host."""

    def __init__(self, call: dict[str, Any], begins: torch.Tensor) -> None:
        self.weights = call.get("weights", call.get("uvm_weights")).detach().view(-1)  # type: ignore[union-attr]
        # [features + 1]; a feature's first row number, or -1 if its table is not cached
        self.begins = begins
        self.table_map, self.offsets = call["cache_index_table_map"], call["weights_offsets"]
        self.d_offsets = call["D_offsets"]

    def row(self, number: int) -> torch.Tensor:
        feature = int(self.table_map[number])
        dim = int(self.d_offsets[feature + 1] - self.d_offsets[feature])
        begin = int(self.offsets[feature]) + (number - int(self.begins[feature])) * dim
        return self.weights[begin : begin + dim]


def populate_lru(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Load the rows of a batch into the cache. The least recently used rows are evicted."""
    call = named(func, args, kwargs)
    state, stamp = call["lxu_cache_state"], int(call["time_stamp"])
    used = call["lru_state"]
    held = _held(state)
    lock = call["lxu_cache_locking_counter"] if call["lock_cache_line"] else None
    for number in _wanted(call):
        place = held[number] if number in held else _fill(call, number, used, held, stamp, lock)
        if place is not None:
            used.view(-1)[place] = stamp
            if lock is not None:
                lock.view(-1)[place] += 1


def populate_lfu(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Load the rows of a batch into the cache. The least frequently used rows are evicted."""
    call = named(func, args, kwargs)
    state, counts = call["lxu_cache_state"], call["lfu_state"]
    held = _held(state)
    limit = int(call["total_cache_hash_size"])
    ids = call["linear_cache_indices"]
    counts.index_add_(0, ids[ids < limit].long(), torch.ones(int((ids < limit).sum()), dtype=counts.dtype))
    for number in _wanted(call):
        if number not in held:
            frequency = torch.where(state >= 0, counts[state.clamp(min=0)], -1)
            _fill(call, number, frequency, held, int(counts[number]), None)


def _wanted(call: dict[str, Any]) -> list[int]:
    ids = call["linear_cache_indices"]
    return torch.unique(ids[ids < int(call["total_cache_hash_size"])]).tolist()


def _held(state: torch.Tensor) -> dict[int, int]:
    return {number: place for place, number in enumerate(state.view(-1).tolist()) if number >= 0}


def _fill(call: dict[str, Any], number: int, rank: torch.Tensor, held: dict[int, int], stamp: int, lock: Any) -> Any:
    """Put a row into its set of the cache, and write the lowest-ranking row of the set back.

    Returns None (a miss) if all ways hold rows of this batch or locked rows.
    """
    state, cache = call["lxu_cache_state"], call["lxu_cache_weights"]
    sets, ways = state.shape
    chosen = int(torch.ops.fbgemm.lxu_cache_slot(number, sets))
    order = [(int(rank[chosen, way]) if state[chosen, way] >= 0 else -1, way) for way in range(ways)]
    if lock is not None:
        order = [(value, way) for value, way in order if lock[chosen, way] == 0]
    if not order or min(order)[0] >= stamp:
        return None
    way = min(order)[1]
    place, tables = chosen * ways + way, _Tables(call, _begins(call))
    evicted = int(state[chosen, way])
    if evicted >= 0:
        old = tables.row(evicted)
        old.copy_(cache[place, : len(old)])
        held.pop(evicted, None)
    row = tables.row(number)
    cache[place, : len(row)] = row.to(cache.dtype)
    state[chosen, way] = number
    held[number] = place
    return place


def _begins(call: dict[str, Any]) -> torch.Tensor:
    found = call.get("hash_size_cumsum", call.get("cache_hash_size_cumsum"))
    assert found is not None
    return found


def flush(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Write every row of the cache back to its table."""
    call = named(func, args, kwargs)
    tables = _Tables(call, _begins(call))
    for number, place in _held(call["lxu_cache_state"]).items():
        row = tables.row(number)
        row.copy_(call["lxu_cache_weights"][place, : len(row)])


def lookup(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the position of each row in the cache, -1 for a miss."""
    call = named(func, args, kwargs)
    held = _held(call["lxu_cache_state"])
    found = [held.get(number, -1) for number in call["linear_cache_indices"].tolist()]
    locations = torch.tensor(found, dtype=torch.int32)
    given = call.get("lxu_cache_locations_output")
    return locations if given is None else given.copy_(locations)


def update_locations(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Keep known locations. For a miss use the new location."""
    call = named(func, args, kwargs)
    old, new = call["lxu_cache_locations"], call["lxu_cache_locations_new"]
    old.copy_(torch.where(old < 0, new[: len(old)], old))


def unlock(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    call = named(func, args, kwargs)
    places = torch.unique(call["lxu_cache_locations"])
    call["lxu_cache_locking_counter"].view(-1)[places[places >= 0].long()] -= 1


def linearize(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return each id's row number over all cached tables; for uncached tables the number after the
    last one.

    FBGEMM's CPU kernel returns uninitialized memory.
    """
    call = named(func, args, kwargs)
    begins, ids, offsets = call["cache_hash_size_cumsum"], call["indices"].long(), call["offsets"].long()
    num_features, base = len(begins) - 1, int(call["indices_base_offset"])
    if call["B_offsets"] is not None:
        ends = offsets[call["B_offsets"].long()[1:]]
    else:
        ends = offsets[torch.arange(1, num_features + 1) * ((len(offsets) - 1) // num_features)]
    feature = torch.searchsorted(ends, torch.arange(base, base + len(ids)), right=True)
    begin = begins[feature]
    return torch.where(begin >= 0, begin + ids, begins[-1]).to(call["indices"].dtype)


def unique(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the distinct numbers padded to the given length, how many there are, and their counts."""
    call = named(func, args, kwargs)
    numbers, counts = torch.unique(call["linear_indices"], return_counts=True)
    padded = torch.full_like(call["linear_indices"], int(call["max_indices"]))
    padded[: len(numbers)] = numbers
    length = torch.tensor([len(numbers)], dtype=torch.int32)
    return padded, length, counts.int() if call["compute_count"] else None


def new_managed(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Allocate host memory that the device reads too."""
    from math import prod

    from pipeline.extras.shadow import memory
    from pipeline.extras.shadow.state import settings

    call = named(func, args, kwargs)
    like, sizes = call["self"], tuple(call["sizes"])
    if prod(sizes) * like.element_size() > settings.untouched_above_bytes:
        return memory.in_host_memory(memory.untouched(sizes, like.dtype), "uvm")
    return memory.in_host_memory(torch.zeros(sizes, dtype=like.dtype), "uvm")


def is_managed(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    from pipeline.extras.shadow import memory

    return memory.is_kind(args[0], "uvm")


KERNELS = [
    ("fbgemm::linearize_cache_indices", linearize),
    ("fbgemm::get_unique_indices", unique),
    ("fbgemm::lru_cache_populate", populate_lru),
    ("fbgemm::lfu_cache_populate", populate_lfu),
    ("fbgemm::lxu_cache_flush", flush),
    ("fbgemm::lxu_cache_lookup", lookup),
    ("fbgemm::lxu_cache_locations_update", update_locations),
    ("fbgemm::lxu_cache_locking_counter_decrement", unlock),
    ("fbgemm::new_(unified|managed|vanilla_managed)_tensor", new_managed),
    ("fbgemm::(is_uvm_tensor|uvm_storage)", is_managed),
]
