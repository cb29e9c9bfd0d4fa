"""Answer everything that differs between devices. devices.current() returns this process's device.

init_distributed chooses the device once. No other code checks the type of a device. To add a kind
of device, subclass base.Device in a new file: @register("device", "xpu").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.devices.base import Device

_current: Device | None = None


def current() -> Device:
    """Return the device that init_distributed chose. Before, and in verbs without ranks, return the CPU."""
    global _current
    if _current is None:
        _current = named("cpu")
    return _current


def use(device: Device | None) -> None:
    """Make `device` the current device. None resets it."""
    global _current
    _current = device


@contextmanager
def using(device: Device) -> Iterator[Device]:
    """Make `device` the current device inside the context."""
    before = _current
    use(device)
    try:
        yield device
    finally:
        use(before)


def named(name: str, index: int = 0, plain: bool = False) -> Device:
    """Return the device of this kind, which this host need not have; for "auto" the current device.

    plain: without this package's kernels (sharding.fast_cpu=false). Raises ConfigError if the kind
    is unknown.
    """
    from pipeline.config.registry import find

    if name == "auto":
        return current()
    kinds()
    kind: type[Device] = find("device", name, "hardware.compute_device")
    return (kind.plain or kind)(index) if plain else kind(index)


def best_here() -> str:
    """Return the kind of this host's first accelerator, or "cpu"."""
    return next((name for name, kind in kinds().items() if kind.has_own_memory and kind.is_available()), "cpu")


def kinds() -> Mapping[str, type[Device]]:
    """Return the classes of all registered devices by name."""
    import pipeline.devices.cpu.device  # noqa: F401  the registry imports the modules of a package, not its folders
    from pipeline.config.registry import components

    return components("device")
