"""A run with tables in tiers ends with the checkpoint of the same run in memory, bit for bit, whatever comes between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.checkpoint.steps import list_steps
from pipeline.checkpoint.tensors import StepTensors
from pipeline.cli.command_line import load_config
from pipeline.config.jobs import EvaluateJob, TrainJob
from pipeline.runtime.errors import ShardingError
from pipeline.training.evaluate_run import EvaluateSummary, evaluate
from pipeline.training.run import TrainSummary, train
from tests.support.ranks import RankPool

SMALL = [
    "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", "trainer.log_every_steps=4",
    "trainer.evaluate_max_batches=1", "logger.tensorboard=false", "logger.report=false",
]  # fmt: skip
TIERS = ["+tables.default.tiers.slots=0.45", "+tables.default.tiers.min_rows=700"]


def _train(rank: int, overrides: list[str]) -> TrainSummary:
    return train(load_config(TrainJob, overrides))


def _evaluate(rank: int, overrides: list[str]) -> EvaluateSummary:
    return evaluate(load_config(EvaluateJob, overrides))


def run(
    ranks: RankPool, world_size: int, data: str, run_dir: Path, steps: int, more: Sequence[str] = ()
) -> TrainSummary:
    words = [*SMALL, f"data.path={data}", f"run_dir={run_dir}", f"trainer.max_steps={steps}", *more]
    return ranks.run(world_size, _train, words)[0]  # type: ignore[no-any-return]


def values(folder: str | Path) -> dict[str, int]:
    """Checksums of whole tensors: tables in tiers take less memory, so a planner may put them on other ranks."""
    tensors = StepTensors(str(folder))
    shapes = {key: tensors.shape(key) for key in tensors.entries}
    return {
        key: zlib.crc32(tensors.read(key, [0] * len(shape), shape).contiguous().numpy().tobytes())
        for key, shape in shapes.items()
    }


def test_tiers_and_memory_give_the_same_checkpoint_and_take_turns(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    expected = run(ranks, 1, prepared_clicks, tmp_path / "memory", 8)
    first = run(ranks, 1, prepared_clicks, tmp_path / "turns", 4, TIERS)
    assert first.throughput["tier_row_hit_percent"] < 100
    found = run(ranks, 1, prepared_clicks, tmp_path / "turns", 8)
    assert values(found.checkpoint) == values(expected.checkpoint)
    assert list((tmp_path / "turns" / "tiers").iterdir()) == []
    line = json.loads((tmp_path / "turns" / "metrics.jsonl").read_text().splitlines()[0])
    assert {
        "tier_stall_percent",
        "tier_hit_percent",
        "tier_read_mb_per_step",
        "tier_written_mb_per_step",
    } <= line.keys()


@pytest.mark.campaign
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_two_ranks_train_to_the_same_checkpoint_and_one_goes_on(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path, kind: str, optimizer: str
) -> None:
    plan = [
        f"+tables.default.sharding.sharding_types=[{kind}]", "+tables.default.sharding.min_partition=4",
        f"optimizer.sparse.name={optimizer}",
    ]  # fmt: skip
    tiers = [*plan, *TIERS]
    expected = run(ranks, 2, prepared_clicks, tmp_path / "memory", 10, plan)
    found = run(ranks, 2, prepared_clicks, tmp_path / "tiers", 10, tiers)
    assert values(found.checkpoint) == values(expected.checkpoint)
    assert found.validation == expected.validation
    if kind == "column_wise" and optimizer == "rowwise_adagrad":
        return  # its state depends on the column shards
    # Another number of ranks, and the two change places.
    whole = ["+tables.default.sharding.sharding_types=[table_wise]", f"optimizer.sparse.name={optimizer}"]
    expected = run(ranks, 1, prepared_clicks, tmp_path / "memory", 16, [*whole, *TIERS])
    found = run(ranks, 1, prepared_clicks, tmp_path / "tiers", 16, whole)
    assert values(found.checkpoint) == values(expected.checkpoint)


@pytest.mark.campaign
def test_an_evaluation_and_a_warm_start_of_tiers_are_those_of_memory(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    runs = {"memory": [], "tiers": TIERS}
    for name, more in runs.items():
        run(ranks, 1, prepared_clicks, tmp_path / name, 8, more)
    measured = [ranks.run(1, _evaluate, [f"run={tmp_path / name}", "split=test"])[0].metrics for name in runs]
    assert measured[0] == measured[1]
    warm = [f"warm_start.run={tmp_path / 'memory'}", "+warm_start=from_run"]
    ends = [run(ranks, 1, prepared_clicks, tmp_path / f"{name}_warm", 4, [*more, *warm]) for name, more in runs.items()]
    assert values(ends[0].checkpoint) == values(ends[1].checkpoint)


@pytest.mark.campaign
@pytest.mark.parametrize("compression", ["quotient_remainder", "frequency_split", "hash"])
def test_parts_of_compressed_tables_lie_in_tiers_too(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path, compression: str
) -> None:
    size = {"frequency_split": "head_rows=64", "hash": "ratio=2", "quotient_remainder": "ratio=2"}[compression]
    words = [f"+tables.default.compression.{word}" for word in (f"kind={compression}", size, "min_rows=700")]
    tiers = ["+tables.default.tiers.slots=0.6", "+tables.default.tiers.min_rows=300"]
    expected = run(ranks, 2, prepared_clicks, tmp_path / "memory", 8, words)
    found = run(ranks, 2, prepared_clicks, tmp_path / "tiers", 8, [*words, *tiers])
    assert found.throughput["tier_hit_percent"] < 100
    assert values(found.checkpoint) == values(expected.checkpoint)


@pytest.mark.campaign
def test_a_killed_run_leaves_no_store_and_ends_as_one_in_memory(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    words = [
        *SMALL, f"data.path={prepared_clicks}", "checkpoint.save_every_steps=5", "trainer.max_steps=40",
    ]  # fmt: skip
    command = [sys.executable, "-m", "pipeline", "train", *words, f"run_dir={tmp_path / 'killed'}", *TIERS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = str(tmp_path / "killed" / "checkpoints")
    while process.poll() is None and not (Path(checkpoints).is_dir() and list_steps(checkpoints)):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list((tmp_path / "killed" / "tiers").iterdir()) == []
    steps = ["checkpoint.save_every_steps=5"]
    found = run(ranks, 1, prepared_clicks, tmp_path / "killed", 40, [*steps, *TIERS])
    expected = run(ranks, 1, prepared_clicks, tmp_path / "memory", 40, steps)
    assert values(found.checkpoint) == values(expected.checkpoint)


@pytest.mark.campaign
def test_a_full_ssd_ends_the_run_and_the_same_command_goes_on_elsewhere(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    words = ["checkpoint.save_every_steps=2", f"sharding.tier_folder={small}", *TIERS]
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(RuntimeError, match=rf"rows of table .* in {small}: No space left on device"):
            run(ranks, 1, prepared_clicks, tmp_path / "run", 12, words)
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)  # the failed rank still has its file
    steps = list_steps(str(tmp_path / "run" / "checkpoints"))
    assert steps and steps[-1] < 12
    found = run(ranks, 1, prepared_clicks, tmp_path / "run", 12, words)
    expected = run(ranks, 1, prepared_clicks, tmp_path / "memory", 12, ["checkpoint.save_every_steps=2"])
    assert values(found.checkpoint) == values(expected.checkpoint)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+tables.default.data_type=fp16"], "use fp32"),
        (["optimizer.sparse.update_rows=all"], "set it to touched"),
        (["sharding.fast_cpu=false"], "sharding.fast_cpu=true"),
        (["checkpoint.differential=true"], "checkpoint.differential=false"),
    ],
    ids=["fp16", "all_rows", "fast_cpu", "differential"],
)
def test_what_would_not_train_exactly_is_refused(
    prepared_clicks: str, tmp_path: Path, ranks: RankPool, words: list[str], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        run(ranks, 1, prepared_clicks, tmp_path / "run", 4, [*TIERS, *words])
    assert ShardingError.__name__ in str(raised.value)
