"""A compression kind from outside the package trains, resumes and is exported, and its settings are checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config import registry
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_from_yaml, job_to_yaml
from pipeline.config.tables import CompressionConfig
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.physical import physical_tables, signature
from pipeline.runtime.errors import ConfigError
from pipeline.serving.artifact.export import export
from pipeline.training.evaluate import evaluate
from pipeline.training.train import train
from tests.embeddings.compressed import as_features, table_of
from tests.support.ranks import RankPool

PLUGIN = "tests.plugins.sample_plugin"


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    registry.load_plugins([PLUGIN])
    yield


def modulo(num_rows: int = 10, **options: object) -> CompressionConfig:
    return CompressionConfig("modulo", num_rows=num_rows, options=dict(options))


def test_ids_share_the_rows_that_the_kind_says() -> None:
    table = table_of("t", modulo(10, shift=3))
    assert [(part.name, part.num_embeddings) for part in physical_tables([table])] == [("t__modulo", 10)]
    split = IdSplitter([table])(as_features({"t_one": [[7], [21]], "t_many": [[0, 9], []]}, slice(None)))
    assert split["t_one__modulo"].values().tolist() == [0, 4]
    assert split["t_many__modulo"].values().tolist() == [3, 2]
    assert split["t_many__modulo"].lengths().tolist() == [2, 0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "{kind: modulo, num_rows: 9, options: {shfit: 1}}",
            r"compression.options.shfit.*takes shift.*did you mean 'shift'",
        ),
        ("{kind: modulo, num_rows: 9, options: {shift: far}}", r"compression.options.shift of kind=modulo.*far"),
        ("{kind: modulo, num_rows: 9, rank: 3}", "compression.rank=3 is a setting of tensor_train"),
        ("{kind: hash, num_rows: 9, options: {shift: 1}}", "compression.kind=hash has no options"),
        ("{kind: modlo, num_rows: 9}", r"compression.kind='modlo' is not one of .*did you mean 'modulo'.*plugins="),
    ],
)
def test_settings_are_checked_by_the_kind(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainJob, ["experiment=quickstart", f"tables.cat_25.compression={word}"])


def test_a_saved_job_and_a_command_line_key_by_key_say_the_same() -> None:
    start = ["experiment=quickstart", f"plugins=[{PLUGIN}]"]
    at_once = load_config(
        TrainJob, [*start, "tables.cat_25.compression={kind: modulo, num_rows: 9, options: {shift: 2}}"]
    )
    key = "tables.cat_25.compression"
    by_key = load_config(TrainJob, [*start, f"{key}.kind=modulo", f"{key}.num_rows=9", f"{key}.options.shift=2"])
    assert by_key.tables["cat_25"] == at_once.tables["cat_25"]
    assert job_from_yaml(TrainJob, job_to_yaml(by_key)).tables == by_key.tables


def test_a_checkpoint_tells_options_apart() -> None:
    assert signature(table_of("t", modulo(10))) != signature(table_of("t", modulo(10, shift=1)))


def _train(rank: int, words: list[str]) -> None:
    train(load_config(TrainJob, words))


def _evaluate(rank: int, run: str) -> float:
    return evaluate(load_config(EvaluateJob, [f"run={run}", "split=validation", f"plugins=[{PLUGIN}]"])).metrics["ne"]


def _losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["logloss"] for row in rows if row["kind"] == "train"}


@pytest.mark.campaign  # test_sample_plugin goes the same way; the losses of a resume are compared here
def test_a_run_trains_resumes_and_exports_a_kind_of_a_plugin(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    def words(name: str, steps: int) -> list[str]:
        return [
            "experiment=quickstart",
            "hardware=cpu",
            "trainer.global_batch_size=256",
            f"data.path={prepared_clicks}",
            f"run_dir={tmp_path / name}",
            f"trainer.max_steps={steps}",
            "trainer.log_every_steps=1",
            "checkpoint.save_every_steps=3",
            "trainer.evaluate_max_batches=1",
            f"plugins=[{PLUGIN}]",
            "tables.cat_25.compression={kind: modulo, num_rows: 300, options: {shift: 7}}",
        ]

    ranks.run(1, _train, words("whole", 6))
    ranks.run(1, _train, words("resumed", 3))
    ranks.run(1, _train, words("resumed", 6))
    # float32 losses, summed in float64 from the run's first step or the resumed one's.
    assert _losses(tmp_path / "resumed") == pytest.approx(_losses(tmp_path / "whole"), rel=1e-12)
    run = tmp_path / "resumed"
    found = json.loads((run / "summary.json").read_text())["compression"]["cat_25"]
    assert (found["kind"], found["collisions"]["ids"]) == ("modulo", 1.0)
    summary = export(load_config(ExportJob, [f"run={run}", "precision=fp32", "parity.splits=[validation]"]))
    assert summary.parity["validation"]["max_score_difference"] < 1e-5
    measured = ranks.run(1, _evaluate, str(run))[0]
    assert summary.certificate["model"]["validation"]["ne"] == pytest.approx(measured, abs=1e-6)
