"""A disk that fails once is tried again, NFS may deny a rename that it has done, and a rank ends with its agent."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.command_line import check_encoding, print_user_errors
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import MetricsWriter
from pipeline.runtime.process.exit_codes import USER_ERROR
from pipeline.runtime.process.processes import AGENT, start_time
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import commit_folder
from pipeline.runtime.storage.checksums import VerifiedFile, checksums_of
from tests.support.messages import names


class Failing:
    """Calls a function, but raises EIO for the first `times` calls."""

    def __init__(self, function: Callable[..., Any], times: int) -> None:
        self.function, self.left = function, times

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.function(*args, **named)


def write_metrics(folder: Path) -> str:
    writer = MetricsWriter(str(folder), tensorboard=False)
    writer.write("train", 1, {"ne": 0.5})
    return writer.path


def write_summary(folder: Path) -> str:
    storage.publish_text(str(folder / "summary.json"), "{}")
    return str(folder / "summary.json")


@pytest.mark.parametrize("write", [write_metrics, write_summary])
def test_one_failure_of_the_disk_is_tried_again_and_two_are_one_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(os, "fsync", Failing(os.fsync, 1))
    path = Path(write(tmp_path))
    assert len(path.read_text().splitlines()) == 1 and isinstance(json.loads(path.read_text()), dict)
    monkeypatch.setattr(os, "fsync", Failing(os.fsync, 9))
    with pytest.raises(SystemExit) as ended, print_user_errors("elsewhere"):
        write(tmp_path)
    assert ended.value.code == USER_ERROR
    assert str(path) in capsys.readouterr().err


def test_a_block_of_a_step_is_read_again_before_it_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"x" * 1000)
    entry = checksums_of(str(path))
    with VerifiedFile(str(path), entry) as file:
        monkeypatch.setattr(file, "_read_block", Failing(file._read_block, 1))
        assert file.read() == b"x" * 1000
    with VerifiedFile(str(path), entry) as file:
        monkeypatch.setattr(file, "_read_block", Failing(file._read_block, 2))
        with pytest.raises(OSError, match=names(str(path))):
            file.read()


def test_a_rename_that_is_done_and_answers_enoent_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS sends a request again if the answer to the first one was lost."""
    for name in ("rename", "replace"):
        done = getattr(os, name)

        def denied(source: str, target: str, done: Callable[[str, str], None] = done) -> None:
            done(source, target)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)

        monkeypatch.setattr(os, name, denied)
    storage.publish_text(str(tmp_path / "a.txt"), "text")
    storage.publish_text(str(tmp_path / "a.txt"), "new")
    assert (tmp_path / "a.txt").read_text() == "new"
    (tmp_path / "attempt").mkdir()
    commit_folder(str(tmp_path / "attempt"), str(tmp_path / "step"), "{}")
    assert (tmp_path / "step" / "manifest.json").read_text() == "{}"
    monkeypatch.setattr(os, "rename", Failing(os.rename, 0))
    with pytest.raises(FileNotFoundError):
        storage.rename(str(tmp_path / "missing"), str(tmp_path / "step"))


def test_a_link_that_is_done_and_answers_eexist_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def denied(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", denied)
    storage.publish_once(str(tmp_path / "1.json"), "one")
    with pytest.raises(FileExistsError):
        storage.publish_once(str(tmp_path / "1.json"), "two")
    assert (tmp_path / "1.json").read_text() == "one"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rank_whose_agent_died_before_it_could_watch_it_ends(is_there: bool) -> None:
    rank = "from pipeline.runtime.process.processes import die_with_parent; die_with_parent(); print('alive')"
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    named = {**os.environ, AGENT: f"{agent.pid}:{start_time(agent.pid)}"}
    if not is_there:
        agent.kill()
        agent.wait()
    done = subprocess.run([sys.executable, "-c", rank], env=named, capture_output=True, text=True)
    agent.kill()
    agent.wait()
    assert (done.returncode, done.stdout) == ((0, "alive\n") if is_there else (-9, ""))


def test_a_name_that_the_process_cannot_decode_is_refused() -> None:
    """With LC_ALL=C and PYTHONUTF8=0 a run_dir with umlauts ended in a traceback."""
    check_encoding(["train", "run_dir=läufe"])
    with pytest.raises(ConfigError, match=names("PYTHONUTF8=1")):
        check_encoding(["train", "run_dir=l\udcc3\udca4ufe"])
