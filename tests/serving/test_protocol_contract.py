"""What GuardedProtocol overrides and reads of uvicorn is there, in the release that setup.cfg pins."""

from __future__ import annotations

import configparser
import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.serving.http.protocol import GuardedProtocol

CALLBACKS = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "on_message_begin": [],
    "on_url": ["url"],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_message_complete": [],
    "send_400_response": ["msg"],
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_has_the_signature_that_is_overridden(name: str) -> None:
    for protocol in (HttpToolsProtocol, GuardedProtocol):
        assert [*inspect.signature(getattr(protocol, name)).parameters][1:] == CALLBACKS[name]
    assert name in vars(GuardedProtocol)


def test_the_attributes_that_are_read_are_set_by_uvicorn() -> None:
    source = inspect.getsource(HttpToolsProtocol.__init__)
    assert [name for name in ("connections", "cycle", "transport", "loop") if f"self.{name}" not in source] == []
    assert "self.send_400_response(" in inspect.getsource(HttpToolsProtocol.data_received)


@pytest.mark.parametrize("extra", ["serve", "dev"])
def test_uvicorn_is_pinned_to_a_release_that_was_tested(extra: str) -> None:
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    lines = config["options.extras_require"][extra].strip().splitlines()
    (pin,) = (Requirement(line) for line in lines if line.startswith("uvicorn"))
    assert pin.specifier.contains(version("uvicorn")) and not pin.specifier.contains("0.55.0")
