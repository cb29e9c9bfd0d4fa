"""Emulate hosts joined by slow links on this machine: network namespaces on a bridge, each behind a token bucket.

Wants root and iproute2 (ip, tc). The kernel counts every byte that leaves a host, headers and all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEVICE = "eth0"
BURST_BYTES = 64 * 1024  # one TCP segmentation offload's worth; less, and tbf drops it whole
QUEUE_MS = 50
MTU = 9000  # jumbo frames, as in a data centre


@dataclass(frozen=True)
class Host:
    """A network namespace; `command(...)` runs there."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def sent_bytes(self) -> int:
        """That have left it since it was made."""
        path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
        shown = subprocess.run(self.command("cat", path), check=True, capture_output=True, text=True)
        return int(shown.stdout)

    def limit(self, mbit_per_s: float | None) -> None:
        """What it sends from now on passes at this rate; None: as fast as the machine can."""
        _run(*self.command("tc", "qdisc", "del", "dev", DEVICE, "root"), check=False)
        if mbit_per_s is not None:
            rate = ["rate", f"{mbit_per_s:g}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
            _run(*self.command("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *rate))


def missing() -> str:
    """Why there can be no such hosts here; empty: there can."""
    if os.geteuid():
        return "it wants root, for network namespaces"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{absent[0]} is not installed (iproute2)" if absent else ""


@contextmanager
def linked_hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts, 10.77.0.1 on, that see each other and nothing else; they are gone afterwards.

    Raises:
        RuntimeError: no root, no iproute2, or a kernel without namespaces, veth or bridges.
    """
    if reason := missing():
        raise RuntimeError(f"no hosts can be made here: {reason}")
    name = f"hosts{os.getpid()}"
    hub, hosts = f"{name}-hub", [Host(f"{name}-{index}", f"10.77.0.{index + 1}") for index in range(count)]
    made: list[str] = []
    try:
        for namespace in [hub, *(host.namespace for host in hosts)]:
            _run("ip", "netns", "add", namespace)
            made.append(namespace)
        _in(hub, "ip", "link", "add", "bridge", "type", "bridge")
        _in(hub, "ip", "link", "set", "bridge", "up")
        for index, host in enumerate(hosts):
            port = f"port{index}"
            _in(hub, "ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", host.namespace)
            _in(hub, "ip", "link", "set", port, "master", "bridge", "up")
            _in(host.namespace, "ip", "link", "set", DEVICE, "mtu", str(MTU))
            _in(hub, "ip", "link", "set", port, "mtu", str(MTU))
            _in(host.namespace, "ip", "address", "add", f"{host.address}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _in(host.namespace, "ip", "link", "set", device, "up")
        yield hosts
    finally:
        for namespace in made:
            _run("ip", "netns", "delete", namespace, check=False)


def _in(namespace: str, *words: str) -> None:
    _run("ip", "netns", "exec", namespace, *words)


def _run(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
