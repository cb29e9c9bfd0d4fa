"""Data sets of categorical features alone, and of dense ones alone, from rows to served scores, for each click model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.model import LayersConfig
from pipeline.config.registry import components
from pipeline.data.prepare.run import prepare
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import ColumnLists, schema_of
from pipeline.training.evaluate import evaluate
from pipeline.training.train import train
from tests.models.every_model import CLICK_MODELS, REFUSED
from tests.serving.exports import assert_raw_rows_are_prepared_rows, raw_blocks, run_export
from tests.support.ranks import RankPool

NUM_ROWS = 6000
# Of the others tests/models/test_every_model.py exports by default, tests/serving serves. No other default test trains without tables.
IN_DEFAULT = [("dense", "deepfm")]
CASES = [(data, kind) for data in ("categorical", "dense") for kind in CLICK_MODELS if kind not in REFUSED[data]]
Sources = dict[str, tuple[str, list[str]]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Data -> (raw file, the overrides that say what it is and where it is prepared)."""
    folder = tmp_path_factory.mktemp("any_data")
    categorical, dense = str(folder / "clicks.tsv"), str(folder / "numbers.csv")
    sizes = [f"data.generator.num_rows={NUM_ROWS}", "data.generator.num_users=200"]
    generate(load_config(GenerateJob, ["data=user_item", f"output={categorical}", *sizes]))
    drawn = random.Random(0)
    rows = [[drawn.random() for _ in range(3)] for _ in range(NUM_ROWS)]
    lines = [",".join(map(str, [int(drawn.random() < row[0] * row[1]), *row])) for row in rows]
    Path(dense).write_text("\n".join(["click,a,b,c", *lines, ""]))
    csv = [
        "data=default",
        "data.name=numbers",
        "data.format=csv",
        "data.columns.label=click",
        "data.columns.dense=[a,b,c]",
    ]
    described = {"categorical": (categorical, ["data=user_item"]), "dense": (dense, csv)}
    return {data: (source, [*options, f"data.path={folder / data}"]) for data, (source, options) in described.items()}


@pytest.fixture(scope="module")
def prepared(sources: Sources) -> Sources:
    for source, options in sources.values():
        prepare(load_config(PrepareJob, [*options, f"source={source}", "data.rows_per_row_group=128"]))
    return sources


def _trained_and_evaluated(rank: int, overrides: list[str], run: str) -> dict[str, float]:
    train(load_config(TrainJob, overrides))
    return evaluate(load_config(EvaluateJob, [f"run={run}", "split=validation"])).metrics


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "kind"), [pytest.param(*case, marks=[] if case in IN_DEFAULT else pytest.mark.campaign) for case in CASES]
)
def test_served_scores_are_those_of_evaluation(
    data: str, kind: str, prepared: Sources, ranks: RankPool, tmp_path: Path
) -> None:
    source, options = prepared[data]
    overrides = [
        *options,
        f"model={kind}",
        f"run_dir={tmp_path / 'run'}",
        "hardware=cpu",
        "trainer.global_batch_size=256",
        "trainer.evaluate_batch_size=256",
        "trainer.max_steps=12",
        "tables.default.embedding_dim=8",
        "checkpoint=at_end",
    ]
    if issubclass(components("model")[kind], LayersConfig):
        overrides += ["model.dropout=0.2", "model.batch_norm=true", "model.layer_norm=false"]
    measured = ranks.run(2, _trained_and_evaluated, overrides, str(tmp_path / "run"))[0]
    exported = run_export(tmp_path / "run", tmp_path / "artifact", "precision=fp32")
    assert exported.certificate["model"]["validation"]["ne"] == pytest.approx(measured["ne"], abs=1e-6)
    served = exported.parity["validation"]
    assert served["rows"] == measured["num_samples"] and served["max_score_difference"] < 1e-6
    assert served["ne"] == pytest.approx(measured["ne"], abs=1e-6)
    assert served["auc"] == pytest.approx(measured["auc"], abs=1e-6)
    job = load_config(TrainJob, overrides)
    if data == "categorical":
        assert assert_raw_rows_are_prepared_rows(exported.artifact, job, source) == NUM_ROWS
    predictor, rows = Predictor.load(exported.artifact), raw_blocks(job.data, source).slice(0, 7)
    schema = schema_of(predictor.columns)
    few = ColumnLists(schema, [rows[name].to_pylist() for name in schema.names], 7)  # as a request brings them
    assert predictor.score(few).scores.tobytes() == predictor.score(rows).scores.tobytes()
