"""Limit the size and time of a request's header and the number of connections, for which uvicorn
has no limits.

A connection that sends nothing, or sends bytes too slowly, is closed. One client can use only a
part of all connections. A request with two Host headers, or with another host's address, is
refused, because a proxy could understand it differently.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.config.serving import LimitsConfig
from pipeline.runtime.errors import ServingError
from pipeline.serving.http.admission import client_key

READ_AT_ONCE = 1 << 18  # asyncio hands over at most this many bytes, of header and body together
REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class GuardedProtocol(HttpToolsProtocol):
    """The protocol. limited_by() sets `limits`, and `open_of` (the open connections of each client)."""

    limits = LimitsConfig()
    open_of: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._in_header = True
        self._header_bytes = self._raw_bytes = 0
        self._hosts: list[bytes] = []
        self._client = self._problem = ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._client = client_key(self.client[0]) if self.client else ""
        self.open_of[self._client] += 1
        if len(self.connections) > self.limits.connections:
            self._refuse(
                503, f"{self.limits.connections} connections are open, and no more are taken", "retry-after: 1"
            )
            return
        most = self.limits.client_connections
        if most is not None and self.open_of[self._client] > most:
            self._refuse(429, f"{most} connections of one client are open, and no more are taken", "retry-after: 1")
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.open_of[self._client] -= 1
        if not self.open_of[self._client]:
            del self.open_of[self._client]
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
        self._hosts = []

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if len(name) == 4 and name.lower() == b"host":
            self._hosts.append(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._raw_bytes = 0
        self._stop_timer()
        self._problem = self._host_problem()
        if self._header_bytes > self.limits.header_bytes or self._problem:
            raise ServingError("header")  # ends the parser, which calls send_400_response
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_header = True

    def send_400_response(self, msg: str) -> None:
        if self._header_bytes > self.limits.header_bytes:
            self._refuse(431, f"the header has more than {self.limits.header_bytes} bytes")
        else:
            self._refuse(400, self._problem or "this is not an HTTP request")

    def _host_problem(self) -> str:
        """Return what is wrong with the Host header by RFC 9112, section 3.2; "" if nothing is wrong."""
        if len(self._hosts) != 1 and (self._hosts or self.parser.get_http_version() == "1.1"):
            return f"a request has one Host header, and this one has {len(self._hosts)}"
        if self.url[:1] not in (b"/", b"*", b""):
            named = httptools.parse_url(self.url)
            host, port = named.host or b"", b"" if named.port is None else b":%d" % named.port
            host = b"[%s]" % host if b":" in host else host
            if self._hosts and (host + port).lower() != self._hosts[0].strip().lower():
                return "the request's address names another host than its Host header"
        return ""

    def _refuse(self, status: int, message: str, header: str = "cache-control: no-store") -> None:
        """Send an error and close the connection; send nothing while an earlier response is not sent yet."""
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
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": limits, "open_of": Counter()})
