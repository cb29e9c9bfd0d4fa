"""Hold what `calibrate` has measured on a machine, and read and write it as JSON.

A setup is "<ranks>x<threads>": ranks that compute at the same time on one host, and threads of each.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import pipeline
from pipeline.extras.step_time.rates import DEFAULT_RATES, fit_rates
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.storage import storage

FORMAT = 2
LIBRARIES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numba")
MAX_BUSY = 0.1  # of a core for each of ours: with more use by other programs, a machine is busy
MAX_NOISE = 0.15  # spread of the operation that is repeated during a calibration
MEMORY_STEP_GIB = 1.0  # a kernel update changes the total by some MiB


@dataclass(frozen=True)
class TimedJob:
    """Hold the time of a small training. us: microseconds of a step. amounts: the amounts of work.AMOUNTS."""

    setup: str
    us: float
    spread: float
    amounts: dict[str, float]


@dataclass(frozen=True)
class Speeds:
    """Hold speeds that were measured directly. exchange_*: speed of an all-to-all between the ranks
    of this host; None for one rank.

    reader_us: microseconds for a row, by the row's number of columns.
    """

    tflops_fp32: float
    tflops_bf16: float
    copy_gb_per_s: float
    write_gb_per_s: float
    reader_us: dict[str, float]
    exchange_gb_per_s: float | None = None
    exchange_us: float | None = None

    def row_us(self, num_columns: int) -> float:
        """Return the microseconds of a row. They are interpolated linearly from the two measured numbers of columns."""
        (few, few_us), (many, many_us) = ((float(key), us) for key, us in self.reader_us.items())
        return max(0.0, few_us + (many_us - few_us) * (num_columns - few) / (many - few))


@dataclass(frozen=True)
class Machine:
    """Hold the properties that distinguish kinds of machines."""

    cpu: str
    cores: int
    memory_gib: float
    l3_mib: float


@dataclass(frozen=True)
class Conditions:
    """Hold the conditions of the measurement. busy_cores: cores that other programs used. noise:
    spread of the times of one repeated operation.

    clock: `wall` seconds, or `cpu` seconds of the process.
    """

    date: str
    seconds: float
    busy_cores: float
    noise: float
    reference_us: float
    clock: str = "wall"


@dataclass(frozen=True)
class Calibration:
    """Hold all results of one run of `calibrate`."""

    name: str
    machine: Machine
    versions: dict[str, str]
    conditions: Conditions
    speeds: Speeds
    jobs: list[TimedJob]

    @property
    def setups(self) -> list[str]:
        return sorted({job.setup for job in self.jobs})

    def rates(self, setup: str) -> dict[str, float]:
        """Return the rates of work.AMOUNTS, fitted to the jobs of one setup. The fit prefers rates
        near the rates of all setups.

        Raises:
            ConfigError: the setup was not measured.
        """
        own = [job for job in self.jobs if job.setup == setup]
        if not own:
            raise ConfigError(
                f"calibration {self.name!r} has measured {', '.join(self.setups)} (ranks x "
                f"threads), but not {setup}; measure it too: python -m pipeline calibrate "
                f"setups=[{setup}]"
            )
        return _fit(own, _fit(self.jobs, DEFAULT_RATES))

    def error(self, setup: str) -> float:
        """Return the geometric mean error of the fitted rates on the setup's jobs."""
        rates = self.rates(setup)
        own = [job for job in self.jobs if job.setup == setup]
        logs = [np.log(step_us(job.amounts, rates) / job.us) for job in own]
        return float(np.exp(np.abs(logs).mean()) - 1)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def _fit(jobs: list[TimedJob], prior: dict[str, float]) -> dict[str, float]:
    return fit_rates([job.amounts for job in jobs], [job.us for job in jobs], prior)


def step_us(amounts: dict[str, float], rates: dict[str, float]) -> float:
    return sum(rates[name] * amount for name, amount in amounts.items())


def read_calibration(path: str) -> Calibration:
    """Return the calibration in a file. Raises ConfigError if there is no such file, or this release cannot read it."""
    if not storage.is_file(path):
        raise ConfigError(
            f"hardware.calibration={path} does not exist; make it with python -m pipeline calibrate, or "
            "set hardware.calibration=null to predict from the data sheet's values"
        )
    try:
        values = json.loads(storage.read_text(path))
        found = values.pop("format", None)
        if found != FORMAT:
            raise DataError(f"its format is {found}, this release reads {FORMAT}")
        return Calibration(
            values["name"],
            Machine(**values["machine"]),
            values["versions"],
            Conditions(**values["conditions"]),
            Speeds(**values["speeds"]),
            [TimedJob(**job) for job in values["jobs"]],
        )
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise ConfigError(
            f"{path} is not a calibration ({error}); make it with python -m pipeline calibrate"
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


def differences(measured: Calibration, machine: Machine, versions: dict[str, str]) -> list[str]:
    """Describe with numbers how the calibration's machine and versions differ from the
    given ones.
    """
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


def disturbances(measured: Calibration) -> list[str]:
    """Describe with numbers what disturbed the measurement: other programs, or times that did not
    repeat.
    """
    conditions, cores, lines = measured.conditions, measured.machine.cores, []
    if conditions.busy_cores > MAX_BUSY * cores:
        lines.append(
            f"other programs took {conditions.busy_cores:.2f} of {cores} cores meanwhile (at most "
            f"{MAX_BUSY * cores:.2f} counts as idle)"
        )
    if conditions.noise > MAX_NOISE:
        lines.append(
            f"an operation of {conditions.reference_us:.0f} us that was repeated throughout varied by "
            f"{100 * conditions.noise:.0f} % (quartiles; at most {100 * MAX_NOISE:.0f} % counts as steady)"
        )
    return lines


def median_and_spread(seconds: Iterable[float]) -> tuple[float, float]:
    """Return the median, and half the distance of the quartiles divided by the median."""
    low, middle, high = np.percentile(list(seconds), (25, 50, 75))
    return float(middle), float((high - low) / 2 / max(middle, 1e-12))


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
