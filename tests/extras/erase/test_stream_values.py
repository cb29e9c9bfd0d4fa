"""A value that a stream has added is erased from the steps and the artifact, and so is one that waits for a row."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.chains import open_tensors
from pipeline.checkpoint.steps import list_steps, step_path
from pipeline.checkpoint.tables import inventory_of_step
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.data.dataset import load_dataset
from pipeline.data.read.endless import FILE, Known, from_bytes
from pipeline.extras.checkpoints.survey import verify_step
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.run import erase
from pipeline.serving.artifact.export import export
from pipeline.serving.scoring.predictor import Predictor
from tests.extras.erase.test_erase import contents, holding
from tests.extras.stream.following import follow_words, start_retrain
from tests.extras.stream.test_new_values import FIXED, _with_new_values
from tests.serving.test_artifacts_served import raw_rows

pytestmark = pytest.mark.campaign
STAYS, VALUE = "new-11", "new-12"


def known_of(steps: Path, step: int) -> Known:
    return from_bytes((Path(step_path(str(steps), step)) / FILE).read_bytes())


def test_values_that_a_stream_has_added_are_erased(prepared_clicks: str, tmp_path: Path) -> None:
    data, source, run = tmp_path / "data", tmp_path / "source", tmp_path / "run"
    shutil.copytree(prepared_clicks, data)
    source.mkdir()
    (source / "a.tsv").write_bytes(_with_new_values(prepared_clicks, 0, 1050))
    words = [FIXED, "stream.idle_s=1", "stream.new_values.spare=0.01", "checkpoint.keep_last_n=9"]
    assert start_retrain(follow_words(str(data), source, run, *words)).wait(200) == 0
    steps = run / "follow/checkpoints"
    newest = max(list_steps(str(steps)))
    limits = [f"parity.{name}=1" for name in ("max_ne_increase", "max_auc_decrease", "max_score_difference")]
    given = [f"run={run}/follow", f"output={tmp_path}/artifact", "parity.max_rows=300", "precision=fp32", *limits]
    export(load_config(ExportJob, given))
    (rows := tmp_path.parent / "rows.tsv").write_bytes(_with_new_values(prepared_clicks, 0, 600))
    table = raw_rows(rows, 600)
    values = table["cat_3"].to_pylist()
    before = Predictor.load(str(tmp_path / "artifact")).score(table).scores

    known = known_of(steps, newest)
    row = load_dataset(str(data)).sparse_feature("cat_3").cardinality + known.values["cat_3"].index(VALUE)
    patterns = {f'"{VALUE}"'.encode()}
    for step in list_steps(str(steps)):
        tensors = open_tensors(step_path(str(steps), step))
        stored = inventory_of_step(tensors).tables["cat_3"]
        if row < stored.rows and VALUE in known_of(steps, step).values["cat_3"]:
            patterns.add(tensors.read(stored.key, [row, 0], [1, stored.dim]).numpy().tobytes())
    (tmp_path / "read").mkdir()
    shutil.move(source / "a.tsv", tmp_path / "read/a.tsv")  # a followed folder has no rewritten files
    assert len(patterns) >= 3 and holding(tmp_path, patterns) and values.count(VALUE) > 1
    result = erase(EraseJob(feature="cat_3", value=VALUE, folders=[str(tmp_path)]))
    assert result.left == {} and holding(tmp_path, patterns) == []
    assert {verify_step(str(steps), step) for step in list_steps(str(steps))} == {""}
    after = Predictor.load(str(tmp_path / "artifact"))
    own, unknown = np.array([each == VALUE for each in values]), table.set_column(
        table.column_names.index("cat_3"), "cat_3", [["nobody" if each == VALUE else each for each in values]]
    )  # fmt: skip
    assert (after.score(table).scores[~own] == before[~own]).all()
    assert (after.score(table).scores == after.score(unknown).scores).all()
    assert (after.score(table).scores[own] != before[own]).any()
    assert known_of(steps, newest).values["cat_3"].index(STAYS) == known.values["cat_3"].index(STAYS)

    waiting = [
        (step, each) for step in list_steps(str(steps)) for each in known_of(steps, step).waiting.get("cat_3", [])
    ]
    print(f"{len(waiting)} values wait at a step", waiting[:5])
    for _, value in waiting[-1:]:
        assert erase(EraseJob(feature="cat_3", value=value, folders=[str(tmp_path)])).left == {}
        assert not [path for path, content in contents(tmp_path).items() if f'"{value}"'.encode() in content]
        assert {verify_step(str(steps), step) for step in list_steps(str(steps))} == {""}

    lines = _with_new_values(prepared_clicks, 1100, 1500).replace(VALUE.encode(), b"other")
    (source / "b.tsv").write_bytes(lines)
    assert start_retrain(follow_words(str(data), source, run, *words)).wait(200) == 0
    assert max(list_steps(str(steps))) > newest and holding(tmp_path, patterns) == []
