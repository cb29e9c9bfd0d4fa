"""A preparation by tasks writes the bytes of the embedded one, whatever the partitions are and however often a task runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.ids import BucketsConfig, IdsConfig
from pipeline.config.labels import NegativeSamplingConfig
from pipeline.config.sequences import SequenceConfig
from pipeline.config.splits import SplitConfig
from pipeline.data.prepare import resources
from pipeline.data.prepare.distributed import runs
from pipeline.data.prepare.distributed.engine import SerialEngine
from pipeline.data.prepare.distributed.prepare import prepare_distributed
from pipeline.data.prepare.distributed.recipe import make_recipe
from pipeline.data.prepare.prepare import prepare_dataset
from pipeline.data.prepare.resources import Resources
from pipeline.data.raw.source import Source, find_sources

Item = TypeVar("Item")
Result = TypeVar("Result")


def digests(folder: Path | str) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows a block and a row group, so that ranges and splits cut through them."""
    monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", 2_000)
    monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", 2_000)
    monkeypatch.setattr(runs, "RUN_GROUP_ROWS", 16)


COLUMNS = ColumnsConfig(
    label="click", dense=["price", "age", "height"], sparse=["item", "city", "device"], multi_hot=["tags"],
    timestamp="when", sequence={"history": SequenceConfig(max_length=3, shares="item")},
)  # fmt: skip


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
            int(rng.random() < 0.3), price, rng.integers(0, 9), f"{170 + 9 * rng.normal():.9f}", f"i{items[0]}", city,
            f"d-{seed}-{row}", "|".join(f"t{item}" for item in items[:2]), rng.integers(0, 500),
            "|".join(f"i{item}" for item in items[2:]), f"u{items[1]}",
        ]  # fmt: skip
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
    return DataConfig(**{**given, **settings})  # type: ignore[arg-type]


def assert_same_bytes_both_ways(
    tmp_path: Path, sources: list[Source], partitions: Sequence[int], **settings: object
) -> None:
    expected_at = tmp_path / "embedded"
    limits = Resources(1 << 30, 2, str(tmp_path / "embedded.staging"))
    expected, _ = prepare_dataset(config_of(expected_at, **settings), sources, limits)
    for number in partitions:
        path = tmp_path / f"by-{number}"
        recipe = make_recipe(
            config_of(path, **settings), sources, replace(limits, staging=f"{path}.staging", threads=1)
        )
        dataset, _ = prepare_distributed(recipe, sources, SerialEngine(recipe), number)
        assert dataset.to_json() == expected.to_json()
        assert digests(path) == digests(expected_at)
        assert not Path(f"{path}.staging").exists()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("row_range", {}),
        ("time", {"split": SplitConfig(kind="time"), "negative_sampling": NegativeSamplingConfig("click", 0.5, 3)}),
        ("user", {"split": SplitConfig(kind="user", validation_fraction=0.2, test_fraction=0.2)}),
    ],
    ids=["row_range", "time", "user"],
)
def test_bytes_are_those_of_the_embedded_engine(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, object]
) -> None:
    if name == "user":  # entries that do not fit into memory
        monkeypatch.setattr(runs, "MEMORY_A_BYTE", 1 << 40)
    for number, (rows, bad) in enumerate([(150, 3), (0, 0), (90, 0)]):
        write_rows(tmp_path / "raw" / f"part_{number}.csv", rows, seed=number, bad=bad)
    assert_same_bytes_both_ways(
        tmp_path, find_sources(str(tmp_path / "raw")), (1, 5) if name == "row_range" else (3,), **settings
    )
