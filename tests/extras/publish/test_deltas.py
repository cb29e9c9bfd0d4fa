"""Deltas bring an artifact to what a whole export gives, bit for bit, are taken in a chain or not at all, and never mix in an answer."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.cli.api.artifact import Artifact
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob, PredictJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.serving import BatchingConfig
from pipeline.extras.publish.job import PublishJob
from pipeline.extras.publish.publish import publish
from pipeline.extras.publish.publisher import Publisher
from pipeline.runtime.errors import ConfigError, DamagedError, ServingError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import read_sealed, seal_manifest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact.deltas import (
    LAYERS_FILE,
    deltas_folder,
    newest_sequence,
    pin,
    stage_delta,
    tensors_from_bytes,
    tensors_to_bytes,
)
from pipeline.serving.artifact.export import ExportSummary, export
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.serving.artifact.writer import write_bytes
from pipeline.serving.http.batching import Batcher, Scores, ServerMetrics
from pipeline.serving.scoring.load import find_folder
from pipeline.serving.scoring.predict import predict
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.train import train
from tests.serving.servers import ROW, running
from tests.serving.stand_in import StandIn, score_of
from tests.serving.test_artifacts_served import raw_rows
from tests.serving.test_switching import wait_until
from tests.support.examples import SEED
from tests.support.messages import mentions, names
from tests.support.object_store import FaultyProxy, store  # noqa: F401
from tests.support.ranks import RankPool


def job_of(artifact: str | Path, *words: str) -> PublishJob:
    return load_config(PublishJob, [f"artifact={artifact}", "delta_gate.max_rows=600", *words])


def export_step(run: Path | str, step: int, folder: Path, *words: str) -> str:
    limits = [
        "parity.max_rows=300",
        "parity.max_ne_increase=1",
        "parity.max_auc_decrease=1",
        "parity.max_score_difference=1",
    ]
    given = [f"run={run}", f"step={step}", f"output={folder}", *limits, *words]
    return export(load_config(ExportJob, given)).artifact


@pytest.fixture(scope="module")
def published(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An artifact of step 10 in int8 with one delta, to step 30."""
    artifact = export_step(small_run, 10, tmp_path_factory.mktemp("published") / "artifact")
    lines = publish(job_of(artifact), find_folder)
    assert len(lines) == 1 and "step 30" in lines[0]
    return artifact


@pytest.fixture(scope="module")
def rows(prepared_clicks: str) -> pa.Table:
    return raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 700)


@pytest.mark.parametrize("memory", ["ram", "mapped", "ssd"])
def test_an_artifact_after_a_delta_scores_as_a_whole_export_of_its_step(
    published: str, small_artifact: ExportSummary, rows: pa.Table, memory: str
) -> None:
    predictor = Predictor.load(published, memory=memory, cache_bytes=200_000 if memory == "ssd" else None)
    before, base = predictor.score(rows).scores, predictor.version
    predictor.catch_up(published)
    assert (predictor.sequence, predictor.version) == (1, f"{base}+1")
    whole = Predictor.load(small_artifact.artifact).score(rows).scores
    np.testing.assert_array_equal(predictor.score(rows).scores, whole)
    assert not np.array_equal(before, whole)
    ids = torch.arange(0, predictor.manifest.tables[-1].stored_rows, 3)
    expected = Predictor.load(small_artifact.artifact).lookup.stored(25, ids)
    assert torch.equal(predictor.lookup.stored(25, ids), expected)


@pytest.mark.long
def test_scores_of_files_and_frames_are_with_deltas_where_that_is_asked_for(
    published: str, small_artifact: ExportSummary, rows: pa.Table, caplog: pytest.LogCaptureFixture
) -> None:
    new, base = Artifact(small_artifact.artifact).predict(rows), Artifact(published).predict(rows)
    assert mentions(caplog.text, f"{published} has deltas to number 1 deltas=true")
    np.testing.assert_array_equal(Artifact(published, memory="ssd", deltas=True).predict(rows), new)
    assert not np.array_equal(base, new)


@pytest.mark.long
def test_a_shard_that_begins_after_a_delta_is_refused_and_a_number_gives_all_shards_one_version(
    published: str, prepared_clicks: str, tmp_path: Path
) -> None:
    raw = (Path(prepared_clicks).parent / "clicks.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / f"in/{number}.tsv").write_text("".join(raw[200 * number : 200 * number + 200]))
    artifact = Path(shutil.copytree(published, tmp_path / "artifact", ignore=shutil.ignore_patterns("deltas")))

    def shard(number: int, *words: str) -> str:
        given = [f"artifact={artifact}", f"source={tmp_path}/in", f"output={tmp_path}/out.parquet", "num_shards=2"]
        return predict(load_config(PredictJob, [*given, f"shard={number}", *words])).artifact_version

    base = shard(0, "deltas=true")
    shutil.copytree(f"{published}/deltas", artifact / "deltas")  # a delta arrives between the starts of the shards
    for words in (["deltas=true"], ["deltas=1"]):
        with pytest.raises(ServingError, match=names(f"{base} {base}+1 deltas overwrite=true")):
            shard(1, *words)
    with pytest.raises(ServingError, match=names("deltas=2 1")):
        shard(1, "deltas=2")
    manifest = tmp_path / "out.parquet.manifest.json"
    assert shard(1, "deltas=false") == base and json.loads(manifest.read_text())["subject"]["artifact"] == base
    assert [shard(number, "deltas=1", "overwrite=true") for number in range(2)] == [f"{base}+1"] * 2
    assert json.loads(manifest.read_text())["subject"]["artifact"] == f"{base}+1"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_delta_is_not_taken_and_what_served_goes_on(
    published: str, small_artifact: ExportSummary, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = read_manifest(published)
    for name in (LAYERS_FILE, "manifest.json", "00025.rows", "00025.ids"):
        copy = Path(shutil.copytree(published, tmp_path / name))
        _flip(copy / "deltas" / "00000001" / name)
        with pytest.raises(DamagedError):
            stage_delta(str(copy), manifest, 1)
    predictor = Predictor.load(str(copy))
    predictor.catch_up(str(copy))
    assert predictor.sequence == 0 and "serves delta 0" in caplog.text
    other = Path(shutil.copytree(small_artifact.artifact, tmp_path / "other"))
    shutil.copytree(Path(published) / "deltas", other / "deltas")
    with pytest.raises(DamagedError, match=names(manifest.version)):
        stage_delta(str(other), read_manifest(str(other)), 1)


def _reseal_delta(artifact: Path, change: Callable[[dict[str, Any]], object], **contents: bytes) -> None:
    """Change the delta's manifest and files (dots of names as underscores), and make every checksum agree."""
    folder = artifact / "deltas" / "00000001"
    values = read_sealed(str(folder / "manifest.json"), None)
    for name, content in contents.items():
        file = folder / name.removeprefix("f").replace("_", ".")
        file.unlink()
        values["files"][file.name] = write_bytes(str(file), content)
    change(values)
    (folder / "manifest.json").write_text(seal_manifest(values, Purpose.DELTA))


@pytest.mark.parametrize("memory", ["ram", "mapped", "ssd"])
def test_a_delta_that_is_refused_leaves_every_bit_of_the_scores(
    published: str, rows: pa.Table, tmp_path: Path, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Path(shutil.copytree(published, tmp_path / "copy"))
    delta, table = copy / "deltas" / "00000001", read_manifest(published).tables[25]
    ids, layers = np.fromfile(delta / "00025.ids", "<u8"), (delta / LAYERS_FILE).read_bytes()
    predictor = Predictor.load(str(copy), memory=memory, cache_bytes=200_000 if memory == "ssd" else None)
    before, version = predictor.score(rows).scores, predictor.version
    every = [torch.arange(one.stored_rows) for one in predictor.manifest.tables]
    stored = [predictor.lookup.stored(number, numbers) for number, numbers in enumerate(every)]

    def assert_refused(what: str) -> None:
        caplog.clear()
        predictor.catch_up(str(copy))
        assert "serves delta 0" in caplog.text and predictor.version == version, what
        np.testing.assert_array_equal(predictor.score(rows).scores, before, what)
        assert all(torch.equal(predictor.lookup.stored(n, every[n]), stored[n]) for n in range(len(every))), what

    for first in (2**64 - 5, 2**64 - 10**7, 2**63, table.stored_rows):
        for changed in ([first, *ids[1:]], [*ids[:-1], first], [first] * len(ids)):
            _reseal_delta(copy, lambda _: None, f00025_ids=np.array(changed, "<u8").tobytes())
            assert_refused(f"id {first}")
    _reseal_delta(copy, lambda _: None, f00025_ids=ids[::-1].tobytes())
    assert_refused("descending ids")
    _reseal_delta(copy, lambda _: None, f00025_ids=ids.tobytes(), dense_tensors=tensors_to_bytes([torch.zeros(1)]))
    assert_refused("other layers")
    bad = [torch.full_like(one, torch.nan) if one.is_floating_point() else one for one in tensors_from_bytes(layers)]
    _reseal_delta(copy, lambda _: None, dense_tensors=tensors_to_bytes(bad))
    assert_refused("layers of NaN")
    _reseal_delta(copy, lambda _: None, dense_tensors=layers)
    patch, calls = predictor.lookup.patch, []

    def fail_on_the_last(*of: Any) -> Callable[[], None]:
        calls.append(of)
        if len(calls) == 26:
            raise MemoryError("no room for the last table")
        return patch(*of)

    predictor.lookup.patch = fail_on_the_last  # type: ignore[method-assign]
    assert_refused("no memory")
    predictor.lookup.patch = patch  # type: ignore[method-assign]
    predictor.catch_up(str(copy))
    assert predictor.sequence == 1 and not np.array_equal(predictor.score(rows).scores, before)


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"sequence": "1"},
        {"saved_at": 10**400},
        {"stats": {"event_time": "now"}},
        {"stats": []},
        {"tables": {}},
        {"tables": [[]]},
        {"tables": [{"table": 0}]},
        {"previous_sha256": 5},
        {"attempt": None},
    ],
    ids=str,
)
def test_a_delta_whose_manifest_has_a_value_of_another_type_is_damaged(
    published: str, tmp_path: Path, change: dict[str, Any]
) -> None:
    copy = Path(shutil.copytree(published, tmp_path / "copy", copy_function=os.link))
    (copy / "deltas/00000001/manifest.json").unlink()
    shutil.copy(Path(published) / "deltas/00000001/manifest.json", copy / "deltas/00000001")
    _reseal_delta(copy, lambda values: values.update(change))
    with pytest.raises(DamagedError, match=names(*change)):
        stage_delta(str(copy), read_manifest(published), 1)


def test_nothing_is_published_twice_or_past_a_pin_or_the_gate(small_run: Path, published: str, tmp_path: Path) -> None:
    assert "nothing" in publish(job_of(published), find_folder)[0]
    copy = Path(shutil.copytree(published, tmp_path / "copy"))
    folder = deltas_folder(str(copy))
    assert newest_sequence(folder) == 1
    publish(job_of(copy, "pin=0"), find_folder)
    assert newest_sequence(folder) == 0
    with pytest.raises(ServingError, match=names("unpin=true")):
        Publisher(job_of(copy), str(copy)).publish_newest()
    publish(job_of(copy, "unpin=true"), find_folder)
    assert newest_sequence(folder) == 1
    shutil.rmtree(folder)
    gates = ["delta_gate.max_rows_fraction=0.000001", "delta_gate.max_ne_increase=0", "delta_gate.max_norm_ratio=1"]
    with pytest.raises(ServingError, match=names("delta_gate.max_rows_fraction")):
        publish(job_of(copy, *gates), find_folder)
    assert newest_sequence(folder) == 0
    with pytest.raises(ConfigError, match=names("follow step")):
        load_config(PublishJob, ["artifact=x", "step=3", "follow=true"])


def test_deltas_of_a_registry_version_lie_beside_its_artifact(tmp_path: Path) -> None:
    assert deltas_folder("r/versions/v000012/artifact") == "r/versions/v000012/deltas"
    assert deltas_folder("runs/a/artifacts/step_00000300.int8/") == "runs/a/artifacts/step_00000300.int8/deltas"
    assert newest_sequence(str(tmp_path / "none")) == 0
    pin(str(tmp_path), 3)
    (tmp_path / "pin.json").write_text("[")
    with pytest.raises(DamagedError):
        newest_sequence(str(tmp_path))


def test_tensors_come_back_as_they_were() -> None:
    given = [torch.randn(3, 2), torch.zeros(0), torch.tensor(2.5), torch.randn(4).bfloat16(), torch.arange(3)]
    found = tensors_from_bytes(tensors_to_bytes(given))
    assert all(one.dtype == two.dtype and torch.equal(one, two) for one, two in zip(given, found, strict=True))
    for content in (
        b"",
        b"[]\nx",
        b"{",
        b'[{"dtype": "float32", "shape": [-1]}]\n',
        b'[{"dtype": "object", "shape": []}]\n',
    ):
        with pytest.raises(DamagedError):
            tensors_from_bytes(content)


def test_an_answer_is_of_one_model_though_it_takes_several_batches() -> None:
    """Requests of five batches each, and a change behind each of them that has begun."""

    async def run() -> list[tuple[list[dict[str, object]], Scores]]:
        scorer = StandIn(version="0", delay_s=0.002)
        batcher = Batcher(scorer, BatchingConfig(max_rows=2), ServerMetrics())
        schema = pa.schema(
            [
                ("price", pa.float64()),
                ("age", pa.float64()),
                ("city", pa.string()),
                ("device", pa.string()),
                ("tags", pa.list_(pa.string())),
            ]
        )
        asked = [[{**ROW, "price": float(10 * request + row)} for row in range(9)] for request in range(12)]
        tables = [pa.Table.from_pylist(rows, schema=schema) for rows in asked]
        answers = [asyncio.create_task(batcher.score(table)) for table in tables]
        for number in range(1, 6):
            await asyncio.sleep(0.01)
            await batcher.change(lambda number=number: setattr(scorer, "version", str(number)))
        found = list(zip(asked, await asyncio.gather(*answers), strict=True))
        await batcher.close()
        return found

    found = asyncio.run(run())
    for rows, scored in found:
        expected = [np.float32(score_of(row, scored.version)) for row in rows]
        np.testing.assert_array_equal(scored.scores, expected)
    assert {scored.version for _, scored in found} > {"0"}, "changes came in between"


def _train(rank: int, overrides: list[str]) -> None:
    train(load_config(TrainJob, overrides))


@pytest.mark.campaign
@pytest.mark.parametrize("compression", ["none", "managed_collision"])
def test_200_deltas_score_as_whole_exports_do(
    ranks: RankPool, prepared_clicks: str, rows: pa.Table, tmp_path: Path, compression: str
) -> None:
    """Of a run that saves changed rows alone, at every step; and what servers with memory=ram and ssd have then."""
    run, last = tmp_path / "run", 201 if compression == "none" else 21
    overrides = [
        "experiment=quickstart",
        "hardware=cpu",
        "trainer.global_batch_size=64",
        f"data.path={prepared_clicks}",
        f"run_dir={run}",
        f"trainer.max_steps={last}",
        "checkpoint.save_every_steps=1",
        "checkpoint.keep_last_n=999",
        "checkpoint.differential=true",
        "trainer.evaluate_max_batches=1",
    ]
    if compression != "none":
        overrides += [
            "tables.cat_25.compression.kind=managed_collision",
            "tables.cat_25.compression.num_rows=2000",
            "tables.cat_25.compression.eviction_interval=2",
        ]
    ranks.run(2, _train, overrides)
    artifact = export_step(run, 1, tmp_path / "artifact", "precision=int4")
    limits = ["delta_gate.max_ne_increase=9", "delta_gate.max_progressive_ne_rise=null"]  # steps of 64 rows scatter
    publisher = Publisher(job_of(artifact, *limits), artifact)
    servers = [Predictor.load(artifact), Predictor.load(artifact, memory="ssd", cache_bytes=100_000)]
    for step in range(2, last + 1):
        delta = publisher.publish_step(step)
        assert delta is not None and delta.sequence == step - 1
        for server in servers:
            server.apply(stage_delta(artifact, server.manifest, delta.sequence))
        if step in (2, last // 2, last):
            whole = Predictor.load(export_step(run, step, tmp_path / f"whole_{step}", "precision=int4"))
            for server in servers:
                np.testing.assert_array_equal(server.score(rows).scores, whole.score(rows).scores)
                for number, table in enumerate(whole.manifest.tables):
                    ids = torch.arange(table.stored_rows)
                    assert torch.equal(server.lookup.stored(number, ids), whole.lookup.stored(number, ids))
    assert publisher.layers.num_traces == 1


@pytest.mark.campaign
def test_a_server_takes_a_delta_while_it_answers_and_goes_back_to_a_pinned_one(
    small_run: Path, small_artifact: ExportSummary, rows: pa.Table, tmp_path: Path
) -> None:
    artifact = export_step(small_run, 10, tmp_path / "artifact")
    first, last = (
        Predictor.load(path).score(rows.slice(0, 40)).scores.tolist() for path in (artifact, small_artifact.artifact)
    )
    version, asked = read_manifest(artifact).version, {"rows": rows.slice(0, 40).to_pylist()}
    with running("pipeline serve", f"artifact={artifact}", "server.port=0", "server.watch_s=0.05") as server:

        def answers(expected: list[float], name: str) -> bool:
            answer = server.client.post(f"{server.url}/score", json=asked)
            assert answer.status_code == 200
            return answer.json()["artifact"] == name and answer.json()["scores"] == pytest.approx(expected, abs=1e-7)

        assert answers(first, version) and server.metric("delta_sequence") == 0
        publish(job_of(artifact), find_folder)
        wait_until(lambda: answers(last, f"{version}+1"))
        assert server.metric("delta_sequence") == 1 and 0 < server.metric("embedding_age_seconds") < 1e6
        publish(job_of(artifact, "pin=0"), find_folder)
        wait_until(lambda: answers(first, version))
        publish(job_of(artifact, "unpin=true"), find_folder)
        wait_until(lambda: answers(last, f"{version}+1"))
        broken = Path(artifact) / "deltas" / "00000002"
        shutil.copytree(Path(artifact) / "deltas" / "00000001", broken)
        server.wait_for("refused delta 2")
        assert answers(last, f"{version}+1") and server.metric("delta_refusals_total") >= 1
    logging.getLogger(__name__).info("%s", server.log())


@pytest.mark.campaign
def test_an_artifact_in_an_object_store_takes_deltas_too(
    small_run: Path,
    small_artifact: ExportSummary,
    rows: pa.Table,
    tmp_path: Path,
    store: FaultyProxy,  # noqa: F811
) -> None:
    local = export_step(small_run, 10, tmp_path / "artifact")
    remote = "s3://bucket/versions/v000001/artifact"
    for path in sorted(Path(local).rglob("*")):
        if path.is_file():
            storage.upload_file(str(path), f"{remote}/{path.relative_to(local)}")
    publish(job_of(remote), find_folder)
    assert newest_sequence("s3://bucket/versions/v000001/deltas") == 1
    predictor = Predictor.load(remote)
    predictor.catch_up(remote)
    whole = Predictor.load(small_artifact.artifact)
    np.testing.assert_array_equal(predictor.score(rows).scores, whole.score(rows).scores)
    publish(job_of(remote, "pin=0"), find_folder)
    assert newest_sequence("s3://bucket/versions/v000001/deltas") == 0


@pytest.mark.campaign
def test_no_flipped_bit_of_a_delta_is_served(published: str, tmp_path: Path) -> None:
    """300 bits over all of its files: each delta is refused as a whole."""
    copy = Path(shutil.copytree(published, tmp_path / "copy"))
    manifest, generator, silent = read_manifest(published), random.Random(18 + SEED), []
    files = sorted(path for path in (copy / "deltas" / "00000001").iterdir())
    for number in range(300):
        path = files[number % len(files)]
        content = path.read_bytes()
        bit = generator.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            stage_delta(str(copy), manifest, 1)
            silent.append((path.name, bit))
        except DamagedError:
            pass
        path.write_bytes(content)
    assert silent == []
    assert stage_delta(str(copy), manifest, 1).delta.sequence == 1
