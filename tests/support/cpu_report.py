"""Write how many CPU seconds each test took, its child processes included:  python -m pytest --cpu-report FILE

Each line is {"test", "phase", "cpu_s"}. `python -m tests.support.cpu_report FILE` adds them up by file of tests.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.forks import ADDRESS, CPU_REPORT
from tests.support.ranks import RankPool


def cpu_seconds() -> float:
    """User and system time of this process, of the children that it has waited for, of those that still run, and of ranks."""
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    return sum(os.times()[:4]) + sum(_cpu_seconds_of(pid) for pid in {*children, *RankPool.pids})


def _cpu_seconds_of(pid: int) -> float:
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except psutil.Error:  # it has ended meanwhile
        return 0.0


class CpuReport:
    def __init__(self, path: str) -> None:
        self._path, self._before = path, cpu_seconds()
        if ADDRESS in os.environ:  # else the server of commands is this process's own
            os.environ[CPU_REPORT] = str(Path(path).resolve())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Iterator[None]:
        now = cpu_seconds()
        with open(self._path, "a") as file:
            line = {
                "test": report.nodeid,
                "phase": report.when,
                "cpu_s": round(max(now - self._before, 0.0), 3),
            }  # less: ranks have ended
            file.write(json.dumps(line) + "\n")
        self._before = now
        return (yield)


def main(path: str) -> None:
    tests, files = Counter[str](), Counter[str]()
    for line in map(json.loads, Path(path).read_text().splitlines()):
        tests[f"{line['test']} ({line['phase']})"] += line["cpu_s"]
        files[line["test"].partition("::")[0]] += line["cpu_s"]
    for title, counted in (("tests", tests), ("files", files)):
        print(f"the {title} that take most, in CPU seconds")
        for name, seconds in counted.most_common(60):
            print(f"{seconds:8.1f}  {name}")
    print(f"{sum(files.values()) / 60:8.1f}  CPU minutes in all")


if __name__ == "__main__":
    main(*sys.argv[1:])
