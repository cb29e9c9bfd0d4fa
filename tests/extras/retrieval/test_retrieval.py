"""A trained two-tower as an artifact: certified, asked over HTTP, predicted into files, switched without a lost request."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.retrieve import retrieve
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob, PredictJob
from pipeline.config.serving import LimitsConfig, RetrievalConfig
from pipeline.extras.retrieval.index import index_class
from pipeline.extras.retrieval.queries import Wish
from pipeline.extras.retrieval.retriever import Retriever
from pipeline.runtime.errors import DamagedError, ServingError
from pipeline.runtime.storage.manifest import read_sealed, seal_manifest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact.export import ExportSummary, describe, export
from pipeline.serving.artifact.manifest import ArtifactError, read_manifest
from pipeline.serving.scoring.predict import predict
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.summary import TrainSummary
from tests.end_to_end.user_items import job_words, train_on_rank
from tests.serving.servers import Server, running
from tests.serving.test_switching import point, wait_until
from tests.support.made_once import made_once
from tests.support.messages import names
from tests.support.ranks import RankPool

USER = {"user_id": "7", "user_group": "3"}


def _export(run: str, output: Path, *words: str) -> ExportSummary:
    return export(load_config(ExportJob, [f"run={run}", f"output={output}", "parity.splits=[validation]", *words]))


@pytest.fixture(scope="module")
def exported(user_item_run: TrainSummary, tmp_path_factory: pytest.TempPathFactory) -> ExportSummary:
    def make(folder: Path) -> ExportSummary:
        return _export(user_item_run.run_dir, folder / "artifact", "precision=fp32")

    return made_once(tmp_path_factory, "retrieval", make)


@pytest.mark.long
def test_users_are_filled_from_a_feature_table(user_item_run: TrainSummary, tmp_path: Path) -> None:
    pq.write_table(pa.table({"user_id": ["7", "8"], "user_group": ["3", "1"]}), tmp_path / "users.parquet")
    words = [f"feature_tables.user_id={tmp_path}/users.parquet", "precision=fp32"]
    retriever = Retriever.load(_export(user_item_run.run_dir, tmp_path / "artifact", *words).artifact)
    body = b'{"rows": [{"user_id": 7}, {"user_id": "8", "user_group": "2"}], "k": 5}'
    answer = retriever.score(retriever.request_reader(LimitsConfig()).read(body, "application/json"))
    full = pa.table({"user_id": ["7", "8"], "user_group": ["3", "2"]})
    wanted = retriever.retrieve(full, [(2, Wish(5))]).scores
    assert [each.positions.tolist() for each in answer.scores] == [each.positions.tolist() for each in wanted]
    assert [each.scores.tobytes() for each in answer.scores] == [each.scores.tobytes() for each in wanted]
    found = []
    for name, rows in (
        ("ids", full.select(["user_id"])),
        ("columns", pa.table({"user_id": ["7", "8"], "user_group": ["3", "1"]})),
    ):
        pq.write_table(rows, tmp_path / f"{name}.parquet")
        words = [
            f"artifact={tmp_path}/artifact",
            f"source={tmp_path}/{name}.parquet",
            f"output={tmp_path}/{name}.out.parquet",
        ]
        predict(load_config(PredictJob, words))
        found.append(pq.read_table(tmp_path / f"{name}.out.parquet"))
    assert found[0].equals(found[1])
    by_id = retriever.user.score(pa.table({"user_id": ["7"]})).scores
    assert by_id.tobytes() == retriever.user.score(full.slice(0, 1)).scores.tobytes()


@pytest.fixture(scope="module")
def hnsw(user_item_run: TrainSummary, tmp_path_factory: pytest.TempPathFactory) -> ExportSummary:
    pytest.importorskip("faiss")

    def make(folder: Path) -> ExportSummary:
        return _export(user_item_run.run_dir, folder / "artifact", "precision=int8", "retrieval.index=hnsw")

    return made_once(tmp_path_factory, "retrieval_hnsw", make)


@pytest.fixture(scope="module")
def raw(user_item_data: str) -> list[dict[str, str]]:
    with (Path(user_item_data).parent / "rows.tsv").open() as file:
        return [dict(row) for _, row in zip(range(300), csv.DictReader(file, delimiter="\t"), strict=False)]


@pytest.fixture(scope="module")
def files(exported: ExportSummary, raw: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rows.tsv, and of these rows users.parquet, items.parquet (vectors) and best.parquet (the 7 best items)."""
    folder = tmp_path_factory.mktemp("files")
    with (folder / "rows.tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(raw[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(raw)
    for name, words in {
        "users": ["retrieve.vectors=true"],
        "items": ["retrieve.vectors=true", "retrieve.tower=item"],
        "best": ["retrieve.k=7"],
    }.items():
        words += [f"artifact={exported.artifact}", f"source={folder}/rows.tsv", f"output={folder}/{name}.parquet"]
        assert predict(load_config(PredictJob, words)).num_refused == 0
    return folder


@pytest.fixture(scope="module")
def server(exported: ExportSummary) -> Iterator[Server]:
    with running("pipeline serve", f"artifact={exported.artifact}", "server.port=0", "limits.k=50") as server:
        yield server


def _vectors(path: Path) -> np.ndarray:
    return np.array(pq.read_table(path)["vector"].to_pylist(), np.float32)


def test_the_certificate_has_the_trainers_recall_and_the_index_misses_nothing(
    exported: ExportSummary, user_item_run: TrainSummary
) -> None:
    about = exported.certificate["splits"]["validation"]
    for name in ("recall_at_5", "recall_at_20", "mrr"):
        assert about["model"][name] == pytest.approx(user_item_run.validation[name], abs=2e-3)
        assert about["artifact"][name] == pytest.approx(about["model"][name], abs=1e-6)
    assert about["max_vector_difference"] < 1e-5 and about["catalogue_items"] == 60
    index = exported.certificate["index"]
    assert (index["kind"], index["items"], index["recall"]) == ("exact", 60, 1.0)
    assert index["clicked"]["recall_at_20"] == pytest.approx(about["model"]["recall_at_20"], abs=0.1)
    assert "recall_at_5" in describe(exported)


def test_files_hold_the_items_whose_vectors_score_highest(exported: ExportSummary, files: Path) -> None:
    users, best = _vectors(files / "users.parquet"), pq.read_table(files / "best.parquet").to_pydict()
    parts = read_manifest(exported.artifact).retrieval
    assert parts is not None
    items = np.fromfile(Path(exported.artifact) / "items.vectors", "<f4").reshape(parts.num_items, parts.dim)
    scores = users @ items.T
    np.testing.assert_allclose(np.array(best["scores"]), -np.sort(-scores, axis=1)[:, :7], atol=1e-6)
    values = Retriever.load(exported.artifact).items
    for row, found in enumerate(best["items"]):
        np.testing.assert_allclose(
            scores[row, [values.positions_of([name])[0] for name in found]], best["scores"][row], atol=1e-6
        )


def test_an_items_vector_is_the_same_in_the_index_and_from_its_raw_row(
    exported: ExportSummary, files: Path, raw: list[dict[str, str]]
) -> None:
    parts = read_manifest(exported.artifact).retrieval
    assert parts is not None
    items = np.fromfile(Path(exported.artifact) / "items.vectors", "<f4").reshape(parts.num_items, parts.dim)
    values = Retriever.load(exported.artifact).items
    own = [values.positions_of([row["item_id"]])[0] for row in raw]
    np.testing.assert_allclose(_vectors(files / "items.parquet"), items[own], atol=1e-6)


def _ask(server: Server, **body: Any) -> httpx.Response:
    return server.client.post(f"{server.url}/retrieve", json=body)


@pytest.mark.long
def test_items_come_back_by_their_raw_values_and_filters_hold(server: Server, raw: list[dict[str, str]]) -> None:
    rows = [{name: row[name] for name in USER} for row in raw[:5]]
    answer = _ask(server, rows=rows, k=9).json()
    assert [len(each) for each in answer["items"]] == [9] * 5 and answer["bad_rows"] == []
    assert all(each == sorted(each, reverse=True) for each in answer["scores"])
    assert set(answer["items"][0]) <= {str(number) for number in range(60)} | {row["item_id"] for row in raw}
    first, second, *_ = answer["items"][0]
    without = _ask(server, rows=rows[:1], k=9, excluded=[first, "of another shop"]).json()
    assert without["items"][0][:8] == answer["items"][0][1:] and len(without["items"][0]) == 9
    only = _ask(
        server, rows=rows[:1], k=9, allowed=[answer["items"][0][4], second, first, "?"], excluded=[first]
    ).json()
    assert only["items"][0] == [second, answer["items"][0][4]]
    np.testing.assert_allclose(only["scores"][0], [answer["scores"][0][1], answer["scores"][0][4]], atol=1e-6)
    assert _ask(server, rows=rows[:1], allowed=["?"]).json()["items"] == [[]]
    assert _ask(server, rows=[]).json()["items"] == []
    example = retrieve(server.url, rows[0], 9, seen=[first])
    assert [item for item, _ in example][:8] == answer["items"][0][1:]


def test_what_cannot_be_asked_is_said_and_pages_and_metrics_speak_of_items(server: Server) -> None:
    assert _ask(server, rows=[USER], k=51).status_code == 422 and "limits.k" in _ask(server, rows=[USER], k=51).text
    many = _ask(server, rows=[USER], excluded=["1"] * 10_001)
    assert many.status_code == 422 and "limits.filter_ids" in many.text
    assert "excluded" in _ask(server, rows=[USER], exluded=["1"]).json()["error"]
    assert _ask(server, rows=[{"item_id": "1"}]).status_code == 422  # a column of the item's tower
    found = server.client.post(f"{server.url}/score", json={"rows": [USER]})
    assert found.status_code == 404 and "/retrieve" in found.json()["error"]
    assert (
        server.client.post(f"{server.url}/retrieve", content=b"x", headers={"Content-Type": "text/plain"}).status_code
        == 415
    )
    paths = server.client.get(f"{server.url}/openapi.json").json()["paths"]
    assert "/retrieve" in paths and "/score" not in paths
    page = server.client.get(f"{server.url}/docs").text
    assert "/retrieve" in page and "user_id" in page and "item_id" not in page
    assert server.metric("items") == 60
    before = server.metric("retrieved_items_total")
    _ask(server, rows=[USER, USER], k=3)
    assert server.metric("retrieved_items_total") == before + 6


@pytest.mark.long
def test_another_artifact_is_taken_up_without_a_lost_request(
    exported: ExportSummary, hnsw: ExportSummary, tmp_path: Path
) -> None:
    link, versions, failures, done = tmp_path / "current", [], [], threading.Event()
    point(link, Path(exported.artifact))
    with running("pipeline serve", f"artifact={link}", "server.port=0", "server.watch_s=0.05") as server:

        def ask() -> None:
            with httpx.Client(timeout=120) as client:
                while not done.is_set():
                    answer = client.post(f"{server.url}/retrieve", json={"rows": [USER] * 3, "k": 5})
                    if answer.status_code != 200 or [len(each) for each in answer.json()["items"]] != [5] * 3:
                        failures.append(answer.text)
                    versions.append(answer.json().get("artifact"))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number, target in enumerate((hnsw, exported), start=1):
                wait_until(lambda: len(versions) > 20 * number)  # noqa: B023
                point(link, Path(target.artifact))
                wait_until(lambda: versions[-1] == target.version)  # noqa: B023
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert failures == [] and set(versions) == {exported.version, hnsw.version}


def test_hnsw_is_certified_and_finds_what_exact_search_finds(exported: ExportSummary, hnsw: ExportSummary) -> None:
    assert hnsw.certificate["index"]["kind"] == "hnsw" and hnsw.certificate["index"]["recall"] > 0.98
    manifest = read_manifest(hnsw.artifact)
    assert {"items.index", "items.vectors", "items.arrow", "item.pt2", "dense.pt2"} <= set(manifest.files)
    # Of users' ids that the tables hold as int8, nearly the same items.
    exact, found = Retriever.load(exported.artifact), Retriever.load(hnsw.artifact)
    rows = _user_rows(40)
    answers = [[set(each.positions) for each in one.retrieve(rows, [(40, Wish(20))]).scores] for one in (exact, found)]
    shared = [len(a & b) / 20 for a, b in zip(*answers, strict=True)]
    assert np.mean(shared) > 0.9
    wishes = [(10, Wish(3)), (30, Wish(2, allowed=("1", "2", "3", "4")))]
    assert [len(each.positions) for each in found.retrieve(rows, wishes).scores] == [3] * 10 + [2] * 30


def _user_rows(count: int) -> Any:
    import pyarrow as pa

    return pa.table({"user_id": [str(number) for number in range(count)], "user_group": ["1"] * count})


@pytest.mark.campaign
def test_a_catalogue_of_raw_rows_names_the_items_and_unknown_ones_are_left_out(
    user_item_run: TrainSummary, raw: list[dict[str, str]], tmp_path: Path
) -> None:
    chosen = {row["item_id"]: row["item_genre"] for row in raw[:20]}
    lines = ["item_id\titem_genre", *(f"{item}\t{genre}" for item, genre in chosen.items()), "never seen\t1"]
    (tmp_path / "catalogue.tsv").write_text("\n".join(lines) + "\n")
    summary = _export(
        user_item_run.run_dir, tmp_path / "artifact", "precision=fp32", f"retrieval.catalogue={tmp_path}/catalogue.tsv"
    )
    found = Retriever.load(summary.artifact).retrieve(_user_rows(1), [(1, Wish(100))]).scores[0]
    values = Retriever.load(summary.artifact).items.values_at(found.positions).to_pylist()
    assert sorted(values) == sorted(chosen)


def test_what_no_artifact_of_items_can_be_is_refused(
    exported: ExportSummary, user_item_run: TrainSummary, small_artifact: ExportSummary, tmp_path: Path
) -> None:
    run = user_item_run.run_dir
    with pytest.raises(ServingError, match=names("precision=auto")):
        _export(run, tmp_path / "auto", "precision=auto")
    with pytest.raises(ServingError, match=names("retrieval.max_recall_decrease")):
        _export(run, tmp_path / "int2", "precision=int2", "retrieval.max_recall_decrease=0")
    assert not (tmp_path / "int2").exists()
    with pytest.raises(ArtifactError, match="Retriever"):
        Predictor.load(exported.artifact)
    with pytest.raises(ArtifactError, match="two-tower"):
        Retriever.load(small_artifact.artifact)
    words = [f"source={tmp_path}/rows.tsv", f"output={tmp_path}/best.csv"]
    (tmp_path / "rows.tsv").write_text("user_id\tuser_group\n1\t1\n")
    with pytest.raises(ServingError, match="parquet"):
        predict(load_config(PredictJob, [f"artifact={exported.artifact}", *words]))
    with pytest.raises(ServingError, match="retrieve"):
        predict(load_config(PredictJob, [f"artifact={small_artifact.artifact}", "retrieve.k=3", *words]))
    damaged = tmp_path / "damaged"
    shutil.copytree(exported.artifact, damaged)
    with (damaged / "items.vectors").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(ArtifactError, match=names("items.vectors")):
        Retriever.load(str(damaged))
    manifest = json.loads((damaged / "manifest.json").read_text())
    manifest["retrieval"]["num_items"] = 1 << 30
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError):
        Retriever.load(str(damaged))


def test_faiss_that_is_missing_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    for kind in ("flat", "hnsw"):
        with pytest.raises(ServingError, match=names("retrieval.index=exact")):
            index_class(kind).build(np.eye(3, dtype=np.float32), RetrievalConfig())
    assert index_class("exact").build(np.eye(3, dtype=np.float32), RetrievalConfig())


@pytest.mark.parametrize("kind", ["plain", pytest.param("compressed", marks=pytest.mark.campaign)])
def test_raw_rows_of_validation_recall_what_the_certificate_says(
    ranks: RankPool, exported: ExportSummary, user_item_data: str, tmp_path: Path, kind: str
) -> None:
    """Compressed user tables, pruned items, int8 layers: each raw row through both towers, as a client would ask."""
    summary = exported
    if kind == "compressed":
        more = ["world_size=1", "tables.user_id.compression.kind=hash", "tables.user_id.compression.num_rows=40"]
        run = ranks.run(1, train_on_rank, job_words(user_item_data, tmp_path / "run", *more))[0].run_dir
        options = ["precision=int8", "dense=int8", "pruning.kind=untrained", "retrieval.max_recall_decrease=0.05"]
        summary = _export(run, tmp_path / "artifact", *options)
    lines = (Path(user_item_data).parent / "rows.tsv").read_text().splitlines()
    (tmp_path / "rows.tsv").write_text("\n".join([lines[0], *lines[16001:18001]]) + "\n")
    vectors = []
    for tower in ("user", "item"):
        words = [f"artifact={summary.artifact}", f"source={tmp_path}/rows.tsv", f"output={tmp_path}/{tower}.parquet"]
        predict(load_config(PredictJob, [*words, "retrieve.vectors=true", f"retrieve.tower={tower}"]))
        vectors.append(_vectors(tmp_path / f"{tower}.parquet"))
    cells = [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[16001:18001]]
    catalogue, first = np.unique([row["item_id"] for row in cells], return_index=True)
    scores = vectors[0] @ vectors[1][first].T
    clicked = [number for number, row in enumerate(cells) if row["click"] == "1"]
    own = scores[clicked, np.searchsorted(catalogue, [cells[number]["item_id"] for number in clicked])]
    places = 1 + (scores[clicked] > own[:, None]).sum(axis=1)
    assert (places <= 20).mean() == pytest.approx(
        summary.certificate["splits"]["validation"]["artifact"]["recall_at_20"], abs=0.003
    )


def _retrieval(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda values: values["retrieval"].__setitem__(key, value)


@pytest.mark.parametrize(
    "change",
    [
        _retrieval("num_items", 61),
        _retrieval("num_items", "60"),
        _retrieval("dim", 0),
        _retrieval("search", -1),
        _retrieval("index", "nope"),
        _retrieval("index", "hnsw"),
        _retrieval("item_feature", "user_id"),
        _retrieval("user_features", ["user_id"]),
        _retrieval("more", 1),
        lambda values: values["files"].pop("item.pt2"),
        lambda values: values.pop("retrieval"),
        lambda values: values["retrieval"].update(dim=values["retrieval"]["dim"] // 2, num_items=120),
        lambda values: values["files"].update({"items.arrow": values["files"]["items.vectors"]}),
    ],
    ids=range(13),
)
def test_a_manifest_that_was_resealed_with_what_cannot_be_is_one_line_of_error(
    exported: ExportSummary, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(exported.artifact, artifact, copy_function=os.link)
    values = read_sealed(str(artifact / "manifest.json"), None)
    change(values)
    (artifact / "manifest.json").unlink()
    (artifact / "manifest.json").write_text(seal_manifest(values, Purpose.ARTIFACT))
    with pytest.raises(DamagedError):
        Retriever.load(str(artifact))


@pytest.mark.campaign
def test_both_towers_are_written_as_onnx_and_certified(user_item_run: TrainSummary, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="pip install 'torchrec-pipeline[onnx]'")
    summary = _export(user_item_run.run_dir, tmp_path / "artifact", "precision=fp32", "onnx=true")
    manifest = read_manifest(summary.artifact)
    assert {"dense.onnx", "item.onnx"} <= set(manifest.files)
    splits = manifest.certificate["onnx"]["splits"]
    assert all(each["rows"] and each["max_vector_difference"] < 1e-4 for each in splits.values())
    assert "onnxruntime" in describe(summary)
