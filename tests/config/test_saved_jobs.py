"""A saved job loads as the job that it was, also of an earlier release, and a damaged one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline import __version__
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_from_yaml, job_to_yaml, load_saved_job, save_job
from pipeline.models.deepfm import DeepFMConfig
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names

# What 0.1.0 saved for experiment=quickstart_dlrm_dcn with a hashed table and a warm start.
SAVED = (Path(__file__).parent / "saved_by_0_1_0.yaml").read_text()


def test_a_job_that_an_earlier_release_saved_means_what_it_meant() -> None:
    saved = job_from_yaml(TrainJob, SAVED)
    words = [
        "tables.cat_3.compression={kind: hash, ratio: 4}",
        "warm_start.run=runs/old",
        "planner.objective=critical_path",
    ]
    composed = load_config(TrainJob, ["experiment=quickstart_dlrm_dcn", *words])
    composed.hardware.hbm_to_ddr_gb_per_s = composed.hardware.intra_host_gb_per_s = 25.0  # of auto, at that time
    for part in (
        "name",
        "run_dir",
        "data",
        "model",
        "optimizer",
        "schedule",
        "planner",
        "hardware",
        "comms",
        "warm_start",
    ):
        assert getattr(saved, part) == getattr(composed, part), part
    assert saved.tables["default"].embedding_dim == composed.tables["default"].embedding_dim == 16
    assert saved.tables["cat_3"] == composed.tables["cat_3"]


def test_a_saved_job_holds_nothing_to_resolve_and_reads_back_the_same() -> None:
    job = load_config(TrainJob, ["experiment=quickstart", "paths.root=/mnt/x"])
    text = job_to_yaml(job)
    assert "${" not in text
    assert job_from_yaml(TrainJob, text) == job


def test_keys_of_another_release_are_dropped_if_they_are_off_and_named_if_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = load_config(TrainJob, ["experiment=quickstart"])
    values = yaml.safe_load(job_to_yaml(job))
    values["trainer"]["removed"] = values["tables"]["default"]["removed"] = values["model"]["removed"] = None
    values["removed"] = {}
    assert job_from_yaml(TrainJob, yaml.safe_dump(values)) == job
    for key in ("trainer.removed", "tables.default.removed", "model.removed", "removed"):
        assert f"{key}=" in caplog.text
    values["trainer"]["removed"] = 5
    with pytest.raises(ConfigError, match=names(f"trainer.removed=5 release {__version__} remove")):
        job_from_yaml(TrainJob, yaml.safe_dump(values))


@pytest.mark.long
def test_what_an_earlier_release_saved_as_deepfm_is_torchrecs_model() -> None:
    job = load_config(TrainJob, ["data=quickstart", "model=simple_deepfm", "model.deep_fm_dimension=32"])
    earlier = job_to_yaml(job).replace("kind: simple_deepfm", "kind: deepfm")
    assert job_from_yaml(TrainJob, earlier) == job
    own = load_config(TrainJob, ["data=quickstart", "model=deepfm"])
    assert job_from_yaml(TrainJob, job_to_yaml(own)) == own


def test_a_saved_job_comes_back_equal_with_its_models_class(tmp_path: Path) -> None:
    job = load_config(
        TrainJob, ["data=quickstart", "model=deepfm", "tables.cat_1.init.scale=0.5", "trainer.max_steps=9"]
    )
    save_job(job, str(tmp_path / "config.yaml"))
    loaded = load_saved_job(TrainJob, str(tmp_path / "config.yaml"))
    assert loaded == job and type(loaded.model) is DeepFMConfig
    assert "!!" not in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("global_batch_size: 2048", "global_batch: 2048", "global_batch_size"),
        ("kind: dlrm", "kind: transformer", "model.kind='transformer' dlrm"),
        ("seed: 0", "seed: zero", "zero"),
        ("seed: 0", "seed: !!python/object/apply:os.getcwd []", "os.getcwd"),
    ],
)
def test_a_damaged_saved_job_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    save_job(load_config(TrainJob, ["experiment=quickstart", "trainer.global_batch_size=2048"]), str(path))
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=names(message)):
        load_saved_job(TrainJob, str(path))


def test_a_saved_job_that_was_cut_off_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_job(load_config(TrainJob, ["experiment=quickstart"]), str(path))
    path.write_text(path.read_text() + "half a li")
    with pytest.raises(ConfigError, match=names(f"{path} line restore")) as failure:
        load_saved_job(TrainJob, str(path))
    assert "unicode string" not in str(failure.value)


def test_a_folder_without_a_saved_job_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_saved_job(TrainJob, str(tmp_path / "config.yaml"))
