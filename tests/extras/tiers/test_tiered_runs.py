"""A run with tables in tiers ends with the checkpoint of the same run in memory, bit for bit, whatever comes between."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.checkpoint.steps import list_steps
from pipeline.checkpoint.tensors import StepTensors
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import load_saved_job
from pipeline.extras.checkpoints.cli.checkpoints import export_checkpoint
from pipeline.extras.checkpoints.config import CheckpointsJob
from pipeline.runtime.errors import ShardingError
from pipeline.serving.artifact.export import export
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.training.evaluate import evaluate
from pipeline.training.summary import EvaluateSummary, TrainSummary
from pipeline.training.train import train
from tests.support.ranks import RankPool

SMALL = [
    "experiment=quickstart",
    "hardware=cpu",
    "trainer.global_batch_size=256",
    "trainer.log_every_steps=4",
    "trainer.evaluate_max_batches=1",
    "logger.tensorboard=false",
    "logger.report=false",
]
TIERS = ["+tables.default.tiers.slots=0.45", "+tables.default.tiers.min_rows=700"]


def _train(rank: int, overrides: list[str]) -> TrainSummary:
    return train(load_config(TrainJob, overrides))


def _evaluate(rank: int, overrides: list[str]) -> EvaluateSummary:
    return evaluate(load_config(EvaluateJob, overrides))


def run(
    ranks: RankPool, world_size: int, data: str, run_dir: Path, steps: int, more: Sequence[str] = ()
) -> TrainSummary:
    words = [*SMALL, f"data.path={data}", f"run_dir={run_dir}", f"trainer.max_steps={steps}", *more]
    return ranks.run(world_size, _train, words)[0]


def values(folder: str | Path) -> dict[str, int]:
    """Checksums of whole tensors: tables in tiers take less memory, so a planner may put them on other ranks."""
    tensors = StepTensors(str(folder))
    shapes = {key: tensors.shape(key) for key in tensors.entries}
    return {
        key: zlib.crc32(tensors.read(key, [0] * len(shape), shape).contiguous().numpy().tobytes())
        for key, shape in shapes.items()
    }


@pytest.mark.long
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
def test_the_planner_chooses_tiers_by_itself_where_memory_does_not_hold_the_tables(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    auto = ["sharding.tiers=auto", "+tables.default.tiers.min_rows=700", "trainer.global_batch_size=64"]
    small = [*auto, "hardware.ddr_cap_gb=0.7511"]  # 1.1 MiB beside the process, for tables and layers
    expected = run(ranks, 1, prepared_clicks, tmp_path / "memory", 8, auto)
    assert "tier_row_hit_percent" not in expected.throughput
    found = run(ranks, 1, prepared_clicks, tmp_path / "tiers", 4, small)
    assert found.throughput["tier_row_hit_percent"] < 100
    tables = load_saved_job(TrainJob, f"{tmp_path}/tiers/config.yaml").tables
    assert [config for config in tables.values() if config.tiers and config.tiers.slots < 1]
    measured = ranks.run(1, _evaluate, [f"run={tmp_path / 'tiers'}", "split=test"])[0]
    assert measured.metrics
    found = run(ranks, 1, prepared_clicks, tmp_path / "tiers", 8, small)  # resumes, and chooses as before
    assert values(found.checkpoint) == values(expected.checkpoint)
    with pytest.raises(RuntimeError, match=r"sharding.tiers=auto: tables take 0.0. GiB .*hardware.ddr_cap_gb"):
        run(ranks, 1, prepared_clicks, tmp_path / "none", 4, [*auto, "hardware.ddr_cap_gb=0.7501"])


@pytest.mark.campaign
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)], ids=["1_to_2", "2_to_1"])
def test_a_step_holds_the_rows_that_were_trained_and_every_way_to_go_on_knows_the_others(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path, first: int, then: int
) -> None:
    data = [
        "trainer.global_batch_size=32",
        "+tables.default.sharding.sharding_types=[row_wise]",
        "+tables.cat_2.num_embeddings=200000",
    ]
    expected = run(ranks, first, prepared_clicks, tmp_path / "memory", 4, data)
    saved = run(ranks, first, prepared_clicks, tmp_path / "tiers", 4, [*data, *TIERS])
    manifest = json.loads((Path(saved.checkpoint) / "manifest.json").read_text())
    assert manifest["format_version"] == 4 and len(manifest["sampled"]) >= first
    taken, whole = (
        sum(path.stat().st_blocks * 512 for path in Path(each.checkpoint).iterdir()) for each in (saved, expected)
    )
    assert taken < whole / 3
    assert values(saved.checkpoint) == values(expected.checkpoint)
    ends = [run(ranks, then, prepared_clicks, tmp_path / "memory", 8, data)]
    shutil.copytree(tmp_path / "tiers", tmp_path / "to_memory")
    for name, more in {"tiers": TIERS, "to_memory": []}.items():
        ends.append(run(ranks, then, prepared_clicks, tmp_path / name, 8, [*data, *more]))
    assert values(ends[0].checkpoint) == values(ends[1].checkpoint) == values(ends[2].checkpoint)


@pytest.mark.campaign
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_two_ranks_train_to_the_same_checkpoint_and_one_goes_on(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path, kind: str, optimizer: str
) -> None:
    plan = [
        f"+tables.default.sharding.sharding_types=[{kind}]",
        "+tables.default.sharding.min_partition=4",
        f"optimizer.sparse.name={optimizer}",
    ]
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
def test_artifacts_and_exported_tables_of_tiers_are_those_of_memory(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    for name, more in {"memory": [], "tiers": TIERS}.items():
        run(ranks, 1, prepared_clicks, tmp_path / name, 8, more)
    memory, tiers = (ranks.run(1, _export, str(tmp_path / name))[0] for name in ("memory", "tiers"))
    assert memory == tiers


def _export(rank: int, run_dir: str) -> tuple[str, dict[str, list[object]]]:
    """The artifact's version, which is a hash of all that scores depend on; and a table with its optimizer's state."""
    summary = export(ExportJob(run=run_dir, output=f"{run_dir}_artifact"))
    table = max(read_manifest(summary.artifact).tables, key=lambda each: each.rows).name
    output = f"{run_dir}.parquet"
    export_checkpoint(CheckpointsJob(run=run_dir, command="export", table=table, output=output, optimizer_state=True))
    return summary.version, pq.read_table(output).to_pydict()


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
        *SMALL,
        f"data.path={prepared_clicks}",
        "checkpoint.save_every_steps=5",
        "trainer.max_steps=40",
    ]
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
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(small)]
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
