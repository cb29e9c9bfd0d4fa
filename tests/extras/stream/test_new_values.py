"""Values that a stream brings get rows of their own: the same ones wherever the training is stopped, and in what serves."""

from __future__ import annotations

import itertools
import json
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.cli.command_line import load_config
from pipeline.config.data import ReaderConfig
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.retraining import NewValuesConfig
from pipeline.config.tables import TableConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.read.batch import Batch
from pipeline.data.read.endless import EndOfInputError, Known, TablesFullError, from_bytes, to_bytes
from pipeline.data.read.quarantine import Quarantine
from pipeline.data.targets import Target
from pipeline.extras.stream.encode import LineEncoder
from pipeline.extras.stream.journal import Journal
from pipeline.extras.stream.new_values import NewValues, TableCapacity
from pipeline.extras.stream.ranks import StreamRanks
from pipeline.extras.stream.reader import StreamReader
from pipeline.extras.stream.sources.folder import FolderSource
from pipeline.extras.stream.table_capacity import capacities_of, with_capacity
from pipeline.runtime.errors import ConfigError, DamagedError
from pipeline.runtime.process.distributed import own_store
from pipeline.runtime.process.exit_codes import REQUEUE
from pipeline.serving.artifact.export import export
from pipeline.serving.scoring.predictor import Predictor
from tests.extras.stream.following import (
    CRITEO,
    FAST,
    follow_words,
    newest_step,
    rows_of,
    start_retrain,
    values_of,
    wait_until,
)
from tests.serving.test_artifacts_served import raw_rows
from tests.support.forks import WarmCommand
from tests.support.messages import names
from tests.support.ranks import RankPool

BATCH = 50
CAT_0, CAT_3 = 14, 17  # cells of a line
# Rows of a step from which on it holds a value that nobody knows: (first, how many) -> what cat_0 holds
BROUGHT = {0: "new-a", 40: "new-a", 60: "new-a", 110: "new-c", 111: "new-b", 112: "new-d", 113: "new-e", 160: "new-e"}


def _lines(prepared: str, count: int, brought: dict[int, str]) -> list[bytes]:
    lines = (Path(prepared).parent / "clicks.tsv").read_bytes().splitlines()[:count]
    for number, value in brought.items():
        cells = lines[number].split(b"\t")
        cells[CAT_0] = value.encode()
        lines[number] = b"\t".join(cells)
    return lines


@pytest.fixture(scope="module")
def folder(prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 rows in two files; cat_0 of some holds what no vocabulary has."""
    made = tmp_path_factory.mktemp("clicks")
    lines = [line + b"\n" for line in _lines(prepared_clicks, 200, BROUGHT)]
    (made / "a.tsv").write_bytes(b"".join(lines[:130]))
    (made / "b.tsv").write_bytes(b"".join(lines[130:]))
    return made


def _reader(prepared: str, folder: Path, run: Path, room: int, ranks: StreamRanks | None = None) -> StreamReader:
    dataset = load_dataset(prepared)
    first = dataset.sparse_feature("cat_0").cardinality
    capacities = {"cat_0": TableCapacity("cat_0", first, first + room)}
    encoder = LineEncoder(
        replace(CRITEO, path=prepared), dataset, FAST, [Target("label")], lambda features: features, capacities
    )
    is_main, world_size = ranks is None or ranks.rank == 0, ranks.world_size if ranks else 1
    return StreamReader(
        FolderSource(str(folder), FAST, CRITEO),
        encoder,
        Journal(str(run / "journal.jsonl")) if is_main else None,
        name="clicks",
        batch_size=BATCH // world_size,
        stream=FAST,
        config=ReaderConfig(),
        quarantine=Quarantine(),
        ranks=ranks,
        values=NewValues(capacities, 1.0),
    )


def _until(batches: Iterator[Batch], end: type[EndOfInputError]) -> list[Batch]:
    found = []
    with pytest.raises(EndOfInputError) as raised:
        while True:
            found.append(next(batches))
    assert raised.type is end
    return found


def _ids_of_cat_0(batch: Batch) -> list[int]:
    keyed = batch.sparse_features
    return keyed.values().view(len(keyed.keys()), -1)[list(keyed.keys()).index("cat_0")].tolist()


def test_a_step_keeps_the_values_of_its_last_batch_though_no_row_has_come_behind_it(
    prepared_clicks: str, folder: Path, tmp_path: Path
) -> None:
    """A training that waits for rows is stopped, and goes on when there are some: as one that was never stopped."""
    whole = _until(_reader(prepared_clicks, folder, tmp_path / "whole", 10).batches(0), EndOfInputError)
    begun = tmp_path / "begun"
    begun.mkdir()
    rows = (folder / "a.tsv").read_bytes().splitlines(keepends=True)
    (begun / "a.tsv").write_bytes(b"".join(rows[:BATCH]))
    stopped = _reader(prepared_clicks, begun, tmp_path / "run", 10)
    assert len(_until(stopped.batches(0), EndOfInputError)) == 1
    kept = stopped.values_of(1)
    assert kept == Known({"cat_0": ["new-a"]}, {})
    place = stopped.place(1)
    stopped.close()
    for file in folder.iterdir():
        (begun / file.name).write_bytes(file.read_bytes())
    goes_on = _reader(prepared_clicks, begun, tmp_path / "run", 10)
    goes_on.go_to(1, place)
    goes_on.restore_values(1, kept)
    given = _until(goes_on.batches(0, 1), EndOfInputError)
    assert [_ids_of_cat_0(batch) for batch in given] == [_ids_of_cat_0(batch) for batch in whole[1:]]


def test_a_new_value_has_a_row_from_the_next_batch_on(prepared_clicks: str, folder: Path, tmp_path: Path) -> None:
    first = load_dataset(prepared_clicks).sparse_feature("cat_0").cardinality
    reader = _reader(prepared_clicks, folder, tmp_path / "wide", 10)
    given = _until(reader.batches(0), EndOfInputError)
    ids = [number for batch in given for number in _ids_of_cat_0(batch)]
    assert [ids[row] for row in BROUGHT] == [0, 0, first, 0, 0, 0, 0, first + 4]
    assert reader.values_of(1) == Known({"cat_0": ["new-a"]}, {})
    assert reader.values_of(3).values == {"cat_0": ["new-a", "new-b", "new-c", "new-d", "new-e"]}
    whole = [row for batch in given for row in rows_of(batch)]

    narrow = _reader(prepared_clicks, folder, tmp_path / "narrow", 3)
    before = _until(narrow.batches(0), TablesFullError)
    assert len(before) == 3 and narrow.full == ["cat_0"], "batch 3 has values without a row"
    place, content = narrow.place(3), to_bytes(narrow.values_of(3))
    known = from_bytes(content)
    assert known == Known({"cat_0": ["new-a", "new-b", "new-c"]}, {"cat_0": ["new-d", "new-e"]})
    narrow.close()
    grown = _reader(prepared_clicks, folder, tmp_path / "narrow", 6)
    grown.go_to(3, place)
    grown.restore_values(3, known)
    after = _until(grown.batches(0, 3), EndOfInputError)
    assert [row for batch in [*before, *after] for row in rows_of(batch)] == whole, "as if there had been room"
    with pytest.raises(DamagedError):
        from_bytes(content[:-3])


def test_a_file_of_new_values_is_read_within_a_limit() -> None:
    for other in (b'{"values": {"a": [1]}, "waiting": {}}', b"[" * 99_999, b"[]", b'"' + b"x" * (20 << 20) + b'"'):
        with pytest.raises(DamagedError):
            from_bytes(zlib.compress(other))
    alike = Known({"a": ["x" * (20 << 20)]}, {})  # shrinks as a bomb does
    assert from_bytes(to_bytes(alike)) == alike


def test_values_are_those_of_the_step_that_is_gone_back_to(prepared_clicks: str, folder: Path, tmp_path: Path) -> None:
    reader = _reader(prepared_clicks, folder, tmp_path, 10)
    given = [rows_of(batch) for batch in _until(reader.batches(0), EndOfInputError)]
    again = _reader(prepared_clicks, folder, tmp_path, 10)
    again.go_to(2, {"name": "clicks", "batch": 2, "offsets": {"a.tsv": _end_of(folder, 100)}, "event_time": None})
    again.restore_values(2, Known({"cat_0": ["new-a"]}, {}))
    assert [rows_of(batch) for batch in _until(again.batches(0, 2), EndOfInputError)] == given[2:]
    assert [rows_of(batch) for batch in _until(again.batches(0, 2), EndOfInputError)] == given[2:], (
        "as after a rollback"
    )


def _end_of(folder: Path, rows: int) -> int:
    return sum(len(line) + 1 for line in (folder / "a.tsv").read_bytes().splitlines()[:rows])


def test_a_value_is_drawn_by_itself_and_the_batch() -> None:
    values = {f"v{number}" for number in range(1000)}
    drawn = [
        NewValues({"a": TableCapacity("a", 1, 2000)}, 0.25).admit(batch, {"a": values})[0]["a"] for batch in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and all(200 < len(each) < 300 for each in drawn)
    full = NewValues({"a": TableCapacity("a", 1, 5, may_grow=False)}, 1.0)
    assert full.admit(1, {"a": values}) == ({"a": sorted(values)[:4]}, set())
    assert full.admit(2, {"a": values}) == ({}, set()) and full.known_to(2).waiting == {}


def test_tables_have_room_for_new_values_and_do_not_become_smaller(prepared_clicks: str) -> None:
    words = ["experiment=quickstart", "hardware=cpu", "follow=true", "source=x", f"data.path={prepared_clicks}"]
    job = load_config(RetrainJob, [*words, "tables.cat_1.compression={kind: hash, num_rows: 3}"])
    dataset, config = load_dataset(prepared_clicks), NewValuesConfig(spare=0.5, max_rows=5000)
    rows = {feature.name: feature.cardinality for feature in dataset.sparse_features}
    roomy = with_capacity(job, dataset, config, {})
    own = {name: table.num_embeddings for name, table in roomy.tables.items()}
    assert own["cat_1"] is None, "several ids of a compressed table share rows"
    assert own["cat_0"] == rows["cat_0"] + max(64, -(-rows["cat_0"] // 2)) and max(filter(None, own.values())) <= 5000
    capacities = capacities_of(roomy, dataset, config)
    assert "cat_1" not in capacities and capacities["cat_0"] == TableCapacity("cat_0", rows["cat_0"], own["cat_0"] or 0)
    grown = with_capacity(roomy, dataset, config, roomy.tables, ["cat_0"])
    assert (grown.tables["cat_0"].num_embeddings or 0) > (own["cat_0"] or 0)
    assert {name: table for name, table in grown.tables.items() if name != "cat_0"} == {
        name: table for name, table in roomy.tables.items() if name != "cat_0"
    }
    again = with_capacity(job, dataset, NewValuesConfig(), {"cat_0": TableConfig(num_embeddings=rows["cat_0"] + 9)})
    assert again.tables["cat_0"].num_embeddings == rows["cat_0"] + 9 and not capacities_of(
        again, dataset, NewValuesConfig()
    )
    for wrong in ("spare=-1", "admit_probability=0", "max_rows=0"):
        with pytest.raises(ConfigError, match=names(f"stream.new_values.{wrong.partition('=')[0]}")):
            load_config(RetrainJob, [*words, f"stream.new_values.{wrong}"])


def _read_on_ranks(rank: int, prepared: str, folder: str, run: str) -> tuple[list[list[bytes]], Known]:
    world_size = dist.get_world_size()
    ranks = StreamRanks(own_store("stream"), rank, world_size) if world_size > 1 else None
    reader = _reader(prepared, Path(folder), Path(run), 10, ranks)
    return [rows_of(batch) for batch in _until(reader.batches(0), EndOfInputError)], reader.values_of(3)


@pytest.mark.campaign
def test_ranks_give_the_ids_that_one_rank_would(
    ranks: RankPool, prepared_clicks: str, folder: Path, tmp_path: Path
) -> None:
    alone, known = ranks.run(1, _read_on_ranks, prepared_clicks, str(folder), str(tmp_path / "alone"))[0]
    found = ranks.run(2, _read_on_ranks, prepared_clicks, str(folder), str(tmp_path / "two"))
    assert [list(itertools.chain(*each)) for each in zip(*(own for own, _ in found), strict=True)] == alone
    assert all(own == known for _, own in found) and len(known.values["cat_0"]) == 5


def _with_new_values(prepared: str, first: int, last: int) -> bytes:
    """Rows of which half hold a value in cat_3 that is new: a further one every 12 rows, and those of before."""
    lines = (Path(prepared).parent / "clicks.tsv").read_bytes().splitlines()[first:last]
    for number in range(0, len(lines), 2):
        cells = lines[number].split(b"\t")
        newest = (first + number) // 12
        cells[CAT_3] = f"new-{newest if number % 4 else number * 7919 % (newest + 1)}".encode()
        lines[number] = b"\t".join(cells)
    return b"".join(line + b"\n" for line in lines)


FIXED = "tables.default.init={kind: uniform, scale: 0.01}"  # whatever the number of rows


@pytest.mark.campaign
def test_a_table_that_grows_without_a_restart_ends_with_the_bits_of_one_that_was_as_large(
    prepared_clicks: str, tmp_path: Path
) -> None:
    """It grows twice in one process; another run of the same rows is killed before, between and after."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.tsv").write_bytes(_with_new_values(prepared_clicks, 0, 4050))

    def command(run: Path, *more: str) -> WarmCommand:
        return start_retrain(follow_words(prepared_clicks, source, run, FIXED, *more))

    runs = {name: tmp_path / name for name in ("wide", "grown", "killed")}
    assert command(runs["wide"], "stream.idle_s=1", "stream.new_values.spare=100").wait(200) == 0
    small = "stream.new_values.spare=0.01"
    assert command(runs["grown"], "stream.idle_s=1", small).wait(200) == 0
    log = (runs["grown"] / "follow/train.log").read_text()
    assert log.count("tables have grown: ") >= 2 and "cat_3" in log
    for wanted in (7, 14, 28):
        process = command(runs["killed"], small)
        try:
            wait_until(lambda wanted=wanted: newest_step(runs["killed"]) >= wanted, process)
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
        finally:
            process.kill()
    assert command(runs["killed"], "stream.idle_s=1", small).wait(200) == 0
    wide, grown, killed = (values_of(run, 40) for run in runs.values())
    assert wide.keys() == grown.keys() == killed.keys()
    assert all(torch.equal(grown[key], killed[key]) for key in grown)
    for key, values in grown.items():
        assert torch.equal(wide[key][: len(values)] if values.dim() else wide[key], values), key
    assert any(wide[key].shape != values.shape for key, values in grown.items())
    known = [from_bytes(_file(run)) for run in runs.values()]
    assert known[0] == known[1] == known[2] and len(known[0].values["cat_3"]) > 200


@pytest.mark.campaign
def test_tables_of_two_ranks_grow_to_the_bits_of_tables_that_were_as_large(
    prepared_clicks: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.tsv").write_bytes(_with_new_values(prepared_clicks, 0, 2050))

    def command(run: Path, *more: str) -> WarmCommand:
        same_plan = "tables.default.sharding.sharding_types=[table_wise]"  # for sums to be taken in the same order
        given = follow_words(prepared_clicks, source, run, FIXED, same_plan, "stream.idle_s=1", *more)
        return start_retrain(given, num_ranks=2)

    runs = {"wide": "stream.new_values.spare=100", "grown": "stream.new_values.spare=0.01"}
    for name, words in runs.items():
        assert command(tmp_path / name, words).wait(200) == 0
    assert "tables have grown: " in (tmp_path / "grown/follow/train.log").read_text()
    wide, grown = (values_of(tmp_path / name, 20) for name in runs)
    assert wide.keys() == grown.keys()
    for key, values in grown.items():
        assert torch.equal(wide[key][: len(values)] if values.dim() else wide[key], values), key


def _file(run: Path) -> bytes:
    return (run / "follow/checkpoints/step_00000040/new_values.json.z").read_bytes()


@pytest.mark.campaign
def test_a_server_knows_the_values_that_a_training_has_given_rows(prepared_clicks: str, tmp_path: Path) -> None:
    """By deltas, and by the artifact that begins a chain anew where a table has grown: as a whole export of that step does."""
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    words = follow_words(
        prepared_clicks,
        source,
        run,
        "publishing.when=every_5_steps",
        "publishing.gate.max_rows=300",
        "checkpoint.keep_last_n=9",
        "stream.new_values.spare=3",
        "publishing.max_chain=null",
        "publishing.gate.max_ne_increase=1",
    )
    folder, log = run / "follow/artifacts", run / "follow/publish.log"
    process, written = start_retrain(words), 0

    def write(count: int) -> None:
        nonlocal written
        (source / f"{written:05d}.tsv").write_bytes(_with_new_values(prepared_clicks, written, written + count))
        written += count

    def until(is_there: Callable[[], bool], most: int) -> None:
        """Rows come all the while: a step that waits for another one to be published goes with the next step."""

        def look() -> bool:
            if written < most:
                write(50)
            time.sleep(0.4)
            return is_there()

        wait_until(look, process)

    try:
        until(lambda: (folder / "published/manifest.json").exists(), 3000)
        until(lambda: any(folder.glob("*/deltas/*/values.json")), 4800)
        write(2000)  # the 412th new value has no row
        until(lambda: "larger tables" in log.read_text() and len(list(folder.glob("published.*"))) > 1, 12_000)
        until(lambda: (folder / "published/deltas/00000001/manifest.json").exists(), 15_000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == REQUEUE
    finally:
        process.kill()
    artifact = str(folder / "published")
    predictor = Predictor.load(artifact)
    base = predictor.num_ids("cat_3")
    predictor.catch_up(artifact)
    assert predictor.applied is not None and predictor.num_ids("cat_3") > base > 1
    limits = [f"parity.{name}=1" for name in ("max_ne_increase", "max_auc_decrease", "max_score_difference")]
    given = [
        f"run={run / 'follow'}",
        f"step={predictor.applied.step}",
        f"output={tmp_path / 'whole'}",
        "parity.max_rows=300",
        *limits,
    ]
    whole = Predictor.load(export(load_config(ExportJob, given)).artifact)
    (tmp_path / "rows.tsv").write_bytes(_with_new_values(prepared_clicks, 3000, 3600))
    rows = raw_rows(tmp_path / "rows.tsv", 600)
    np.testing.assert_array_equal(predictor.score(rows).scores, whole.score(rows).scores)
    for few in (rows.slice(0, 7), rows.slice(7, 3)):
        np.testing.assert_array_equal(predictor.score(few).scores, whole.score(few).scores)
    counts: Any = predictor.score(rows).row_zero["cat_3"]
    assert json.dumps(counts) and counts[1] < counts[0] / 20
