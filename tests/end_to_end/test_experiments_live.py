"""Models of histories and of several labels on two ranks: stopped and resumed, then exported, and served with a delta."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.extras.publish.publish import publish
from pipeline.serving.scoring.load import find_folder
from pipeline.serving.scoring.predict import predict
from tests.extras.publish.test_deltas import export_step, job_of
from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool
from tests.support.stored_tensors import step_tensors

DATA = {
    "histories": [
        "data.generator.num_items=120",
        "data.generator.num_categories=8",
        "data.generator.max_length=6",
        "data.columns.sequence.history.max_length=5",
    ],
    "conversions": ["data.generator.num_users=200", "data.generator.num_items=100"],
}
EXPERIMENTS = [
    "conversions_dbmtl", "conversions_mmoe", "conversions_pepnet", "histories_bst", "histories_dien", "histories_din",
    "histories_encoders", "histories_hstu",
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(raw file, overrides that name the prepared data)."""
    folder = tmp_path_factory.mktemp(request.param)
    small = [*DATA[request.param], "data.generator.num_rows=4000", "data.rows_per_row_group=128"]
    raw, named = folder / "raw.tsv", [f"data.path={folder / 'prepared'}"]
    generate(load_config(GenerateJob, [f"data={request.param}", *small, f"output={raw}"]))
    prepare(load_config(PrepareJob, [f"data={request.param}", *small, *named, f"source={raw}"]))
    return raw, [*small, *named]


def _scores(artifact: str, raw: Path, output: Path) -> dict[str, np.ndarray]:
    predict(load_config(PredictJob, [f"artifact={artifact}", f"source={raw}", f"output={output}", "deltas=true"]))
    table = pq.read_table(output)
    return {name: table[name].to_numpy() for name in table.column_names if "score" in name}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("prepared", "experiment"), [(name.partition("_")[0], name) for name in EXPERIMENTS], indirect=["prepared"]
)
def test_a_run_resumes_bit_for_bit_and_a_delta_gives_the_scores_of_a_new_export(
    ranks: RankPool, prepared: tuple[Path, list[str]], tmp_path: Path, experiment: str
) -> None:
    raw, words = prepared
    steps = ["trainer.global_batch_size=256", "trainer.evaluate_max_batches=1", "checkpoint.save_every_steps=3"]
    words = [f"experiment={experiment}", *words, *steps, "world_size=2"]
    ranks.run(2, train_on_rank, [*words, f"run_dir={tmp_path / 'whole'}", "trainer.max_steps=6"])
    for last in (3, 6):
        ranks.run(2, train_on_rank, [*words, f"run_dir={tmp_path / 'run'}", f"trainer.max_steps={last}"])
    resumed, whole = step_tensors(tmp_path / "run", 6), step_tensors(tmp_path / "whole", 6)
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[key], whole[key]) for key in whole)

    artifact = export_step(tmp_path / "run", 3, tmp_path / "artifact")
    before = _scores(artifact, raw, tmp_path / "before.parquet")
    publish(job_of(artifact, "delta_gate.max_rows_fraction=1", "delta_gate.max_ne_increase=9"), find_folder)
    after = _scores(artifact, raw, tmp_path / "after.parquet")
    new = _scores(export_step(tmp_path / "run", 6, tmp_path / "new"), raw, tmp_path / "new.parquet")
    assert after and after.keys() == new.keys()
    for key, wanted in new.items():
        np.testing.assert_array_equal(after[key], wanted)
        assert not np.array_equal(before[key], wanted)
