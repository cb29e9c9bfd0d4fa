"""A data set may keep to the ids of an earlier one, or count on from them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.runtime.errors import DataError

HEADER = "click,x,item\n"


def _prepare(folder: Path, name: str, items: str, *words: str) -> dict[str, tuple[int, int]]:
    """value -> (id, count) of data set `name`, prepared from a row a letter."""
    source = folder / f"{name}.csv"
    source.write_text(HEADER + "".join(f"{i % 2},1,{item}\n" for i, item in enumerate(items)))
    options = [
        "data=open_bandit", f"data.name={name}", f"source={source}", f"data.path={folder / name}", "data.columns.label=click",
        "data.columns.dense=[x]", "data.columns.sparse=[item]", "data.columns.multi_hot=[]", "data.columns.timestamp=null",
        "data.feature_ids={}", "data.ids.min_frequency=1", "data.split.kind=row_range", "data.split.validation_fraction=0", "data.split.test_fraction=0", *words,
    ]  # fmt: skip
    prepare(load_config(PrepareJob, options))
    table = pq.read_table(folder / name / "vocabulary" / "item.parquet").to_pydict()
    return {value: (row, count) for value, row, count in zip(table["value"], table["id"], table["count"], strict=True)}


def _ids(folder: Path, name: str) -> list[int]:
    return pq.read_table(folder / name / "train" / "00000.parquet", columns=["item"])["item"].to_pylist()


def test_frozen_vocabularies_give_the_ids_that_they_gave(tmp_path: Path) -> None:
    before = _prepare(tmp_path, "old", "aaabbc")
    after = _prepare(tmp_path, "new", "cccd", f"vocabularies.path={tmp_path / 'old'}", "vocabularies.frozen=true")
    assert after == before == {"a": (1, 3), "b": (2, 2), "c": (3, 1)}
    assert _ids(tmp_path, "new") == [3, 3, 3, 0]  # d is unknown


def test_counts_go_on_and_ids_go_by_them(tmp_path: Path) -> None:
    _prepare(tmp_path, "old", "aaabbc")
    after = _prepare(tmp_path, "new", "cccd", f"vocabularies.path={tmp_path / 'old'}")
    assert after == {"c": (1, 4), "a": (2, 3), "b": (3, 2), "d": (4, 1)}
    assert _ids(tmp_path, "new") == [1, 1, 1, 4]


def test_old_counts_decay_and_rare_values_lose_their_row(tmp_path: Path) -> None:
    _prepare(tmp_path, "old", "aaaabbc")
    base = [f"vocabularies.path={tmp_path / 'old'}", "vocabularies.count_decay=0.5", "data.ids.min_frequency=2"]
    assert _prepare(tmp_path, "new", "ccdd", *base) == {"a": (1, 2), "c": (2, 2), "d": (3, 2)}


def test_another_base_is_another_data_set(tmp_path: Path) -> None:
    _prepare(tmp_path, "old", "aab")
    _prepare(tmp_path, "new", "ab")
    with pytest.raises(DataError):
        _prepare(tmp_path, "new", "ab", f"vocabularies.path={tmp_path / 'old'}")
