"""What can hardly be meant is remarked on at a training's end, and what is undefined is null and says why."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, SplitConfig
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.serving import ParityConfig
from pipeline.data.prepare.run import prepare
from pipeline.data.targets import Target
from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage.manifest import read_sealed, seal_manifest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact.certificate import excesses
from pipeline.serving.artifact.export import export
from pipeline.serving.artifact.task_quality import LabelledRows, Quality, compare, quality
from pipeline.training import summary as train_summary
from pipeline.training.evaluate import evaluate
from pipeline.training.summary import EvaluateSummary, TrainSummary, undefined
from pipeline.training.train import train
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool


def test_what_is_not_finite_is_null_in_a_manifest_and_fails_a_gate(tmp_path: Path) -> None:
    text = seal_manifest({"a": [math.nan, {"b": math.inf}], "c": 1.5}, Purpose.STEP)
    assert "NaN" not in text and "Infinity" not in text
    (tmp_path / "manifest.json").write_text(text)
    assert read_sealed(str(tmp_path / "manifest.json"), Purpose.STEP) == {"a": [None, {"b": None}], "c": 1.5}
    scores, nothing = np.array([[0.2], [0.3]]), np.zeros((2, 1))
    rows = LabelledRows([Target("click")], nothing, np.ones((2, 1)))
    parity = compare(scores, scores, rows, [Quality(math.nan, math.nan)])
    (line,) = excesses({"test": parity}, ParityConfig())
    assert mentions(line, "test undefined 2 rows max_ne_increase max_auc_decrease parity.splits")
    assert "prepare" in excesses({"validation": parity}, ParityConfig())[0]


def test_a_certificate_weighs_rows_as_an_evaluation_does() -> None:
    scores, labels = np.array([0.2, 0.7, 0.4, 0.9]), np.array([0.0, 1.0, 1.0, 0.0])
    repeated = [0, 1, 1, 1, 2]  # what weights of 1, 3, 1 and 0 mean
    for kind in ("binary", "regression"):
        weighted = quality(kind, scores, labels, np.array([1.0, 3.0, 1.0, 0.0]))
        plain = quality(kind, scores[repeated], labels[repeated], np.ones(5))
        assert weighted.ne == pytest.approx(plain.ne, rel=1e-12)
        assert math.isnan(quality(kind, scores, labels, np.zeros(4)).ne)


def test_of_several_labels_each_that_is_of_one_kind_is_named_with_its_rows(tmp_path: Path) -> None:
    metrics = {
        "click/label_rate": 0.2,
        "click/num_samples": 900,
        "order/label_rate": 0.0,
        "order/num_samples": 180,
        "view/label_rate": 1.0,
        "view/num_samples": 1000,
        "num_samples": 1000,
    }
    reason = undefined(metrics)
    assert mentions(reason, "order: all 180 labels are 0 view: all 1,000 labels are 1") and "click" not in reason
    assert undefined({name: value for name, value in metrics.items() if name.startswith("click")}) == ""
    told = EvaluateSummary(str(tmp_path), "test", 3, "", metrics, None, path=str(tmp_path / "evaluation.json"))
    train_summary.write_evaluation(told, [])
    assert json.loads((tmp_path / "evaluation.json").read_text())["undefined"] == reason


@pytest.fixture(scope="module")
def one_class(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its last rows, those of validation, have no click."""
    folder = tmp_path_factory.mktemp("one_class")
    lines = [f"{int(n % 3 == 0 and n < 800)},{n % 7},c{n % 5}" for n in range(1000)]
    (folder / "rows.csv").write_text("\n".join(["y,x,c", *lines, ""]))
    columns = ColumnsConfig(label="y", dense=["x"], sparse=["c"])
    split = SplitConfig(validation_fraction=0.2, test_fraction=0.0)
    data = DataConfig("one_class", str(folder / "data"), "csv", columns, split=split, rows_per_row_group=32)
    prepare(PrepareJob(data=data, source=str(folder / "rows.csv")))
    return str(folder / "data")


def _train_and_evaluate(rank: int, overrides: list[str], run: str) -> tuple[TrainSummary, EvaluateSummary]:
    summary = train(load_config(TrainJob, overrides))
    return summary, evaluate(load_config(EvaluateJob, [f"run={run}", "split=validation"]))


@pytest.mark.long
def test_measures_of_one_kind_of_label_are_null_with_the_reason_and_nothing_is_exported(
    ranks: RankPool, one_class: str, tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    words = ["data=default", "data.name=one_class", f"data.path={one_class}", "model=fm", f"run_dir={run}", "hardware=cpu",
             "trainer.global_batch_size=64", "trainer.max_steps=4", "tables.default.embedding_dim=4",
             "logger.tensorboard=false", "checkpoint=at_end"]  # fmt: skip
    trained, evaluated = ranks.run(1, _train_and_evaluate, words, run)[0]
    assert math.isnan(trained.validation["ne"]) and math.isnan(evaluated.metrics["auc"])
    for text in (train_summary.describe(trained), train_summary.describe_evaluation(evaluated)):
        assert mentions(text, "undefined all 200 labels are 0")
    written = json.loads(Path(evaluated.path).read_text())
    assert written["ne"] is None and "all 200 labels are 0" in written["undefined"]
    manifest = (Path(trained.checkpoint) / "manifest.json").read_text()
    assert "NaN" not in manifest and json.loads(manifest)["metrics"]["ne"] is None
    assert "worth a look" in train_summary.describe(trained) and trained.remarks
    with pytest.raises(ServingError, match=names("validation 200 labels max_ne_increase")):
        export(load_config(ExportJob, [f"run={run}", f"output={tmp_path / 'artifact'}"]))
    assert not (tmp_path / "artifact").exists()
