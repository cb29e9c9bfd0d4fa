"""Hold the table of what a machine's operations take, with where and when it was measured, and read and write it as JSON.

A setup is "<ranks>x<threads>": so many ranks that compute at the same time on one host, each with so many threads.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pipeline
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.storage import storage

FORMAT = 1
LIBRARIES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numba")
MOST_BUSY = 0.1  # of a core by each of ours: what other programs may take before a measurement is called busy
MOST_NOISE = 0.15  # spread of the reference operation over a calibration
LEAST_JOBS = 4  # of a setup, for quartiles
STEADY_NOISE = 0.1  # up to which steps are predicted as closely as docs/do/planning.md says
MEMORY_STEP_GIB = 1.0  # a kernel's update moves the total by some MiB

Number = float | int | str


@dataclass(frozen=True)
class Measurement:
    """`us`: median microseconds of one call; `spread`: half the distance of its quartiles, as a share of the median. beside: of a job,
    microseconds of each of machine_state.PROBES before and after it."""

    kind: str
    setup: str
    shape: dict[str, Number]
    us: float
    spread: float = 0.0
    beside: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """What tells one kind of machine from another; a fleet's equal nodes are one kind."""

    cpu: str
    cores: int
    memory_gib: float
    l3_mib: float


@dataclass(frozen=True)
class Conditions:
    """busy_cores: cores that other programs took meanwhile; noise: spread of one operation repeated throughout; clock: `wall`, or
    `cpu` seconds of the process, which others lengthen through caches and frequency alone."""

    date: str
    seconds: float
    busy_cores: float
    noise: float
    reference_us: float
    clock: str = "wall"


@dataclass(frozen=True)
class Measurements:
    """The whole table of one calibration."""

    name: str
    machine: Machine
    versions: dict[str, str]
    conditions: Conditions
    rows: list[Measurement]

    @property
    def setups(self) -> list[str]:
        return sorted({row.setup for row in self.rows})

    def of(self, kind: str, setup: str) -> list[Measurement]:
        return [row for row in self.rows if row.kind == kind and row.setup == setup]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def read_measurements(path: str) -> Measurements:
    """Raises ConfigError where there is no such file, or none that this release can read."""
    if not storage.is_file(path):
        raise ConfigError(
            f"hardware.calibration={path} is not there; make it with python -m pipeline calibrate, or set "
            "hardware.calibration=null to predict from the data sheet's values"
        )
    try:
        values = json.loads(storage.read_text(path))
        found = values.pop("format", None)
        if found != FORMAT:
            raise DataError(f"its format is {found}, this release reads {FORMAT}")
        return Measurements(
            values["name"],
            Machine(**values["machine"]),
            values["versions"],
            Conditions(**values["conditions"]),
            [Measurement(**row) for row in values["rows"]],
        )
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise ConfigError(
            f"{path} is no table of measurements ({error}); make it with python -m pipeline calibrate"
        ) from error


def this_machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(_cpu_name(), len(os.sched_getaffinity(0)), round(memory, 2), _l3_mib())


def these_versions() -> dict[str, str]:
    found = {"pipeline": pipeline.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def differences(measured: Measurements, machine: Machine, versions: dict[str, str]) -> list[str]:
    """Say in what the machine and versions of a calibration differ from those given, with numbers. Empty: in nothing."""
    own, lines = measured.machine, []
    if own.cpu != machine.cpu or own.cores != machine.cores:
        lines.append(f"measured on {own.cores} x {own.cpu}, this machine has {machine.cores} x {machine.cpu}")
    if abs(own.memory_gib - machine.memory_gib) > MEMORY_STEP_GIB:
        lines.append(f"measured with {own.memory_gib:g} GiB of memory, this machine has {machine.memory_gib:g}")
    if own.l3_mib != machine.l3_mib:
        lines.append(f"measured with {own.l3_mib:g} MiB of last-level cache, this machine has {machine.l3_mib:g}")
    for name in sorted(measured.versions.keys() | versions.keys()):
        before, now = measured.versions.get(name, "none"), versions.get(name, "none")
        if before != now:
            lines.append(f"measured with {name} {before}, here is {now}")
    return lines


def disturbances(measured: Measurements) -> list[str]:
    """Say with numbers what was wrong while it was measured: other programs, or times that did not repeat."""
    conditions, lines = measured.conditions, []
    if conditions.busy_cores > MOST_BUSY * measured.machine.cores:
        lines.append(
            f"other programs took {conditions.busy_cores:.2f} of {measured.machine.cores} cores meanwhile "
            f"(at most {MOST_BUSY * measured.machine.cores:.2f} is called idle)"
        )
    if conditions.noise > MOST_NOISE:
        lines.append(
            f"one and the same operation of {conditions.reference_us:.0f} us varied by {100 * conditions.noise:.0f} % "
            f"(quartiles; at most {100 * MOST_NOISE:.0f} % is called steady)"
        )
    return lines


def unsteadiness(measured: Measurements) -> str:
    """What to expect of a machine that varied more than predictions are off on a steady one; empty where it did not.

    By the product that is repeated throughout, and by the pass over memory that is timed beside each job: other guests of a
    processor slow memory down where they leave a core's own cache alone.
    """
    noise, memory = measured.conditions.noise, _memory_spread(measured)
    varied = [f"one and the same operation varied by {100 * noise:.0f} %"] if STEADY_NOISE < noise <= MOST_NOISE else []
    varied += [f"a pass over memory beside its jobs varied by {100 * memory:.0f} %"] if memory > STEADY_NOISE else []
    if not varied:
        return ""
    return (
        f"the machine was unsteady while it was calibrated: {', '.join(varied)} (quartiles; up to {100 * STEADY_NOISE:.0f} % is steady), and "
        "predicted steps may be off by twice as much. Order of plans is safer than milliseconds; calibrate again in another hour"
    )


def _memory_spread(measured: Measurements) -> float:
    """The largest of all setups; 0 where it was not timed."""
    found = {
        setup: [row.beside["memory"] for row in measured.of("job", setup) if "memory" in row.beside]
        for setup in measured.setups
    }
    return max((median_and_spread(times)[1] for times in found.values() if len(times) >= LEAST_JOBS), default=0.0)


def median_and_spread(seconds: Iterable[float]) -> tuple[float, float]:
    """The median, and half the distance of the quartiles as a share of it."""
    ordered = sorted(seconds)
    count = len(ordered)
    middle = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
    return middle, (ordered[(3 * count) // 4 if count > 1 else 0] - ordered[count // 4]) / 2 / max(middle, 1e-12)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _l3_mib() -> float:
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    text = size.read_text().strip() if size.exists() else ""
    units = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
    return float(text[:-1]) * units[text[-1]] if text[-1:] in units else 0.0
