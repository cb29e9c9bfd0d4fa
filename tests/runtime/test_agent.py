"""What a scheduler sees of a launch: the ranks' exit code, restarts where they may help, lines instead of tracebacks."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.forks import WarmCommand
from tests.support.messages import mentions

# A rank without torch: it ends with the code that its rank and attempt are given.
RANK = """
import os, signal, sys, time
from pipeline.runtime.process import preemption
from pipeline.runtime.process.failures import write_error_file
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"start {attempt} of rank {rank}", flush=True)
CODES
"""


def _launch(tmp_path: Path, codes: str, max_restarts: int = 2, ranks: int = 2) -> WarmCommand:
    script = tmp_path / "rank.py"
    script.write_text(RANK.replace("CODES", codes))
    words = ["--grace-s", "12", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", script]
    return WarmCommand("pipeline agent", words, {"PYTHONPATH": str(Path(__file__).resolve().parents[2])})


@pytest.mark.parametrize(
    ("flags", "conf"),
    [
        (["--node-rank", "0"], "is_host=true"),
        (["--node_rank=3", "--rdzv-conf", "read_timeout=9"], "read_timeout=9,is_host=false"),
        ([], ""),
        (["--node-rank", "1", "--rdzv-backend", "static"], ""),
    ],
)
def test_the_first_node_hosts_the_meeting_whatever_names_say(flags: list[str], conf: str) -> None:
    from pipeline.runtime.process.agent import parse

    nodes = ["--nnodes", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "head:29500"]
    assert parse([*nodes, *flags, "-m", "pipeline", "train"]).rdzv_conf == conf


@pytest.mark.long
@pytest.mark.parametrize(
    ("codes", "expected", "num_starts", "said"),
    [
        pytest.param("sys.exit(0)", 0, 1, "", marks=pytest.mark.campaign),
        ("sys.exit(2)", 2, 1, ""),  # a user's error is the same at the next start; rank 0 has said it
        ("sys.exit(75)", 75, 1, ""),
        pytest.param("sys.exit(76 if rank == 0 else 0)", 76, 3, "ended with code 76", marks=pytest.mark.campaign),
        ("os.kill(os.getpid(), 9) if attempt == 0 and rank == 1 else sys.exit(0)", 0, 2, "was ended by SIGKILL"),
        ("write_error_file('error: only here'); sys.exit(2 if rank == 1 else time.sleep(30))", 2, 1, "error: only here"),
    ],
)  # fmt: skip
def test_the_launch_ends_as_its_ranks_do(tmp_path: Path, codes: str, expected: int, num_starts: int, said: str) -> None:
    process = _launch(tmp_path, codes)
    out, err = process.communicate(timeout=300)
    assert process.returncode == expected, err
    assert f"start {num_starts - 1} of rank" in out and f"start {num_starts} of rank" not in out
    assert said in err and "Traceback" not in err
    # Where both ranks end at once, the second may be told to before it has ended by itself.
    assert said or err == "" or "it left no message" in err


@pytest.mark.long
def test_a_rank_told_to_end_because_another_died_does_not_make_it_a_requeue(tmp_path: Path) -> None:
    codes = "preemption.listen(); os.kill(os.getpid(), 9) if rank == 1 and not time.sleep(1) else time.sleep(30)"
    process = _launch(tmp_path, codes, max_restarts=0)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert mentions(err, "SIGKILL")


@pytest.mark.long
def test_a_second_signal_does_not_cut_the_saving_short(tmp_path: Path) -> None:
    codes = """
def save(*_):
    time.sleep(3)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    process = _launch(tmp_path, codes, ranks=1)
    while process.stdout.readline() != "ready\n":
        pass
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (75, "saved\n", "")
