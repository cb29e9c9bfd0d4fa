"""An S3 server on loopback with faults in front of it: what a checkpoint meets in a real store, on purpose."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import boto3
import pytest
from botocore.retries.standard import ExponentialBackoff
from moto.server import ThreadedMotoServer

from pipeline.runtime.storage import object_store, storage

BUCKET = "bucket"
Faults = Callable[[str, str], str]  # method, path -> "", "503", "500", "403", "reset", "lost", "slow" or "truncated"


class FaultyProxy:
    """Passes requests on to `port`, except where `faults` names one; `counts` says how often each was planted."""

    def __init__(self, port: int) -> None:
        self.faults: Faults = lambda method, path: ""
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy._plant(self.command, self.path)
                if fault == "slow":
                    time.sleep(0.3)
                if fault in ("503", "500", "403"):
                    self._refuse(int(fault))
                    return
                if fault == "reset":
                    self._reset()
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", port)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                upstream.request(self.command, self.path, body=body, headers=headers)
                answer = upstream.getresponse()
                content = answer.read()
                upstream.close()
                if fault == "lost":
                    self._reset()
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if fault == "truncated" and len(content) > 1:
                    self.wfile.write(content[: len(content) // 2])
                    self._reset()
                else:
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

            def _refuse(self, status: int) -> None:
                code = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied"}[status]
                content = b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _reset(self) -> None:
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()

            def log_message(self, *_: object) -> None: ...

            def finish(self) -> None:
                try:
                    super().finish()
                except (OSError, ValueError):
                    return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _plant(self, method: str, path: str) -> str:
        with self._lock:
            if fault := self.faults(method, path):
                self.counts[fault] = self.counts.get(fault, 0) + 1
            return fault

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def faulty_store() -> Iterator[FaultyProxy]:
    """A server with an empty bucket, and the proxy in front of it."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    port = moto.get_host_and_port()[1]
    proxy = FaultyProxy(port)
    try:
        urllib.request.urlopen(
            f"http://127.0.0.1:{port}/moto-api/reset", data=b""
        ).close()  # its state is the process's
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **CREDENTIALS).create_bucket(Bucket=BUCKET)
        yield proxy
    finally:
        proxy.close()
        moto.stop()


CREDENTIALS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}


def environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def use_store(url: str, attempts: int = 4) -> None:
    """In this process: point s3:// at the server, with few attempts, so that a lasting fault is soon an error."""
    import os

    os.environ.update(environment(url))
    storage.path_manager()._path_handlers.pop("s3://", None)
    storage.path_manager().register_handler(object_store.S3Handler(attempts))


def quick_retries() -> AbstractContextManager[object]:
    """As many as ever, without botocore's waits of seconds between them."""
    return patch.object(ExponentialBackoff, "delay_amount", lambda *_, **__: 0.02)


@pytest.fixture
def store() -> Iterator[FaultyProxy]:
    with faulty_store() as proxy, quick_retries():
        use_store(proxy.url)
        yield proxy
    storage.path_manager()._path_handlers.pop("s3://", None)
