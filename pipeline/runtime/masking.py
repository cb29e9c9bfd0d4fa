"""Mask credentials in text (stdlib only).

Hidden are user and password of a URL, the signing parameters of its query, and the values of environment variables
whose names say that they are secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

MASK = "***"
SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
SHORTEST = 8  # a shorter value would blot out ordinary words
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^\s/@'\"?#]+)@", re.IGNORECASE)
_QUERY = re.compile(
    r"(?P<name>[?&][\w.-]*(?:signature|token|secret|password|credential|api[-_]?key|access[-_]?key[\w-]*|sig)=)[^&\s'\"]+",
    re.IGNORECASE,
)


def mask(text: str) -> str:
    text = _QUERY.sub(rf"\g<name>{MASK}", _USER_INFO.sub(rf"\g<scheme>{MASK}@", text))
    for value in _secret_values():
        text = text.replace(value, MASK)
    return text


def find_secret(values: Any, key: str = "") -> str:
    """The dotted key of a text in nested dicts and lists that mask() would change; empty where there is none."""
    if isinstance(values, dict):
        inner = ((f"{key}.{name}" if key else str(name), value) for name, value in values.items())
    elif isinstance(values, list | tuple):
        inner = ((f"{key}[{index}]", value) for index, value in enumerate(values))
    else:
        return key if isinstance(values, str) and mask(values) != values else ""
    return next((found for name, value in inner if (found := find_secret(value, name))), "")


def _secret_values() -> Iterator[str]:
    """Longest first, so that a value inside another leaves nothing over."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}
    # A path or a file's name in such a variable (AWS_WEB_IDENTITY_TOKEN_FILE) is no secret.
    return iter(sorted((value for value in values if not os.path.isabs(value)), key=len, reverse=True))
