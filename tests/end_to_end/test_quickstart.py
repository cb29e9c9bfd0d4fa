"""The data set of `make train`, whole: each model reaches what the planted teacher allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.data.prepare.run import prepare
from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool


@pytest.fixture(scope="module")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("quickstart")
    source = str(folder / "quickstart.tsv")
    generate(load_config(GenerateJob, ["data=quickstart", f"output={source}"]))
    return prepare(
        load_config(PrepareJob, ["data=quickstart", f"source={source}", f"data.path={folder / 'prepared'}"])
    ).path


def _share_of_lift(ranks: RankPool, experiment: str, data: str, run_dir: Path) -> float:
    overrides = [f"experiment={experiment}", f"data.path={data}", f"run_dir={run_dir}", "hardware=cpu"]
    summary = ranks.run(2, train_on_rank, overrides)[0]
    assert summary.bayes_auc is not None
    return (summary.validation["auc"] - 0.5) / (summary.bayes_auc - 0.5)


@pytest.mark.campaign
def test_dlrm_reaches_97_percent_of_the_teachers_lift(ranks: RankPool, quickstart_data: str, tmp_path: Path) -> None:
    assert _share_of_lift(ranks, "quickstart", quickstart_data, tmp_path) >= 0.97


@pytest.mark.campaign
def test_dlrm_reaches_99_percent_in_three_epochs(ranks: RankPool, quickstart_data: str, tmp_path: Path) -> None:
    assert _share_of_lift(ranks, "quickstart_three_epochs", quickstart_data, tmp_path) >= 0.99


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("experiment", "least"),
    [
        ("quickstart_dlrm_dcn", 0.95),
        ("quickstart_deepfm", 0.90),
        ("deepfm_three_epochs", 0.985),
        ("dcnv2_three_epochs", 0.985),
    ],
)
def test_the_other_models_learn_the_teacher(
    ranks: RankPool, quickstart_data: str, tmp_path: Path, experiment: str, least: float
) -> None:
    assert _share_of_lift(ranks, experiment, quickstart_data, tmp_path) >= least
