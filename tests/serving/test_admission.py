"""A real server process asks for tokens, speaks HTTPS, and gives no client all of its connections or its time."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from pipeline.config.serving import LimitsConfig, ServerConfig
from pipeline.runtime.errors import ConfigError, ServingError
from pipeline.serving.http import admission
from pipeline.serving.http.admission import Admission, ClientRates, Refusal, Tokens, client_key, read_tokens
from pipeline.serving.http.serve import check_certificate
from tests.serving.servers import LIMITS, ROW, Server, server_of, write_artifact
from tests.support.messages import names

TOKENS = ["first-0123456789abcdef", "second-0123456789abcdef"]


def _certificate(folder: Path, password: bytes | None = None) -> tuple[str, str]:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False).sign(key, hashes.SHA256())
    )  # fmt: skip
    hidden = BestAvailableEncryption(password) if password else NoEncryption()
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden))
    return str(folder / "cert.pem"), str(folder / "key.pem")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, httpx.Client]]:
    """A server with two tokens and a certificate, and a client that trusts it and has no token."""
    folder = tmp_path_factory.mktemp("guarded")
    cert, key = _certificate(folder)
    (folder / "tokens").write_text("\n".join(TOKENS) + "\n")
    words = [f"server.tls_cert={cert}", f"server.tls_key={key}", f"server.token_file={folder / 'tokens'}", *LIMITS]
    with server_of(write_artifact(folder / "artifact", "v1"), *words) as server:
        assert server.url.startswith("https://")
        url = f"https://localhost:{server.port}"
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=cert), timeout=120) as client:
            yield server, client


@pytest.mark.long
def test_a_request_needs_one_of_the_tokens_and_no_log_has_one(guarded: tuple[Server, httpx.Client]) -> None:
    server, client = guarded
    wrong = [[], [("Authorization", f"Bearer {TOKENS[0]}x")], [("Authorization", f"Basic {TOKENS[0]}")],
             [("Authorization", "Bearer")], [("Authorization", f"Bearer {TOKENS[0]}")] * 2]  # fmt: skip
    for headers in wrong:
        for method, path in (("POST", "/score"), ("GET", "/docs"), ("GET", "/metrics"), ("GET", "/nothing")):
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer", (headers, path)
            assert not any(token in answer.text for token in TOKENS)
    for scheme, token in (("Bearer", TOKENS[0]), ("bearer", TOKENS[1])):
        answer = client.post("/score", json={"rows": [ROW]}, headers={"Authorization": f"{scheme} {token}"})
        assert answer.status_code == 200
    assert client.get("/health/ready").status_code == client.get("/health").status_code == 200, "probes have none"
    assert not any(token in server.log() for token in TOKENS)


def test_https_alone_is_spoken_and_a_silent_client_is_closed(guarded: tuple[Server, httpx.Client]) -> None:
    server, client = guarded
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as silent:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP" not in plain.recv(1000)
        assert silent.recv(1) == b"", "its handshake took limits.header_timeout_s"
    assert client.get("/health/live").status_code == 200


def _ask(port: int, address: str, path: str = "/docs") -> tuple[int, httpx.Headers]:
    """From one of this machine's own addresses."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
        answer = client.get(f"http://127.0.0.1:{port}{path}")
        return answer.status_code, answer.headers


@pytest.mark.long
def test_one_client_neither_takes_all_connections_nor_asks_more_often_than_it_may(tmp_path: Path) -> None:
    words = ["limits.connections=12", "limits.client_connections=8", "limits.client_requests_per_s=0.001"]
    with server_of(write_artifact(tmp_path, "v1"), *words) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        try:
            with closing(socket.create_connection(("127.0.0.1", server.port))) as one_more:
                answer = one_more.recv(1000)
            assert answer.startswith(b"HTTP/1.1 429 ") and b"retry-after" in answer and b"8 connections" in answer
            assert _ask(server.port, "127.0.0.2")[0] == 200, "another client is answered meanwhile"
            status, headers = _ask(server.port, "127.0.0.2")
            assert status == 429 and int(headers["Retry-After"]) > 900
            assert _ask(server.port, "127.0.0.3")[0] == 200
            assert _ask(server.port, "127.0.0.2", "/health/ready")[0] == 200, "probes are not counted"
        finally:
            for each in idle:
                each.close()


def test_a_client_may_ask_again_as_its_bucket_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(admission, "MOST_CLIENTS", 3)
    rates = ClientRates(2.0)
    assert [rates.take("a") for _ in range(3)] == [0.0, 0.0, 0.5]
    now[0] += 0.5
    assert [rates.take("a") for _ in range(2)] == [0.0, 0.5]
    assert all(rates.take(str(number)) == 0.0 for number in range(100)) and len(rates._left) <= 3
    assert client_key("10.0.0.1") == client_key("::ffff:10.0.0.1") != client_key("10.0.0.2")
    assert client_key("2001:db8::1") == client_key("2001:db8:0:0:ffff::2") != client_key("2001:db8:0:1::1")


def test_tokens_and_certificates_that_cannot_be_used_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORES_TOKEN", TOKENS[0])
    assert read_tokens(ServerConfig(token_env="SCORES_TOKEN")).allow([b"Bearer " + TOKENS[0].encode()])
    short = "only-secret"
    for content in (b"", b"\n", short.encode(), "täken-0123456789abcdef".encode(), b"\xff\xfe" * 20):
        (tmp_path / "tokens").write_bytes(content)
        with pytest.raises(ServingError, match=names("server.token_file")) as refused:
            read_tokens(ServerConfig(token_file=str(tmp_path / "tokens")))
        assert short not in str(refused.value)
    with pytest.raises(ServingError, match=names("NOT_THERE server.token_env")):
        read_tokens(ServerConfig(token_env="NOT_THERE"))
    with pytest.raises(ServingError, match=names("server.token_file")):
        read_tokens(ServerConfig(token_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=names("server.tls_cert server.tls_key")):
        ServerConfig(tls_cert="cert.pem")
    cert, key = _certificate(tmp_path, b"password")
    for files in ((cert, key), (cert, cert), (cert, str(tmp_path / "none"))):
        with pytest.raises(ServingError, match=names("server.tls_cert server.tls_key")):
            check_certificate(ServerConfig(tls_cert=files[0], tls_key=files[1]))
    check_certificate(ServerConfig(**dict(zip(("tls_cert", "tls_key"), _certificate(tmp_path), strict=True))))


def test_without_tokens_and_limits_everybody_is_let_in() -> None:
    scope = {"path": "/score", "client": ("10.0.0.1", 1), "headers": [(b"host", b"anything")]}
    admission = Admission([], LimitsConfig(), Tokens([]))

    async def ask() -> list[Refusal | None]:
        return [await admission.refusal(scope) for _ in range(1000)]

    assert asyncio.run(ask()) == [None] * 1000
