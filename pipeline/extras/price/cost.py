"""Read and describe the cost of a run, which the hook `price` writes to run_dir/cost.json."""

from __future__ import annotations

import json
from typing import Any

from pipeline.runtime.storage import storage

FILE = "cost.json"
# What is added up over ranks and attempts. Energy and network are of the hosts, with all their programs.
SUMMED = ("seconds", "cpu_s", "gpu_s", "disk_read_bytes", "disk_written_bytes", "network_bytes", "energy_j")


def cost_of_run(run_dir: str) -> dict[str, Any]:
    """Return the cost of all attempts of a run; empty if none was measured."""
    path = storage.join(run_dir, FILE)
    try:
        found = json.loads(storage.read_text(path)) if storage.is_file(path) else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def priced(totals: dict[str, float | None], world_size: int, price_per_hour: float | None) -> dict[str, float | None]:
    """Return the totals with the rank-hours and the price of `seconds` on `world_size` ranks."""
    hours = (totals["seconds"] or 0.0) / 3600 * world_size
    return totals | {"rank_hours": hours, "price": None if price_per_hour is None else hours * price_per_hour}


def describe_cost(cost: dict[str, Any]) -> str:
    """Return the cost as one line; what could not be measured is left out."""
    parts = [f"{cost['rank_hours']:.3g} rank-hours, {cost['cpu_s']:,.0f} CPU-seconds"]
    parts += [f"{cost['gpu_s']:,.0f} GPU-seconds"] if cost.get("gpu_s") else []
    for name, key in (("read from disk", "disk_read_bytes"), ("written", "disk_written_bytes")):
        parts += [f"{cost[key] / 2**20:,.1f} MiB {name}"] if cost.get(key) is not None else []
    for name, key, unit in (("of the network", "network_bytes", 2**20), ("of energy", "energy_j", 3600.0)):
        if cost.get(key) is not None:
            parts.append(f"{cost[key] / unit:,.1f} {'MiB' if unit == 2**20 else 'Wh'} {name} (of the hosts)")
    parts += [f"price {cost['price']:.4g}"] if cost.get("price") is not None else []
    return ", ".join(parts)
