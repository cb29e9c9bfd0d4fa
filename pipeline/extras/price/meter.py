"""Count what this process and this host use: CPU time, bytes, energy. None: cannot be read here."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pipeline import devices

POWERCAP, NETWORK, OWN_IO = Path("/sys/class/powercap"), Path("/proc/self/net/dev"), Path("/proc/self/io")


class Meter:
    """Count from now on. of_host: this process also counts the network and the energy of its host."""

    def __init__(self, of_host: bool) -> None:
        self._sources: dict[str, Callable[[], float | None]] = {
            "seconds": time.monotonic,
            "cpu_s": _cpu_seconds,
            "gpu_s": time.monotonic if devices.current().is_asynchronous else lambda: 0.0,
            "disk_read_bytes": lambda: _own_bytes("read_bytes"),
            "disk_written_bytes": lambda: _own_bytes("write_bytes"),
            "network_bytes": _network_bytes if of_host else lambda: 0.0,
        }
        self._packages = list(POWERCAP.glob("intel-rapl:[0-9]*")) if of_host else []
        self._packages = [each for each in self._packages if each.name.count(":") == 1]
        self._is_of_host = of_host
        self._joules, self._last = 0.0, self._counters()
        self._begin = {name: source() for name, source in self._sources.items()}

    def read(self) -> dict[str, float | None]:
        """Return what was used since the meter was made."""
        found: dict[str, float | None] = {}
        for name, source in self._sources.items():
            now, before = source(), self._begin[name]
            found[name] = None if now is None or before is None else now - before
        return found | {"energy_j": self._energy()}

    def _energy(self) -> float | None:
        """Return joules of the host's processors (RAPL) and of this rank's GPU (NVML)."""
        now = self._counters()
        if not now:
            return None if self._is_of_host else 0.0
        for name, (value, wraps_at) in now.items():
            before = self._last.get(name, (value, wraps_at))[0]
            self._joules += value - before + (wraps_at if value < before else 0.0)
        self._last = now
        return self._joules

    def _counters(self) -> dict[str, tuple[float, float]]:
        """Return counter -> joules, and the value at which it begins again."""
        found = {}
        for package in self._packages:
            with suppress(OSError, ValueError):  # only root can read it on most hosts
                values = (float((package / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj"))
                found[package.name] = (next(values), next(values))
        if (handle := _gpu()) is not None:
            import pynvml

            with suppress(pynvml.NVMLError):
                found["gpu"] = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, 0.0)
        return found


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    of = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in of)


def _own_bytes(name: str) -> float | None:
    try:
        lines = dict(line.split(": ") for line in OWN_IO.read_text().splitlines())
        return float(lines[name])
    except (OSError, KeyError, ValueError):
        return None


def _network_bytes() -> float | None:
    """Return the bytes received and sent by all interfaces except loopback."""
    try:
        lines = [line.partition(":") for line in NETWORK.read_text().splitlines()[2:]]
        return float(sum(int(cells.split()[at]) for name, _, cells in lines if name.strip() != "lo" for at in (0, 8)))
    except (OSError, IndexError, ValueError):
        return None


@cache
def _gpu() -> Any:
    """Return NVML's handle of this rank's GPU; None without a GPU or without pynvml."""
    if not devices.current().is_asynchronous:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:  # the simulated GPU, an old driver: the energy is not known
        return None
