"""Rows that were hardly trained, or are hardly looked up, are left out; what that costs stands in the certificate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint.chains import open_step
from pipeline.checkpoint.tables import inventory_of_step
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.serving import PruningConfig
from pipeline.runtime.errors import CheckpointError, ConfigError, ServingError
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.serving.scoring.predictor import Predictor
from tests.serving.exports import assert_raw_rows_are_prepared_rows, run_export
from tests.support.messages import names

# Of 3,000 rows and a model after 30 steps: not what a limit of 0.001 is for.
LOOSE = ["parity.max_ne_increase=0.5", "parity.max_auc_decrease=0.2", "parity.max_score_difference=1"]
FEW_ROWS = ["parity.splits=[validation]", "parity.max_rows=300"]  # where their scores are not what is asserted


def _states(small_run: Path, table: str) -> np.ndarray:
    _, _, tensors = open_step(str(small_run / "checkpoints"), 30)
    stored = inventory_of_step(tensors).tables[table]
    return tensors.read(stored.states["momentum1"].key, [0], [stored.rows]).numpy()


@pytest.mark.long
def test_rows_that_were_never_trained_are_the_unknown_row_and_all_others_stay(small_run: Path, tmp_path: Path) -> None:
    summary = run_export(small_run, tmp_path / "artifact", "precision=fp32", "pruning.kind=untrained", *LOOSE)
    pruning = summary.certificate["pruning"]
    # Never trained: validation rows that look them up see first, random weights in the place of the unknown row's.
    assert pruning["rows_after"] < 0.6 * pruning["rows_before"] and abs(pruning["ne_delta"]) < 1e-3
    assert summary.parity["validation"]["ne_delta"] == pytest.approx(pruning["ne_delta"], abs=1e-7)
    assert summary.parity["train"]["max_score_difference"] > 0
    assert summary.sizes["tables_after"] < 0.65 * summary.sizes["tables_before"]
    predictor, states = Predictor.load(summary.artifact), _states(small_run, "cat_25")
    number = [table.name for table in read_manifest(summary.artifact).tables].index("cat_25")
    rows = torch.arange(len(states))
    features = len(predictor.lookup.features)
    ends = torch.tensor([0] * (number * len(rows)) + list(range(len(rows) + 1)) + [len(rows)] * ((features - number - 1) * len(rows)))  # fmt: skip
    found = predictor.lookup.pooled(rows, ends)[:, 16 * number : 16 * (number + 1)]
    _, _, tensors = open_step(str(small_run / "checkpoints"), 30)
    stored = inventory_of_step(tensors).tables["cat_25"]
    weights = tensors.read(stored.key, [0, 0], [stored.rows, stored.dim])
    stays = torch.from_numpy(states > 0)
    stays[0] = True
    assert torch.equal(found, torch.where(stays[:, None], weights, weights[0]))


@pytest.mark.campaign
def test_the_rarest_half_of_all_rows_is_left_out(small_run: Path, prepared_clicks: str, tmp_path: Path) -> None:
    words = ["precision=int8", "pruning.kind=frequency", "pruning.fraction=0.5", *LOOSE, *FEW_ROWS]
    summary = run_export(small_run, tmp_path / "artifact", *words)
    tables = read_manifest(summary.artifact).tables
    rows = sum(table.rows for table in tables)
    assert sum(table.stored_rows for table in tables) == rows - int(0.5 * rows)
    assert all(table.stored_rows == table.rows for table in tables if table.rows < 30), "small tables are hot"
    assert summary.sizes["tables_after"] < 0.2 * summary.sizes["tables_before"]
    job = load_config(TrainJob, ["experiment=quickstart", f"data.path={prepared_clicks}"])
    source = Path(prepared_clicks).parent / "clicks.tsv"
    assert_raw_rows_are_prepared_rows(summary.artifact, job, str(source), same_ids=False, splits=["test"])


@pytest.mark.campaign
def test_the_least_trained_share_is_found_by_a_histogram(small_run: Path, tmp_path: Path) -> None:
    words = ["precision=int8", "pruning.kind=untrained", "pruning.fraction=0.9", *LOOSE, *FEW_ROWS]
    tables = read_manifest(run_export(small_run, tmp_path / "artifact", *words).artifact).tables
    states = {table.name: _states(small_run, table.name) for table in tables}
    ranked = np.sort(np.concatenate(list(states.values())))
    low, high = (ranked[int(share * len(ranked))] for share in (0.85, 0.91))  # a bucket is not one state
    for table in tables:
        of_table = states[table.name]
        assert np.count_nonzero(of_table > high) <= table.stored_rows <= 1 + np.count_nonzero(of_table > low)


def test_settings_that_do_not_go_together_are_refused(small_run: Path) -> None:
    for words, message in (
        (["pruning.kind=frequency"], "pruning.fraction pruning.keep_lookups"),
        (["pruning.fraction=0.5"], "pruning.kind=none"),
        (["pruning.kind=untraned"], "untrained"),
        (["precision=int5"], "int8"),
        (["tables.cat_3=int5"], "tables.cat_3='int5'"),
        (["parity.splits=[test]"], "parity.splits validation"),
    ):
        with pytest.raises(ConfigError, match=names(message)):
            load_config(ExportJob, [f"run={small_run}", *words])
    assert PruningConfig(kind="frequency", keep_lookups=0.99).keep_lookups == 0.99


@pytest.mark.campaign
def test_auto_finds_a_smaller_mix_than_int8_within_its_budget(small_run: Path, tmp_path: Path) -> None:
    words = ["precision=auto", "ne_budget=0.0005", "tables.cat_25=fp16", "parity.max_rows=3000", *LOOSE]
    summary = run_export(small_run, tmp_path / "artifact", *words)
    chosen = {table.name: table.precision for table in read_manifest(summary.artifact).tables}
    assert chosen["cat_25"] == "fp16" and len(set(chosen.values())) > 1
    assert summary.parity["validation"]["ne_delta"] <= 0.0005 + 1e-7
    assert summary.sizes["tables_after"] < summary.certificate["precisions"]["int8"]["table_bytes"]


@pytest.mark.campaign
def test_auto_takes_no_mix_that_would_be_refused(small_run: Path, tmp_path: Path) -> None:
    limits = ["parity.max_ne_increase=0.5", "parity.max_auc_decrease=0.2", "parity.max_score_difference=0.01"]
    words = ["ne_budget=0.5", "parity.max_rows=1000", "parity.splits=[validation]", *limits]
    with pytest.raises(ServingError, match=names("parity.max_score_difference 0.01")):
        run_export(small_run, tmp_path / "smallest", "precision=int2", *words)
    summary = run_export(small_run, tmp_path / "artifact", "precision=auto", *words)
    assert 0 < summary.parity["validation"]["max_score_difference"] <= 0.01
    assert summary.sizes["tables_after"] < summary.certificate["precisions"]["fp16"]["table_bytes"]


def test_an_unknown_table_and_a_run_that_is_none_are_named(small_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=names("tables.cat_99 26 cat_9")):
        run_export(small_run, tmp_path / "artifact", "tables.cat_99=fp32")
    with pytest.raises(ServingError):
        run_export(tmp_path, tmp_path / "artifact")
    with pytest.raises(CheckpointError, match=names("10 20 30")):
        run_export(small_run, tmp_path / "artifact", "step=7")
