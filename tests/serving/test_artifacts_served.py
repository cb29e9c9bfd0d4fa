"""Real artifacts of a trained run, predicted from files, served over HTTP, and with their tables on SSD."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob, PredictJob
from pipeline.config.serving import SsdConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.raw.formats.criteo_tsv import criteo_columns
from pipeline.extras.ssd_serving.lookup import SsdLookup
from pipeline.retraining.find_artifact import find_artifact
from pipeline.runtime.errors import DamagedError, RetrainingError, ServingError
from pipeline.runtime.storage.signature import requiring
from pipeline.serving.artifact.export import ExportSummary, export
from pipeline.serving.artifact.manifest import ArtifactError
from pipeline.serving.artifact.raw_schema import lookups_of
from pipeline.serving.scoring.predict import predict
from pipeline.serving.scoring.predictor import Predictor
from tests.runtime.test_signature import make_keys
from tests.serving.servers import Server, running
from tests.support.forks import run_warm
from tests.support.messages import names


@pytest.fixture(scope="module")
def artifact(small_artifact: ExportSummary) -> str:
    return small_artifact.artifact


@pytest.fixture(scope="module")
def pruned(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    output = tmp_path_factory.mktemp("pruned") / "artifact"
    options = [
        "pruning.kind=frequency", "pruning.fraction=0.5", "precision=int4", "parity.max_rows=500",
        "parity.max_ne_increase=1", "parity.max_auc_decrease=1", "parity.max_score_difference=1",
    ]  # fmt: skip
    return export(load_config(ExportJob, [f"run={small_run}", f"output={output}", *options])).artifact


@pytest.fixture(scope="module")
def clicks(prepared_clicks: str) -> Path:
    """The generated TSV, labels and all."""
    return Path(prepared_clicks).parent / "clicks.tsv"


def raw_rows(clicks: Path, count: int) -> pa.Table:
    columns = criteo_columns()
    lines = [line.split("\t") for line in clicks.read_text().splitlines()[:count]]
    names = [columns.label, *columns.dense, *columns.sparse]
    values = dict(zip(names, zip(*lines, strict=True), strict=True))
    table = {name: [float(value) if value else None for value in values[name]] for name in columns.dense}
    table |= {name: [value or None for value in values[name]] for name in columns.sparse}
    return pa.table(table)


@pytest.mark.long
def test_predicted_files_hold_the_scores_of_the_predictor(artifact: str, clicks: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.tsv", tmp_path / "scores.parquet"
    source.write_text("".join(clicks.read_text().splitlines(keepends=True)[:1000]))
    job = load_config(PredictJob, [f"artifact={artifact}", f"source={source}", f"output={output}", "batch_rows=300"])
    assert predict(job).num_rows == 1000
    rows, predictor = raw_rows(clicks, 1000), Predictor.load(artifact)
    wanted = np.concatenate([predictor.score(rows.slice(begin, 300)).scores for begin in range(0, 1000, 300)])
    np.testing.assert_array_equal(pq.read_table(output)["score"].to_numpy(), wanted)
    ssd = load_config(PredictJob, [*(f"{key}={value}" for key, value in {"artifact": artifact, "source": source, "output": f"{output}.ssd.parquet", "batch_rows": 300, "memory": "ssd", "ssd.cache_gb": 0.00001}.items())])  # fmt: skip
    predict(ssd)
    np.testing.assert_array_equal(pq.read_table(f"{output}.ssd.parquet")["score"].to_numpy(), wanted)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["artifact", "pruned"])
def test_scores_with_tables_on_ssd_are_bitwise_those_of_memory(
    kind: str, request: pytest.FixtureRequest, clicks: Path
) -> None:
    path, rows = request.getfixturevalue(kind), raw_rows(clicks, 700)
    wanted = Predictor.load(path).score(rows).scores
    total = sum(table.size_bytes for table in Predictor.load(path).manifest.tables)
    for share in (0.0, 0.05, 0.5, 1.0):
        on_ssd = Predictor.load(path, memory="ssd", cache_bytes=int(share * total))
        np.testing.assert_array_equal(on_ssd.score(rows).scores, wanted)
        assert isinstance(on_ssd.lookup, SsdLookup) and on_ssd.lookup.counts.lookups == 700 * 26
        assert (on_ssd.lookup.counts.hits == 700 * 26) == (share == 1.0) or share == 0.5


def test_the_cache_is_filled_by_the_curves_and_hits_as_they_say(
    artifact: str, prepared_clicks: str, clicks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = load_dataset(prepared_clicks)
    assert Predictor.load(artifact).manifest.lookups == lookups_of(dataset, prepared_clicks, {})
    with caplog.at_level(logging.INFO, "pipeline"):
        predictor = Predictor.load(artifact, memory="ssd", cache_bytes=200_000)
    expected = float(caplog.text.split(" reads a row expected")[0].split()[-1])
    predictor.score(raw_rows(clicks, 4000))
    assert isinstance(predictor.lookup, SsdLookup)
    counts = predictor.lookup.counts
    # Between the points of a curve lookups are taken to fall evenly, though the more frequent rows have more of them.
    assert 0.7 * expected < (counts.lookups - counts.hits) / 4000 < 1.1 * expected
    wide = Predictor.load(artifact, memory="ssd", ssd=SsdConfig(p99_target_ms=1e6))
    tight = Predictor.load(artifact, memory="ssd", ssd=SsdConfig(p99_target_ms=0.001))
    assert isinstance(wide.lookup, SsdLookup) and isinstance(tight.lookup, SsdLookup)
    assert wide.lookup.heads == [1] * 26 and tight.lookup.cache_bytes > 100 * wide.lookup.cache_bytes


def test_a_flipped_byte_in_a_table_is_refused_with_tables_on_ssd_too(artifact: str, tmp_path: Path) -> None:
    copy = shutil.copytree(artifact, tmp_path / "copy")
    path = next((copy / "tables").iterdir())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError):
        Predictor.load(str(copy), memory="ssd")


@pytest.fixture(scope="module")
def server(artifact: str) -> Iterator[Server]:
    words = [f"artifact={artifact}", "server.port=0", "memory=ssd", "ssd.cache_gb=0.0001"]
    with running("pipeline serve", *words) as server:
        yield server


@pytest.mark.long
def test_a_served_artifact_gives_the_predictors_scores(server: Server, artifact: str, clicks: Path) -> None:
    rows = raw_rows(clicks, 50)
    answer = server.client.post(f"{server.url}/score", json={"rows": rows.to_pylist()})
    assert answer.json()["scores"] == pytest.approx(Predictor.load(artifact).score(rows).scores.tolist(), abs=1e-7)
    assert answer.json()["artifact"] == Predictor.load(artifact).version
    lookups = server.metric("table_lookups_total")
    assert lookups == (50 + 2) * 26  # two rows were tried at the start
    assert 0 < server.metric("table_cache_hits_total") < lookups
    assert server.metric("table_cache_bytes") > 0


@pytest.mark.campaign
def test_compiled_layers_are_served_and_predicted_by(small_run: Path, clicks: Path, tmp_path: Path) -> None:
    private, public = make_keys(tmp_path, "own")
    options = [f"run={small_run}", f"output={tmp_path / 'artifact'}", "parity.max_rows=500", "compiled=true"]
    path = export(load_config(ExportJob, [*options, f"sign_key={private}"])).artifact
    rows = raw_rows(clicks, 300)
    wanted = Predictor.load(path).score(rows).scores
    with requiring(public):
        np.testing.assert_allclose(Predictor.load(path, compiled=True).score(rows).scores, wanted, atol=1e-6)
    words = [f"artifact={path}", "server.port=0", "compiled=true", f"require_signature={public}"]
    with running("pipeline serve", *words) as server:
        answer = server.client.post(f"{server.url}/score", json={"rows": rows.to_pylist()})
        assert answer.json()["scores"] == pytest.approx(wanted.tolist(), abs=1e-6)
    source = tmp_path / "rows.tsv"
    source.write_text("".join(clicks.read_text().splitlines(keepends=True)[:300]))
    job = [f"artifact={path}", f"source={source}", f"output={tmp_path}/scores.parquet"]
    with requiring(public):
        assert not predict(load_config(PredictJob, [*job, "compiled=true"])).already_scored
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(scores, wanted, atol=1e-6)
    with pytest.raises(ValueError):
        predict(load_config(PredictJob, job))


def test_an_artifact_without_compiled_layers_says_so_when_they_are_asked_for(artifact: str, tmp_path: Path) -> None:
    options = [
        f"artifact={artifact}",
        f"source={tmp_path}/none.tsv",
        f"output={tmp_path}/scores.parquet",
        "compiled=true",
    ]
    (tmp_path / "none.tsv").write_text("")
    with pytest.raises(ArtifactError, match=names("compiled=true")):
        predict(load_config(PredictJob, options))


def test_hostile_values_reach_the_model_as_unknown_ids(server: Server) -> None:
    rows = [
        {"cat_0": "x" * 5000, "cat_1": "\u0000", "cat_2": "\u202e\U0001f600", "int_0": 1e38},
        {"int_1": -1e308},
        {"int_2": 1e39},
    ]
    body = json.dumps({"rows": rows}).replace("-1e+308", "-1e+400")
    answer = server.client.post(f"{server.url}/score", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and 0 < answer.json()["scores"][0] < 1
    assert [bad["row"] for bad in answer.json()["bad_rows"]] == [1, 2]  # no 32-bit number


def test_a_damaged_artifact_keeps_the_server_from_starting_with_one_line(artifact: str, tmp_path: Path) -> None:
    copy = shutil.copytree(artifact, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["step"] = 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    done = run_warm("pipeline serve", f"artifact={copy}", "server.port=0")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "manifest.json" in done.stderr


def test_a_registrys_champion_is_found_and_one_without_an_artifact_is_named(artifact: str, tmp_path: Path) -> None:
    from pipeline.retraining.registry import Registry

    registry = Registry(str(tmp_path / "registry"))
    with pytest.raises(ServingError):
        find_artifact(registry.path)
    files = {
        f"artifact/{os.path.relpath(os.path.join(folder, name), artifact)}": os.path.join(folder, name)
        for folder, _, names in os.walk(artifact)
        for name in names
    }
    versions = []
    for number, held in enumerate((files, files, {"config.yaml": os.path.join(artifact, "manifest.json")})):
        versions.append(registry.publish(registry.next_name(), held, {"window": str(number)}))
    pointer, keys = None, []
    for version in versions[:2]:
        pointer = registry.promote(version, pointer)
        keys.append(find_artifact(registry.path))
        assert Predictor.load(keys[-1].path).version == Predictor.load(artifact).version
    assert keys[0].key != keys[1].key and keys[0].path != keys[1].path
    registry.promote(versions[2], pointer)
    with pytest.raises(RetrainingError):
        find_artifact(registry.path)
