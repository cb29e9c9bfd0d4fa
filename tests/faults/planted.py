"""Run a verb, `train` or `evaluate`, with faults planted in it:  python -m tests.faults.planted FAULTS.json key=value ...

FAULTS.json holds {"folder": ..., "faults": [{"attempt", "rank", "at", "step", "do"}, ...]}. `at` is import, rendezvous,
load, step, evaluation, save or input; `do` is kill, stop, block, term (to this process), term_agent, slow or raise. Which
rows each attempt read for which step goes to <folder>/rows.<rank>.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.forks import run_as_this_process

RANK, ATTEMPT = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def plant(faults: list[dict[str, Any]], at: str, step: int | None = None) -> None:
    """Do what is planted for this place."""
    for fault in faults:
        if (fault["attempt"], fault["rank"], fault["at"]) == (ATTEMPT, RANK, at) and fault.get("step") in (None, step):
            faults.remove(fault)
            _do(fault)
            return


def _do(fault: dict[str, Any]) -> None:
    kind = fault["do"]
    if kind == "kill" and "after_ms" in fault:  # somewhere within the next step
        threading.Timer(fault["after_ms"] / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif kind in ("kill", "stop", "term"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])
    elif kind == "term_agent":
        for _ in range(2):  # the second must be harmless
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.2)
    elif kind in ("block", "slow"):
        _read_from_a_disk_that_does_not_answer()
    elif kind == "raise":
        raise RuntimeError(os.environ["PLANTED_MESSAGE"])


def _read_from_a_disk_that_does_not_answer() -> None:
    time.sleep(600)


def _before(function: Callable[..., Any], act: Callable[..., None]) -> Callable[..., Any]:
    def with_fault(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return function(*args, **kwargs)

    return with_fault


def plant_all(faults: list[dict[str, Any]], folder: str) -> None:
    import torch.distributed as dist

    from pipeline.data.read.reader import ShardReader
    from pipeline.runtime.process import watchdog
    from pipeline.runtime.storage.atomic import LocalFolders
    from pipeline.training import train
    from pipeline.training.readers import BatchOrder

    def at_beat(step: int | None = None, phase: str | None = None) -> None:
        if step is not None:
            plant(faults, "step", step)
        if phase == "evaluating":
            plant(faults, "evaluation")

    dist.init_process_group = _before(dist.init_process_group, lambda *_, **__: plant(faults, "rendezvous"))
    train.shard = _before(train.shard, lambda *_, **__: plant(faults, "load"))
    watchdog.beat = _before(watchdog.beat, at_beat)
    LocalFolders.commit = _before(
        LocalFolders.commit, lambda _, attempt, *__: plant(faults, "save", int(attempt.name.removeprefix("step_")))
    )
    ShardReader.batches = _read_with_faults(ShardReader.batches, faults)
    BatchOrder.batches = recorded(BatchOrder.batches, folder)


def _read_with_faults(batches: Any, faults: list[dict[str, Any]]) -> Any:
    def read(reader: Any, epoch: int, start_step: int = 0) -> Iterator[Any]:
        for step, batch in enumerate(batches(reader, epoch, start_step), start=start_step):
            plant(faults, "input", step)
            yield batch

    return read


def _hash(row: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(row, digest_size=8).digest())


def recorded(batches: Any, folder: str) -> Any:
    """The same batches; each one's rows are written down, by a hash of their values, before it is used."""

    def with_record(order: Any, start_step: int) -> Iterator[Any]:
        with open(f"{folder}/rows.{RANK}.jsonl", "a") as file:
            for step, batch in enumerate(batches(order, start_step), start=start_step):
                rows = [_hash(row.tobytes()) for row in batch.dense_features.numpy()]
                file.write(json.dumps({"attempt": ATTEMPT, "step": step, "rows": rows}) + "\n")
                file.flush()
                yield batch

    return with_record


if __name__ == "__main__":
    if os.environ.pop("WARM", ""):
        run_as_this_process("tests.faults.planted")
    with open(sys.argv[1]) as plan:
        wanted = json.load(plan)
    del sys.argv[1]
    plant(wanted["faults"], "import")
    plant_all(wanted["faults"], wanted["folder"])
    from pipeline.cli import evaluate, train

    (train if wanted["verb"] == "train" else evaluate).main()
