"""The hosts that benchmarks make of network namespaces."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.slow_links import linked_hosts, missing

MEBIBYTE = 1 << 20
SEND = f"import socket; s = socket.create_connection(('10.77.0.1', 7000)); s.sendall(bytes({MEBIBYTE})); s.recv(1)"
RECEIVE = (
    "import socket; server = socket.create_server(('10.77.0.1', 7000)); print('ready', flush=True); c, _ = server.accept();"
    f"n = 0\nwhile n < {MEBIBYTE}: n += len(c.recv(65536))\nc.sendall(b'1')"
)


@pytest.mark.skipif(bool(missing()), reason=f"no hosts here: {missing()}")
def test_what_a_host_sends_is_counted_and_takes_as_long_as_its_link_says() -> None:
    try:
        with linked_hosts(2) as (one, other):
            other.limit(20)
            receiver = subprocess.Popen(one.command(sys.executable, "-c", RECEIVE), stdout=subprocess.PIPE)
            assert receiver.stdout is not None
            receiver.stdout.readline()
            before, started = other.sent_bytes(), time.monotonic()
            subprocess.run(other.command(sys.executable, "-c", SEND), check=True, timeout=300)
            seconds = time.monotonic() - started
            sent = other.sent_bytes() - before
            receiver.wait(10)
    except RuntimeError as error:  # a kernel or container that does not let root make namespaces
        pytest.skip(str(error))
    assert 1.0 < sent / MEBIBYTE < 1.2
    assert seconds > 0.3, "8 Mbit at 20 Mbit/s, less a burst"
    assert one.namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
