"""Tokens of an identity provider are accepted by its public keys, for their audience and time; all others get 401."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from pipeline.config.serving import LimitsConfig, ServerConfig
from pipeline.runtime.errors import ConfigError, ServingError
from pipeline.serving.http.admission import Admission, read_tokens
from tests.support.examples import SEED
from tests.support.messages import names

jwt = pytest.importorskip("jwt")
from pipeline.extras.jwks import signed_tokens  # noqa: E402  # needs PyJWT

RSA_KEY, EC_KEY = rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1())
STATIC = "static-0123456789abcdef"


def entry(key: Any, kid: str, **more: str) -> dict[str, Any]:
    algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return {**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid, **more}


def token(key: Any = RSA_KEY, algorithm: str = "RS256", kid: str | None = "one", **claims: Any) -> str:
    values = {"iss": "https://id.example", "aud": "scores", "exp": int(time.time()) + 600, **claims}
    values = {name: value for name, value in values.items() if value is not None}
    return str(jwt.encode(values, key, algorithm, headers={"kid": kid} if kid else None))


def part(values: Any) -> str:
    content = values if isinstance(values, bytes) else json.dumps(values).encode()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


class Provider:
    """Answers with `content`, or as `answer` says, and counts requests."""

    def __init__(self) -> None:
        self.keys, self.num_asked = [entry(RSA_KEY, "one"), entry(EC_KEY, "two")], 0
        self.content: bytes | None = None
        self.moved = ""
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.num_asked += 1
                self.send_response(302 if provider.moved else 200)
                if provider.moved:
                    self.send_header("Location", provider.moved)
                self.end_headers()
                self.wfile.write(provider.content or json.dumps({"keys": provider.keys}).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/keys"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.end()


def config(source: str, **more: Any) -> ServerConfig:
    return ServerConfig(jwks=source, jwt_issuer="https://id.example", jwt_audience="scores", **more)


def asked(admission: Admission, *tokens: str) -> list[str]:
    """The message of each token's 401; empty if it is let in."""

    async def ask() -> list[str]:
        found = []
        for each in tokens:
            headers = [(b"authorization", f"Bearer {each}".encode("latin-1"))]
            refusal = await admission.refusal({"path": "/score", "client": ("10.0.0.1", 1), "headers": headers})
            assert refusal is None or (refusal.status, refusal.headers) == (401, {"WWW-Authenticate": "Bearer"})
            found.append(refusal.message if refusal else "")
        return found

    return asyncio.run(ask())


def test_a_token_is_accepted_by_its_key_issuer_audience_and_time(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"keys": provider.keys}))
    monkeypatch.setenv("STATIC", STATIC)
    for source in (provider.url, str(tmp_path / "keys.json")):
        admission = Admission([], LimitsConfig(), read_tokens(config(source, token_env="STATIC")))
        good = [STATIC, token(), token(EC_KEY, "ES256", "two"), token(aud=["other", "scores"])]
        assert asked(admission, *good) == [""] * 4
        now, public = int(time.time()), RSA_KEY.public_key()
        secret = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        signed_by_public = (
            f"{part({'alg': 'HS256', 'kid': 'one'})}.{part(jwt.decode(token(), options={'verify_signature': False}))}"
        )
        mac = hmac.new(secret, signed_by_public.encode(), hashlib.sha256).digest()
        head, body, signature = token().split(".")
        bad = {
            token(exp=now - 60): "expired", token(nbf=now + 600): "not valid yet", token(aud="x"): "audience",
            token(iss="x"): "issuer", token(exp=None): "lacks", token(aud=None): "lacks", token(iss=None): "lacks",
            token(algorithm="PS256"): "algorithm", token(EC_KEY, "ES256", "one"): "algorithm",
            f"{signed_by_public}.{part(mac)}": "algorithm",
            f"{part({'alg': 'none', 'kid': 'one'})}.{body}.": "algorithm",
            f"{head}.{part({**json.loads(base64.urlsafe_b64decode(body + '==')), 'aud': 'scores', 'x': 1})}.{signature}": "signature",
            token(rsa.generate_private_key(65537, 2048)): "signature", token(kid="three"): "(kid)", token(kid=None): "(kid)",
            f"{part(b'[' * 6000)}.{body}.{signature}": "not a signed token", "a.b.c": "not a signed token",
            "..": "not a signed token", STATIC[:-1]: "Bearer <token>", "": "Bearer <token>", "\xff.\xff.\xff": "not a signed",
        }  # fmt: skip
        for message, wanted in zip(asked(admission, *bad), bad.values(), strict=True):
            assert wanted in message, (wanted, message)


def test_keys_rotate_and_an_unknown_key_asks_the_provider_seldom(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    admission = Admission([], LimitsConfig(), read_tokens(config(provider.url)))
    assert admission._tokens.signed is not None
    admission._tokens.signed._asked_at = now[0]
    monkeypatch.setattr(signed_tokens.time, "monotonic", lambda: now[0])
    provider.keys = [entry(EC_KEY, "new")]
    new, old = token(EC_KEY, "ES256", "new"), token()
    assert asked(admission, old) == [""]
    assert "(kid)" in asked(admission, *[new] * 50)[49] and provider.num_asked == 1
    now[0] += 11
    assert asked(admission, new) == [""] and provider.num_asked == 2
    assert "(kid)" in asked(admission, *[old] * 50)[0] and provider.num_asked == 2, "the old key was withdrawn"
    many = json.dumps({"keys": [entry(EC_KEY, str(number)) for number in range(101)]}).encode()
    for content in (b"{", b'{"keys": []}', b" " * (1 << 19), b"[" * 100_000, many, None):
        provider.content, provider.moved = content, "" if content else provider.url
        now[0] += 11
        assert "(kid)" in asked(admission, old)[0] and asked(admission, new) == [""], "the keys from before are used"
    assert provider.num_asked == 8 and "server.jwks" in caplog.text and old not in caplog.text


def test_keys_that_cannot_be_used_are_one_line_at_the_start(provider: Provider, tmp_path: Path) -> None:
    secret = {"kty": "oct", "kid": "s", "k": part(b"0" * 32), "alg": "HS256"}
    short = entry(rsa.generate_private_key(65537, 1024), "short")
    unusable: list[list[Any]] = [[secret], [short], [entry(EC_KEY, "enc", use="enc")], [entry(EC_KEY, "")], [{}], [7]]
    for keys in unusable:
        provider.keys = keys
        with pytest.raises(ServingError, match=names("server.jwks")):
            read_tokens(config(provider.url))
    for missing in (str(tmp_path / "none"), "https://127.0.0.1:1/keys"):
        with pytest.raises(ServingError, match=names("server.jwks")):
            read_tokens(config(missing))
    with pytest.raises(ConfigError, match=names("server.jwks server.jwt_issuer server.jwt_audience")):
        ServerConfig(jwks=provider.url, jwt_issuer="x")
    with pytest.raises(ConfigError, match=names("server.jwks https://")):
        config("http://id.example/keys")


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.campaign)])
def test_a_mutated_token_is_refused(provider: Provider, count: int) -> None:
    admission, good = Admission([], LimitsConfig(), read_tokens(config(provider.url))), token()
    mutated = []
    for seed in range(SEED, SEED + count):
        chosen, content = random.Random(seed), list(good)
        for _ in range(chosen.randrange(1, 4)):
            at = chosen.randrange(len(good) - 1)  # bits of the last letter stand for nothing
            content[at] = chosen.choice([each for each in "abcXYZ019-_.=\x00\xe4" if each != content[at]])
        mutated.append("".join(content))
    assert all(asked(admission, *mutated))
