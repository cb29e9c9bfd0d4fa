"""A canary gets its share of the keys, no answer mixes versions, and one evaluation stops a planted bad version."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.canary import PLANTED, decisions, load, measure, pairs_of, registry_of
from benchmarks.serving_artifacts import DENSE, SPARSE, Shape, write_artifact
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ServeJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.retraining import GateConfig
from pipeline.config.serving import BatchingConfig, LimitsConfig
from pipeline.extras.canary.cli.canary import canary
from pipeline.extras.canary.config import CanaryJob
from pipeline.extras.canary.evaluate import decide, labelled_rows
from pipeline.extras.canary.pair_log import PairLog, Pairs, read_pairs
from pipeline.extras.canary.pointer import CanaryFile, CanaryPointer
from pipeline.extras.canary.router import is_in_share, key_of
from pipeline.extras.canary.slot import ChallengerSlot
from pipeline.extras.pages.registry_page import render_registry
from pipeline.retraining import challenge
from pipeline.retraining.challenge import Outcome
from pipeline.retraining.ledger import ADDED, REJECTED, Ledger, Record
from pipeline.retraining.promotion import files_of_artifact
from pipeline.retraining.registry import Registry, RegistryError
from pipeline.retraining.tick import Tick
from pipeline.retraining.windows import Window
from pipeline.runtime.errors import ConfigError, DamagedError, DataError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import seal_manifest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.http.batching import Scores, ServerMetrics
from pipeline.serving.http.routing import ServerParts
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import ColumnLists, UserItems
from tests.retraining.runs import candidate, finished
from tests.serving.servers import running
from tests.serving.test_champion_served import publish
from tests.serving.test_switching import wait_until
from tests.support.forks import WarmCommand
from tests.support.messages import mentions


@pytest.mark.parametrize(("num_answers", "moves"), [(1500, 4), pytest.param(1_000_000, 40, marks=pytest.mark.campaign)])
def test_no_answer_mixes_versions_while_models_switch_and_deltas_come(
    tmp_path: Path, num_answers: int, moves: int
) -> None:
    answers, logged, share, strayed, _ = figures = measure(tmp_path, num_answers, share=0.2, shadow=0.2, moves=moves)
    print(*figures, sep="\n")
    assert answers["result"] == "0 mixed" and answers["count"] > num_answers * 2 / 3
    assert logged["result"] == "0 wrong" and logged["count"] > answers["count"]
    assert strayed["result"] == "0 strayed" and strayed["count"] > 50
    assert abs(float(share["result"].split(", ")[1].split()[0])) < 5.0, share


def test_a_key_stays_with_its_model_and_shares_are_as_wanted() -> None:
    keys = [f"user-{number}" for number in range(20_000)]
    taken = {salt: [is_in_share(key, salt, 0.05) for key in keys] for salt in ("a", "b")}
    for each in taken.values():
        assert abs(np.mean(each) - 0.05) < 4 * np.sqrt(0.05 * 0.95 / len(keys))
    both = np.mean(np.logical_and(*taken.values()))
    assert abs(both - 0.0025) < 0.0015  # another challenger takes other keys
    assert all(
        is_in_share(key, "a", 0.2) for key in keys if is_in_share(key, "a", 0.05)
    )  # a larger share keeps its keys
    assert not any(is_in_share(key, "a", 0.0) for key in keys) and all(is_in_share(key, "a", 1.0) for key in keys)


def test_the_key_is_the_value_of_the_first_row_in_every_form_of_a_request() -> None:
    schema = pa.schema([("user", pa.string()), ("price", pa.float64())])
    lists = ColumnLists(schema, [["u1", "u2"], [1.0, 2.0]], 2)
    assert key_of(lists, "user") == "u1" and key_of(pa.table({"user": [7, 8]}), "user") == "7"
    one = ColumnLists(pa.schema([schema.field("user")]), [["u9"]], 1)
    items = ColumnLists(pa.schema([schema.field("price")]), [[1.0, 2.0]], 2)
    assert key_of(UserItems(one, items), "user") == "u9" and key_of(UserItems(one, items), "price") == "1.0"
    assert key_of(ColumnLists(schema, [[None], [1.0]], 1), "user") is None
    assert key_of(ColumnLists(schema, [[], []], 0), "user") is None


@pytest.mark.parametrize("kinds", [("reversed", "too high"), pytest.param(PLANTED, marks=pytest.mark.long)])
def test_one_evaluation_stops_each_planted_version_and_promotes_sound_ones(kinds: tuple[str, ...]) -> None:
    figures = decisions(1, 10_000 if len(kinds) == 2 else 20_000, ("equal", *kinds))
    found = {figure["case"].removeprefix("one evaluation, challenger "): figure["result"] for figure in figures}
    assert found == {"equal": "promote 1", **dict.fromkeys(kinds, "stop 1")}


def test_too_few_labels_wait_until_it_is_over_and_a_fall_of_the_label_rate_stops() -> None:
    job = CanaryJob(registry="r", gate=GateConfig(bootstrap_samples=200))
    draw = np.random.default_rng(0)
    scores = draw.uniform(0.1, 0.3, 20_000)
    labels = draw.random(20_000) < scores
    few = pairs_of(scores, scores, labels).slice(0, 500)
    assert decide(job, few, is_over=False).action == "wait"
    over = decide(job, few, is_over=True)
    assert over.action == "stop" and "max_hours=168" in over.reasons[0]
    by_canary = np.arange(20_000) % 2 == 0
    bad = decide(
        job, pairs_of(scores, scores, labels & (~by_canary | (draw.random(20_000) < 0.7)), by_canary), is_over=False
    )
    assert bad.action == "stop" and "label rate" in bad.reasons[0]
    assert decide(job, pairs_of(scores, scores, labels, by_canary), is_over=False).action == "promote"


def _log(folder: Path, version: str, other: str) -> None:
    log = PairLog(str(folder), 1 << 20, ServerMetrics().registry, "x")
    for number in range(5):
        first, second = (Scores(np.array([0.25, 0.5], np.float32), [], each) for each in (f"{version}+{number}", other))
        log.add(Pairs.of_both(f"r{number}", 100.0 + number, first, second))
    log.add(Pairs.of_answer("old", 1.0, Scores(np.array([0.5], np.float32), [], version), by_challenger=False))
    log.add(Pairs.of_answer("another", 200.0, Scores(np.array([0.5], np.float32), [], "c"), by_challenger=True))
    log.close()


def test_labels_join_by_request_and_row_and_bad_files_are_refused(tmp_path: Path) -> None:
    _log(tmp_path / "log", "a", "b")
    labels = pa.table({"request_id": ["r0", "r1", "r1", "r9"], "row": [1, 0, 0, 0], "label": [1, 0, 1, 1]})
    pq.write_table(labels, tmp_path / "labels.parquet")

    def job(**given: object) -> CanaryJob:
        files = {"log": str(tmp_path / "log"), "labels": str(tmp_path / "labels.parquet"), "command": "evaluate"}
        return CanaryJob(registry="r", **files | given)  # type: ignore[arg-type]

    found = labelled_rows(job(), "a", "b", since=50.0).to_pylist()
    assert [(each["request_id"], each["row"], each["label"]) for each in found] == [("r0", 1, 1.0), ("r1", 0, 1.0)]
    assert (found[0]["champion"], found[0]["champion_score"]) == ("a+0", 0.5)
    assert labelled_rows(job(negative_after_s=60.0), "a", "b", since=50.0).num_rows == 10
    (tmp_path / "empty").mkdir()
    for words in (
        {"labels": str(tmp_path / "none")},
        {"label_column": "labl"},
        {"log": str(tmp_path / "labels.parquet")},
        {"log": str(tmp_path / "empty")},  # a server makes the folder before it writes the first file
    ):
        with pytest.raises(DataError, match=r"labels=|log="):
            labelled_rows(job(**words), "a", "b", since=50.0)
    pq.write_table(labels.set_column(2, "label", pa.array([1, 0, 1, 5])).set_column(0, "request_id", pa.array(["r0"] * 4)), tmp_path / "labels.parquet")  # fmt: skip
    with pytest.raises(DataError, match="needs 0 and 1"):
        labelled_rows(job(row_column="none"), "a", "b", since=50.0)


def test_a_log_stays_within_its_size(tmp_path: Path) -> None:
    log = PairLog(str(tmp_path), 4000, ServerMetrics().registry, "x")
    for number in range(20):
        log.add(Pairs.of_answer(f"r{number}", 1.0, Scores(np.zeros(9, np.float32), [], "a"), by_challenger=False))
        log.close()
    kept = list(tmp_path.iterdir())
    assert 1 <= len(kept) < 20 and sum(path.stat().st_size for path in kept) <= 4000
    assert pq.read_table(tmp_path)["request_id"].to_pylist()[-1] == "r19"


def test_a_comparison_is_logged_only_while_pairs_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipeline.extras.canary.pair_log.SAY_EVERY_S", 0.0)
    log = PairLog(None, 0, ServerMetrics().registry, "x")
    with caplog.at_level(logging.INFO, logger="pipeline"):
        log.add(Pairs.of_both("r", 1.0, *(Scores(np.array([0.25, 0.5], np.float32), [], each) for each in "ab")))
        for _ in range(3):
            log._compare()
    assert [record.getMessage() for record in caplog.records] == [
        "challenger b compared with a on 2 rows: mean difference 0.00000, rank correlation 1.0000"
    ]


def test_a_log_is_read_while_its_server_removes_the_oldest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        log = PairLog(str(tmp_path), 1 << 20, ServerMetrics().registry, "x")
        log.add(Pairs.of_answer(name, 1.0, Scores(np.zeros(2, np.float32), [], "v"), by_challenger=False))
        log.close()
    list_folder = storage.list_folder

    def remove_one(folder: str) -> list[str]:
        names = list_folder(folder)
        Path(folder, names[0]).unlink()
        return names

    monkeypatch.setattr(storage, "list_folder", remove_one)
    assert read_pairs(str(tmp_path))["request_id"].to_pylist() == ["b", "b"]
    with pytest.raises(DataError, match="has no file yet"):
        read_pairs(str(tmp_path))


def test_a_canary_is_started_once_and_not_of_the_champion(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, 3)
    file = CanaryFile(registry.path)
    with pytest.raises(RegistryError, match="v000001 is the champion"):
        file.start(registry, "v000001", 0.1)
    assert "none" in canary(CanaryJob(registry=registry.path))[1]
    canary(CanaryJob(registry=registry.path, command="start", version="v000002", share=0.1))
    assert "v000002, 10 %" in canary(CanaryJob(registry=registry.path))[1]
    since = f"canary: 10 % of the keys since {file.read().started_at}"
    assert since in render_registry(registry, Ledger(registry.path))
    with pytest.raises(RegistryError, match="v000002 is the canary"):
        file.start(registry, "v000003", 0.1)
    canary(CanaryJob(registry=registry.path, command="stop", reason="slow"))
    assert file.read().version is None and file.read().number == 2
    assert "of the keys" not in render_registry(registry, Ledger(registry.path))
    record = next(Ledger(registry.path).newest())
    assert (record.state, record.version, record.reasons) == (REJECTED, "v000002", ["canary: slow"])
    with pytest.raises(RegistryError, match="no canary to promote"):
        canary(CanaryJob(registry=registry.path, command="promote"))
    canary(CanaryJob(registry=registry.path, command="start", version="v000003"))
    canary(CanaryJob(registry=registry.path, command="promote"))
    champion, pointer = registry.champion(), registry.pointer()
    assert champion is not None and pointer is not None
    assert (champion.name, pointer.previous, file.read().version) == ("v000003", "v000001", None)
    Path(file.path).write_text('{"version": "v000002", "share": 7, "number": 3}')
    with pytest.raises(DamagedError, match="share 7"):
        file.read()


def test_retrain_starts_its_challenger_as_canary_and_waits_until_it_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_of(tmp_path, 4)
    Ledger(registry.path).append(Record(ADDED, version="v000001"))
    (tmp_path / "source" / "dt=2026-11-20").mkdir(parents=True)
    words = [
        "data=quickstart",
        f"source={tmp_path / 'source'}",
        f"registry.path={registry.path}",
        f"run_dir={tmp_path}",
    ]
    tick = Tick(load_config(RetrainJob, [*words, "registry.canary_share=0.2", "registry.keep=2"]), None, [])  # type: ignore[arg-type]
    made = tmp_path / "artifact"
    made.mkdir()
    (made / "manifest.json").write_text(seal_manifest({"files": {}, "lineage": {}}, Purpose.ARTIFACT))
    offered = replace(
        candidate(finished(tmp_path / "run"), "w1", "v000001", registry.pointer()), extra=files_of_artifact(str(made))
    )
    window = Window("w1", datetime(2026, 11, 20), datetime(2026, 11, 21), "x")
    outcome = Outcome(window, offered.record, offered)
    monkeypatch.setattr(challenge, "Challenge", lambda *given: SimpleNamespace(run=lambda: outcome))
    monkeypatch.setattr(Tick, "_runner", lambda self: SimpleNamespace(forget=lambda window: None))
    monkeypatch.setattr(Registry, "check_inputs", lambda self, version: None)
    assert tick._work_on(window, window, registry.pointer()) == ""
    canary_now, pointer = CanaryFile(registry.path).read(), registry.pointer()
    assert pointer is not None
    assert (canary_now.version, canary_now.share, pointer.version) == ("v000005", 0.2, "v000001")
    assert registry.names() == ["v000001", "v000004", "v000005"]  # the champion and the newest two
    assert next(tick.ledger.newest()).state == "offered"
    assert "v000005 is the canary" in tick.run().note
    canary(CanaryJob(registry=registry.path, command="promote"))
    record = next(tick.ledger.newest())
    assert (record.state, record.window, record.version) == ("promoted", "w1", "v000005")
    assert "canary" not in tick.run().note


def test_a_canary_that_ends_during_a_check_of_the_server_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_of(tmp_path, 2)
    file, read = CanaryFile(registry.path), CanaryFile.read
    started = file.start(registry, "v000002", 0.5)

    def read_and_end(self: CanaryFile) -> CanaryPointer:
        pointer = read(self)
        if pointer.version is not None and slot.is_loaded:
            monkeypatch.setattr(CanaryFile, "read", read)
            file.stop("promoted")
        return pointer

    async def serve() -> None:
        await slot.check()
        monkeypatch.setattr(CanaryFile, "read", read_and_end)
        await slot.check()  # the canary ends after this check has read the pointer
        assert slot.is_loaded and file.read().number == started.number + 1
        await slot.check()
        assert not slot.is_loaded

    parts = ServerParts(None, load, BatchingConfig(), LimitsConfig(), ServerMetrics(), 1.0)  # type: ignore[arg-type]
    slot = ChallengerSlot(registry.path, parts)
    with caplog.at_level(logging.INFO, logger="pipeline"):
        asyncio.run(serve())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"challenger v000002 {each}") for each in ("serves now", "serves no longer")
    ]


def test_wrong_settings_are_refused_before_anything_is_loaded() -> None:
    for words, message in {
        "router.canary.share=2": "router.canary.share",
        "router.canary.shares=0.1": "shares",
        "router.canari.share=0.1": "canary",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config(ServeJob, ["artifact=x", "router.canary.artifact=x", words])
    with pytest.raises(ConfigError, match="needs an artifact"):
        load_config(
            RetrainJob, ["data=quickstart", "source=x", "registry.canary_share=0.1", "gate.export.enabled=false"]
        )
    for given in ({"command": "start"}, {"command": "evaluate"}, {"run": "x"}, {"gate": GateConfig(slices={"a": 0.1})}):
        with pytest.raises(ConfigError):
            CanaryJob(registry="r", **given)  # type: ignore[arg-type]


def _rows(number: int) -> list[dict[str, object]]:
    draw = np.random.default_rng(number)
    return [
        {name: int(draw.integers(100)) for name in DENSE} | {name: str(draw.integers(50)) for name in SPARSE}
        for _ in range(20)
    ]


@pytest.mark.long
@pytest.mark.parametrize("num_requests", [150, pytest.param(20_000, marks=pytest.mark.campaign)])
def test_a_server_drops_a_bad_canary_after_one_evaluation(tmp_path: Path, num_requests: int) -> None:
    """By real artifacts over HTTP. The labels are drawn by the champion's scores, and the challenger's are too high."""
    shapes = {"champion": Shape(50), "challenger": Shape(50, seed=1, bias=1.0)}
    artifacts = [write_artifact(tmp_path / name, shape, "int8") for name, shape in shapes.items()]
    registry = Registry(str(tmp_path / "registry"))
    versions = [publish(registry, artifact) for artifact in artifacts]
    registry.promote(versions[0], None)
    canary(CanaryJob(registry=registry.path, command="start", version=versions[1].name, share=0.3))
    log, draw, shadow = tmp_path / "log", np.random.default_rng(0), 1.0 if num_requests < 1000 else 0.1
    words = [
        f"artifact={registry.path}",
        "server.port=0",
        "server.watch_s=0.1",
        f"router.canary.artifact={registry.path}",
    ]
    refused = WarmCommand("pipeline serve", [*words, "router.canary.key=usr"])
    assert refused.wait(120) == 2 and mentions(refused.stderr.read(), f"router.canary.key=usr {SPARSE[0]} choose one")
    asked = [_rows(number) for number in range(40)]
    scores = {
        predictor.version: [predictor.score(pa.Table.from_pylist(rows)).scores for rows in asked]
        for predictor in (Predictor.load(str(artifact)) for artifact in artifacts)
    }
    champion, challenger = scores
    words += [f"router.canary.shadow={shadow}", f"router.canary.log={log}"]
    with running("pipeline serve", *words) as server:
        wait_until(lambda: "challenger" in server.log() and "serves now" in server.log())

        def ask(number: int) -> tuple[str, np.ndarray]:
            headers = {"X-Request-ID": f"r{number}"}
            answer = server.client.post(f"{server.url}/score", json={"rows": asked[number % 40]}, headers=headers)
            assert answer.headers["X-Request-ID"] == f"r{number}"
            assert answer.headers["X-Artifact-Version"] == answer.json()["artifact"]
            return answer.json()["artifact"], np.array(answer.json()["scores"])

        with ThreadPoolExecutor(8) as pool:
            served = list(pool.map(ask, range(num_requests)))
        for number, (version, found) in enumerate(served):
            np.testing.assert_allclose(found, scores[version][number % 40], atol=1e-5)
        apart = np.abs(np.concatenate(scores[challenger]) - np.concatenate(scores[champion]))
        assert apart.min() > 0.1  # so the comparison above finds each row that the other version has scored
        by_canary = np.mean([version == challenger for version, _ in served])
        assert abs(by_canary - 0.3) < 4 * np.sqrt(0.3 * 0.7 / num_requests)
        assert [version for version, _ in served] == [
            challenger if is_in_share(f"r{number}", challenger, 0.3) else champion for number in range(num_requests)
        ]

        def logged() -> int:
            return len(read_pairs(str(log))["request_id"].unique()) if any(log.glob("*.parquet")) else 0

        wait_until(lambda: logged() + server.metric("challenger_shadow_drops_total") == num_requests)
        wait_until(lambda: server.metric("challenger_mean_difference") > 0.1)  # it is set after the file is written
        labels = {
            "request_id": np.repeat([f"r{number}" for number in range(num_requests)], 20),
            "row": list(range(20)) * num_requests,
            "label": [
                int(draw.random() < each) for number in range(num_requests) for each in scores[champion][number % 40]
            ],
        }
        pq.write_table(pa.table(labels), tmp_path / "labels.parquet")
        gate = GateConfig(bootstrap_samples=200, min_rows=500)
        job = CanaryJob(
            registry=registry.path, command="evaluate", log=str(log), labels=str(tmp_path / "labels.parquet"), gate=gate
        )
        print(f"{num_requests:,} answers, {by_canary:.4f} by the canary", *(lines := canary(job)), sep="\n")
        assert "decision    stop" in lines[-1] and "calibration" in lines[-1]
        wait_until(lambda: "serves no longer" in server.log())
        assert {ask(number)[0] for number in range(min(num_requests, 300))} == {champion}
    assert next(Ledger(registry.path).newest()).state == REJECTED
