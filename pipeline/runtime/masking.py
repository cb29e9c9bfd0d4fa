"""Remove credentials and control characters from printed and saved text (stdlib only).

`mask` hides the user and password of a URL, the signing parameters of its query, secret environment
variables and the texts given to `hide`. `printable` and `one_line` escape the characters by which a
name in somebody's data could move the cursor, forge a line or reverse the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

MASK = "***"
MIN_HIDDEN_LETTERS = 8  # replacing a shorter value would change ordinary words
# Words that may be joined to others (PGPASSWORD), then words that must stand alone between underscores: PWD and
# GIT_AUTHOR_NAME are not secret, MYSQL_PWD and PROXY_AUTH are.
SECRET_NAME = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|CONNECTION_?STRING|API_?KEY"
    r"|(ACCESS|PRIVATE|ACCOUNT|STORAGE|SIGNING|SIGN|ENCRYPTION|MASTER|SHARED|APP|APPLICATION|SERVICE|ROUTING"
    r"|INTEGRATION|LICENSE|FERNET|SSH)_?KEY"
    r"|(^|[_.-])(PASS|AUTH|AUTHORIZATION|DSN|SAS|JAAS|COOKIE|PING_URL|OTLP_HEADERS)([_.-]|$)"
    r"|[_.-]PWD([_.-]|$)|SASL_JAAS",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^\s/@'\"?#]+)@", re.IGNORECASE)
_QUERY = re.compile(
    r"(?P<name>[?&][\w.-]*(?:signature|token|secret|password|credential|api[-_]?key|access[-_]?key[\w-]*|sig)=)"
    r"[^&\s'\"]+",
    re.IGNORECASE,
)
# C0 and C1 without tab and line feed, DEL, the line and paragraph separators, and the marks that reorder text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_hidden: set[str] = set()


def mask(text: str) -> str:
    """Return `text` with each credential replaced by ***."""
    text = _mask_urls_and_environment(text)
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def hide(url: str) -> None:
    """Let `mask` hide this address, and its path alone, from now on: a webhook's path is its password."""
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    _hidden.update(value for value in (url, path) if len(value) >= MIN_HIDDEN_LETTERS)


def without_hidden(values: Mapping[str, object]) -> dict[str, object]:
    """Return nested dicts with the texts given to `hide` replaced by ***."""
    return {
        name: without_hidden(value) if isinstance(value, dict) else MASK if value in list(_hidden) else value
        for name, value in values.items()
    }


def find_secret(values: Any, key: str = "") -> str:
    """Return the dotted key of a text in nested values that holds a credential; empty if none does.

    Texts given to `hide` do not count: they are masked when they are saved.
    """
    if isinstance(values, dict):
        inner = ((f"{key}.{name}" if key else str(name), value) for name, value in values.items())
    elif isinstance(values, list | tuple):
        inner = ((f"{key}[{index}]", value) for index, value in enumerate(values))
    else:
        return key if isinstance(values, str) and _mask_urls_and_environment(values) != values else ""
    return next((found for name, value in inner if (found := find_secret(value, name))), "")


def printable(text: str) -> str:
    r"""Return `text` with control characters as \x1b or \u202e, so that a terminal and a log show them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: object) -> str:
    r"""Return printable(text) in one line: line feeds become \n."""
    return printable(str(text)).replace("\n", "\\n")


def for_log(text: str) -> str:
    """Return `text` masked and printable; lines after the first are indented, so that none looks like an entry."""
    return printable(mask(text)).replace("\n", "\n    ")


def _mask_urls_and_environment(text: str) -> str:
    text = _QUERY.sub(rf"\g<name>{MASK}", _USER_INFO.sub(rf"\g<scheme>{MASK}@", text))
    for value in _secret_values():
        text = text.replace(value, MASK)
    return text


def _secret_values() -> Iterator[str]:
    """Yield secret values, the longest first, so that a value that contains another value is masked completely."""
    values = {
        value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= MIN_HIDDEN_LETTERS
    }
    # A path in such a variable (AWS_WEB_IDENTITY_TOKEN_FILE, SSH_AUTH_SOCK) is not a secret.
    return iter(sorted((value for value in values if not os.path.isabs(value)), key=len, reverse=True))
