"""Fault 23: checkpoints in an object store that fails: what passes is outlasted, what lasts is an error, never an empty folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import list_steps, read_manifest
from pipeline.runtime.errors import CheckpointError
from tests.faults.checkpoints import MIXED, load_once, save_steps
from tests.faults.conftest import FaultRecorder
from tests.support.examples import SEED
from tests.support.object_store import FaultyProxy, quick_retries, store, use_store  # noqa: F401
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded

FOLDER = "s3://bucket/run/checkpoints"
PASSING = ("503", "500", "reset", "lost", "slow", "truncated")


def _now_and_then(fault: str, seed: int, share: float = 0.15) -> Callable[[str, str], str]:
    """Of the same request three times in a row at most: what passes is never more than the retries outlast."""
    generator, in_a_row = random.Random(seed + SEED), dict[tuple[str, str], int]()

    def plant(method: str, path: str) -> str:
        before = in_a_row.get((method, path), 0)
        planted = before < 3 and generator.random() < share
        in_a_row[method, path] = before + 1 if planted else 0
        return fault if planted else ""

    return plant


def _on_store(rank: int, url: str, function: Callable[..., Any], *args: Any) -> Any:
    use_store(url, attempts=6)
    with quick_retries():
        return function(rank, *args)


def _error_of(rank: int, action: str, staging: str) -> str:
    _, model, optimizer, context = build_sharded(MIXED)
    checkpointer = Checkpointer(FOLDER, model, optimizer, context, staging=staging)
    with pytest.raises((CheckpointError, OSError)) as error:
        checkpointer.save(9) if action == "save" else checkpointer.restore_latest()
    return str(error.value)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("lost", "truncated"), id="some", marks=pytest.mark.campaign),
        pytest.param(PASSING, id="all", marks=pytest.mark.campaign),
    ],
)
def test_passing_faults_are_outlasted_and_what_is_saved_loads_exactly(
    ranks: RankPool,
    store: FaultyProxy,  # noqa: F811
    tmp_path: Path,
    fault: FaultRecorder,
    kinds: tuple[str, ...],
) -> None:
    digests = {}
    for step, kind in enumerate(kinds, start=1):
        store.faults = _now_and_then(kind, step)
        options = {"staging": str(tmp_path / "staging"), "asynchronous": step % 2 == 0}
        digests |= ranks.run(2, _on_store, store.url, save_steps, FOLDER, [step], options)[0]
        store.faults = _now_and_then(kind, step + 100)
        assert ranks.run(2, _on_store, store.url, load_once, FOLDER)[0] == (step, digests[step]), kind
    assert all(store.counts.get(kind, 0) for kind in kinds), store.counts
    count = sum(store.counts.values())
    assert not list((tmp_path / "staging").iterdir())
    fault(23, f"{len(kinds)} kinds that pass: every step saved and loaded exactly", count=count, seed=1 + SEED)


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.campaign
def test_lasting_faults_end_a_save_and_are_never_taken_for_an_empty_folder(
    ranks: RankPool,
    store: FaultyProxy,  # noqa: F811
    tmp_path: Path,
    fault: FaultRecorder,
    every: int,
) -> None:
    staging = str(tmp_path / "staging")
    digests = ranks.run(2, _on_store, store.url, save_steps, FOLDER, [1], {"staging": staging})[0]
    cases = [("503", "PUT"), ("403", "PUT"), ("503", "GET"), ("403", "GET"), ("403", "HEAD")][::every]
    for number, (kind, method) in enumerate(cases):
        store.faults = lambda verb, path, kind=kind, method=method: kind if verb == method else ""
        action = "save" if method == "PUT" else "load"
        for message in ranks.run(2, _quick, store.url, action, f"{staging}/{number}"):
            assert FOLDER in message and kind in message, message
            assert method != "PUT" or "bytes" in message
    store.faults = lambda verb, path: ""
    assert list_steps(FOLDER) == [1]
    assert ranks.run(2, _on_store, store.url, load_once, FOLDER)[0] == (1, digests[1])
    fault(
        23,
        "403 at once and 503 after its retries end a save or a load with path, and bytes when writing; step N-1 loads",
        count=len(cases),
    )


def _quick(rank: int, url: str, action: str, staging: str) -> str:
    use_store(url, attempts=2)
    with quick_retries():
        return _error_of(rank, action, staging)


def _purges(rank: int, staging: str) -> list[int]:
    save_steps(rank, FOLDER, [1, 2, 3], {"staging": staging, "keep_last_n": 2})
    return list_steps(FOLDER)


@pytest.mark.campaign
def test_steps_are_purged_and_damage_is_walked_past(
    ranks: RankPool,
    store: FaultyProxy,  # noqa: F811
    tmp_path: Path,
) -> None:
    assert ranks.run(2, _on_store, store.url, _purges, str(tmp_path))[0] == [2, 3]
    from pipeline.runtime.storage import storage

    (attempt,) = [name for name in storage.list_folder(f"{FOLDER}/step_00000003") if "manifest" not in name]
    victim = f"{FOLDER}/step_00000003/{attempt}/__0_0.distcp"
    with storage.open_file(victim, "rb") as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 4
    with storage.open_file(victim, "wb") as file:
        file.write(content)
    assert ranks.run(2, _on_store, store.url, load_once, FOLDER)[0][0] == 2


@pytest.mark.campaign
def test_a_chain_of_changed_rows_is_saved_and_loaded_exactly_past_passing_faults(
    ranks: RankPool,
    store: FaultyProxy,  # noqa: F811
    tmp_path: Path,
    fault: FaultRecorder,
) -> None:
    store.faults = _now_and_then("lost", 18, share=0.05)
    steps = [1, 2, 3, 4]
    digests = ranks.run(2, _on_store, store.url, save_steps, FOLDER, steps, {"staging": str(tmp_path)}, 9)[0]
    assert ranks.run(2, _on_store, store.url, load_once, FOLDER)[0] == (4, digests[4])
    assert ["chain" in read_manifest(f"{FOLDER}/step_{step:08d}") for step in steps] == [False, True, True, True]
    assert store.counts["lost"]
    fault(
        23,
        "a chain of 3 links on a base, saved and loaded exactly past lost answers",
        count=store.counts["lost"],
        seed=18 + SEED,
    )
