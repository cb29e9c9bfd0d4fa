"""A run's checkpoints are listed, verified, shown and exported without ranks, and a table larger than memory may be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.checkpoint.chains import open_step
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.tables import inventory_of_step
from pipeline.cli.command_line import load_config, read_arguments
from pipeline.extras.checkpoints.cli import checkpoints
from pipeline.extras.checkpoints.cli.checkpoints import (
    export_checkpoint,
    list_checkpoints,
    show_checkpoint,
    verify_checkpoints,
)
from pipeline.extras.checkpoints.config import CheckpointsJob
from tests.checkpoint.resharding import optimizers, tables, whole
from tests.runtime.test_signature import make_keys
from tests.support.ranks import RankPool
from tests.training.tiny import TinyTable, build, context


def _job(*words: str) -> CheckpointsJob:
    return load_config(CheckpointsJob, read_arguments(words, checkpoints.COMMANDS, "list").overrides())


def _run(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["checkpoints", *words])
        checkpoints.main()


def test_every_step_is_listed_with_age_size_ranks_and_metrics(small_run: Path) -> None:
    header, *lines, where = list_checkpoints(_job(str(small_run)))
    assert [int(line.split()[0]) for line in lines] == [10, 20, 30]
    assert all(" ago" in line and "MiB" in line and "  ne 0." in line and "auc 0." in line for line in lines)
    assert sum("best ne" in line for line in lines) == 1
    assert header.split() == ["step", "saved", "size", "ranks", "validation"] and str(small_run) in where


def test_steps_are_listed_and_found_without_the_plugin_of_the_model(small_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("kind: dlrm", "kind: mine").replace("plugins: []", "plugins: [mine]")
    )
    assert sum("best ne" in line for line in list_checkpoints(_job(str(run)))) == 1
    assert len(show_checkpoint(_job("show", str(run)))) > 26


def test_run_and_step_are_told_apart_in_any_order() -> None:
    for words in (("show", "runs/a", "30"), ("show", "30", "runs/a"), ("30", "show", "run=runs/a")):
        job = _job(*words)
        assert (job.command, job.run, job.step) == ("show", "runs/a", 30)
    assert (_job("20261121").run, _job("20261121").step) == ("20261121", None)


def test_verify_reads_every_byte_and_names_what_is_damaged(small_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "run"))
    assert verify_checkpoints(_job("verify", str(run))) == {10: "", 20: "", 30: ""}
    (part,) = (run / "checkpoints" / "step_00000020").rglob("__1_0.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 4
    part.write_bytes(content)
    found = verify_checkpoints(_job("verify", f"run={run}"))
    assert (found[10], found[30]) == ("", "") and "__1_0.distcp" in found[20]
    with pytest.raises(SystemExit) as end:
        _run(["verify", str(run)])
    assert end.value.code == 1
    _run([str(run), "verify", "30"])  # and the process ends with 0
    with pytest.raises(SystemExit) as end:  # nobody signed the step
        _run([str(run), "verify", "30", f"require_signature={make_keys(tmp_path, 'own')[1]}"])
    assert end.value.code == 1
    part.unlink()
    assert "__1_0.distcp" in list_checkpoints(_job(str(run)))[2]


def test_show_says_where_a_step_is_from_and_what_its_tables_are(small_run: Path) -> None:
    lines = show_checkpoint(_job("show", str(small_run), "20"))
    assert lines[0] == "step 20 of quickstart, saved by 2 rank(s)"
    text = "\n".join(lines)
    for words in ("search for cpu", "rowwise_adagrad", "26, and", "quickstart at "):
        assert words in text
    (row,) = (line for line in lines if line.split()[0] == "cat_25")
    assert row.split()[2:5] == ["16", "fp32", "row_wise"] and "momentum1 a row (fp32)" in row


def test_an_exported_table_has_each_rows_value_vector_and_state(
    small_run: Path, tmp_path: Path, prepared_clicks: str
) -> None:
    output = str(tmp_path / "cat_25.parquet")
    export_checkpoint(_job("export", str(small_run), "30", "table=cat_25", f"output={output}", "optimizer_state=true"))
    exported = pq.read_table(output)
    assert exported.column_names == ["row", "value", "vector", "momentum1"]
    _, _, tensors = open_step(str(small_run / "checkpoints"), 30)
    table = inventory_of_step(tensors).tables["cat_25"]
    weights = tensors.read(table.key, [0, 0], [table.rows, table.dim]).numpy()
    vectors = np.stack(exported["vector"].to_numpy())
    np.testing.assert_array_equal(vectors, weights)
    states = tensors.read(table.states["momentum1"].key, [0], [table.rows]).numpy()
    np.testing.assert_array_equal(exported["momentum1"].to_numpy(), states)
    assert states.any() and exported["row"].to_pylist() == list(range(table.rows))
    vocabulary = pq.read_table(f"{prepared_clicks}/vocabulary/cat_25.parquet")
    assert exported["value"].to_pylist() == [None, *vocabulary["value"].to_pylist()]


def test_another_data_set_under_the_old_path_gives_no_values_and_says_so(small_run: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "out.parquet")
    lines = export_checkpoint(
        _job("export", str(small_run), "table=cat_3", f"output={output}", f"data_path={tmp_path}")
    )
    assert "without raw values" in lines[1] and str(tmp_path) in lines[1]
    assert pq.read_table(output).column_names == ["row", "vector"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "RUN", "table=cat_33", "output=x"], r"no table 'cat_33' among 26; did you mean 'cat_3'"),
        (["export", "RUN", "table=cat_3"], "export needs output"),
        (["show", "RUN", "11"], r"there is no step 11 in .*; there are steps 10, 20, 30"),
        (["verify", "RUN", "11"], r"there is no step 11"),
        (["exprot", "RUN"], "cannot read 'exprot'.*did you mean 'export'"),
        (["nowhere"], "nowhere/checkpoints holds no checkpoint"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    small_run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        _run([str(small_run) if word == "RUN" else word for word in words])
    assert end.value.code == 2
    import re

    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


LARGE = [TinyTable("large", "table_wise", num_embeddings=500_000, embedding_dim=64)]


def _save_large(rank: int, folder: str) -> None:
    model, training = build(rank, LARGE, optimizers("adagrad"), None, 1, 0)
    Checkpointer(folder, model, training, context(rank)).save(1)


EXPORT = """
import resource, sys
from pipeline.extras.checkpoints.export import export_table
from pipeline.checkpoint.chains import open_step
from pipeline.extras.checkpoints.survey import verify_step
from pipeline.checkpoint.tables import inventory_of_step
folder, small, output = sys.argv[1:]
def export(folder, output):
    step, _, tensors = open_step(folder, None)
    assert verify_step(folder, step) == ""
    (table,) = inventory_of_step(tensors).tables.values()
    export_table(tensors, [table], output, with_state=True)
export(small, output + ".small")  # what libraries load on first use
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(folder, output)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def _save_small(rank: int, folder: str) -> None:
    model, training = build(rank, tables(("table_wise",)), optimizers("adagrad"), None, 1, 0)
    Checkpointer(folder, model, training, context(rank)).save(1)


@pytest.mark.campaign
def test_exporting_a_table_takes_a_fraction_of_its_size_in_memory(ranks: RankPool, tmp_path: Path) -> None:
    """122 MiB of weights and as much state, stored in one piece each."""
    large, small = str(tmp_path / "large"), str(tmp_path / "small")
    ranks.run(1, _save_large, large)
    ranks.run(1, _save_small, small)
    output = str(tmp_path / "large.parquet")
    finished = subprocess.run(
        [sys.executable, "-c", EXPORT, large, small, output], capture_output=True, text=True, timeout=300, check=True
    )
    assert float(finished.stdout) < 90, f"{finished.stdout} MiB"
    assert pq.ParquetFile(output).metadata.num_rows == 500_000


def _save_columns(rank: int, folder: str, optimizer: str) -> dict:
    model, training = build(rank, tables(("grid_shard",)), optimizers(optimizer), None, 2, 0)
    Checkpointer(folder, model, training, context(rank)).save(1)
    return whole(model, training)


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("rowwise_adagrad", marks=pytest.mark.campaign)])
def test_a_table_cut_by_rows_and_columns_is_exported_whole(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    values = ranks.run(4, _save_columns, str(tmp_path / "run/checkpoints"), optimizer, local_world_size=2)[0]
    output = str(tmp_path / "t0.parquet")
    from pipeline.extras.checkpoints.export import export_table

    _, _, tensors = open_step(str(tmp_path / "run/checkpoints"), 1)
    export_table(tensors, [inventory_of_step(tensors).tables["t0"]], output, with_state=True)
    exported = pq.read_table(output)
    weight, state = (values[key].numpy() for key in values if ".t0." in key)
    np.testing.assert_array_equal(np.stack(exported["vector"].to_numpy()), weight)
    expected = state if optimizer == "adagrad" else state.reshape(2, 53).T
    np.testing.assert_array_equal(np.stack(exported["momentum1"].to_numpy()), expected)
