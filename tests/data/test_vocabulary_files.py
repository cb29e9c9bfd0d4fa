"""No reader takes a vocabulary that is not the one that dataset.json names."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.checkpoint.vocabularies import id_space, read_values
from pipeline.config.data import BaseVocabularyConfig
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.prepare.base_vocabulary import load_base
from pipeline.data.vocabulary_files import find_vocabulary
from pipeline.retraining.promotion import FinishedRun
from pipeline.runtime.errors import CheckpointError, DataError
from pipeline.runtime.storage import storage
from pipeline.serving.artifact.writer import vocabulary_path
from tests.data.sources import prepare_rows
from tests.support.messages import names

READERS: dict[str, Callable[[Dataset, str], object]] = {
    "base": lambda _, folder: load_base(BaseVocabularyConfig(folder)),
    "warm start": lambda dataset, folder: id_space(dataset, folder, ["c"]),
    "export, stream": lambda dataset, folder: vocabulary_path(dataset.sparse_feature("c"), folder),
    "registry": lambda _, folder: FinishedRun("run", "run/step_1", folder, {"files": {}}).files(),
    "prepare again": lambda _, folder: prepare_rows(Path(folder).parent, Path(folder).parent / "rows.csv"),
}


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Dataset, str]:
    path = tmp_path / "rows.csv"
    path.write_text("y,x,c,m\n" + "".join(f"{i % 2},{i},v{i % 90},m\n" for i in range(300)))
    return prepare_rows(tmp_path, path).dataset, str(tmp_path / "data")


def _flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_of_a_vocabulary_is_found_by_every_reader(prepared: tuple[Dataset, str], reader: str) -> None:
    dataset, folder = prepared
    path = Path(folder) / "vocabulary" / "c.parquet"
    READERS[reader](dataset, folder)
    _flip(path, random.Random(reader).randrange(path.stat().st_size * 8))
    with pytest.raises(DataError, match=names(f"{path} SHA-256 dataset.json prepare")):
        READERS[reader](dataset, folder)


def test_a_data_set_of_an_earlier_release_is_read_and_reported_once(
    prepared: tuple[Dataset, str], caplog: pytest.LogCaptureFixture
) -> None:
    _, folder = prepared
    path = Path(folder) / "dataset.json"
    written = json.loads(path.read_text())
    for feature in written["sparse_features"]:
        assert len(feature.pop("vocabulary_sha256")) == 64
        assert feature.pop("vocabulary_bytes") == (Path(folder) / feature["vocabulary"]).stat().st_size
    path.write_text(json.dumps(written))
    dataset = load_dataset(folder)
    assert "vocabulary_sha256" not in dataset.to_json()
    with caplog.at_level("INFO"):
        for feature in dataset.sparse_features * 2:
            find_vocabulary(folder, feature)
    assert caplog.text.count("no checksums of vocabularies") == 1


@pytest.mark.parametrize("change", ["types", "columns", "text"])
def test_a_file_that_is_not_a_vocabulary_is_refused(prepared: tuple[Dataset, str], change: str) -> None:
    """It ended in DuckDB's traceback."""
    _, folder = prepared
    path = Path(folder) / "vocabulary" / "c.parquet"
    if change == "text":
        path.write_text("no Parquet")
    else:
        table = pq.read_table(path)
        text = table.set_column(2, "id", table["id"].cast(pa.string()))
        pq.write_table(text if change == "types" else table.drop_columns(["count"]), path)
    _without_checksums(folder)
    with pytest.raises(DataError, match=names(str(path))):
        load_base(BaseVocabularyConfig(folder))


def _without_checksums(folder: str) -> Dataset:
    described = Path(folder) / "dataset.json"
    written = json.loads(described.read_text())
    for feature in written["sparse_features"]:
        del feature["vocabulary_sha256"]
    described.write_text(json.dumps(written))
    return load_dataset(folder)


def test_a_file_that_unpacks_to_more_than_it_can_hold_is_refused_by_its_footer(
    prepared: tuple[Dataset, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checksum the size of a vocabulary was not bounded."""
    dataset, folder = _without_checksums(prepared[1]), prepared[1]
    path, feature = Path(folder) / "vocabulary" / "c.parquet", dataset.sparse_feature("c")
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    with pytest.raises(DataError, match=names(f"{path} has 89 values, dataset.json says 90")):
        find_vocabulary(folder, feature)
    zeros = pa.array([f"{number:02}" + "0" * 100_000 for number in range(len(table))])
    pq.write_table(table.set_column(0, "value", zeros), path, use_dictionary=False)
    monkeypatch.setattr(storage, "most_unpacked_bytes", lambda size_bytes: 16 * size_bytes)
    with pytest.raises(DataError, match=names(f"{path} {path.stat().st_size:,} bytes, which unpack to 9,0")):
        find_vocabulary(folder, feature)


def test_a_long_value_that_a_dictionary_repeats_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    """65,536 rows of a file of 70 kB took 6.5 GB."""
    path, num_rows = str(tmp_path / "c.parquet"), 1 << 16
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), ["x" * 100_000])
    pq.write_table(pa.table({"value": repeated, "id": pa.array(range(1, num_rows + 1), pa.int32())}), path)
    before = pa.total_allocated_bytes()
    with pytest.raises(CheckpointError, match="a value twice"):
        next(read_values(path))
    pool = pa.default_memory_pool()
    assert pool.max_memory() - before < 64 << 20
