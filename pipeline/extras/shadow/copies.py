"""Count copies between the host and a shadow GPU, and find reads of memory that a copy still fills.

A non-blocking copy into pinned memory returns at once; the host must wait before it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.extras.shadow import memory, report, streams
from pipeline.extras.shadow.rules import Rule

_in_flight: dict[int, tuple[Any, int, int, str]] = {}  # id of a storage -> storage, stream, tick, place


def check_host_reads(rule: Rule, flat: list[Any]) -> None:
    """Find operations of the host on memory that a copy may still fill."""
    if not _in_flight:
        return
    for each in flat:
        if isinstance(each, torch.Tensor) and (key := id(each.untyped_storage())) in _in_flight:
            _, stream, tick, since = _in_flight[key]
            if not streams.host_knows(stream, tick) and rule.touches_data:
                report.current().find(
                    "host_read",
                    f"{rule.name} on the host uses a tensor of shape {list(each.shape)} that a non-blocking "
                    f"copy at {since} still fills: synchronize first",
                )
            if streams.host_knows(stream, tick):
                del _in_flight[key]


def _remember(storage: Any) -> None:
    """Record that the current stream still fills this memory of the host. Drop finished copies."""
    for key, (_, stream, tick, _) in list(_in_flight.items()):
        if streams.host_knows(stream, tick):
            del _in_flight[key]
    stream = streams.current_stream().number
    _in_flight[id(storage)] = (storage, stream, streams.tick_of(stream), report.place())


@dataclass(frozen=True)
class Copy:
    """One copy: source and target (host or GPU), and whether the host continues without waiting."""

    from_host: bool
    to_host: bool
    is_near: bool  # within one device
    non_blocking: bool
    from_pinned: bool
    num_bytes: int


def described(rule: Rule, args: Any, kwargs: Any, target: torch.device) -> Copy:
    """Describe what copy_ or _to_copy is about to copy."""
    source, into = (args[1], args[0].device) if rule.base == "copy_" else (args[0], target)
    non_blocking = kwargs.get("non_blocking", args[2] if rule.base == "copy_" and len(args) > 2 else False)
    from_host = source.device.type == "cpu"
    return Copy(
        from_host=from_host,
        to_host=into.type == "cpu",
        is_near=source.device == into,
        non_blocking=bool(non_blocking),
        from_pinned=from_host and memory.is_kind(source, "pinned"),
        num_bytes=source.numel() * source.element_size(),
    )


def finish(copied: Copy, result: torch.Tensor) -> None:
    """Count the copy. The host waits for it unless it is non-blocking and its memory is pinned."""
    if copied.from_host:
        report.copy("host_to_device" if copied.from_pinned else "pageable_host_to_device", copied.num_bytes)
        waits = not copied.non_blocking and copied.num_bytes > 0
    elif copied.to_host:
        report.copy("device_to_host", copied.num_bytes)
        waits = not (copied.non_blocking and memory.is_kind(result, "pinned"))
        if not waits:
            _remember(result.untyped_storage())
    else:
        report.copy("on_device" if copied.is_near else "device_to_device", copied.num_bytes)
        waits = False
    if waits:
        report.sync("host_to_device" if copied.from_host else "device_to_host")
        streams.wait_for_host_copy()


def reset() -> None:
    """Forget the copies of an earlier program."""
    _in_flight.clear()
