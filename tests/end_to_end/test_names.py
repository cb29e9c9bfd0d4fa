"""Columns may be called whatever a file can call them: prepared, trained, warm-started, exported, scored and served."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline.checkpoint.chains import open_step
from pipeline.checkpoint.tables import inventory_of_step
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.tables import TAKEN, entry_name, table_name
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import schema_of
from tests.serving.exports import assert_raw_rows_are_prepared_rows, run_export
from tests.serving.requests import ARROW, post, stream_of
from tests.serving.servers import running
from tests.support.examples import examples
from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool

SPARSE = ["item.id", "item", "type", "items", "keys", "values", "user id", 'a"b', "a,b", "naïve ☃", "Type", "train", "",
          "a/b", "item%2Eid", "100%", "_modules", "x__hot", "__group__", "$f{x}", "\\", "T_destination"]  # fmt: skip
DENSE = ["price.usd", "T", "weight?"]
MULTI_HOT = ["tags.all"]
NUM_ROWS = 1500


@given(st.text(max_size=8) | st.sampled_from(sorted(TAKEN)) | st.text("a.%25E", max_size=6))
@examples(500)
def test_every_entry_has_a_table_name_of_its_own_that_a_module_can_have(entry: str) -> None:
    name = table_name(entry)
    assert entry_name(name) == entry
    nn.ModuleDict()[name] = nn.Module()


def test_the_names_that_modules_cannot_have_are_those_of_the_installed_torch() -> None:
    assert set(dir(nn.ModuleDict())) <= TAKEN
    kept = ["cat_3", "user id", "a/b", "naïve", "50%x", "__index_level_0__"]
    assert [table_name(name) for name in kept] == kept  # earlier checkpoints hold them


def _write_source(path: Path, names: list[str]) -> str:
    """Columns of random whole numbers under these names; as text, quoted, or typed."""
    drawn = random.Random(0)
    kinds: list[Any] = [lambda: int(drawn.random() < 0.3), *[lambda: round(drawn.random(), 3) for _ in DENSE]]
    kinds += [lambda size=size: str(drawn.randrange(size)) for size in range(4, 4 + len(SPARSE))]
    kinds += [lambda: [str(drawn.randrange(9)) for _ in range(drawn.randrange(3))]]
    rows = [[kind() for kind in kinds] for _ in range(NUM_ROWS)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table([pa.array(column) for column in zip(*rows, strict=True)], names=names), path)
        return str(path)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([*row[:-1], "|".join(row[-1])] for row in rows)
    return str(path)


def _words(folder: Path, sparse: list[str], path: Path) -> list[str]:
    columns = {"label": "label.x", "dense": DENSE, "sparse": sparse, "multi_hot": MULTI_HOT}
    config = {"name": "names", "format": path.suffix.strip("."), "path": str(folder / "data"), "columns": columns}
    config |= {"rows_per_row_group": 64, "feature_ids": {"item.id": {"min_frequency": 2}}}
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "conf" / "data" / "names.yaml").write_text(yaml.safe_dump({"defaults": ["default", "_self_"], **config}))
    return [f"--config-dir={folder / 'conf'}", "data=names"]


def _prepared(folder: Path, name: str, sparse: list[str]) -> list[str]:
    source = _write_source(folder / name, ["label.x", *DENSE, *sparse, *MULTI_HOT])
    words = _words(folder, sparse, folder / name)
    prepare(load_config(PrepareJob, [*words, f"source={source}"]))
    return words


def test_typed_files_have_line_breaks_in_names_too(tmp_path: Path) -> None:
    sparse = [name if name != "train" else "line\nbreak" for name in SPARSE]
    _prepared(tmp_path, "rows.parquet", sparse)
    assert load_dataset(str(tmp_path / "data")).sparse_feature_names == [*sparse, *MULTI_HOT]


@pytest.mark.long
@pytest.mark.parametrize(("model", "world_size"), [("fm", 1), pytest.param("deepfm", 2, marks=pytest.mark.campaign)])
def test_columns_of_any_name_are_trained_exported_and_scored(
    ranks: RankPool, tmp_path: Path, model: str, world_size: int
) -> None:
    run, options = tmp_path / "run", _prepared(tmp_path, "rows.csv", SPARSE)
    words = [
        *options,
        f"model={model}",
        f"run_dir={run}",
        "hardware=cpu",
        "trainer.global_batch_size=128",
        "tables={type: {compression: {kind: hash, num_rows: 4}}, item.id: {pooling: mean}}",
        "trainer.evaluate_max_batches=1",
        "tables.default.embedding_dim=8",
        "trainer.max_steps=2",
        "logger.tensorboard=false",
    ]
    ranks.run(world_size, train_on_rank, words)
    tables = inventory_of_step(open_step(f"{run}/checkpoints", 2)[2]).tables
    assert {entry_name(name) for name in tables} >= {*SPARSE, *MULTI_HOT} - {"type"}
    if world_size > 1:
        ranks.run(
            1, train_on_rank, [*words, f"run_dir={tmp_path / 'warm'}", f"warm_start.run={run}", "trainer.max_steps=1"]
        )
    exported = run_export(run, tmp_path / "artifact", "precision=fp32", "tables={item.id: fp16}")
    source = str(tmp_path / "rows.csv")
    assert assert_raw_rows_are_prepared_rows(exported.artifact, load_config(TrainJob, words), source) == NUM_ROWS
    _assert_serves(exported.artifact)


def _assert_serves(artifact: str) -> None:
    """As JSON and as Arrow the rows of any names have the predictor's scores, errors name the column, and pages are whole."""
    predictor = Predictor.load(artifact)
    names = [*predictor.columns.dense, *predictor.columns.sparse, *predictor.columns.lists]
    rows: list[dict[str, Any]] = [
        dict.fromkeys(DENSE, 1.5) | dict.fromkeys(SPARSE, "3"),
        {'a"b': "1", "\\": "2"},
    ]
    table = pa.Table.from_pylist(rows, schema=schema_of(predictor.columns))
    wanted = predictor.score(table).scores.tolist()
    assert set(names) == {*DENSE, *SPARSE, *MULTI_HOT} and wanted[0] != wanted[1]
    with running("pipeline serve", f"artifact={artifact}", "server.port=0") as server:
        assert post(server, rows).json()["scores"] == pytest.approx(wanted, abs=1e-6)
        body = stream_of(rows, table.schema)
        answer = server.client.post(f"{server.url}/score", content=body, headers={"Content-Type": ARROW})
        scores = pa.ipc.open_stream(answer.content).read_all()["score"].to_pylist()
        assert scores == pytest.approx(wanted, abs=1e-6)
        for wrong, said in (
            ({'a"b': []}, 'a"b'),
            ({"\\": {}}, "\\"),
            ({'a"c': 1}, 'a"c'),
            ({"weight?": "x"}, "weight?"),
        ):
            refused = post(server, [wrong])
            assert refused.status_code == 422 and said in refused.json()["error"], refused.text
        page = server.client.get(f"{server.url}/docs")
        properties = server.client.get(f"{server.url}/openapi.json").json()["paths"]["/score"]["post"]["requestBody"]
        kinds = properties["content"]["application/json"]["schema"]["anyOf"][0]["properties"]["rows"]["items"][
            "properties"
        ]
        assert page.status_code == 200 and "a&#34;b" in page.text and set(kinds) == set(names)
