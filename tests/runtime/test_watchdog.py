"""A process that no longer gets on is ended and says where it stood; one that is merely slow, or was suspended, is not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.runtime.process.exit_codes import HANG, REQUEUE
from tests.support.messages import mentions

START = """
import time
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.watchdog import Limits, WAITING_FOR_INPUT
preemption.listen()
"""


Ended = dict[str, Future[tuple[int, str]]]
SCENARIOS = {
    "blocked": """
watchdog.start(3, Limits(step_s=1.0))
def read_from_a_dead_disk():
    time.sleep(600)
with watchdog.stepping("training"):
    watchdog.beat(17, WAITING_FOR_INPUT)
    read_from_a_dead_disk()
""",
    "long phases": """
watchdog.start(0, Limits(step_s=4.0))
with watchdog.stepping("training"):
    for step in range(45):
        time.sleep(0.1)  # other work on the machine may make it longer
        watchdog.beat(step)
    with watchdog.saving():
        time.sleep(4.5)
    with watchdog.stage("training"):
        time.sleep(4.5)
watchdog.end()
time.sleep(4.5)
""",
    "silent": """
from tests.runtime.test_watchdog import board_with_a_silent_rank
watchdog.start(0, Limits(step_s=1.0))
watchdog.watch_others(board_with_a_silent_rank, 2, "0")
with watchdog.saving():  # own time is not up: it is the other's silence that counts
    time.sleep(600)
""",
    "absent": """
from tests.runtime.test_watchdog import EmptyBoard
watchdog.start(0, Limits(stage_s=1.0, step_s=1.0))
watchdog.watch_others(EmptyBoard, 3, "0")
with watchdog.stage("joining"):
    time.sleep(600)
""",
    "slow save": """
import os, signal
watchdog.start(0, Limits(grace_s=7.0))
with preemption.deferred(), watchdog.saving():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
    time.sleep(600)
""",
}


def _run(code: str) -> tuple[int, str]:
    """(exit code, stderr) of a process without torch, which is to end long before its sleeps do."""
    done = subprocess.run([sys.executable, "-c", START + code], stderr=subprocess.PIPE, text=True, timeout=300)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def ended() -> Iterator[Ended]:
    """What became of each scenario; all run at once, for they do little but wait."""
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        yield {name: pool.submit(_run, code) for name, code in SCENARIOS.items()}


def test_a_blocked_step_is_found_and_its_stack_is_shown(ended: Ended) -> None:
    code, text = ended["blocked"].result()
    assert code == HANG
    assert mentions(text, "rank 3 17 input") and re.search(r"no progress for \d", text)
    assert "read_from_a_dead_disk" in text


def test_phases_that_may_take_long_are_no_hangs(ended: Ended) -> None:
    assert ended["long phases"].result() == (0, "")


def test_the_time_in_which_a_scheduler_suspends_the_run_does_not_count() -> None:
    code = (
        START
        + """
watchdog.start(0, Limits(step_s=5.0))
with watchdog.stepping("training"):
    print("ready", flush=True)
    began = time.monotonic()
    time.sleep(1.0)  # the suspension falls into it
    while time.monotonic() - began < 9.0:
        time.sleep(0.1)
        watchdog.beat()
"""
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    process.send_signal(signal.SIGCONT)
    _, text = process.communicate(timeout=300)
    assert (process.returncode, text) == (0, "")


def test_a_rank_that_gives_no_sign_is_named_by_the_one_before_it(ended: Ended) -> None:
    code, text = ended["silent"].result()
    assert code == HANG
    assert "rank 1" in text
    assert mentions(text, "rank 1 elsewhere 41 training")


def test_who_has_not_come_is_named(ended: Ended) -> None:
    code, text = ended["absent"].result()
    assert code == HANG
    assert mentions(text, "joining") and "rank 1" in text and "rank 2" in text


class EmptyBoard:
    """What the watchdog needs of a store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def board_with_a_silent_rank() -> EmptyBoard:
    board = EmptyBoard()
    board.set(
        "pulse/0/1",
        '{"rank": 1, "tick": 9, "step": 41, "phase": "training", "idle_s": 2.0, "host": "elsewhere", "pid": 1, "started": 1}',
    )
    return board


@pytest.mark.parametrize("again", [False, True])
def test_sigterm_where_nothing_is_to_be_saved_ends_at_once(again: bool) -> None:
    sends = "os.kill(os.getpid(), signal.SIGTERM)\n" * (1 + again)
    assert _run(f"import os, signal\ntry:\n    {sends.splitlines()[0]}\nfinally:\n    {sends}\ntime.sleep(600)") == (
        REQUEUE,
        "",
    )


def test_a_save_that_outlasts_the_grace_ends_with_the_requeue_code(ended: Ended) -> None:
    code, text = ended["slow save"].result()
    assert code == REQUEUE
    assert mentions(text, "trainer.grace_s=7")
    found = re.search(r"(\d+) s after SIGTERM", text)
    assert found is not None and int(found[1]) >= 2  # most of the grace was used


def test_a_rank_does_not_outlive_its_agent(tmp_path: Path) -> None:
    rank = "import time; from pipeline.runtime.process.processes import die_with_parent; die_with_parent(); print('ready', flush=True); time.sleep(60)"
    agent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {rank!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (child,) = (int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(int(pid)) == process.pid)
    process.kill()
    assert process.stdout.read() == ""  # its end of the pipe is closed: the child is gone
    assert not os.path.exists(f"/proc/{child}") or _parent(child) != process.pid


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
