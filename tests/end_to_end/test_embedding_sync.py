"""Tables averaged rarely, from the command line's job to an evaluated run: 2 hosts of 2 ranks on generated clicks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.cli.plan import plan
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.runtime.errors import TrainingError
from pipeline.training.preflight import validate_job
from pipeline.training.summary import describe_evaluation
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.support.stored_tensors import step_tensors


def _job(data: str, run_dir: Path, *more: str) -> list[str]:
    return [
        "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", "trainer.evaluate_batch_size=512",
        f"data.path={data}", f"run_dir={run_dir}", "trainer.max_steps=24", "checkpoint.save_every_steps=8",
        "checkpoint.keep_last_n=9", "trainer.evaluate_every_steps=12", "trainer.evaluate_max_batches=2",
        "trainer.log_every_steps=12", "parallel.embedding_sync=every_8_steps",
        "tables.cat_25.sharding.sharding_types=[row_wise]", "tables.cat_23.sharding.sharding_types=[table_wise]",
        "tables.cat_22.sharding.sharding_types=[data_parallel]", *more,
    ]  # fmt: skip


def _manifest(run: Path, step: int) -> dict[str, object]:
    return json.loads((run / "checkpoints" / f"step_{step:08d}" / "manifest.json").read_text())


def _differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


@pytest.fixture(scope="module")
def run(ranks: RankPool, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Averaged at steps 8 and 16, saved at 8, 16 and, with the replicas apart, 20."""
    folder = tmp_path_factory.mktemp("synced") / "run"
    ranks.run(4, train_on_rank, _job(prepared_clicks, folder, "trainer.max_steps=20"), local_world_size=2)
    return folder


@pytest.mark.campaign
def test_steps_keep_replicas_apart_only_where_they_differ(run: Path) -> None:
    assert _manifest(run, 16)["replicas"] == {"num_hosts": 2, "embedding_sync": "every_8_steps", "apart": False}
    assert _manifest(run, 20)["replicas"] == {"num_hosts": 2, "embedding_sync": "every_8_steps", "apart": True}
    equal, apart = step_tensors(run, 16), step_tensors(run, 20)
    own = [key for key in apart if key.startswith("replica_")]
    assert equal.keys() == apart.keys() - set(own) and len(own) > 20
    table = "model.model.sparse_arch.embedding_bag_collection.embedding_bags.cat_25.weight"
    first, second = apart[f"replica_0.{table}"], apart[f"replica_1.{table}"]
    assert not torch.equal(first, second)
    torch.testing.assert_close(apart[table], (first + second) / 2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    synced = [line for line in lines if line["kind"] == "train"]
    assert [line["embedding_syncs"] for line in synced] == [1, 1]
    assert synced[0]["embedding_sync_bytes"] > 100_000


def _cut_and_whole(ranks: RankPool, data: str, folder: Path, world_size: int, local: int) -> tuple[Path, Path]:
    """One run in three goes, cut where replicas are apart, and one in one."""
    cut, whole = _job(data, folder / "cut"), _job(data, folder / "whole")
    for end in (5, 12, 24):
        ranks.run(world_size, train_on_rank, [*cut, f"trainer.max_steps={end}"], local_world_size=local)
    ranks.run(world_size, train_on_rank, whole, local_world_size=local)
    assert _manifest(folder / "cut", 12)["replicas"]["apart"]
    return folder / "cut", folder / "whole"


@pytest.mark.campaign
def test_a_stopped_run_goes_on_with_each_hosts_own_tables_bit_for_bit(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    cut, whole = _cut_and_whole(ranks, prepared_clicks, tmp_path, 2, 1)
    for step in (16, 24):
        assert not _differing(step_tensors(cut, step), step_tensors(whole, step))


@pytest.mark.campaign
def test_a_stopped_run_on_four_ranks_goes_on_to_rounding(ranks: RankPool, prepared_clicks: str, tmp_path: Path) -> None:
    """DDP orders its buckets anew after a first step, and a sum of four depends on the order: plain sharding has it too."""
    cut, whole = (step_tensors(run, 24) for run in _cut_and_whole(ranks, prepared_clicks, tmp_path, 4, 2))
    for key in cut:
        torch.testing.assert_close(cut[key], whole[key], atol=1e-5, rtol=1e-4)


@pytest.mark.campaign
def test_saving_on_the_way_changes_no_weight(ranks: RankPool, prepared_clicks: str, run: Path, tmp_path: Path) -> None:
    words = _job(prepared_clicks, tmp_path / "busy", "checkpoint.save_every_steps=3", "trainer.max_steps=20")
    ranks.run(4, train_on_rank, [*words, "checkpoint.asynchronous=true"], local_world_size=2)
    assert not _differing(step_tensors(tmp_path / "busy", 20), step_tensors(run, 20))


@pytest.mark.campaign
def test_evaluate_says_whose_tables_it_used(ranks: RankPool, run: Path) -> None:
    words = [f"run={run}", "split=validation"]
    averaged = ranks.run(1, evaluate_on_rank, [*words, "world_size=1"])[0]
    on_four = ranks.run(4, evaluate_on_rank, [*words, "world_size=4"], local_world_size=2)[0]
    assert averaged.tables == on_four.tables == "averaged, of 2 hosts (every_8_steps)"
    assert averaged.metrics == pytest.approx(on_four.metrics, abs=1e-4)
    own = ranks.run(4, evaluate_on_rank, [*words, "world_size=4", "tables=own"], local_world_size=2)[0]
    assert own.tables == "each host's own, of 2 hosts (every_8_steps)" and own.tables in describe_evaluation(own)
    assert own.metrics["ne"] != averaged.metrics["ne"] and own.path != averaged.path
    assert json.loads(Path(own.path).read_text())["tables"] == own.tables
    equal = ranks.run(1, evaluate_on_rank, [*words, "world_size=1", "step=16"])[0]
    assert equal.tables == "of all 2 hosts, just averaged (every_8_steps)"
    for step, held in (
        (20, "holds tables of each of 2 hosts and this evaluation runs on 1"),
        (16, "one model's tables"),
    ):
        with pytest.raises(RuntimeError, match=held):
            ranks.run(2, evaluate_on_rank, [*words, "world_size=2", "tables=own", f"step={step}"])


@pytest.mark.campaign
@pytest.mark.parametrize(
    "hosts",
    [[(2, 2, "every_step")], [(4, 1, "never")]],
    ids=["fewer", "more"],
)
def test_another_number_of_hosts_goes_on_from_the_mean(
    ranks: RankPool, prepared_clicks: str, run: Path, tmp_path: Path, hosts: list[tuple[int, int, str]]
) -> None:
    import shutil

    for world_size, local, sync in hosts:
        copy = tmp_path / f"{world_size}_{local}"
        shutil.copytree(run, copy)
        words = _job(prepared_clicks, copy, f"parallel.embedding_sync={sync}")
        summary = ranks.run(world_size, train_on_rank, words, local_world_size=local)[0]
        assert summary.step == 24 and summary.validation["auc"] > 0.5
        stored = _manifest(copy, 24).get("replicas")
        assert stored == ({"num_hosts": 4, "embedding_sync": sync, "apart": True} if sync == "never" else None)


@pytest.mark.campaign
def test_a_plan_is_for_the_ranks_of_one_host(prepared_clicks: str, tmp_path: Path) -> None:
    words = _job(
        prepared_clicks, tmp_path, "hardware=h100_80gb", "world_size=16", f"planner.plan_file={tmp_path}/plan.json"
    )
    words.remove("hardware=cpu")
    summary = plan(load_config(PlanJob, words))
    assert (summary.world_size, summary.local_world_size) == (8, 8)


@pytest.mark.parametrize(
    "compression",
    [
        "{kind: managed_collision, num_rows: 64}",
        "{kind: frequency_split, head_rows: 20, tail: {kind: managed_collision, num_rows: 64}}",
    ],
)
def test_tables_whose_rows_are_evicted_are_refused_before_torch(
    compression: str, prepared_clicks: str, tmp_path: Path
) -> None:
    words = _job(prepared_clicks, tmp_path, f"tables.cat_24.compression={compression}")
    with pytest.raises(TrainingError, match=names("tables.cat_24")):
        validate_job(load_config(TrainJob, words), 4)
