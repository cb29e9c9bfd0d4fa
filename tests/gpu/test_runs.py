"""What a run on GPUs can do besides plain steps: each equals the same job on the CPU, or a run in one go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.training.summary import TrainSummary
from tests.gpu.conftest import BASE, Gpus
from tests.gpu.data import HASHED, prepared
from tests.gpu.jobs import evaluate_on_rank, train_on_rank
from tests.gpu.test_matrix import EXACT, assert_same
from tests.support.stored_tensors import step_tensors

KINDS = "tables.default.sharding.sharding_types=[table_wise,row_wise]"
CLICKS = ["experiment=quickstart", KINDS]


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*CLICKS, *EXACT, *prepared(tmp_path_factory, "quickstart")]


def assert_as_on_the_cpu(gpus: Gpus, words: list[str], folder: Path, tolerance: float = 1e-5, **more: Any) -> None:
    cpu = gpus.train(2, words, folder / "cpu", on="cpu", **more)
    assert_same(gpus.train(2, words, folder / "gpu", **more), cpu, tolerance)


def assert_same_steps(one: Path, other: Path, step: int, tolerance: float = 0.0) -> None:
    found, wanted = step_tensors(one, step), step_tensors(other, step)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=tolerance, atol=tolerance)


OPTIMIZERS = ["sgd", "rowwise_adagrad", "adam", "adamw", "rowwise_adam"]  # the matrix is trained by adagrad
TOUCHED = "optimizer.sparse.update_rows=touched"  # all rows at every step: the CPU only
OURS = "sharding.fast_cpu=true"  # FBGEMM's CPU kernels cannot do it, and this package's can
JOBS: dict[str, list[str]] = {
    **{
        name: [f"optimizer={name}", "optimizer.sparse.eps=0.01", "optimizer.dense.eps=0.01", TOUCHED, OURS]
        for name in OPTIMIZERS
    },
    "accumulation": ["trainer.gradient_accumulation_steps=2", "trainer.gradient_clip_norm=0.5"],
    "weight_decay": [
        "optimizer=rowwise_adagrad",
        "optimizer.sparse.eps=0.01",
        "optimizer.sparse.weight_decay=0.1",
        OURS,
    ],
    "early_stop": ["trainer.evaluate_every_steps=1", "trainer.early_stop.patience=1", "trainer.early_stop.min_delta=9"],
    "asynchronous": ["checkpoint.asynchronous=true", "checkpoint.save_every_steps=1"],
    "differential": ["checkpoint.differential=true", "checkpoint.save_every_steps=1"],
    "base_pipeline": ["trainer.pipeline=base"],
    "averaged_layers": ["trainer.average.kind=ema", "trainer.average.decay=0.25", "checkpoint.save_every_steps=1"],
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_equals_the_cpus(gpus: Gpus, clicks: list[str], tmp_path: Path, name: str) -> None:
    assert_as_on_the_cpu(gpus, [*clicks, *JOBS[name]], tmp_path)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8"])
def test_quantized_exchanges_stay_close_to_the_cpus_fp32(
    gpus: Gpus, clicks: list[str], tmp_path: Path, precision: str
) -> None:
    cpu = gpus.train(2, clicks, tmp_path / "cpu", on="cpu")
    gpu = gpus.train(2, [*clicks, f"comms={precision}"], tmp_path / "gpu")
    assert_same(gpu, cpu, 2e-2)
    for report in filter(None, gpu.reports):
        sent = {dtype for entry in report.collectives if "all" in entry["op"] for _, dtype in entry["tensors"]}
        assert {"bf16": "bfloat16", "fp16": "float16", "int8": "uint8"}[precision] in sent


def test_bf16_layers_stay_close_to_the_cpus(gpus: Gpus, clicks: list[str], tmp_path: Path) -> None:
    assert_as_on_the_cpu(gpus, [*clicks, "trainer.precision=bf16"], tmp_path, 2e-2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_frequency_split_equals_the_cpus(gpus: Gpus, clicks: list[str], tmp_path: Path, kind: str) -> None:
    """Bags without a rare id are left out, so batch sizes differ by feature: FBGEMM's VBE."""
    table = "tables.default.compression"
    words = [
        *clicks,
        f"{table}.kind=frequency_split",
        f"{table}.min_rows=500",
        f"{table}.head_rows=16",
        f"tables.default.sharding.sharding_types=[{kind}]",
    ]
    assert_as_on_the_cpu(gpus, [*words, "optimizer=rowwise_adagrad", "optimizer.sparse.eps=0.01"], tmp_path)


def test_half_precision_tables_stay_close_to_the_cpus(gpus: Gpus, clicks: list[str], tmp_path: Path) -> None:
    # A GPU rounds stochastically: to one of the two numbers of fp16 next to the exact one.
    assert_as_on_the_cpu(gpus, [*clicks, "tables.default.data_type=fp16"], tmp_path, 5e-3)


def test_weighted_ids_equal_the_cpus(gpus: Gpus, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    words = ["experiment=tags_lr", *EXACT, KINDS, "tables.default.init.kind=auto", *prepared(tmp_path_factory, "tags")]
    assert_as_on_the_cpu(gpus, words, tmp_path)


def test_managed_collision_equals_the_cpus(
    gpus: Gpus, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    table = "tables.default.compression"
    words = ["experiment=quickstart", *EXACT, *prepared(tmp_path_factory, "quickstart", *HASHED)]
    words += [
        f"{table}.kind=managed_collision",
        f"{table}.num_rows=64",
        f"{table}.eviction_interval=1",
        f"{table}.buckets=2",
        "tables.default.sharding.sharding_types=[row_wise]",
    ]
    assert_as_on_the_cpu(gpus, words, tmp_path)


@pytest.mark.usefixtures("needs_two_gpus")
def test_tables_of_two_hosts_equal_the_cpus(gpus: Gpus, clicks: list[str], tmp_path: Path) -> None:
    words = [*clicks, "parallel.embedding_sync=every_2_steps", "trainer.max_steps=4"]
    assert_as_on_the_cpu(gpus, words, tmp_path, local_world_size=1)


@pytest.mark.usefixtures("needs_two_gpus")
def test_lamb_is_the_same_on_any_number_of_gpus(gpus: Gpus, clicks: list[str], tmp_path: Path) -> None:
    """FBGEMM has LAMB for GPUs alone; test_lookups.py compares it with its formula."""
    words = [*clicks, "optimizer.sparse.name=lamb", "optimizer.sparse.lr=0.01"]
    one = gpus.train(1, words, tmp_path / "one")
    assert_same(gpus.train(2, words, tmp_path / "two"), one)


# ---- a loss that is not finite ----


def _train_with_nans(rank: int, words: list[str], steps: list[int]) -> TrainSummary:
    """Train; the labels that rank 0 reads for these steps, counted from 0, are not finite."""
    from pipeline.data.read.reader import ShardReader

    read = ShardReader._read

    def with_nans(self: Any, epoch: int, start_step: int) -> Any:
        for step, batch in enumerate(read(self, epoch, start_step), start_step):
            if self.drop_last and rank == 0 and step in steps:  # of an evaluation it is false
                batch.labels[0] = float("nan")
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardReader, "_read", with_nans)
        return train_on_rank(rank, words)


@pytest.mark.parametrize(("policy", "steps"), [("skip", [1]), ("rollback", [2, 3])])
def test_a_loss_that_is_not_finite_ends_as_on_the_cpu(
    gpus: Gpus, clicks: list[str], tmp_path: Path, policy: str, steps: list[int]
) -> None:
    words = [
        *BASE,
        *clicks,
        f"trainer.non_finite_loss={policy}",
        "trainer.max_non_finite_steps=1",
        "checkpoint.save_every_steps=2",
        "trainer.max_steps=5",
    ]
    on_cpu = [*words, "hardware=cpu", "sharding.fast_cpu=false", f"run_dir={tmp_path}/cpu"]
    on_gpu = [*words, "hardware=h100_80gb", f"run_dir={tmp_path}/gpu"]
    world_size = gpus.at_most(2)
    cpu = gpus.run_on_cpu(world_size, _train_with_nans, on_cpu, steps)[0]
    [gpu, *_], reports = gpus.run(world_size, _train_with_nans, on_gpu, steps)
    assert gpu.step == cpu.step
    assert gpu.validation == pytest.approx(cpu.validation, rel=1e-5)
    assert_same_models(tmp_path / "gpu", tmp_path / "cpu", gpu.step)
    assert all(report.problems == [] for report in filter(None, reports))


def assert_same_models(one: Path, other: Path, step: int) -> None:
    found, wanted = step_tensors(one, step), step_tensors(other, step)
    for name in [name for name in wanted if name.startswith("model.")]:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


# ---- a run in parts, on other ranks, and what is made of it ----


@pytest.fixture(scope="session")
def whole(gpus: Gpus, clicks: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on two GPUs in one go, saved at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    gpus.train(2, [*clicks, "trainer.max_steps=4", "checkpoint.save_every_steps=2"], folder)
    return folder


def _until_step_2(whole: Path, folder: Path) -> Path:
    """The run as it was when it had been stopped after step 2."""
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "step_00000004")
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line).get("step", 0) <= 2))
    return folder


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    gpus: Gpus, clicks: list[str], whole: Path, tmp_path: Path
) -> None:
    folder = _until_step_2(whole, tmp_path / "run")
    words = [*clicks, "trainer.max_steps=4", "checkpoint.save_every_steps=2"]
    job = gpus.train(2, words, folder)
    assert job.summary.step == 4
    assert_same_steps(folder, whole, 4)


@pytest.mark.usefixtures("needs_two_gpus")
def test_a_run_goes_on_on_fewer_and_on_more_gpus(gpus: Gpus, clicks: list[str], whole: Path, tmp_path: Path) -> None:
    words = [*clicks, "trainer.max_steps=4", "checkpoint.save_every_steps=2"]
    gpus.train(1, words, _until_step_2(whole, tmp_path / "fewer"))
    assert_same_steps(tmp_path / "fewer", whole, 4, 1e-5)
    gpus.train(1, [*words, "trainer.max_steps=2"], tmp_path / "more")
    gpus.train(2, words, tmp_path / "more")
    assert_same_models(tmp_path / "more", whole, 4)


def test_an_evaluation_equals_the_cpus(gpus: Gpus, whole: Path) -> None:
    words = [f"run={whole}", "split=test", "max_batches=3", "slices=[cat_0,int_1]", "importance_rows=128"]
    words.append("metrics=[xauc,gauc:cat_1,segmented_ne:cat_0,recalibrated_ne]")
    results, reports = gpus.run(gpus.at_most(2), evaluate_on_rank, words)
    found = dict(results[0].metrics)
    [cpu] = gpus.run_on_cpu(1, evaluate_on_rank, words)
    assert found == pytest.approx(cpu.metrics, rel=1e-5) and results[0].details == cpu.details
    assert all(report.problems == [] for report in filter(None, reports))


def test_a_run_of_gpus_is_exported(whole: Path, tmp_path: Path) -> None:
    """The artifact's certificate compares its scores with the trained model's, on the CPU."""
    from tests.serving.exports import run_export

    summary = run_export(whole, tmp_path / "artifact", "precision=fp32")
    assert summary.step == 4
    for split in summary.parity.values():
        assert abs(split["ne_delta"]) < 1e-5 and split["max_score_difference"] < 1e-5, split
