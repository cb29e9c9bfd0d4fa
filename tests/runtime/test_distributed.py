"""What is said of ranks and threads."""

from __future__ import annotations

import os

import pytest
import torch

from pipeline.runtime.process.distributed import DistributedContext, describe_threads


@pytest.mark.parametrize(
    ("ranks", "threads", "asked", "said"),
    [
        (2, 1, "1", "2 rank(s) on this host x 1 thread(s) (OMP_NUM_THREADS=1) on 2 core(s)"),
        (1, 2, None, "1 rank(s) on this host x 2 thread(s) (torch's default, a thread a physical core) on 2 core(s)"),
        (2, 2, "2", "2 rank(s) on this host x 2 thread(s) (OMP_NUM_THREADS=2) on 2 core(s): more threads than cores, set OMP_NUM_THREADS=1"),
        (1, 1, "1", "1 rank(s) on this host x 1 thread(s) (OMP_NUM_THREADS=1) on 2 core(s): OMP_NUM_THREADS=2 would use them all"),
    ],
)  # fmt: skip
def test_the_log_says_how_cores_are_shared_and_why(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int, asked: str | None, said: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert describe_threads(DistributedContext(0, ranks, 0, ranks, torch.device("cpu"), "gloo")) == said
