"""Record what a program did on the shadow GPU: counts, and findings with their places.

A finding is a fault that a real GPU would not report, or not at its place. Subtract two `counts()`
to get the counts of one step.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

# The files whose frames are reported as the place of a sync or a fault: not files of torch or of
# the shadow.
_PLACES = ("/pipeline/", "/torchrec/", "/fbgemm_gpu/", "/tests/", "/benchmarks/", "/examples/")
_MAX_FINDINGS = 200  # of one kind, because a fault in a loop is found once per step


@dataclass(frozen=True)
class Finding:
    """A fault: its kind (race, reuse, host_read, device, collective), what happened, and where."""

    kind: str
    text: str
    place: str
    count: int = 1


@dataclass
class Report:
    """Everything that the shadow has counted in this process since `start()`."""

    rank: int = 0
    operations: Counter[str] = field(default_factory=Counter)  # on GPU tensors, by name
    launches: int = 0  # operations that are kernels: neither views nor queries of a tensor
    syncs: Counter[str] = field(default_factory=Counter)  # "kind place": the host waits
    copies: Counter[str] = field(default_factory=Counter)  # host_to_device, device_to_host, ...
    copied_bytes: Counter[str] = field(default_factory=Counter)
    waits: int = 0  # of one stream for another
    record_streams: int = 0
    collectives: list[dict[str, Any]] = field(default_factory=list)  # in order, see collectives.py
    findings: dict[tuple[str, str, str], int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)  # live tensors, by phase

    def find(self, kind: str, text: str) -> None:
        """Record a fault at the caller's place."""
        key = (kind, text, place())
        if key in self.findings or len(self.findings) < _MAX_FINDINGS:
            self.findings[key] = self.findings.get(key, 0) + 1

    @property
    def problems(self) -> list[Finding]:
        return [Finding(*key, count) for key, count in self.findings.items()]

    def kinds(self, kind: str) -> list[Finding]:
        return [each for each in self.problems if each.kind == kind]

    def counts(self) -> dict[str, int]:
        """Return the totals that benchmarks compare. Subtract two results to get the counts of one step."""
        return {
            "launches": self.launches,
            "syncs": sum(self.syncs.values()),
            "collectives": len(self.collectives),
            "waits": self.waits,
            "record_streams": self.record_streams,
            **{f"copies_{kind}": count for kind, count in self.copies.items()},
        }

    def as_record(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        record = {name: value for name, value in vars(self).items() if name not in ("findings", "collectives")}
        record["problems"] = [asdict(each) for each in self.problems]
        record["num_collectives"] = len(self.collectives)
        return json.loads(json.dumps(record))

    def summary(self) -> str:
        """Return one line for a terminal."""
        peak = max(self.peak_bytes.values(), default=0) / 2**20
        return (
            f"shadow GPU of rank {self.rank}: {self.launches:,} launches, {sum(self.syncs.values())} syncs, "
            f"{sum(self.copies.values())} copies, {len(self.collectives)} collectives, {self.waits} waits, "
            f"peak {peak:.1f} MiB, {len(self.findings)} problem(s)"
        )


_current = Report()


def current() -> Report:
    return _current


def start(rank: int = 0) -> Report:
    """Begin a new report. The earlier report stays unchanged."""
    global _current
    _current = Report(rank)
    return _current


def place() -> str:
    """Return folder/file.py:line of the innermost frame of the program, or "?" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/extras/shadow/" not in name and any(part in name for part in _PLACES):
            return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def sync(kind: str) -> None:
    """Count that the host waits for the device at the caller's place."""
    _current.syncs[f"{kind} {place()}"] += 1


def copy(kind: str, num_bytes: int) -> None:
    _current.copies[kind] += 1
    _current.copied_bytes[kind] += num_bytes
