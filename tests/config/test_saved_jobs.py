"""A run folder of an earlier release is read by this one."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_from_yaml, job_to_yaml

# What 0.1.0 saved for experiment=quickstart_dlrm_dcn with a hashed table and a warm start.
SAVED = (Path(__file__).parent / "saved_by_0_1_0.yaml").read_text()


def test_a_job_that_an_earlier_release_saved_means_what_it_meant() -> None:
    saved = job_from_yaml(TrainJob, SAVED)
    words = ["tables.cat_3.compression={kind: hash, ratio: 4}", "warm_start.run=runs/old"]
    composed = load_config(TrainJob, ["experiment=quickstart_dlrm_dcn", *words])
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


def test_what_an_earlier_release_saved_as_deepfm_is_torchrecs_model() -> None:
    job = load_config(TrainJob, ["data=quickstart", "model=simple_deepfm", "model.deep_fm_dimension=32"])
    earlier = job_to_yaml(job).replace("kind: simple_deepfm", "kind: deepfm")
    assert job_from_yaml(TrainJob, earlier) == job
    own = load_config(TrainJob, ["data=quickstart", "model=deepfm"])
    assert job_from_yaml(TrainJob, job_to_yaml(own)) == own
