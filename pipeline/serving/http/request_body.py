"""Read a request's body within limits of bytes and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from pipeline.config.serving import LimitsConfig
from pipeline.serving.http.request_rows import BadRequest

LINGER_S = 1.0  # a client that is still sending does not look at an answer: what it sends is dropped so long


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """Raises BadRequest for a body that is too large, too slow, encoded, or cut off."""
    if encoding := request.headers.get("content-encoding"):
        raise BadRequest(415, f"Content-Encoding {encoding!r} is not read: send the body as it is")
    too_large = BadRequest(413, f"the body has more than {limits.body_bytes} bytes: send its rows in several requests")
    if _announced(request) > limits.body_bytes:
        if "expect" not in request.headers:  # else nothing is sent before it is asked for
            await _drop_rest(request)
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    break
                chunks.append(chunk)
    except TimeoutError:
        raise BadRequest(408, f"no whole body within {limits.body_timeout_s:g} s") from None
    except ClientDisconnect:
        raise BadRequest(400, "the client went away before its body was read") from None
    if size > limits.body_bytes:
        await _drop_rest(request)
        raise too_large
    return b"".join(chunks)


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


async def _drop_rest(request: Request) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await request.receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
