"""Serve an artifact's scores over HTTP:  python -m pipeline serve artifact=artifacts/quickstart

It listens on loopback. Elsewhere put a proxy in front, or set tokens and a certificate
(docs/do/serving.md). A newer artifact behind the same link, or a registry's new champion, replaces
the current model between two requests.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.config.jobs.evaluate import ServeJob
from pipeline.config.serving import ServerConfig
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.processes import none_while_importing
from pipeline.serving.scoring.load import FoundArtifact, find_folder

if TYPE_CHECKING:
    from pipeline.serving.scoring.scorer import Scorer

logger = get_logger(__name__)


def serve(
    job: ServeJob,
    load: Callable[[FoundArtifact], Scorer] | None = None,
    find: Callable[[str], FoundArtifact] = find_folder,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Then respond to the requests that were accepted before.

    Raises ServingError if the artifact cannot be loaded, or the address is not free.
    """
    check_certificate(job.server)
    listener = bind(job.server.host, job.server.port)
    # Here, so that a typo in the command, or a port in use, fails before torch is imported.
    with none_while_importing():
        try:
            from pipeline.serving.http.admission import read_tokens
            from pipeline.serving.http.server import Settings, run_server
        except ImportError as error:
            raise ServingError(f"serving needs its extra: pip install 'torchrec-pipeline[serve]' ({error})") from error
        from pipeline.serving.scoring.load import load_artifact
        from pipeline.serving.scoring.predictor import Predictor

    def load_found(found: FoundArtifact) -> Scorer:
        scorer = load_artifact(found.path, job.memory, job.ssd, job.threads, job.compiled)
        if isinstance(scorer, Predictor):  # the items of a retriever would have to be found again
            scorer.catch_up(found.path)
        return scorer

    tokens, router = read_tokens(job.server), next(iter(job.read_router().values()), None)
    settings = Settings(job.server, job.batching, job.limits, tokens, job.read_observers(), router)
    run_server(settings, listener, lambda: find(job.artifact), load or load_found)


def check_certificate(server: ServerConfig) -> None:
    """Raise ServingError if the certificate and key cannot be used. The key must have no password."""
    if server.tls_cert is None or server.tls_key is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key, password=lambda: b"")
    except (OSError, ValueError) as error:
        said = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ServingError(
            f"server.tls_cert={server.tls_cert} and server.tls_key={server.tls_key} are not a certificate and its key "
            f"as PEM without a password ({said})"
        ) from None


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that clients do not wait while the artifact is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        hints = {
            errno.EADDRINUSE: "another program listens there: choose another server.port (0 takes any)",
            errno.EACCES: "ports below 1024 want root: choose another server.port",
        }
        hint = hints.get(error.errno or 0, "server.host is an address of this machine")
        raise ServingError(f"cannot listen on {host}:{port} ({error.strerror or error}): {hint}") from error
    return listener
