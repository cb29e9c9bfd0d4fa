"""Every executor writes the same bytes, however often a task runs and in whatever order."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig, NegativeSamplingConfig, SequenceConfig
from pipeline.config.data import BucketsConfig, DataConfig, IdsConfig, SplitConfig
from pipeline.data.prepare import number_feature, resources
from pipeline.data.prepare import recipe as recipe_module
from pipeline.data.prepare.executor import LocalExecutor
from pipeline.data.prepare.prepare import prepare_dataset
from pipeline.data.prepare.recipe import Recipe, make_recipe
from pipeline.data.prepare.resources import Resources
from pipeline.data.prepare.vocabulary import open_engine
from pipeline.data.raw.source import find_sources
from pipeline.runtime.errors import LimitError

Item = TypeVar("Item")
Result = TypeVar("Result")


def digests(folder: Path | str) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows a block, so that splits and shards cut through them."""
    monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", 2_000)
    monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", 2_000)


COLUMNS = ColumnsConfig(
    label="click",
    dense=["price", "age", "height"],
    sparse=["item", "city", "device"],
    multi_hot=["tags"],
    timestamp="when",
    sequence={"history": SequenceConfig(max_length=3, shares="item")},
)


def write_rows(path: Path, num_rows: int, seed: int, bad: int = 0) -> None:
    """Skewed ids, ties, missing values, a value of half the rows, one that is in every row another."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["click,price,age,height,item,city,device,tags,when,history,user"]
    for row in range(num_rows):
        items = (40 * rng.random(5) ** 3).astype(int)
        city = "Rome" if rng.random() < 0.5 else f"città {int(30 * rng.random())}"
        price = "" if rng.random() < 0.1 else f"{rng.normal():.6f}"
        cells = [
            int(rng.random() < 0.3),
            price,
            rng.integers(0, 9),
            f"{170 + 9 * rng.normal():.9f}",
            f"i{items[0]}",
            city,
            f"d-{seed}-{row}",
            "|".join(f"t{item}" for item in items[:2]),
            rng.integers(0, 500),
            "|".join(f"i{item}" for item in items[2:]),
            f"u{items[1]}",
        ]
        lines.append(",".join(map(str, cells)))
    path.write_text("\n".join([*lines, *["x"] * bad]) + "\n")


def config_of(path: Path | str, **settings: object) -> DataConfig:
    given: dict[str, object] = {
        "name": "rows", "path": str(path), "format": "csv", "columns": COLUMNS, "max_quarantined_fraction": 0.5,
        "rows_per_shard": 70, "rows_per_row_group": 32, "group_column": "user",
        "dense_transforms": {"height": "standardize"}, "buckets": {"age": BucketsConfig(num_buckets=4)},
        "feature_ids": {"device": IdsConfig(kind="hash", hash_size=50), "tags": IdsConfig(min_frequency=2),
                        "city": IdsConfig(max_size=9)},
    }  # fmt: skip
    return DataConfig(**{**given, **settings})


class OtherProcesses(LocalExecutor):
    """As processes of many machines: tasks are pickled, run in any order, and may run twice."""

    in_order = False

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def map(
        self,
        description: str,
        task: Callable[[Recipe, Item], Result],
        items: Iterable[Item],
        sizes: Sequence[float],
        at_once: int = 1,
    ) -> Iterator[Result]:
        numbered = list(enumerate(items))
        found = {}
        for number, item in reversed(numbered):
            for _ in range(2):
                found[number] = task(*pickle.loads(pickle.dumps((self._recipe, item))))
        return iter([found[number] for number, _ in numbered])


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split": SplitConfig(kind="time"), "negative_sampling": NegativeSamplingConfig("click", 0.5, 3)},
        {"split": SplitConfig(kind="user", validation_fraction=0.2, test_fraction=0.2)},
    ],
    ids=["row_range", "time", "user"],
)
def test_bytes_do_not_depend_on_the_executor_or_on_how_values_are_numbered(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    for number, (rows, bad) in enumerate([(150, 3), (0, 0), (90, 0)]):
        write_rows(tmp_path / "raw" / f"part_{number}.csv", rows, seed=number, bad=bad)
    sources = find_sources(str(tmp_path / "raw"))
    found = []
    for name, executor in (("here", LocalExecutor), ("elsewhere", OtherProcesses)):
        path = tmp_path / name
        recipe = make_recipe(config_of(path, **settings), sources, Resources(1 << 30, 2, f"{path}.staging"))
        dataset, _ = prepare_dataset(recipe, executor(recipe))
        found.append((dataset.to_json(), digests(path)))
        assert not Path(f"{path}.staging").exists()
        monkeypatch.setattr(number_feature, "MEMORY_PER_BYTE", 1 << 40)
        monkeypatch.setattr(number_feature, "VALUES_JOINED_AND_SORTED", 2 if settings else 1 << 24)
    assert found[0] == found[1] and len(found[0][1]) > 8


@pytest.mark.long
def test_more_values_than_memory_are_counted_by_spilling_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [f"value number {i:030d}" for i in np.random.default_rng(0).permutation(300_000)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["click,item", *(f"{i % 2},{value}" for i, value in enumerate(values))]))
    config = DataConfig(
        name="rows",
        path=str(tmp_path / "ds"),
        format="csv",
        columns=ColumnsConfig(label="click", dense=[], sparse=["item"]),
        split=SplitConfig(validation_fraction=0.0, test_fraction=0.0),
    )
    monkeypatch.setattr(Resources, "engine_bytes", 32 << 20)
    recipe = make_recipe(config, find_sources(str(path)), Resources(1 << 30, 1, f"{tmp_path}/staging"))
    monkeypatch.setattr(recipe_module, "open_engine", without_spilling)
    with pytest.raises(LimitError, match="memory_limit_gb"):
        prepare_dataset(recipe, LocalExecutor(recipe))
    monkeypatch.setattr(recipe_module, "open_engine", open_engine)
    dataset, _ = prepare_dataset(recipe, LocalExecutor(recipe))
    found = pq.read_table(tmp_path / "ds" / str(dataset.sparse_features[0].vocabulary))["value"]
    assert found.to_pylist() == sorted(values)


def without_spilling(*settings: Any) -> duckdb.DuckDBPyConnection:
    engine = open_engine(*settings)
    engine.execute("SET max_temp_directory_size = '0KiB'")
    return engine
