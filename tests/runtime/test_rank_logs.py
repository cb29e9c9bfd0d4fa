"""The files of a rank's output tell host and job, and the newest is found by the rank."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from pipeline.runtime.process.agent import DAY_S, RankLogs, old_starts, remove_starts

HOST = socket.gethostname().partition(".")[0]


def _start(folder: Path, ranks: range, attempt: int = 0) -> list[str]:
    """The stderr files of a launch on one host."""
    logs = RankLogs(log_dir=str(folder), redirects=Std.ALL)
    envs = {
        local: {"RANK": str(rank), "TORCHELASTIC_RUN_ID": "12.0", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        for local, rank in enumerate(ranks)
    }
    return list(logs.reify(envs).stderrs.values())


def test_two_hosts_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _start(tmp_path, range(2))
    monkeypatch.setattr(socket, "gethostname", lambda: "node2.cluster")
    second = _start(tmp_path, range(2, 4))
    for index, file in enumerate([*first, *second]):
        Path(file).write_text(f"rank {index}")
    assert [(tmp_path / f"rank_{rank}.stderr.log").read_text() for rank in range(4)] == [
        f"rank {rank}" for rank in range(4)
    ]
    assert {"_".join(path.name.split("_")[:2]) for path in tmp_path.glob("12.0_*")} == {f"12.0_{HOST}", "12.0_node2"}


def test_a_second_launch_keeps_the_files_of_the_first(tmp_path: Path) -> None:
    (old,) = _start(tmp_path, range(1))
    Path(old).write_text("old")
    (new,) = _start(tmp_path, range(1))
    Path(new).write_text("new")
    assert Path(old).read_text() == "old"
    assert (tmp_path / "rank_0.stderr.log").read_text() == "new"


def test_starts_that_are_old_and_not_among_the_newest_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [Path(file) for _ in range(4) for file in _start(tmp_path, range(1))]
    for days, file in enumerate(reversed(files)):  # the newest today, the oldest three days ago
        file.write_text("text")
        os.utime(file, (time.time() - days * DAY_S,) * 2)
    starts = [str(file.parents[2]) for file in files]
    assert old_starts(str(tmp_path), kept=2, days=0.5) == [starts[1], starts[0]]
    assert old_starts(str(tmp_path), kept=0, days=2.5) == [starts[0]]
    assert old_starts(str(tmp_path / "nowhere")) == [] == old_starts(str(tmp_path))
    monkeypatch.setattr("pipeline.runtime.process.agent.old_starts", lambda base: starts[:3])
    (newest,) = _start(tmp_path, range(1))
    assert sorted(str(path) for path in tmp_path.iterdir() if path.is_dir()) == sorted([starts[3], str(Path(newest).parents[2])])  # fmt: skip
    remove_starts([starts[3], str(Path(newest).parents[2])])
    assert list(tmp_path.iterdir()) == []  # links that lead nowhere went with them
