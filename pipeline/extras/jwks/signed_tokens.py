"""Accept tokens that an identity provider signs (JWT), by the keys that it publishes (JWKS, RFC 7517).

Keys are read at the start, every REFRESH_S seconds, and when a token names a key that is not known,
at most every COOLDOWN_S seconds. If the keys cannot be read again, the previous keys are used.
PyJWT checks the tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from typing import Any

import jwt
from jwt.algorithms import RSAAlgorithm

from pipeline.config.serving import ServerConfig
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger

# Only public keys. A token by HS256 would be checked with the public key as its secret, and "none" has no signature.
ALGORITHMS = frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"))
MAX_BYTES, MAX_KEYS = 1 << 18, 100
RSA_BITS = range(2048, 8193)
REFRESH_S, COOLDOWN_S, TIMEOUT_S, LEEWAY_S = 300.0, 10.0, 5.0, 30.0
SAYS: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "it has expired",
    jwt.ImmatureSignatureError: "it is not valid yet",
    jwt.InvalidAudienceError: "it is for another audience",
    jwt.InvalidIssuerError: "it is of another issuer",
    jwt.MissingRequiredClaimError: "it lacks exp, iss or aud",
    jwt.InvalidAlgorithmError: "its algorithm is not that of its key",
    jwt.InvalidSignatureError: "its signature is wrong",
}
logger = get_logger(__name__)


class UnknownKeyError(ValueError):
    """No key has the id that the token names."""


class SignedTokens:
    """The keys of server.jwks, and the checks of tokens. Raises ServingError if the keys cannot be read."""

    def __init__(self, server: ServerConfig) -> None:
        assert server.jwks is not None
        self._source, self._audience, self._issuer = server.jwks, server.jwt_audience, server.jwt_issuer
        self._fetching = asyncio.Lock()
        self._keys, self._asked_at = read_keys(self._source), time.monotonic()

    async def problem(self, token: str) -> str:
        """Return why a token is not accepted; "" if it is accepted. If it names an unknown key, read the keys again."""
        try:
            return self._checked(token)
        except UnknownKeyError:
            await self._refresh(COOLDOWN_S)
        try:
            return self._checked(token)
        except UnknownKeyError:
            return "its key (kid) is not known"

    async def keep_fresh(self) -> None:
        """Read the keys again every REFRESH_S seconds, until the task is cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._refresh(COOLDOWN_S)

    async def _refresh(self, least_s: float) -> None:
        async with self._fetching:
            if time.monotonic() - self._asked_at < least_s:
                return
            self._asked_at = time.monotonic()
            try:
                self._keys = await asyncio.to_thread(read_keys, self._source)
            except ServingError as error:
                logger.error("%s; the keys from before are used", error)

    def _checked(self, token: str) -> str:
        try:
            key = self._keys.get(str(jwt.get_unverified_header(token).get("kid")))
            if key is None:
                raise UnknownKeyError
            jwt.decode(
                token, key, algorithms=[key.algorithm_name], audience=self._audience, issuer=self._issuer,
                leeway=LEEWAY_S, options={"require": ["exp", "iss", "aud"]},
            )  # fmt: skip
        except UnknownKeyError:
            raise
        except Exception as error:  # whatever a token makes a parser raise: it is not accepted
            return next((text for kind, text in SAYS.items() if isinstance(error, kind)), "it is not a signed token")
        return ""


def read_keys(source: str) -> dict[str, jwt.PyJWK]:
    """Read the keys of a URL or a file, by their ids.

    Keys that are secret or short, and keys without an id, are left out. Raises ServingError if no
    key remains.
    """
    try:
        values = json.loads(_content(source))
        entries = values["keys"]
        if len(entries) > MAX_KEYS:
            raise ValueError(f"it has {len(entries)} keys, more than {MAX_KEYS}")
    except Exception as error:  # of a network, a file or a parser
        said = " ".join(str(error).split())[:200]
        raise ServingError(
            f"server.jwks={source} cannot be read as a set of keys: {said or type(error).__name__}"
        ) from None
    found = {}
    for entry in entries:
        try:
            key = jwt.PyJWK(entry)
        except Exception:  # of a kind that PyJWT does not know, or damaged
            continue
        if key.key_id and key.algorithm_name in ALGORITHMS and key.public_key_use in (None, "sig") and _is_long(key):
            found[str(key.key_id)] = key
    if not found:
        raise ServingError(
            f"server.jwks={source} has no public key with a kid for {', '.join(sorted(ALGORITHMS))} "
            f"(RSA: {RSA_BITS[0]} to {RSA_BITS[-1]} bits)"
        )
    return found


def _is_long(key: jwt.PyJWK) -> bool:
    return not isinstance(key.Algorithm, RSAAlgorithm) or key.key.key_size in RSA_BITS


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _content(source: str) -> bytes:
    if source.startswith(("https://", "http://")):
        with urllib.request.build_opener(_NoRedirects).open(source, timeout=TIMEOUT_S) as answer:
            content, deadline = b"", time.monotonic() + 2 * TIMEOUT_S  # the timeout is of each read
            while len(content) <= MAX_BYTES and (part := answer.read1(MAX_BYTES)):
                content += part
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it did not arrive within {2 * TIMEOUT_S:g} s")
    else:
        with open(source, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return content
