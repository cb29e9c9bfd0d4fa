"""Answer everything that differs between devices: devices.current() is the device of this process.

init_distributed chooses the device once. No other code asks what type a tensor's or a rank's device has.
A device of another kind is a subclass of base.Device in a file of its own: @register("device", "xpu").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.devices.base import Device

_current: Device | None = None


def current() -> Device:
    """The device that init_distributed has chosen; the CPU before that, and in verbs without ranks."""
    global _current
    if _current is None:
        _current = named("cpu")
    return _current


def use(device: Device | None) -> None:
    """Make `device` the current one; None: forget it."""
    global _current
    _current = device


@contextmanager
def using(device: Device) -> Iterator[Device]:
    """Make `device` the current one inside."""
    before = _current
    use(device)
    try:
        yield device
    finally:
        use(before)


def named(name: str, index: int = 0, plain: bool = False) -> Device:
    """The device of this kind, or the current one for auto; `plain`: without this package's kernels (sharding.fast_cpu=false).

    The device need not be here: a plan is made for hardware that is somewhere else.

    Raises:
        ConfigError: no device of that name is registered.
    """
    from pipeline.config.registry import find

    if name == "auto":
        return current()
    kinds()
    kind: type[Device] = find("device", name, "hardware.compute_device")
    return (kind.plain or kind)(index) if plain else kind(index)


def best_here() -> str:
    """The name of the first accelerator that is here, else cpu."""
    return next((name for name, kind in kinds().items() if kind.has_own_memory and kind.is_available()), "cpu")


def kinds() -> Mapping[str, type[Device]]:
    """By name."""
    import pipeline.devices.cpu.device  # noqa: F401  the registry imports the modules of a package, not its folders
    from pipeline.config.registry import components

    return components("device")
