"""Decide before a request is read whether it is accepted, by its Host header, its client's rate and its token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from starlette.types import Scope

from pipeline.config.registry import from_extra
from pipeline.config.serving import LimitsConfig, ServerConfig
from pipeline.runtime.errors import ServingError

HEALTH_PATHS = frozenset(("/health", "/health/live", "/health/ready"))  # probes have no token, and no rate
SHORTEST_TOKEN = 16
MOST_CLIENTS = 10_000  # whose rates are remembered


class Refusal(NamedTuple):
    status: int
    message: str
    headers: dict[str, str] = {}  # noqa: RUF012  # never changed


def client_key(address: str) -> str:
    """Return the key of a client: an IPv4 address, or the 64-bit network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


class SignedTokens(Protocol):
    """The interface of tokens that an identity provider signs."""

    async def problem(self, token: str) -> str: ...
    async def keep_fresh(self) -> None: ...


class Tokens:
    """The bearer tokens, one of which a request must have. Only their SHA-256 is stored.

    `signed`: tokens of an identity provider are accepted too.
    """

    def __init__(self, tokens: Sequence[str], signed: SignedTokens | None = None) -> None:
        self.signed = signed
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests) or self.signed is not None

    def allow(self, headers: Sequence[bytes]) -> bool:
        """Compare the Authorization headers with every token. The time does not depend on which bytes are equal."""
        scheme, _, token = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        given = hashlib.sha256(token.strip()).digest()
        equal = sum(hmac.compare_digest(given, digest) for digest in self._digests)
        return scheme.lower() == b"bearer" and equal > 0

    async def problem(self, headers: Sequence[bytes]) -> str:
        """Return why no token in the Authorization headers is accepted; "" if one is accepted."""
        if self.allow(headers):
            return ""
        scheme, _, token = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        if self.signed is None or scheme.lower() != b"bearer" or token.count(b".") != 2:
            return "this server wants a header Authorization: Bearer <token>"
        said = await self.signed.problem(token.strip().decode("latin-1"))
        return f"the token is not accepted: {said}" if said else ""


def read_tokens(server: ServerConfig) -> Tokens:
    """Read server.token_file and the variable that server.token_env names. Raise ServingError, which shows no token."""
    tokens: list[str] = []
    if server.token_file is not None:
        try:
            with open(server.token_file, encoding="utf-8") as file:
                lines = [line.strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise ServingError(
                f"server.token_file={server.token_file} cannot be read: {type(error).__name__}"
            ) from None
        tokens += [line for line in lines if line]
        if not tokens:
            raise ServingError(f"server.token_file={server.token_file} is empty: write a token to each line")
    if server.token_env is not None:
        if not (token := os.environ.get(server.token_env, "").strip()):
            raise ServingError(f"the variable {server.token_env} of server.token_env is not set or empty")
        tokens.append(token)
    if any(len(token) < SHORTEST_TOKEN or not token.isascii() or " " in token for token in tokens):
        raise ServingError(
            f"a token of server.token_file or server.token_env is shorter than {SHORTEST_TOKEN} characters, or has "
            "others than ASCII ones without spaces: make one by `openssl rand -hex 32`"
        )
    if server.jwks is None:
        return Tokens(tokens)
    try:
        signed_tokens = from_extra("signed_tokens", "server.jwks")
    except ImportError as error:
        raise ServingError(f"server.jwks needs PyJWT: pip install 'torchrec-pipeline[jwt]' ({error})") from error
    return Tokens(tokens, signed_tokens(server))


class ClientRates:
    """A token bucket for each client: a client may send `per_s` requests per second, and as many at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._most = per_s, max(1.0, per_s)
        self._left: dict[str, tuple[float, float]] = {}  # client: requests that are left, and when

    def take(self, client: str) -> float:
        """Count a request. Return 0, or the seconds after which the client may send the next request."""
        now = time.monotonic()
        left, then = self._left.get(client, (self._most, now))
        left = min(self._most, left + (now - then) * self._per_s)
        if left < 1.0:
            return (1.0 - left) / self._per_s
        if client not in self._left and len(self._left) >= MOST_CLIENTS:
            self._forget(now)
        self._left[client] = left - 1.0, now
        return 0.0

    def _forget(self, now: float) -> None:
        """Forget clients whose bucket is full, because they are like new clients. If there are none, forget all."""
        kept = {
            client: (left, then)
            for client, (left, then) in self._left.items()
            if left + (now - then) * self._per_s < self._most
        }
        self._left = kept if len(kept) < MOST_CLIENTS else {}


class Admission:
    """The checks of one server. `allowed_hosts`: the accepted names in a Host header; empty: any name."""

    def __init__(self, allowed_hosts: Sequence[str], limits: LimitsConfig, tokens: Tokens) -> None:
        self._allowed_hosts, self._tokens = frozenset(allowed_hosts), tokens
        per_s = limits.client_requests_per_s
        self._rates = None if per_s is None else ClientRates(per_s)

    async def refusal(self, scope: Scope) -> Refusal | None:
        """Return the response to a request that is not accepted, or None."""
        if self._allowed_hosts and (problem := self._host_problem(scope)):
            return problem
        if scope["path"] in HEALTH_PATHS:
            return None
        if self._rates is not None and scope["client"] and (wait_s := self._rates.take(client_key(scope["client"][0]))):
            headers = {"Retry-After": str(max(1, round(wait_s)))}
            return Refusal(429, "more requests of one client than limits.client_requests_per_s", headers)
        given = [value for name, value in scope["headers"] if name == b"authorization"] if self._tokens else []
        if self._tokens and (said := await self._tokens.problem(given)):
            return Refusal(401, said, {"WWW-Authenticate": "Bearer"})
        return None

    def _host_problem(self, scope: Scope) -> Refusal | None:
        """Return why the Host header is refused. A web page must not reach this server through a browser."""
        named = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        name = named.rpartition(":")[0] if named.rpartition(":")[2].isdigit() else named
        if name.lower() in self._allowed_hosts:
            return None
        return Refusal(400, f"Host {named[:100]!r} is not served here (server.allowed_hosts)")
