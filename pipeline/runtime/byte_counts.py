"""Format numbers of bytes for people."""

from __future__ import annotations

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def show_bytes(num_bytes: float) -> str:
    """Format with two decimals in GiB, MiB or KiB: the largest unit with a value of at least 0.1."""
    for unit, size in UNITS[:-1]:
        if abs(num_bytes) >= size / 10:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes / 1024:,.2f} KiB"


def show_size(size_bytes: int) -> str:
    """Format with one decimal in the largest unit with a value of at least 1, such as 153.6 KiB."""
    for unit, size in UNITS:
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} B"
