"""Post prepared bodies over many connections, as fast as they are answered or at a bounded rate."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Latencies:
    """`seconds` of the requests that were answered with 200; `others` counts all other answers."""

    seconds: list[float] = field(default_factory=list)
    others: int = 0
    clock_s: float = 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.seconds) / self.clock_s

    def percentile_ms(self, percent: float) -> float:
        return 1000 * float(np.percentile(self.seconds, percent)) if self.seconds else float("nan")


def post(
    port: int, bodies: list[bytes], content_type: str, connections: int, seconds: float, rate: float = 0.0
) -> Latencies:
    """`rate`: requests a second over all connections, which take turns; 0 asks again as soon as there is an answer."""
    return asyncio.run(_post(port, bodies, content_type, connections, seconds, rate))


async def _post(
    port: int, bodies: list[bytes], content_type: str, connections: int, seconds: float, rate: float
) -> Latencies:
    found = Latencies()
    head = f"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\nContent-Length: "
    requests = [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]
    begun = time.perf_counter()
    await asyncio.gather(
        *(
            _connection(
                port,
                requests[number::connections],
                begun + seconds,
                connections / rate if rate else 0.0,
                found,
                number / rate if rate else 0.0,
            )
            for number in range(connections)
        )
    )
    found.clock_s = time.perf_counter() - begun
    return found


async def _connection(
    port: int, requests: list[bytes], until: float, pause_s: float, found: Latencies, begin_s: float
) -> None:
    """The first request after `begin_s`: connections that began together would ask together from then on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    next_at, number = time.perf_counter() + begin_s, random.randrange(len(requests))
    while time.perf_counter() < until:
        if pause_s:
            await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
            next_at += pause_s
        begun = time.perf_counter()
        writer.write(requests[number % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        if b" 200 " in head[:15]:
            found.seconds.append(time.perf_counter() - begun)
        else:
            found.others += 1
        number += 1
    writer.close()
