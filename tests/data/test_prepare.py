"""From raw rows to a data set: every row and id as worked out in plain Python; killed, repeated, spoilt and remote runs."""

from __future__ import annotations

import csv
import errno
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import SPLITS, DataConfig, IdsConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare import number_feature, resources, staging
from pipeline.data.prepare import prepare as preparation
from pipeline.data.prepare.identity import check_not_contradicted
from pipeline.data.prepare.run import describe, prepare
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import Layout
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.process.processes import only_one_run
from pipeline.runtime.storage import storage
from tests.data.criteo_rows import (
    assert_rows_equal,
    random_lines,
    read_split,
    run_prepare,
    vocabularies,
    write_lines,
)
from tests.data.sources import TRAIN_ALONE, prepare_rows
from tests.support.memory_store import ObjectStore
from tests.support.messages import mentions, names


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the source files whose rows are read, as they are."""
    names: list[str] = []
    open_source = staging.open_source

    def note(layout: Layout, source: Source, block_bytes: int) -> object:
        names.append(source.name)
        return open_source(layout, source, block_bytes)

    monkeypatch.setattr(staging, "open_source", note)
    return names


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows a block, so that small files have many, and splits and shards cut through them."""
    monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", 3_000)
    monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", 3_000)


def test_rows_and_ids_equal_those_worked_out_in_plain_python(tmp_path: Path, small_blocks: None) -> None:
    lines = random_lines(400)
    source = write_lines(tmp_path / "train.txt", lines)
    ids = IdsConfig(min_frequency=2, max_size=25)
    dataset = run_prepare(source, tmp_path / "ds", ids=ids, rows_per_shard=90, rows_per_row_group=25)
    known = vocabularies(lines[:320], min_frequency=2, max_size=25)
    parts = {"train": lines[:320], "validation": lines[320:360], "test": lines[360:]}
    for split, part in parts.items():
        assert_rows_equal(read_split(tmp_path / "ds", dataset, split), part, known)
        assert dataset.splits[split].num_positives == sum(line[0] == "1" for line in part)
    assert [feature.cardinality for feature in dataset.sparse_features] == [len(column) + 1 for column in known]
    distinct = [len({line.split("\t")[14 + i] for line in lines[:320]} - {""}) for i in range(26)]
    assert [feature.num_distinct for feature in dataset.sparse_features] == distinct
    for file in (file for split in dataset.splits.values() for file in split.files):
        content = (tmp_path / "ds" / file.path).read_bytes()
        assert (file.size_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert load_dataset(str(tmp_path / "ds")) == dataset
    assert not Path(f"{tmp_path}/ds.staging").exists()


@pytest.mark.long
def test_blocks_threads_and_compression_leave_no_trace_in_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = random_lines(500)
    for i, block_bytes in enumerate((2_000, 9_000, 1 << 20)):
        monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", block_bytes)
        source = write_lines(tmp_path / str(i) / "day_0", lines[:300])
        write_lines(tmp_path / str(i) / "day_1", lines[300:])
        run_prepare(str(Path(source).parent), tmp_path / f"ds{i}", threads=i + 1)
    texts = [(tmp_path / f"ds{i}" / "dataset.json").read_bytes() for i in range(3)]
    assert texts[0] == texts[1] == texts[2]
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "day.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    zipped = run_prepare(f"{tmp_path}/gz/*.gz", tmp_path / "ds_gz")
    plain = load_dataset(str(tmp_path / "ds0"))
    assert (zipped.splits, zipped.sparse_features) == (plain.splits, plain.sparse_features)


@pytest.mark.long
def test_killed_run_goes_on_after_its_finished_files_and_ends_equal(tmp_path: Path, files_read: list[str]) -> None:
    for day in range(3):
        write_lines(tmp_path / "days" / f"day_{day}", random_lines(200, seed=day))
    expected = run_prepare(str(tmp_path / "days"), tmp_path / "uninterrupted", split=SplitConfig(kind="files"))
    killer = (
        "import os, signal, pipeline.runtime.storage.storage as storage\n"
        "from tests.data.criteo_rows import run_prepare\n"
        "from pipeline.config.data import SplitConfig\n"
        "publish = storage.publish_text\n"
        "def publish_then_die(path, text):\n"
        "    publish(path, text)\n"
        "    if '00002-' in path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "storage.publish_text = publish_then_die\n"
        f"run_prepare({str(tmp_path / 'days')!r}, {str(tmp_path / 'ds')!r}, split=SplitConfig(kind='files'))\n"
    )
    killed = subprocess.run([sys.executable, "-c", killer], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL
    files_read.clear()
    assert not (tmp_path / "ds" / "dataset.json").exists()
    dataset = run_prepare(str(tmp_path / "days"), tmp_path / "ds", split=SplitConfig(kind="files"))
    assert files_read == ["day_2"]
    assert dataset.to_json() == expected.to_json()


def test_staged_file_that_lost_bytes_or_changed_is_staged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_read: list[str]
) -> None:
    for day in range(3):
        write_lines(tmp_path / "days" / f"day_{day}", random_lines(60, seed=day))

    def fail(*_: object) -> None:
        Path(f"{tmp_path}/ds.staging/00001-x.attempt-1").write_bytes(b"half")
        Path(f"{tmp_path}/ds.staging/spill").mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_write_dataset", fail)
        with pytest.raises(OSError, match="No space"):
            run_prepare(str(tmp_path / "days"), tmp_path / "ds")
    kept = sorted(path.name[:6] for path in Path(f"{tmp_path}/ds.staging").iterdir())
    assert kept == ["00000-", "00001-", "00002-", "lock"]
    files_read.clear()
    truncated = next(Path(f"{tmp_path}/ds.staging").glob("00000-*/rows.arrow"))
    truncated.write_bytes(truncated.read_bytes()[:-10])
    write_lines(tmp_path / "days" / "day_2", random_lines(60, seed=9))
    run_prepare(str(tmp_path / "days"), tmp_path / "ds")
    assert files_read == ["day_0", "day_2"]


def test_second_run_returns_at_once_and_other_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = random_lines(80)
    source = write_lines(tmp_path / "a" / "train.txt", lines)
    first = run_prepare(source, tmp_path / "ds")
    copy = write_lines(tmp_path / "b" / "train.txt", lines)
    monkeypatch.setattr(preparation, "_stage", lambda *_: pytest.fail("staged again"))
    job = load_config(
        PrepareJob,
        [
            "data=criteo_kaggle",
            f"source={copy}",
            f"data.path={tmp_path}/ds",
            "data.split.validation_fraction=0.1",
            "data.split.test_fraction=0.1",
        ],
    )
    summary = prepare(job)
    assert summary.already_prepared and summary.dataset == first
    assert f"already prepared in {tmp_path}/ds: nothing to do" in describe(summary)
    with pytest.raises(DataError, match=names("data.ids.min_frequency data.path")):
        run_prepare(source, tmp_path / "ds", ids=IdsConfig(min_frequency=4))
    write_lines(tmp_path / "b" / "train.txt", [*lines[:-1], "1" + lines[-1][1:] + "0"])
    with pytest.raises(DataError, match=names("train.txt")):
        run_prepare(copy, tmp_path / "ds")
    (tmp_path / "ds" / "train" / "00000.parquet").unlink()
    with pytest.raises(DataError, match=names("00000.parquet dataset.json")):
        run_prepare(source, tmp_path / "ds")


def test_unreadable_rows_are_counted_named_and_limited(tmp_path: Path, small_blocks: None) -> None:
    lines = random_lines(300)
    spoilt = {7: "gone", 150: "2" + lines[150][1:], 299: lines[299] + "\tx" * 400}
    write_lines(tmp_path / "days" / "day_0", [spoilt.get(i, line) for i, line in enumerate(lines)][:200])
    write_lines(tmp_path / "days" / "day_1", [spoilt.get(i, line) for i, line in enumerate(lines)][200:])
    with pytest.raises(DataError, match=names("300 1.00% 0.10% day_0 40")):
        run_prepare(str(tmp_path / "days"), tmp_path / "ds")
    dataset = run_prepare(str(tmp_path / "days"), tmp_path / "ds", max_quarantined_fraction=0.01)
    assert (dataset.accepted_rows, dataset.quarantined_rows, dataset.source_rows) == (297, 3, 300)
    assert [(s["num_rows"], s["num_quarantined"]) for s in dataset.sources] == [(200, 2), (100, 1)]
    entries = [json.loads(line) for line in (tmp_path / "ds" / "quarantine.jsonl").read_text().splitlines()]
    assert [(e["file"], e["line"], e["reason"]) for e in entries] == [
        ("day_0", 8, "1 columns, not 40"),
        ("day_0", 151, "label is '2', not 0 or 1"),
        ("day_1", 100, "440 columns, not 40"),
    ]
    assert entries[0]["text"] == "gone" and len(entries[2]["text"]) == 500
    sound = [line for i, line in enumerate(lines) if i not in spoilt]
    known = vocabularies(sound[:238])
    assert_rows_equal(read_split(tmp_path / "ds", dataset, "train"), sound[:238], known)


def test_file_in_another_format_is_given_up_after_its_first_rows(tmp_path: Path, small_blocks: None) -> None:
    source = write_lines(tmp_path / "train.csv", [line.replace("\t", ",") for line in random_lines(5_000)])
    with pytest.raises(DataError, match=names("100.00% 40 data.format")) as error:
        run_prepare(source, tmp_path / "ds", max_quarantined_fraction=0.4)
    assert int(str(error.value).split(" of ")[1].split(" ")[0].replace(",", "")) < 1_100


def test_no_rows_and_too_little_memory_say_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = write_lines(tmp_path / "empty.txt", [])
    with pytest.raises(DataError, match=names("empty.txt 0 bytes source=")):
        run_prepare(empty, tmp_path / "ds")
    source = write_lines(tmp_path / "train.txt", random_lines(50))
    with pytest.raises(ConfigError, match=names("memory_limit_gb=0.2 0.5")):
        run_prepare(source, tmp_path / "ds", memory_limit_gb=0.2)
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=names("memory_limit_gb=1")),
    ):
        patch.setattr(resources.Resources, "engine_bytes", 1 << 20)
        patch.setattr(number_feature, "MEMORY_PER_BYTE", 1 << 40)
        run_prepare(source, tmp_path / "ds", memory_limit_gb=1.0, threads=1)
    assert run_prepare(source, tmp_path / "ds").accepted_rows == 50


def test_threads_share_the_memory_that_there_is() -> None:
    few, many = resources.Resources(2 << 30, 2, "unused"), resources.Resources(2 << 30, 96, "unused")
    assert (few.engine_threads, few.shard_threads(16_384, 40), few.block_bytes) == (2, 2, resources.MAX_BLOCK_BYTES)
    assert many.engine_threads == 9 and many.engine_bytes * 1.15 + resources.PROCESS_BYTES < many.memory_bytes
    assert many.shard_threads(16_384, 40) * (16_384 + 65_535) * 40 * 16 <= many.memory_bytes // 2
    assert many.block_bytes * resources.BYTES_A_TEXT_BYTE * 97 <= many.memory_bytes // 3


def test_second_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "train.txt", random_lines(20))
    os.makedirs(f"{tmp_path}/ds.staging")
    with (
        only_one_run(f"{tmp_path}/ds.staging", "preparing"),
        pytest.raises(ValueError),
    ):
        run_prepare(source, tmp_path / "ds")


def test_source_and_data_set_may_lie_in_an_object_store(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    storage.path_manager().register_handler(store)
    try:
        lines = random_lines(100)
        for day in range(2):
            store.objects[f"raw/day_{day}"] = "".join(line + "\n" for line in lines[50 * day :][:50]).encode()
        dataset = run_prepare("test://bucket/raw/day_*", "test://bucket/ds", temp_dir=str(tmp_path), rows_per_shard=30)
        local = run_prepare(write_lines(tmp_path / "train.txt", lines), tmp_path / "ds", rows_per_shard=30)
        assert load_dataset("test://bucket/ds").splits == local.splits == dataset.splits
        written = {key for key in store.objects if key.startswith("ds/")}
        files = {f"ds/{file.path}" for name in SPLITS for file in dataset.splits[name].files}
        assert written == {"ds/dataset.json", *files, *(f"ds/{f.vocabulary}" for f in dataset.sparse_features)}
    finally:
        del storage.path_manager()._path_handlers["test://"]


@pytest.mark.parametrize(
    ("data", "pattern", "splits"),
    [
        ("criteo_kaggle", "criteo_kaggle_head10k.txt", (8572, 714, 714)),
        ("criteo_1tb", "criteo_1tb_day*", (1000, 1500, 1500)),
        ("criteo_kaggle", "criteo_1tb_day0_first1k.tsv", (858, 71, 71)),
    ],
)
def test_real_criteo_rows_equal_an_independent_count_and_vocabulary(
    tmp_path: Path, samples: Path, data: str, pattern: str, splits: tuple[int, int, int]
) -> None:
    lines = [line for path in sorted(samples.glob(pattern)) for line in path.read_text().splitlines()]
    job = load_config(PrepareJob, [f"data={data}", f"source={samples}/{pattern}", f"data.path={tmp_path}/ds"])
    dataset = prepare(job).dataset
    assert (dataset.source_rows, dataset.accepted_rows, dataset.quarantined_rows) == (len(lines), len(lines), 0)
    assert tuple(dataset.splits[name].num_rows for name in SPLITS) == splits
    known = vocabularies(lines[: splits[0]])
    assert [feature.cardinality for feature in dataset.sparse_features] == [len(column) + 1 for column in known]
    begin = 0
    for name, num_rows in zip(SPLITS, splits, strict=True):
        part = lines[begin : begin + num_rows]
        assert_rows_equal(read_split(tmp_path / "ds", dataset, name), part, known)
        assert dataset.splits[name].num_positives == sum(line[0] == "1" for line in part)
        begin += num_rows


def test_real_csv_with_named_columns_is_split_by_time(tmp_path: Path, samples: Path) -> None:
    path = samples / "open_bandit_random_men.csv"
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    dataset = prepare(
        load_config(PrepareJob, ["data=open_bandit", f"source={path}", f"data.path={tmp_path}/ds"])
    ).dataset
    assert dataset.accepted_rows == len(rows) == 10_000
    times = sorted(row["timestamp"] for row in rows)
    train = [row for row in rows if row["timestamp"] < times[8_000]]
    table = read_split(tmp_path / "ds", dataset, "train")
    assert table["click"].to_pylist() == [int(row["click"]) for row in train]
    for name in ("item_id", "user_feature_2"):
        counts: dict[str, int] = {}
        for row in train:
            counts[row[name]] = counts.get(row[name], 0) + 1
        ranked = sorted((value for value in counts if counts[value] >= 2), key=lambda value: (-counts[value], value))
        assert dataset.sparse_feature(name).cardinality == len(ranked) + 1
        ids = {value: i for i, value in enumerate(ranked, start=1)}
        assert table[name].to_pylist() == [ids.get(row[name], 0) for row in train]
    newest = [row for row in rows if row["timestamp"] >= times[9_000]]
    assert dataset.splits["test"].num_rows == len(newest)
    assert dataset.splits["test"].num_positives == sum(int(row["click"]) for row in newest)


def test_a_training_refuses_keys_that_contradict_its_data_set(tmp_path: Path) -> None:
    """It cannot apply them, so a sweep over them would compare equal runs."""
    source = tmp_path / "rows.csv"
    source.write_text("y,x,c,d\n1,1,a,b\n0,2,b,a\n")
    columns = {"label": "y", "dense": ["x"], "sparse": ["c", "d"]}
    dataset = prepare_rows(tmp_path, source, columns).dataset

    def config(**more: Any) -> DataConfig:
        given = {**columns, **more.pop("columns", {})}
        return DataConfig(
            name="rows", path="x", format="csv", columns=ColumnsConfig(**given), split=TRAIN_ALONE, **more
        )

    check_not_contradicted(
        config(), dataset, ["data.path", "data.reader.shuffle", "data.columns.sparse", "trainer.seed"]
    )
    for key, other in {
        "data.columns.sparse": config(columns={"sparse": ["c"]}),
        "data.columns.weight": config(columns={"weight": "x", "dense": []}),
        "data.dense_transform": config(dense_transform="none"),
        "data.ids.min_frequency": config(ids=IdsConfig(min_frequency=3)),
        "data.group_column": config(group_column="c"),
        "data.columns.null_values": config(columns={"null_values": ["a"]}),
    }.items():
        with pytest.raises(DataError, match=names(f"{key}= prepared data.path")):
            check_not_contradicted(other, dataset, [key])
    assert not check_not_contradicted(config(), dataset, [])
    reported = check_not_contradicted(config(dense_transform="none", ids=IdsConfig(min_frequency=3)), dataset, [])
    assert mentions(reported, "data.dense_transform=none log1p data.ids.min_frequency=3 1 data.path")  # in a YAML file
    with pytest.raises(DataError, match=names("c, d categorical d, c")):
        check_not_contradicted(config(columns={"sparse": ["d", "c"]}), dataset, [])
