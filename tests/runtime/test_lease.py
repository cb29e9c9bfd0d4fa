"""A run folder has one writer: the second is told who and since when, the dead are followed, the followed commit nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.checkpoint.steps import list_steps
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.storage.lease import Holder, LeaseLostError, RunFolderHeldError, take_lease
from pipeline.training.train import train
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

ELSEWHERE = Holder(4, "node7", "another boot", 4711, 99, "", 0, "2026-01-01 00:00:00 UTC")


def _plant(run_dir: Path, holder: Holder, silent_s: float = 0.0) -> Path:
    """As if another host's run had taken the folder and sent its last heartbeat `silent_s` ago."""
    path = run_dir / ".lease" / f"{holder.token:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


def test_the_second_is_refused_and_told_by_whom_since_when(tmp_path: Path) -> None:
    lease = take_lease(str(tmp_path), 60)
    with pytest.raises(
        RunFolderHeldError, match=rf"process {os.getpid()} on .*, since 2.* UTC, last heartbeat \d s ago"
    ):
        take_lease(str(tmp_path), 60)
    lease.check()
    lease.release()
    follower = take_lease(str(tmp_path), 60)
    assert follower.token == lease.token + 1
    with pytest.raises(LeaseLostError, match=names("1")):
        lease.check()
    follower.release()


def test_a_run_on_another_host_holds_it_until_it_has_been_silent_for_the_ttl(tmp_path: Path) -> None:
    _plant(tmp_path, ELSEWHERE, silent_s=50)
    with pytest.raises(RunFolderHeldError, match=names("4711 node7")):
        take_lease(str(tmp_path), 60)
    _plant(tmp_path, ELSEWHERE, silent_s=61)
    lease = take_lease(str(tmp_path), 60)
    assert lease.token == 5
    lease.release()


def test_a_heartbeat_ahead_of_the_clock_is_told_with_what_to_do(tmp_path: Path) -> None:
    """Where the clock has gone back, nobody can tell a run that is over from one that goes on: nothing is taken over."""
    _plant(tmp_path, ELSEWHERE, silent_s=-7200)
    with pytest.raises(RunFolderHeldError, match=r"4711 .* 7,[12]\d\d s ahead of the clock.* remove \.lease"):
        take_lease(str(tmp_path), 60)


def test_a_killed_holder_of_this_host_is_followed_at_once(tmp_path: Path) -> None:
    code = f"import os; from pipeline.runtime.storage.lease import take_lease; take_lease({str(tmp_path)!r}, 60); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    lease = take_lease(str(tmp_path), 60)
    assert lease.token == 2
    lease.release()


def test_a_requeued_job_follows_its_earlier_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    _plant(tmp_path / "a", replace(ELSEWHERE, job="31"))
    take_lease(str(tmp_path / "a"), 60).release()  # the scheduler has ended that one: no wait
    _plant(tmp_path / "b", replace(ELSEWHERE, job="30"))
    with pytest.raises(RunFolderHeldError, match="job 30"):
        take_lease(str(tmp_path / "b"), 60)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    _plant(tmp_path / "c", replace(ELSEWHERE, job="31"))
    began = time.monotonic()
    take_lease(str(tmp_path / "c"), 1.5).release()  # nobody can say whether it still runs: once it is silent
    assert time.monotonic() - began > 1


def test_signs_keep_it_and_the_loss_of_it_is_noticed(tmp_path: Path) -> None:
    lost = threading.Event()
    lease = take_lease(str(tmp_path), 1.0, lost.set)
    path = tmp_path / ".lease" / "00000001.json"
    os.utime(path, (1, 1))
    until = time.monotonic() + 30
    while path.stat().st_mtime == 1:
        assert time.monotonic() < until, "no sign is given"
        time.sleep(0.05)
    assert not lost.is_set()
    _plant(tmp_path, ELSEWHERE)
    assert lost.wait(30)
    with pytest.raises(LeaseLostError, match="node7"):
        lease.check()


def _train_and_lose_the_folder(rank: int, overrides: list[str], run_dir: str) -> str:
    def take() -> None:
        while not (Path(run_dir) / "metrics.jsonl").exists():
            time.sleep(0.05)
        _plant(Path(run_dir), ELSEWHERE)

    threading.Thread(target=take).start()
    with pytest.raises(ValueError) as error:
        train(load_config(TrainJob, overrides))
    return str(error.value)


def test_a_run_that_lost_its_folder_stops_and_commits_nothing(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    overrides = [
        "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", f"data.path={prepared_clicks}",
        f"run_dir={tmp_path}", "trainer.epochs=500", "trainer.lease_ttl_s=1",
    ]  # fmt: skip
    (message,) = ranks.run(1, _train_and_lose_the_folder, overrides, str(tmp_path))
    assert "no longer holds" in message and mentions(message, "4711 node7")
    assert list_steps(str(tmp_path / "checkpoints")) == []


def _train(rank: int, overrides: list[str]) -> int:
    return train(load_config(TrainJob, overrides)).step


@pytest.mark.long
def test_a_run_that_fails_lets_go_of_its_folder(ranks: RankPool, prepared_clicks: str, tmp_path: Path) -> None:
    """In a process that lives on, as a notebook does."""
    overrides = [
        "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", f"data.path={prepared_clicks}",
        f"run_dir={tmp_path}", "trainer.max_steps=2", "trainer.evaluate_max_batches=1",
    ]  # fmt: skip
    missing = [*overrides, "warm_start.run=/no/such/run"]
    with pytest.raises(RuntimeError, match="/no/such/run"):
        ranks.run(1, _train, missing)
    assert ranks.run(1, _train, overrides) == [2]
