"""A Ray cluster of two nodes on this machine, started by `ray start`, whose workers and nodes a test may kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

RAY = str(Path(sys.executable).with_name("ray"))
START_S = 120
TASKS = ("stage_file", "divide_file", "number_feature", "write_shard")
# On the loopback alone: no token is needed, and one in the home folder is not to be asked for.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}


class RayCluster:
    """Two nodes: the head, on which the driver runs, and another."""

    def __init__(self, folder: str, cpus: tuple[int, int], environment: Mapping[str, str]) -> None:
        self._folder, self._cpus = folder, cpus
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.environment = {**os.environ, **ENVIRONMENT, **environment, "RAY_ADDRESS": self.address}
        self._head: list[psutil.Process] = []
        self._other: list[psutil.Process] = []

    def start(self) -> None:
        self._head = self._start("--head", f"--port={self._port}", f"--temp-dir={self._folder}", cpus=self._cpus[0])
        self.start_other()

    def start_other(self) -> None:
        if self._cpus[1]:
            self._other = self._start(f"--address={self.address}", cpus=self._cpus[1])

    def kill_other(self) -> None:
        """The whole node at once, as a machine that loses power."""
        _kill(self._other)

    def kill_a_worker(self, number: int) -> bool:
        """A process that runs a task, if there is one."""
        busy = [each for root in (*self._head, *self._other) for each in _workers(root)]
        if busy:
            with suppress(psutil.NoSuchProcess):
                busy[number % len(busy)].send_signal(signal.SIGKILL)
                return True
        return False

    def stop(self) -> None:
        _kill(self._other)
        _kill(self._head)

    def _start(self, *words: str, cpus: int) -> list[psutil.Process]:
        """The processes of a node, which go on when `ray start` has ended."""
        before = {process.pid for process in psutil.process_iter()}
        command = [
            RAY,
            "start",
            *words,
            "--node-ip-address=127.0.0.1",
            f"--num-cpus={cpus}",
            "--memory=8000000000",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            *(["--include-dashboard=false"] if "--head" in words else []),
        ]
        log = os.path.join(self._folder, "start.log")
        with open(log, "a") as out:
            ended = subprocess.run(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=START_S
            )
        if ended.returncode:
            raise RuntimeError(Path(log).read_text()[-2000:])
        mark = self.address
        started = [each for each in psutil.process_iter(["cmdline"]) if each.pid not in before]
        return [each for each in started if _is_node(each, self._folder, mark)]


def _is_node(process: psutil.Process, folder: str, address: str) -> bool:
    with suppress(psutil.Error):
        words = " ".join(process.cmdline())
        return "/ray/" in words and (folder in words or address in words)
    return False


def _workers(root: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [each for each in root.children(recursive=True) if _runs_a_task(each)]
    return []


def _runs_a_task(process: psutil.Process) -> bool:
    """Ray gives a worker the name of its task; a node's agents, without which it ends, have other names."""
    title = " ".join(process.cmdline())
    return title.startswith("ray::") and any(title.split(": ")[-1].startswith(task) for task in TASKS)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            for each in [*process.children(recursive=True), process]:
                with suppress(psutil.Error):
                    each.kill()
    psutil.wait_procs(processes, timeout=30)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def ray_cluster(cpus: tuple[int, int], environment: Mapping[str, str] | None = None) -> Iterator[RayCluster]:
    # Paths of sockets may have 107 characters, and pytest's folders have more.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(folder, cpus, environment or {})
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
