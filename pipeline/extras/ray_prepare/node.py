"""Run one node of a preparation with Ray:  python -m pipeline.extras.ray_prepare.node --address
HOST:PORT -- data=... engine=ray

Run the same command on every node of an allocation. The first node starts the head of a Ray
cluster, runs `prepare` there and ends the cluster afterwards. The other nodes join. It does the
same as `ray symmetric-run`, except that it exits with the code of `prepare`, even if Ray did not
start, and does not stop other clusters on the host: symmetric-run (2.60) exits with 0 in that case,
and ends by `ray stop`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.runtime.process.exit_codes import FAILED

MEETING_S = 600  # how long a node waits for the head
ENDING_S = 30  # how long the head has to end
LEAVING_S = 2  # how long a worker has, because nothing runs on it once the head is gone
STARTED = "Ray runtime started"  # part of the output of `ray start`
# Workers start with their node, and import what tasks need while the driver still starts.
PRELOADED = ("pipeline.extras.ray_prepare.executor", "pipeline.data.prepare.prepare")
Process = subprocess.Popen[bytes]


def set_token_mode() -> None:
    """Let `ray start` and `ray.init` agree on tokens: the first requires a token if the home folder
    has one, the second does not send it.
    """
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    has_token = has_token or (Path.home() / ".ray" / "auth_token").is_file()
    os.environ.setdefault("RAY_AUTH_MODE", "token" if has_token else "disabled")


def run_head(host: str, port: int, flags: list[str], words: list[str]) -> int:
    """Run the head and return the exit code of `prepare`."""
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path, because it contains sockets
    address = f"{_address_of(host)}:{port}"
    log = Path(folder) / "start.log"
    node = _start_node(
        [
            "--head",
            "--no-monitor",
            f"--node-ip-address={_address_of(host)}",
            f"--port={port}",
            f"--temp-dir={folder}",
            *flags,
        ],
        log,
    )
    try:
        if not _answers(host, port, node) or not _has_started(node, log):
            print(f"error: Ray did not start:\n{log.read_text()[-2000:]}", file=sys.stderr, flush=True)
            return FAILED
        command = [sys.executable, "-u", "-m", "pipeline", "prepare", *words]
        verb = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": address})
        _pass_on_signals(verb)
        return verb.wait()
    finally:
        _end(node, ENDING_S)
        shutil.rmtree(folder, ignore_errors=True)


def run_worker(host: str, port: int, flags: list[str]) -> int:
    """Join and return 0. The head's exit code reports the result of the job."""
    if not _answers(host, port, None):
        print(
            f"error: the head of Ray, {host}:{port}, did not answer within {MEETING_S} s", file=sys.stderr, flush=True
        )
        return FAILED
    with tempfile.TemporaryDirectory() as folder:
        node = _start_node([f"--address={_address_of(host)}:{port}", *flags], Path(folder) / "start.log")
        _pass_on_signals(node)
        try:
            while node.poll() is None and _is_open(host, port):
                time.sleep(1)
        finally:
            _end(node, LEAVING_S)
    return 0


def _start_node(words: list[str], log: Path) -> Process:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *words]
    environment = {
        "RAY_preload_python_modules": ",".join(PRELOADED),
        "RAY_enable_worker_prestart": "1",
        "RAY_enable_metrics_collection": "0",
        **os.environ,
    }
    with open(log, "wb") as out:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def _end(node: Process, seconds: float) -> None:
    """End the node with everything that it has started, and nothing else on this host."""
    with suppress(psutil.Error):
        started = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        _, left = psutil.wait_procs([psutil.Process(node.pid), *started], timeout=seconds)
        for each in left:
            with suppress(psutil.Error):
                each.kill()
    node.wait()


def _pass_on_signals(process: Process) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: process.send_signal(received))


def _answers(host: str, port: int, node: Process | None) -> bool:
    """Return whether the head listens before the time limit and before `node` ends."""
    deadline = time.monotonic() + MEETING_S
    while time.monotonic() < deadline and (node is None or node.poll() is None):
        if _is_open(host, port):
            return True
        time.sleep(0.5)
    return False


def _has_started(node: Process, log: Path) -> bool:
    """Return whether tasks can run.

    The head listens earlier; `ray start` prints when tasks can run.
    """
    deadline = time.monotonic() + MEETING_S
    while time.monotonic() < deadline and node.poll() is None:
        if STARTED in log.read_text(errors="replace"):
            return True
        time.sleep(0.2)
    return False


def _is_open(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def _address_of(host: str) -> str:
    return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])


def _is_head(host: str) -> bool:
    """Return whether this is the head.

    With Slurm the first node is the head, otherwise the host's addresses decide.
    """
    if "SLURM_NODEID" in os.environ:
        return os.environ["SLURM_NODEID"] == "0"
    own = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    return _address_of(host) in own


def _with_min_nodes(words: list[str]) -> list[str]:
    """Wait for all nodes of a Slurm job, unless the words of prepare say how many."""
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES")
    if num_nodes is None or any(word.lstrip("+").startswith("ray.min_nodes=") for word in words):
        return words
    return [*words, f"ray.min_nodes={num_nodes}"]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.extras.ray_prepare.node", description=__doc__)
    parser.add_argument(
        "--address", required=True, help="HOST:PORT of the head, as all nodes know it; port 0: a free port"
    )
    parser.add_argument("--memory-mb", type=int, default=0, help="of this node, for tasks; 0: Ray's default")
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard on the head")
    parser.add_argument("words", nargs="*", help="of prepare, behind --")
    typed = parser.parse_args()
    host, _, port = typed.address.rpartition(":")
    set_token_mode()
    # Ray counts the host's cores, but a job may have only some of them.
    flags = [f"--num-cpus={os.environ.get('SLURM_CPUS_PER_TASK') or len(os.sched_getaffinity(0))}"]
    flags += [f"--memory={typed.memory_mb << 20}"] if typed.memory_mb else []
    if _is_head(host):
        flags += [f"--include-dashboard={str(typed.dashboard).lower()}"]
        sys.exit(run_head(host, int(port) or _free_port(), flags, _with_min_nodes(typed.words)))
    sys.exit(run_worker(host, int(port), flags))


if __name__ == "__main__":
    main()
