"""A job that cannot train on its data and ranks fails from dataset.json alone, with numbers and the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import save_job
from pipeline.data.dataset import Split, check_split, load_dataset
from pipeline.runtime.errors import ConfigError, DataError, UserError
from pipeline.training.preflight import validate_evaluation, validate_job
from tests.support.datasets import described_dataset
from tests.support.messages import names


@pytest.fixture
def data(tmp_path: Path) -> str:
    """13 dense features and three tables' worth of ids, 4096 training rows; no shards."""
    (tmp_path / "dataset.json").write_text(
        described_dataset({"cat_0": 1000, "cat_1": 50, "cat_2": 7}, num_dense=13, num_rows=4096).to_json()
    )
    return f"data.path={tmp_path}"


def _validate(data: str, *overrides: str, world_size: int = 2) -> list[str]:
    job = load_config(TrainJob, ["experiment=quickstart", data, *overrides])
    return [f"{table.name}:{table.num_embeddings}x{table.embedding_dim}" for table in validate_job(job, world_size)]


def test_a_job_that_fits_gives_its_tables(data: str) -> None:
    assert _validate(data, "trainer.global_batch_size=1024") == ["cat_0:1000x16", "cat_1:50x16", "cat_2:7x16"]


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["data.path=/nowhere"], 2, "dataset.json /nowhere pipeline prepare data=quickstart source"),
        (["trainer.global_batch_size=1000"], 2, "1000 992 1008"),
        ([], 3, "num_streams=16 16"),
        (["trainer.global_batch_size=8192"], 2, "4096 8192 train"),
        (["trainer.gradient_accumulation_steps=256"], 2, "data.reader.num_streams=16"),
        (["trainer.evaluate_batch_size=100"], 2, "100 96 112"),
        (["tables.cat_0.num_embeddings=999"], 2, "num_embeddings=999 999 1000"),
        (["tables.cat_9.embedding_dim=16"], 2, "cat_9 described"),
        (["tables.cat_1.embedding_dim=8"], 2, "embedding_dim [8 16]"),
        (["tables.default.embedding_dim=32"], 2, "16 embedding_dim 32"),
        (["data.synthetic_multi_hot.cat_8=3"], 2, "synthetic_multi_hot cat_8"),
        (["comms=int8", "trainer.global_batch_size=2064"], 4, "batch_size=516 32"),
        (["tables.default.embedding_dim=15", "model.dense_arch_layer_sizes=[32,15]"], 2, "embedding_dim=15 16"),
        (["planner=file", "planner.plan_file=plans/none.json"], 2, "plans/none.json pipeline plan"),
        (
            ["hardware=cpu", "optimizer=adam", "sharding.fast_cpu=false"],
            2,
            "optimizer.sparse.name=adam CPU sharding.fast_cpu=true",
        ),
        (
            ["hardware=cpu", "optimizer.sparse.weight_decay=0.01", "sharding.fast_cpu=false"],
            2,
            "weight_decay=0.01 CPU FBGEMM",
        ),
        (["hardware=cpu", "optimizer.sparse.name=lamb"], 2, "optimizer.sparse.name=lamb GPU"),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(data: str, overrides: list[str], world_size: int, message: str) -> None:
    with pytest.raises(UserError, match=names(message)):
        _validate(data, *overrides, world_size=world_size)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_split_that_was_prepared_without_rows_asks_for_its_fraction(data: str, tmp_path: Path, split: str) -> None:
    dataset = load_dataset(str(tmp_path))
    dataset.splits[split] = Split([], 0, 0)
    with pytest.raises(DataError, match=names(f"{split!r} data.split.{split}_fraction")):
        check_split(dataset, split, 1)


def test_adam_passes_on_every_device(data: str) -> None:
    assert len(_validate(data, "hardware=cpu", "optimizer=adam")) == 3
    replicated = "tables.default.sharding.sharding_types=[data_parallel]"
    assert len(_validate(data, "hardware=cpu", "optimizer=adam", "sharding.fast_cpu=false", replicated)) == 3
    assert len(_validate(data, "hardware=h100_80gb", "optimizer=adam")) == 3


def test_an_evaluation_that_cannot_be_dealt_to_its_ranks_is_refused(data: str, tmp_path: Path) -> None:
    trained = load_config(TrainJob, ["experiment=quickstart", data])
    save_job(trained, str(tmp_path / "config.yaml"))
    job = load_config(EvaluateJob, [f"run={tmp_path}"])
    validate_evaluation(job, trained, 4)
    with pytest.raises(ConfigError, match=names("3")):
        validate_evaluation(job, trained, 3)


@pytest.mark.long
def test_composing_and_validating_needs_no_torch(data: str) -> None:
    """Prints how long it takes; the target is under a second on a laptop."""
    code = (
        "import sys, time; started = time.perf_counter()\n"
        "from pipeline.cli.command_line import load_config\nfrom pipeline.config.jobs.train import TrainJob\nfrom pipeline.training.preflight import validate_job\n"
        f"job = load_config(TrainJob, ['experiment=quickstart', {data!r}])\n"
        "validate_job(job, 2)\n"
        "print(f'composed and validated in {time.perf_counter() - started:.2f} s')\n"
        "heavy = {'torch', 'torchrec', 'fbgemm_gpu', 'pyarrow', 'duckdb', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
