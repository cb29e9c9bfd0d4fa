"""Agents that meet in a folder: nodes come, are lost and come back, and the ranks of those that are there go on."""

from __future__ import annotations

import io
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from pipeline.runtime.process.file_rendezvous import KEPT_STATES, FolderBackend
from pipeline.runtime.storage.lease import take_lease
from tests.support.forks import WarmCommand

# A rank without torch. It runs until the test says otherwise, and saves when it is asked to stop.
RANK = """
import os, signal, sys, time
from pathlib import Path
from pipeline.runtime.process.processes import die_with_parent
folder, world = Path(os.environ["FOLDER"]), int(os.environ["WORLD_SIZE"])
die_with_parent()
def save(*_):
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
print(f"rank {os.environ['RANK']} of {world} at {os.environ['MASTER_PORT']} in round {os.environ['PIPELINE_ELASTIC_ROUND']}", flush=True)
while not (folder / "done").exists():
    if world > 1 and (folder / "lost").exists():
        os._exit(1)  # as gloo does when a peer is gone
    time.sleep(0.05)
os._exit(int((folder / "done").read_text()))
"""


class Node:
    """An agent, as the scheduler starts it on a node."""

    def __init__(self, folder: Path, name: str, nodes: str = "1:2", *flags: str) -> None:
        (folder / "rank.py").write_text(RANK)
        words = [
            "--grace-s", "10", "--rdzv-backend", "folder", "--rdzv-endpoint", str(folder / "meetings"), "--rdzv-id", "7", "--nnodes",
            nodes, "--nproc-per-node", "1", "--rdzv-conf", "last_call_timeout=1", "--tee", "3", "--log-dir", str(folder / name),
            "--role", "", "--local-addr", "localhost", *flags, str(folder / "rank.py"),
        ]  # fmt: skip
        environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "FOLDER": str(folder)}
        self.folder, self.process = folder / name, WarmCommand("pipeline agent", words, environment)

    def said(self) -> str:
        """By the ranks of all attempts, in order."""
        logs = sorted(self.folder.rglob("stdout.log"), key=lambda path: path.stat().st_mtime_ns)
        return "".join(path.read_text() for path in logs)

    def wait_for(self, *words: str) -> None:
        until = time.monotonic() + 240
        while not all(word in self.said() for word in words):
            assert self.process.poll() is None and time.monotonic() < until, (words, self.said())
            time.sleep(0.05)

    def ends(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=240)
        return self.process.returncode, errors


def test_a_state_is_followed_by_one_of_those_who_have_read_it(tmp_path: Path) -> None:
    first, second = FolderBackend(str(tmp_path / "7")), FolderBackend(str(tmp_path / "7"))
    states = [pickle.dumps(_RendezvousState()) for _ in range(3)]
    assert first.get_state() is None
    assert first.set_state(states[0]) == (states[0], 1, True)
    assert second.set_state(states[1]) == (states[0], 1, False)  # it had not read the first
    _, token = second.get_state() or (b"", None)
    assert second.set_state(states[1], token) == (states[1], 2, True)
    assert first.set_state(states[2], 1) == (states[1], 2, False)
    for number in range(2, 3 * KEPT_STATES):
        assert first.set_state(states[2], number) == (states[2], number + 1, True)
    assert len(list((tmp_path / "7").iterdir())) == KEPT_STATES
    assert second.set_state(states[0], 2) == (states[2], 3 * KEPT_STATES, False)  # it slept: its number is free again
    assert second.get_state() == (states[2], 3 * KEPT_STATES)


def test_a_state_that_would_run_something_is_not_read(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    buffer = io.BytesIO()
    pickle.dump(Bad(), buffer)
    backend = FolderBackend(str(tmp_path / "7"))
    (tmp_path / "7" / "state.00000001").write_bytes(buffer.getvalue())
    with pytest.raises(RendezvousStateError, match="mkdir"):
        backend.get_state()
    assert not (tmp_path / "made").exists()


def test_the_ranks_of_a_later_round_take_the_run_folder_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_ELASTIC_JOB", "7")
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # of a task's own
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    monkeypatch.setenv("PIPELINE_ELASTIC_ROUND", "1")
    monkeypatch.setattr("pipeline.runtime.process.processes.machine", lambda: "a node that was lost")
    first = take_lease(str(tmp_path), 3600)
    monkeypatch.setattr("pipeline.runtime.process.processes.machine", lambda: "a node that is left")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    monkeypatch.setenv("PIPELINE_ELASTIC_ROUND", "2")
    second = take_lease(str(tmp_path), 3600)
    assert second.token == first.token + 1
    second.release()
    first.release()


@pytest.mark.long
def test_for_a_node_that_comes_the_ranks_save_and_all_start_again(tmp_path: Path) -> None:
    first = Node(tmp_path, "first")
    first.wait_for("rank 0 of 1")
    second = Node(tmp_path, "second")
    first.wait_for("saved", "of 2 at ")
    second.wait_for("of 2 at ")
    (tmp_path / "done").write_text("0")
    code, said = first.ends()
    assert code == 0 and "a node has joined" in said and "2 node(s) have joined; before: 1" in said
    assert second.ends()[0] == 0
    ports = {line.split()[5] for line in (first.said() + second.said()).splitlines() if "of 2 at" in line}
    assert len(ports) == 1  # both went to the same first node
    late = Node(tmp_path, "late")
    code, said = late.ends()
    assert code == 0 and "other nodes of the job have ended it with code 0" in said and late.said() == ""


@pytest.mark.campaign
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_lost_node_costs_no_restart_and_comes_back(tmp_path: Path, restarts: str) -> None:
    first, second = Node(tmp_path, "first", "1:2", "--max-restarts", restarts), Node(tmp_path, "second")
    first.wait_for("of 2 at ")
    second.wait_for("of 2 at ")
    for _ in range(2):
        (tmp_path / "lost").touch()
        second.process.send_signal(signal.SIGKILL)
        second.ends()
        before = first.said().count("of 1 at ")
        until = time.monotonic() + 240
        while first.said().count("of 1 at ") == before:
            assert first.process.poll() is None and time.monotonic() < until, first.said()
            time.sleep(0.1)
        (tmp_path / "lost").unlink()
        second = Node(tmp_path, f"again{before}")
        second.wait_for("of 2 at ")
    (tmp_path / "done").write_text("2")  # a mistake ends all nodes
    assert [first.ends()[0], second.ends()[0], Node(tmp_path, "late").ends()[0]] == [2, 2, 2]


@pytest.mark.campaign
def test_a_node_that_is_asked_to_stop_leaves_the_others_to_go_on(tmp_path: Path) -> None:
    first, second = Node(tmp_path, "first"), Node(tmp_path, "second")
    first.wait_for("of 2 at ")
    second.wait_for("of 2 at ")
    second.process.send_signal(signal.SIGTERM)
    assert second.ends()[0] == 75
    (tmp_path / "lost").touch()
    first.wait_for("of 1 at ")
    first.process.send_signal(signal.SIGTERM)
    assert first.ends()[0] == 75
