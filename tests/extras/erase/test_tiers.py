"""A value of a table in tiers is erased from steps that leave out untrained rows, and no resumed run restores it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.checkpoint.steps import list_steps, step_path
from pipeline.checkpoint.tables import StoredTable, inventory_of_step
from pipeline.checkpoint.tensors import StepTensors
from pipeline.data.dataset import load_dataset
from pipeline.extras.checkpoints.survey import verify_step
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.datasets import id_of
from pipeline.extras.erase.run import erase
from pipeline.serving.scoring.predictor import Predictor
from tests.extras.erase.test_erase import holding
from tests.extras.tiers.test_tiered_runs import TIERS, run, values
from tests.serving.exports import run_export
from tests.serving.test_artifacts_served import raw_rows
from tests.support.ranks import RankPool

pytestmark = pytest.mark.campaign
FEATURE = "cat_25"
SPARSE = ["+tables.default.sharding.sharding_types=[row_wise]", "+tables.cat_2.num_embeddings=200000"]
WORDS = ["trainer.global_batch_size=32", "checkpoint.save_every_steps=2", "checkpoint.keep_last_n=9", *SPARSE]
LIMITS = [f"parity.{name}=1" for name in ("max_ne_increase", "max_auc_decrease", "max_score_difference")]


def table_of(steps: Path, step: int) -> tuple[StepTensors, StoredTable]:
    tensors = StepTensors(step_path(str(steps), step))
    return tensors, inventory_of_step(tensors).tables[FEATURE]


def row_of(steps: Path, step: int, row: int) -> bytes:
    tensors, table = table_of(steps, step)
    return bytes(tensors.read(table.key, [row, 0], [1, table.dim]).numpy().tobytes())


def num_blocks(steps: Path) -> int:
    return sum(path.stat().st_blocks for path in steps.rglob("*"))


def test_value_of_a_table_in_tiers_is_erased(ranks: RankPool, prepared_clicks: str, tmp_path: Path) -> None:
    data, steps, artifact = tmp_path / "data", tmp_path / "run/checkpoints", tmp_path / "artifact"
    shutil.copytree(prepared_clicks, data)
    run(ranks, 1, str(data), tmp_path / "run", 4, [*WORDS, *TIERS])
    run_export(tmp_path / "run", artifact, "precision=fp32", "parity.max_rows=300", *LIMITS)
    feature = load_dataset(str(data)).sparse_feature(FEATURE)
    tensors, table = table_of(steps, 4)
    is_held = tensors.held_rows(table.key, [0, 0], [table.rows, table.dim])
    assert is_held[1] and not is_held.all() and list_steps(str(steps)) == [2, 4]
    names = pa.parquet.read_table(data / str(feature.vocabulary))
    trained, untrained = (names.filter(pa.compute.equal(names["id"], each))["value"][0].as_py()
                          for each in (1, int(np.flatnonzero(~is_held)[-1])))  # fmt: skip
    rows = raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 300)
    at, texts = rows.column_names.index(FEATURE), rows[FEATURE].to_pylist()
    blocks = num_blocks(steps)

    for value in (trained, untrained):
        row = id_of(str(data), load_dataset(str(data)).sparse_feature(FEATURE), value)
        assert row is not None
        asked = rows.set_column(at, FEATURE, [[value] * 20 + texts[20:]])
        own = np.array([each == value for each in asked[FEATURE].to_pylist()])
        before = Predictor.load(str(artifact)).score(asked).scores
        patterns = {row_of(steps, step, row) for step in (2, 4)} if value == trained else set()
        held = [path for path in holding(tmp_path, patterns) if path.suffix in (".distcp", ".rows")]
        assert len(held) >= 3 or value == untrained
        result = erase(EraseJob(feature=FEATURE, value=value, folders=[str(tmp_path)]))
        assert result.left == {} and holding(tmp_path, patterns) == []
        assert [verify_step(str(steps), step) for step in (2, 4)] == ["", ""]
        predictor = Predictor.load(str(artifact))
        after, unknown = (
            predictor.score(asked.set_column(at, FEATURE, [[name if each == value else each for each in asked[FEATURE].to_pylist()]])).scores
            for name in (value, "nobody")
        )  # fmt: skip
        assert (after[~own] == before[~own]).all() and (after == unknown).all() and (after[own] != before[own]).any()
    assert num_blocks(steps) <= 1.1 * blocks, "untrained rows are still left out"

    row = 1
    erased = row_of(steps, 4, row)
    shutil.rmtree(tmp_path / "artifact")
    for name, more in {"tiers": TIERS, "memory": []}.items():
        shutil.copytree(tmp_path / "run", tmp_path / name)
        run(ranks, 1, str(data), tmp_path / name, 8, [*WORDS, *more])
        assert row_of(tmp_path / name / "checkpoints", 8, row) == erased
        tensors, table = table_of(tmp_path / name / "checkpoints", 8)
        assert [float(tensors.read(each.key, [row], [1])) for each in table.states.values()] == [0.0]
    newest = [step_path(str(tmp_path / name / "checkpoints"), 8) for name in ("tiers", "memory")]
    assert values(newest[0]) == values(newest[1])
    assert row_of(steps, 2, row) == row_of(steps, 2, 0)
