"""Artifacts with feature tables: rows of ids score as rows that carry the columns, bit for bit, from Python, files and servers."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.api.artifact import Artifact
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.run import erase
from pipeline.extras.publish.publish import publish
from pipeline.extras.serving_log.job import SkewJob
from pipeline.extras.serving_log.skew import skew
from pipeline.runtime.errors import DamagedError, ServingError
from pipeline.serving.artifact.manifest import ArtifactError, read_manifest
from pipeline.serving.artifact.writer import write_arrow, write_bytes
from pipeline.serving.http.request_rows import ARROW_TYPE
from pipeline.serving.scoring.load import find_folder
from pipeline.serving.scoring.predict import predict
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import UserItems
from tests.extras.publish.test_deltas import export_step, job_of
from tests.serving.requests import stream_of
from tests.serving.servers import Server, running
from tests.serving.test_artifacts_served import raw_rows
from tests.serving.test_switching import point, wait_until
from tests.support.messages import names

OF_USER = ["int_0", "int_1", "int_2", "cat_0", "cat_1", "cat_2", "cat_3"]
OF_AD = ["int_9", "cat_9", "cat_20"]
Row = dict[str, Any]


def write_tables(folder: Path, rows: Sequence[Row], shift: int = 0) -> list[str]:
    """Tables by cat_8, which the model reads, and by `ad`, which it does not. shift: each id gets the columns of another
    row. Return the words of the command line."""
    folder.mkdir(exist_ok=True)
    ids = {"cat_8": sorted({row["cat_8"] for row in rows if row["cat_8"]}), "ad": [str(each) for each in range(40)]}
    for key, columns in (("cat_8", OF_USER), ("ad", OF_AD)):
        table = pa.Table.from_pylist(
            [{name: rows[(n + shift) % len(rows)][name] for name in columns} for n in range(len(ids[key]))]
        )
        pq.write_table(table.append_column(key, pa.array(ids[key])), folder / f"{key}.parquet")
    return [f"feature_tables.{key}={folder}/{key}.parquet" for key in ids]


def filled(row: Row, folder: Path) -> Row:
    """The row with the columns of the tables in `folder`, without its ad."""
    whole = dict(row)
    for key, columns in (("cat_8", OF_USER), ("ad", OF_AD)):
        stored = {each.pop(key): each for each in pq.read_table(folder / f"{key}.parquet").to_pylist()}
        whole = {**dict.fromkeys(columns), **stored.get(row[key], {}), **whole}
    return {name: value for name, value in whole.items() if name != "ad"}


@pytest.fixture(scope="module")
def rows(prepared_clicks: str) -> list[Row]:
    return raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 300).to_pylist()


@pytest.fixture(scope="module")
def asked(rows: list[Row]) -> list[Row]:
    """Rows with ids instead of the tables' columns. Some ids are unknown."""
    kept = [name for name in rows[0] if name not in (*OF_USER, *OF_AD)]
    found = [{**{name: row[name] for name in kept}, "ad": str(number % 43)} for number, row in enumerate(rows)]
    found[5]["cat_8"] = "nobody"
    return found


@pytest.fixture(scope="module")
def tables(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write_tables(folder, rows)
    return folder


@pytest.fixture(scope="module")
def artifact(small_run: Path, tables: Path, rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("with_tables") / "artifact"
    return Path(export_step(small_run, 20, output, *write_tables(tables, rows)))


@pytest.mark.long
def test_ids_score_as_the_columns_from_python_and_files(
    artifact: Path, tables: Path, asked: list[Row], rows: list[Row], small_run: Path, tmp_path: Path
) -> None:
    predictor, by_id = Predictor.load(str(artifact)), pa.Table.from_pylist(asked)
    full = pa.Table.from_pylist([filled(row, tables) for row in asked])
    wanted = predictor.score(full).scores
    assert predictor.score(by_id).scores.tobytes() == wanted.tobytes() and len(np.unique(wanted)) > 200
    user, items = by_id.slice(3, 1).select(["cat_8"]), by_id.drop_columns(["cat_8"])
    each = [filled({**row, "cat_8": asked[3]["cat_8"]}, tables) for row in asked]
    of_user = predictor.score(UserItems(user, items)).scores
    assert of_user.tobytes() == predictor.score(pa.Table.from_pylist(each)).scores.tobytes()
    whole = Artifact(str(artifact))
    assert whole.predict(by_id).tobytes() == wanted.tobytes() == whole.predict(full).tobytes()
    assert whole.explain(by_id.slice(0, 3)).equals(whole.explain(full.slice(0, 3)))
    for source, kept in (
        (tmp_path / "ids.parquet", by_id),
        (tmp_path / "some.parquet", by_id.append_column("int_9", full["int_9"])),
    ):
        pq.write_table(kept, source)
        words = [f"artifact={artifact}", f"source={source}", f"output={source}.scores.parquet", "id_columns=[ad]"]
        predict(load_config(PredictJob, words))
        scores = pq.read_table(f"{source}.scores.parquet")
        assert scores["score"].to_numpy().tobytes() == wanted.tobytes() and scores["ad"].equals(by_id["ad"])
    with pytest.raises(ServingError, match=names("columns 'int_9'")):
        predictor.score(by_id.drop_columns(["ad"]))
    # The same files again are the same artifact; other rows of a table are not.
    assert export_step(small_run, 20, artifact, *write_tables(tables, rows)) == str(artifact)
    with pytest.raises(ServingError, match="of another step, run or setting"):
        export_step(small_run, 20, artifact, *write_tables(tmp_path / "other", rows, shift=1))
    with pytest.raises(ServingError, match=names("'int_99' 'int_9'")):
        pq.write_table(pa.table({"ad": ["1"], "int_99": [1.0]}), tmp_path / "ads.parquet")
        export_step(small_run, 20, tmp_path / "none", f"feature_tables.ad={tmp_path}/ads.parquet")


@pytest.mark.long
def test_a_damaged_table_is_refused_and_an_id_that_is_no_feature_is_erased(artifact: Path, tmp_path: Path) -> None:
    (file,) = (name for key, name in read_manifest(str(artifact)).feature_tables.items() if key == "ad")
    copy = Path(shutil.copytree(artifact, tmp_path / "damaged"))
    content = bytearray((copy / file).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / file).write_bytes(content)
    with pytest.raises(DamagedError, match=file):
        Predictor.load(str(copy))
    copy = Path(shutil.copytree(artifact, tmp_path / "erased"))
    result = erase(EraseJob(feature="ad", value="17", folders=[str(copy)]))
    assert result.left == {} and result.rewritten == [str(copy)]
    before, after = Predictor.load(str(artifact)).feature_tables, Predictor.load(str(copy)).feature_tables
    assert before is not None and after is not None
    ads = pa.table({"ad": [str(number) for number in range(40)]})
    wanted = [
        dict.fromkeys(row, None) | {"ad": "17"} if row["ad"] == "17" else row for row in before.fill(ads).to_pylist()
    ]
    assert after.fill(ads).to_pylist() == wanted != before.fill(ads).to_pylist()
    assert Predictor.load(str(copy)).version != Predictor.load(str(artifact)).version


def _cut(table: pa.Table) -> bytes:
    """The table as two batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return sink.getvalue().to_pybytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.take(pa.array(range(table.num_rows - 1, -1, -1))), "hashes ascend"),
        (
            lambda table: table.rename_columns([table.column_names[0], "user", *table.column_names[2:]]),
            "not feature table",
        ),
        (lambda table: table.set_column(2, table.column_names[2], pa.array(["a"] * table.num_rows)), "'int_9' type"),
        (lambda table: table.slice(0, 0), "not feature table"),
        (lambda table: table.set_column(1, "ad", pa.nulls(table.num_rows, pa.string())), "without id"),
        (_cut, "not feature table"),
        (lambda table: b"user,age", "Arrow"),
    ],
)
def test_a_table_that_was_resealed_with_what_cannot_be_is_refused(
    artifact: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table | bytes], words: str
) -> None:
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    manifest = read_manifest(str(copy))
    path = copy / (file := manifest.feature_tables["ad"])
    content = change(pa.ipc.open_file(path.read_bytes()).read_all())
    path.unlink()
    entry = (
        write_bytes(str(path), content)
        if isinstance(content, bytes)
        else write_arrow(str(path), content, is_mapped=True)
    )
    (copy / "manifest.json").write_text(replace(manifest, files={**manifest.files, file: entry}).to_text())
    with pytest.raises(ArtifactError, match=names(words)):
        Predictor.load(str(copy))


def ask(server: Server, number: int, by_id: list[Row]) -> list[float]:
    """The scores of 20 rows: as rows, as a user with items, or as Arrow."""
    chosen, headers = by_id[number * 7 : number * 7 + 20], {"X-Request-ID": f"request-{number}"}
    if number % 3 == 2:
        schema = pa.Table.from_pylist(chosen).schema
        answer = server.client.post(
            f"{server.url}/score", content=stream_of(chosen, schema),
            headers={**headers, "Content-Type": ARROW_TYPE, "Accept": "application/json"},
        )  # fmt: skip
    else:
        body: Row = {"rows": chosen}
        if number % 3:
            items = [{name: value for name, value in row.items() if name != "cat_8"} for row in chosen]
            body = {"user": {"cat_8": chosen[0]["cat_8"]}, "items": items}
        answer = server.client.post(f"{server.url}/score", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["scores"]


def expected(predictor: Predictor, number: int, by_id: list[Row], tables: Path) -> list[float]:
    chosen = by_id[number * 7 : number * 7 + 20]
    if number % 3 == 1:
        chosen = [{**row, "cat_8": chosen[0]["cat_8"]} for row in chosen]
    full = pa.Table.from_pylist([filled(row, tables) for row in chosen])
    return predictor.score(full).scores.tolist()


@pytest.mark.long
def test_a_server_fills_rows_over_a_delta_and_a_switch_and_its_log_has_what_was_filled(
    artifact: Path, tables: Path, asked: list[Row], rows: list[Row], small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:  # fmt: skip
    artifacts, link, log = tmp_path / "artifacts", tmp_path / "current", tmp_path / "log"
    first = Path(shutil.copytree(artifact, artifacts / "first"))
    second = Path(export_step(small_run, 10, artifacts / "second", *write_tables(tmp_path / "other", rows, shift=3)))
    point(link, first)
    options = [
        "server.port=0",
        "server.watch_s=0.05",
        f"observers.log.folder={log}",
        "batching.latency_budget_ms=60000",
    ]
    with running("pipeline serve", f"artifact={link}", *options) as server:
        predictor = Predictor.load(str(first))
        numbers = range(12)
        assert [ask(server, n, asked) for n in numbers] == [expected(predictor, n, asked, tables) for n in numbers]
        publish(job_of(first), find_folder)
        wait_until(lambda: server.metric("delta_sequence") == 1)
        predictor.catch_up(str(first))
        assert predictor.sequence == 1
        assert [ask(server, n, asked) for n in numbers] == [expected(predictor, n, asked, tables) for n in numbers]
        point(link, second)
        wait_until(lambda: server.metric("artifact_switches_total") == 1)
        predictor, other = Predictor.load(str(second)), tmp_path / "other"
        assert [ask(server, n, asked) for n in numbers] == [expected(predictor, n, asked, other) for n in numbers]
        assert server.metric('feature_table_ids_total{column="ad"}') == 3 * 20 * len(numbers)
        assert 0 < server.metric('feature_table_unknown_ids_total{column="ad"}') < 0.2 * 3 * 20 * len(numbers)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    found = skew(
        load_config(SkewJob, [f"artifact={artifacts}", f"log={log}", f"data_path={prepared_clicks}", "max_psi=99"])
    )
    assert found["passed"] and found["replay"]["equal_scores"] == found["rows"] == 3 * 20 * len(numbers)
    logged = pq.read_table(log).to_pylist()
    rows_of = [each for each in logged if each["log.request_id"] == "request-0"][:20]
    wanted = [filled(row, tables) for row in asked[:20]]
    assert [{name: row[name] for name in wanted[0]} for row in rows_of] == wanted
