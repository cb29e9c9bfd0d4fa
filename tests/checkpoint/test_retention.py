"""The last and the best steps stay, and none goes before two later ones are known to be intact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.retention import Retention, measured_metric
from pipeline.checkpoint.steps import list_steps
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded


@pytest.mark.parametrize(
    ("retention", "gone"),
    [
        (Retention(2), [1, 2, 3]),
        (Retention(1), [1, 2, 3]),  # two stay, whatever is asked for
        (Retention(9), []),
        (Retention(2, 1, "ne"), [1, 3]),
        (Retention(2, 1, "auc"), [2, 3]),
        (Retention(2, 2, "ne"), [3]),
    ],
)
def test_the_last_and_the_best_stay(retention: Retention, gone: list[int]) -> None:
    metrics = {1: 0.9, 2: 0.7, 3: None, 4: float("nan"), 5: 0.8}
    assert retention.expendable(metrics) == gone


def test_metrics_of_an_earlier_step_say_nothing_of_a_later_one() -> None:
    manifest = {"step": 20, "metrics_step": 20, "metrics": {"ne": 0.8}}
    assert measured_metric(manifest, "ne") == 0.8
    assert measured_metric({**manifest, "metrics_step": 10}, "ne") is None
    assert measured_metric(manifest, "auc") is None


def _keeps_best(rank: int, folder: str) -> list[int]:
    _, model, optimizer, context = build_sharded(dict.fromkeys("abcd", "row_wise"))
    checkpointer = Checkpointer(folder, model, optimizer, context, keep_last_n=2, keep_best_n=1)
    for step, ne in ((1, 0.9), (2, 0.5), (3, 0.8), (4, 0.7), (5, 0.6)):
        checkpointer.save(step, {"metrics": {"ne": ne}, "metrics_step": step})
    return list_steps(folder)


def test_the_best_step_outlives_later_ones(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, _keeps_best, str(tmp_path)) == [[2, 4, 5]]


def _purges_beside_damage(rank: int, folder: str) -> list[int]:
    """Step 2 is damaged by another process before a new one, which has verified nothing, saves step 3."""
    _, model, optimizer, context = build_sharded(dict.fromkeys("abcd", "row_wise"))
    Checkpointer(folder, model, optimizer, context).save(1)
    Checkpointer(folder, model, optimizer, context).save(2)
    victim = Path(folder) / "step_00000002" / "__0_0.distcp"
    victim.write_bytes(victim.read_bytes()[:-1])
    Checkpointer(folder, model, optimizer, context).save(3)
    return list_steps(folder)


def test_a_good_step_stays_while_a_later_one_is_damaged(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, _purges_beside_damage, str(tmp_path)) == [[1, 2, 3]]


def _counts_groups(rank: int, folder: str) -> list[int]:
    """Process groups after each of: one checkpointer, three more, one that saves in a thread, its close()."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    _, model, optimizer, context = build_sharded(dict.fromkeys("abcd", "row_wise"))
    Checkpointer(folder, model, optimizer, context).save(1)
    counts = [len(groups)]
    for step in (2, 3, 4):
        Checkpointer(folder, model, optimizer, context).save(step)
    counts.append(len(groups))
    beside = Checkpointer(folder, model, optimizer, context, asynchronous=True)
    beside.save(5)
    counts.append(len(groups))
    beside.close()
    return [*counts, len(groups), list_steps(folder)[-1]]


def test_checkpointers_of_a_process_share_one_group_and_a_thread_lets_its_own_go(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, three_more, beside, closed, saved = ranks.run(1, _counts_groups, str(tmp_path))[0]
    assert (three_more - first, beside - first, closed - first, saved) == (0, 1, 0, 5)
