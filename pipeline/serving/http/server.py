"""Run the server on a bound socket, and drain it after SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
import uvloop

from pipeline.config.serving import BatchingConfig, LimitsConfig, ServerConfig
from pipeline.runtime.logs import get_logger
from pipeline.serving.http.admission import Admission, Tokens
from pipeline.serving.http.app import LOOPBACK_NAMES, ScoringApp
from pipeline.serving.http.batching import ServerMetrics
from pipeline.serving.http.observers import Observers, ObserverSettings
from pipeline.serving.http.protocol import limited_by
from pipeline.serving.http.routing import RouterSettings, ServerParts
from pipeline.serving.http.switching import FoundArtifact, ModelSlot, try_out
from pipeline.serving.scoring.scorer import Scorer

KEEP_ALIVE_S = 30
EVERY_ANSWER = [("X-Content-Type-Options", "nosniff")]
logger = get_logger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings of the server. `tokens`: if there are any, a request must have one of them.
    observers: name -> settings of an observer of answered requests. router: None: one model answers.
    """

    server: ServerConfig
    batching: BatchingConfig
    limits: LimitsConfig
    tokens: Tokens = field(default_factory=lambda: Tokens([]))
    observers: Mapping[str, ObserverSettings] = field(default_factory=dict)
    router: RouterSettings | None = None


Find = Callable[[], FoundArtifact]
Load = Callable[[FoundArtifact], Scorer]


def run_server(settings: Settings, listener: socket.socket, find: Find, load: Load) -> None:
    """Serve until SIGTERM or SIGINT. Raises ServingError if the first artifact cannot be loaded."""
    found = find()
    scorer = load(found)
    try_out(scorer)
    serving = _serve(settings, listener, find, load, found, scorer)
    interrupted = uvloop.run(serving, loop_factory=lambda: _Loop(settings.limits.header_timeout_s))
    if interrupted:
        raise KeyboardInterrupt


class _Loop(uvloop.Loop):
    """An event loop that limits TLS handshakes: a connection that does not finish its handshake in time is closed."""

    def __init__(self, handshake_timeout_s: float) -> None:
        super().__init__()
        self._handshake_timeout_s = handshake_timeout_s

    async def create_server(self, *args: Any, **keywords: Any) -> Any:
        if keywords.get("ssl") is not None:
            keywords["ssl_handshake_timeout"] = self._handshake_timeout_s
        return await super().create_server(*args, **keywords)


class _Server(uvicorn.Server):
    """serve() handles the signals. `announce` is called when the server accepts connections."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    settings: Settings, listener: socket.socket, find: Find, load: Load, found: FoundArtifact, scorer: Scorer
) -> bool:
    """Run the server. Return True if Ctrl-C ended it."""
    metrics = ServerMetrics()
    slot = ModelSlot(find, load, settings.batching, settings.limits, metrics)
    slot.begin(found, scorer)
    admission = Admission(allowed_hosts(settings.server), settings.limits, settings.tokens)
    observers = Observers({name: each.make(metrics) for name, each in settings.observers.items()}, metrics)
    router = None
    if settings.router is not None:
        parts = ServerParts(slot, load, settings.batching, settings.limits, metrics, settings.server.watch_s)
        router = settings.router.make(parts)
    app = ScoringApp(slot, settings.limits, metrics, admission, observers, router)
    server = _Server(
        uvicorn.Config(
            app.asgi, http=limited_by(settings.limits), ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(settings.server.drain_s), headers=EVERY_ANSWER,
            ssl_certfile=settings.server.tls_cert, ssl_keyfile=settings.server.tls_key,
        ),
        lambda: _announce(settings, listener, scorer),
    )  # fmt: skip
    interrupted = False

    def end(number: int) -> None:
        nonlocal interrupted
        interrupted = number == signal.SIGINT
        app.draining = True
        delay = 0.0 if interrupted else settings.server.shutdown_delay_s
        loop.call_later(delay, setattr, server, "should_exit", True)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    tasks = [asyncio.create_task(slot.watch(settings.server.watch_s))]
    if router is not None:
        tasks.append(asyncio.create_task(router.watch()))
    if settings.tokens.signed is not None:
        tasks.append(asyncio.create_task(settings.tokens.signed.keep_fresh()))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
    if router is not None:
        await router.close()
    await slot.close()
    await asyncio.to_thread(observers.close)
    logger.info("all requests are answered, the server ends")
    return interrupted


def allowed_hosts(server: ServerConfig) -> list[str]:
    """Return the accepted host names. By default on loopback: this machine's names. Elsewhere: any name."""
    if server.allowed_hosts or not _is_loopback(server.host):
        return [name.lower() for name in server.allowed_hosts]
    return [*LOOPBACK_NAMES, server.host.lower()]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _announce(settings: Settings, listener: socket.socket, scorer: Scorer) -> None:
    host, port = listener.getsockname()[:2]
    server = settings.server
    if not _is_loopback(server.host) and not (settings.tokens and server.tls_cert):
        logger.warning(
            "server.host=%s is open to the network without %s: put a proxy in front, or set server.%s",
            server.host,
            "encryption" if settings.tokens else "a check of who asks",
            "tls_cert and tls_key" if settings.tokens else "token_file, tls_cert and tls_key",
        )
    scheme = "https" if server.tls_cert else "http"
    print(
        f"serving artifact {scorer.version} on {scheme}://{f'[{host}]' if ':' in host else host}:{port}, /docs says how",
        flush=True,
    )
