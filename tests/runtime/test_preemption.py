"""Requests to stop: the first Ctrl-C of a training is noted, the second ends it, and afterwards Python's own handler is back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pipeline.runtime.process import preemption


@pytest.fixture(autouse=True)
def python_takes_ctrl_c() -> Iterator[None]:
    """Its own handler is not there where the tests were started in the background, where shells ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_is_noted_and_the_second_is_an_interrupt(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), preemption.deferred(interrupts=True):
        os.kill(os.getpid(), signal.SIGINT)
        assert preemption.wanted() and preemption.interrupted()
        assert preemption.seconds_since_arrival() == 0.0  # no grace runs: nobody sends SIGKILL after it
        assert "again to end it at once" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not preemption.wanted() and not preemption.interrupted()


def test_where_ctrl_c_is_not_asked_for_it_is_an_interrupt_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), preemption.deferred():
        os.kill(os.getpid(), signal.SIGINT)
