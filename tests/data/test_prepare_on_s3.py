"""A preparation reads from an object store and writes to one, by either executor, with the bytes that it has on a disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.executor import LocalExecutor
from pipeline.data.prepare.prepare import prepare_dataset
from pipeline.data.prepare.recipe import make_recipe
from pipeline.data.prepare.resources import Resources
from pipeline.data.raw.source import find_sources
from pipeline.runtime.storage import storage
from tests.data.criteo_rows import random_lines, run_prepare, write_lines
from tests.data.test_executors import OtherProcesses, config_of, digests, small_blocks, write_rows
from tests.extras.ray_prepare.ray_cluster import ray_cluster
from tests.extras.ray_prepare.test_ray import finish, start
from tests.support.object_store import BUCKET, FaultyProxy, environment, store

__all__ = ["small_blocks", "store"]
ROOT = f"s3://{BUCKET}"


def upload(folder: Path, to: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.publish_bytes(f"{to}/{path.relative_to(folder)}", path.read_bytes())


def digests_in_store(path: str) -> dict[str, str]:
    dataset = load_dataset(path)
    names = ["dataset.json", *(shard.path for split in dataset.splits.values() for shard in split.files)]
    names += [feature.vocabulary for feature in dataset.sparse_features if feature.vocabulary]
    found = {}
    for name in names:
        with storage.open_file(f"{path}/{name}", "rb") as file:
            found[name] = hashlib.sha256(file.read()).hexdigest()
    return found


@pytest.mark.campaign
@pytest.mark.usefixtures("store", "small_blocks")
def test_both_executors_read_and_write_an_object_store(tmp_path: Path) -> None:
    for number, (rows, bad) in enumerate([(150, 3), (90, 0)]):
        write_rows(tmp_path / "raw" / "dt=1" / f"part_{number}.csv", rows, seed=number, bad=bad)
    upload(tmp_path / "raw", f"{ROOT}/raw")
    sources = find_sources(f"{ROOT}/raw")
    assert [source.name for source in sources] == ["dt=1/part_0.csv", "dt=1/part_1.csv"]
    local = make_recipe(
        config_of(tmp_path / "local"), find_sources(str(tmp_path / "raw")), Resources(1 << 30, 2, f"{tmp_path}/staging")
    )
    prepare_dataset(local, LocalExecutor(local))
    here = make_recipe(config_of(f"{ROOT}/here"), sources, Resources(1 << 30, 2, f"{tmp_path}/staging"))
    prepare_dataset(here, LocalExecutor(here))
    expected, in_store = digests(tmp_path / "local"), digests_in_store(f"{ROOT}/here")
    assert in_store == {name: expected[name] for name in in_store} and len(in_store) > 4
    staging = f"{ROOT}/elsewhere.staging"
    elsewhere = make_recipe(config_of(f"{ROOT}/elsewhere"), sources, Resources(1 << 30, 1, staging))
    prepare_dataset(elsewhere, OtherProcesses(elsewhere))
    assert digests_in_store(f"{ROOT}/elsewhere") == in_store
    assert not storage.list_folder(staging)


@pytest.mark.campaign
def test_ray_reads_and_writes_an_object_store(store: FaultyProxy, tmp_path: Path) -> None:
    for day in range(3):
        write_lines(tmp_path / "raw" / f"day_{day}", random_lines(1_000, seed=day, distinct=200))
    run_prepare(
        str(tmp_path / "raw"), tmp_path / "local", name="criteo_kaggle", rows_per_shard=1_500, rows_per_row_group=500
    )
    upload(tmp_path / "raw", f"{ROOT}/raw")
    with ray_cluster((1, 1), environment(store.url)) as cluster:
        finish(start(cluster, f"{ROOT}/raw", f"{ROOT}/by-ray"))
    in_store, expected = digests_in_store(f"{ROOT}/by-ray"), digests(tmp_path / "local")
    assert in_store == {name: expected[name] for name in in_store} and len(in_store) > 26
