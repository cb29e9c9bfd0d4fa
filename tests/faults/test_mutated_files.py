"""Mutate what describes files: a reader gives the right type or a UserError, within 2 CPU seconds and 256 MB.

Manifests are sealed again after a mutation, as someone does who has no key and needs none.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import random
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.checkpoint.chains import chain_of
from pipeline.checkpoint.retention import measured_metric
from pipeline.checkpoint.steps import read_manifest
from pipeline.checkpoint.vocabularies import read_values
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_to_yaml, load_saved_job
from pipeline.config.tables import CompressionConfig
from pipeline.data.dataset import load_dataset
from pipeline.extras.checkpoints.survey import summarize_step
from pipeline.planner.plan_codec import read_plan
from pipeline.planner.plan_record import read_view
from pipeline.retraining.ledger import Ledger
from pipeline.retraining.registry import Registry
from pipeline.runtime.errors import UserError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import checksums_of
from pipeline.runtime.storage.manifest import MANIFEST, seal_manifest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact import manifest as artifacts
from pipeline.serving.artifact.composed import ComposedTables
from pipeline.serving.artifact.deltas import name_of, newest_sequence, read_delta, why_pinned
from pipeline.serving.scoring.artifact_files import ArtifactFiles
from tests.embeddings.compressed import table_of
from tests.faults.signed_world import World, make_world
from tests.support.datasets import described_dataset
from tests.support.examples import SCALE, SEED

PLAN = next(iter(sorted(Path(__file__).parents[2].glob("sharding_plans/*.json"))))
COMPOSED = artifacts.COMPOSED_FILE
MOST_BYTES, MOST_CPU_S = 256 << 20, 2.0


def _deep() -> Any:
    value: Any = 0
    for _ in range(60):
        value = [value]
    return value


VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**200, -(2**70), 0.5, 1e308, float("nan"), float("inf"), "", "..",
    "../../x", "/etc/passwd", "a/../b", "a\x00b", "\x1b[31m", "v000001", "x" * 100_000, [], {}, [None], {"a": {}},
    ["a"] * 1000, _deep(),
]  # fmt: skip


def _read_step(world: World) -> None:
    path = str(world.run / "step_00000007")
    manifest = read_manifest(path)
    chain_of(path, manifest)
    measured_metric(manifest, "ne")
    assert isinstance(summarize_step(str(world.run), 7).problem, str)


def _read_version(world: World) -> None:
    registry = Registry(str(world.registry))
    for version in registry.versions():
        assert isinstance(version.size_bytes, int) and isinstance(registry.verify(version)[0], str)
        assert version.artifact is None or isinstance(version.artifact, str)


def _read_champion(world: World) -> None:
    pointer = Registry(str(world.registry)).pointer()
    assert pointer is None or (isinstance(pointer.version, str) and isinstance(pointer.number, int))
    Registry(str(world.registry)).champion()
    assert Registry(str(world.registry)).next_name()


def _read_ledger(world: World) -> None:
    for record in Ledger(str(world.registry)).newest():
        assert isinstance(record.reasons, list) and isinstance(record.window, str)


def _read_deltas(world: World) -> None:
    folder, artifact = str(world.newest / "deltas"), str(world.newest / "artifact")
    for sequence in range(1, newest_sequence(folder) + 1):
        delta = read_delta(folder, artifact, artifacts.read_manifest(artifact), sequence)
        assert isinstance(delta.size_bytes, int)
    assert isinstance(why_pinned(folder), str)


def _read_artifact(world: World) -> None:
    manifest = artifacts.read_manifest(str(world.newest / "artifact"))
    assert len(manifest.version) == 16 and isinstance(manifest.size_bytes, int) and isinstance(manifest.columns, dict)


def _read_dataset(world: World) -> None:
    dataset = load_dataset(str(world.folder))
    assert len(dataset.fingerprint()) == len(dataset.schema_hash()) == 64 and dataset.label_columns


def _read_plan(world: World) -> None:
    view = read_view(str(world.folder / "plan.json"))
    assert all(isinstance(load.cost_ms, float) for load in view.description.ranks)
    assert read_plan(str(world.folder / "plan.json")).plan.plan


def _read_vocabulary(world: World) -> None:
    """Of an artifact; its checksums are made again."""
    name = "vocabulary/00000.arrow"
    manifest = artifacts.read_manifest(str(world.newest / "artifact"))
    manifest = replace(manifest, files={name: checksums_of(str(world.folder / name))})
    table = ArtifactFiles(str(world.folder), manifest, verify=True).vocabulary(name)
    assert isinstance(table.num_rows, int)


def _read_parquet_vocabulary(world: World) -> None:
    values = [value for _, some in read_values(str(world.folder / "vocabulary/cat_0.parquet")) for value in some]
    assert len(values) <= 150


def _read_composed(world: World) -> None:
    """Of an artifact of compressed tables; its checksums are made again."""
    manifest = artifacts.read_manifest(str(world.newest / "artifact"))
    manifest = replace(manifest, files={COMPOSED: checksums_of(str(world.folder / COMPOSED))})
    found = ArtifactFiles(str(world.folder), manifest, verify=True).composed()
    assert found is not None and isinstance(found.dims, list)


def _read_saved_job(world: World) -> None:
    job = load_saved_job(TrainJob, str(world.folder / "config.yaml"))
    assert isinstance(job, TrainJob) and len(job_to_yaml(job)) > 100


# name -> (the file below the world's folder, its purpose if it is sealed, who reads it)
READERS: dict[str, tuple[str, Purpose | None, Callable[[World], None]]] = {
    "step": (f"run/checkpoints/step_00000007/{MANIFEST}", Purpose.STEP, _read_step),
    "version": (f"registry/versions/v000002/{MANIFEST}", Purpose.VERSION, _read_version),
    "artifact": (f"registry/versions/v000002/artifact/{MANIFEST}", Purpose.ARTIFACT, _read_artifact),
    "delta": (f"registry/versions/v000002/deltas/{name_of(1)}/{MANIFEST}", Purpose.DELTA, _read_deltas),
    "champion": ("registry/champion.json", None, _read_champion),
    "pin": ("registry/versions/v000002/deltas/pin.json", None, _read_deltas),
    "ledger": ("registry/ledger/00000001.json", None, _read_ledger),
    "dataset": ("dataset.json", None, _read_dataset),
    "plan": ("plan.json", None, _read_plan),
    "saved job": ("config.yaml", None, _read_saved_job),
    "vocabulary": ("vocabulary/00000.arrow", None, _read_vocabulary),
    "composed tables": (COMPOSED, None, _read_composed),
    "parquet vocabulary": ("vocabulary/cat_0.parquet", None, _read_parquet_vocabulary),
}


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in nested dicts and lists."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in items] + [node for _, inner in items for node in _nodes(inner)]


def mutate_values(content: bytes, purpose: Purpose | None, chosen: random.Random) -> bytes:
    values = json.loads(content)
    for key in ("sha256", "signature"):
        values.pop(key, None) if purpose else None
    for _ in range(chosen.choice((1, 1, 1, 2, 5))):
        nodes = _nodes(values)
        if not nodes:
            break
        container, key = chosen.choice(nodes)
        way = chosen.random()
        if way < 0.15:
            del container[key]
        elif way < 0.25 and isinstance(container, dict):
            container[chosen.choice(("planted", "..", "", "a/../../b"))] = copy.deepcopy(container[key])
        else:
            container[key] = copy.deepcopy(chosen.choice(VALUES))
    return (seal_manifest(values, purpose) if purpose else json.dumps(values)).encode()


def mutate_bytes(before: bytes, purpose: Purpose | None, chosen: random.Random) -> bytes:
    content = bytearray(before)
    for _ in range(chosen.randrange(1, 4)):
        if not content:
            break
        at = chosen.randrange(len(content))
        way = chosen.randrange(4)
        if way == 0:
            content[at] ^= 1 << chosen.randrange(8)
        elif way == 1:
            del content[at : at + chosen.randrange(1, 50)]
        elif way == 2:
            content[at:at] = chosen.choice(
                (b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b'"', b"NaN", b"{}", b"\x00" * 10)
            )
        else:
            del content[max(1, at) :]
    return bytes(content)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = make_world(tmp_path_factory.mktemp("world"), None)
    (made.folder / "dataset.json").write_text(described_dataset({"cat_0": 10, "cat_1": 3}).to_json())
    shutil.copy(PLAN, made.folder / "plan.json")
    (made.folder / "vocabulary").mkdir()
    table = pa.table({"value": [f"v{number}" for number in range(150)], "id": np.arange(1, 151)})
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(made.folder / "vocabulary/00000.arrow", table.schema, options=options) as file:
        file.write_table(table)
    pq.write_table(table, made.folder / "vocabulary/cat_0.parquet")
    compressed = [
        table_of("item", CompressionConfig("quotient_remainder", bases=[80], operation="multiply"), num_ids=5000),
        table_of("user", CompressionConfig("mixed_dimension", ratio=2), num_ids=100),
    ]
    keys = [feature for each in compressed for feature in each.feature_names]
    (made.folder / COMPOSED).write_bytes(ComposedTables(compressed, keys).to_bytes())
    job = load_config(TrainJob, ["experiment=quickstart", "hardware=cpu"])
    (made.folder / "config.yaml").write_text(job_to_yaml(job))
    (made.registry / "ledger").mkdir()
    (made.registry / "ledger/00000001.json").write_text(json.dumps({"state": "promoted", "window": "w", "number": 1}))
    return made


def try_mutations(world: World, name: str, seeds: range) -> None:
    file, purpose, read = READERS[name]
    path = world.folder / file
    content = path.read_bytes()
    share_of_values = 0.7 if path.suffix == ".json" else 0.0
    read(world)
    try:
        for seed in seeds:
            chosen = random.Random(f"{name} {seed}")
            mutate = mutate_values if chosen.random() < share_of_values else mutate_bytes
            path.write_bytes(mutate(content, purpose, chosen))
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)  # SIGVTALRM then ends the process
            try:
                read(world)
            except UserError as error:
                assert str(error) and len(str(error)) < 20_000, seed
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}: {error!r}") from error
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        path.write_bytes(content)


def _in_child(world: World, name: str, seeds: range) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    try_mutations(world, name, seeds)


def _run(world: World, name: str, seeds: range) -> None:
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(world, name, seeds))
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_gives_a_user_error_or_is_read(name: str, world: World) -> None:
    _run(world, name, range(40))


@pytest.mark.campaign
@pytest.mark.parametrize("name", READERS)
def test_three_thousand_mutations_of_a_file_give_user_errors_or_are_read(name: str, world: World) -> None:
    _run(world, name, range(40 + SEED, 40 + SEED + 3000 * SCALE))


def test_a_vocabulary_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "most_unpacked_bytes", lambda size_bytes: 32 * size_bytes)
    name, path = "vocabulary/00000.arrow", world.folder / "vocabulary/00000.arrow"
    before = path.read_bytes()
    table = pa.table({"value": ["a" * 100_000] * 20, "id": np.arange(1, 21, dtype=np.int32)})
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table)
    with pytest.raises(artifacts.ArtifactError, match=f"{path.stat().st_size} bytes, which unpack to 2000"):
        _read_vocabulary(world)
    path.write_bytes(before)
    assert name in str(path)


def test_composed_tables_of_a_small_file_take_no_memory_for_large_settings(world: World) -> None:
    path = world.folder / COMPOSED
    before = path.read_bytes()
    line, _, body = before.partition(b"\n")
    header = json.loads(line)
    name = next(iter(header["parameters"]))
    header["parameters"][name] = [1 << 40, 1 << 40]
    header["tables"][1]["embedding_dim"] = 1 << 40
    for content in (
        json.dumps(header).encode() + b"\n" + body,
        before[:2000] + b"[" * 100_000 + b"\xdb" + before[2000:],
    ):
        path.write_bytes(content)
        with pytest.raises(artifacts.ArtifactError, match="export again") as refused:
            _read_composed(world)
        assert len(str(refused.value)) < 1000
    path.write_bytes(before)
