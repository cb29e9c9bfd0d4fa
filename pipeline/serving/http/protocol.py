"""Limit the size and time of a request's header and the number of connections, for which uvicorn has no limits.

A header may be so long and take so long; a connection that sends nothing, or a byte now and then, is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.config.server import LimitsConfig
from pipeline.runtime.errors import ServingError

READ_AT_ONCE = 1 << 18  # asyncio hands over at most this many bytes, of header and body together
REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class GuardedProtocol(HttpToolsProtocol):
    """`limits` is set by limited_by()."""

    limits = LimitsConfig()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._in_header = True
        self._header_bytes = self._raw_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(
                503, f"{self.limits.connections} connections are open, and no more are taken", "retry-after: 1"
            )
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_header:
            self._start_timer()
            self._raw_bytes += len(data)
        super().data_received(data)
        if self._in_header and self._raw_bytes > self.limits.header_bytes + READ_AT_ONCE:
            self._refuse(431, f"the header has more than {self.limits.header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._raw_bytes = 0
        self._stop_timer()
        if self._header_bytes > self.limits.header_bytes:
            raise ServingError("header")  # ends the parser, which calls send_400_response
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_header = True

    def send_400_response(self, msg: str) -> None:
        if self._header_bytes > self.limits.header_bytes:
            self._refuse(431, f"the header has more than {self.limits.header_bytes} bytes")
        else:
            self._refuse(400, "this is not an HTTP request")

    def _refuse(self, status: int, message: str, header: str = "cache-control: no-store") -> None:
        """Answer and hang up; nothing is answered where an earlier request's answer is still to be sent."""
        self._stop_timer()
        if not self.transport.is_closing():
            cycle = self.cycle
            is_first = cycle is None or cycle.response_complete
            if cycle is not None and not cycle.response_complete:
                # Within a body it is that request which is refused, and nobody has answered it.
                is_first = not self._in_header and not self.pipeline and not cycle.response_started
                cycle.disconnected = True
                cycle.message_event.set()
            if is_first:
                body = b'{"error":"%s"}' % message.encode()
                head = (
                    f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n{header}\r\nconnection: close\r\n\r\n"
                )
                self.transport.write(head.encode() + body)
            self.transport.close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        self._refuse(408, f"no whole header within {self.limits.header_timeout_s:g} s")


def limited_by(limits: LimitsConfig) -> type[GuardedProtocol]:
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": limits})
