"""Tables resolve against a data set, or say what does not fit."""

from __future__ import annotations

import pytest

from pipeline.config.tables import CompressionConfig, InitConfig, TableConfig
from pipeline.embeddings.table import RowUpdates
from pipeline.embeddings.tables import resolve_tables
from pipeline.runtime.errors import ConfigError
from tests.support.datasets import described_dataset
from tests.support.messages import names

DATASET = described_dataset({"user": 100, "item": 5000, "context": 7})


def test_every_feature_gets_a_table_of_its_cardinality() -> None:
    tables = resolve_tables({"default": TableConfig(embedding_dim=16)}, DATASET)
    assert [(table.name, table.num_embeddings, table.embedding_dim) for table in tables] == [
        ("user", 100, 16),
        ("item", 5000, 16),
        ("context", 7, 16),
    ]


def test_a_table_overrides_the_default_field_by_field() -> None:
    tables = resolve_tables(
        {
            "default": TableConfig(embedding_dim=16, pooling="mean", init=InitConfig("normal", 0.1)),
            "item": TableConfig(num_embeddings=6000, embedding_dim=32),
        },
        DATASET,
    )
    item = tables[1]
    assert (item.num_embeddings, item.embedding_dim, item.pooling, item.init.scale) == (6000, 32, "mean", 0.1)
    assert tables[0].embedding_dim == 16


def test_l2_is_set_by_default_by_pattern_and_by_table() -> None:
    configs = {"default": TableConfig(l2=0.1), "*te*": TableConfig(l2=0.2), "user": TableConfig(l2=0.0)}
    assert [table.updates.l2 for table in resolve_tables(configs, DATASET)] == [0.0, 0.2, 0.2]
    assert [table.updates.l2 for table in resolve_tables({}, DATASET)] == [0.0, 0.0, 0.0]
    trains = CompressionConfig("tensor_train", rank=2)
    with pytest.raises(ConfigError, match=names("tables.item l2=0.1 model.l2")):
        resolve_tables({"item": TableConfig(embedding_dim=16, l2=0.1, compression=trains)}, DATASET)


def test_a_tables_own_settings_come_from_its_entry_a_pattern_or_the_default() -> None:
    configs = {
        "default": TableConfig(weight_decay=0.1),
        "*te*": TableConfig(lr_factor=0.5),
        "user": TableConfig(frozen=True),
    }
    found = {table.name: table.updates for table in resolve_tables(configs, DATASET)}
    assert found["item"] == RowUpdates(weight_decay=0.1, lr_factor=0.5)
    assert found["user"] == RowUpdates(weight_decay=0.1, frozen=True)
    with pytest.raises(ConfigError, match=names("lr_factor=0 frozen=true")):
        TableConfig(lr_factor=0)
    trains = CompressionConfig("tensor_train", rank=2)
    with pytest.raises(ConfigError, match=names("tables.item frozen=true compression.kind=none")):
        resolve_tables({"item": TableConfig(embedding_dim=16, frozen=True, compression=trains)}, DATASET)


def test_a_shared_table_holds_the_largest_of_its_features_and_stands_at_the_first() -> None:
    tables = resolve_tables({"shared": TableConfig(feature_names=["user", "context"])}, DATASET)
    assert [(table.name, table.feature_names, table.num_embeddings) for table in tables] == [
        ("shared", ["user", "context"], 100),
        ("item", ["item"], 5000),
    ]


def test_multi_hot_sizes_replace_the_pooling_factor() -> None:
    tables = resolve_tables({}, DATASET, multi_hot={"item": 20})
    assert [table.pooling_factors for table in tables] == [[1.0], [20.0], [1.0]]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"itme": TableConfig()}, "itme item"),
        ({"item": TableConfig(num_embeddings=10)}, "num_embeddings=10 4999 max_size=10"),
        ({"a": TableConfig(feature_names=["item"]), "item": TableConfig()}, "item a"),
        ({"default": TableConfig(num_embeddings=10)}, "num_embeddings"),
    ],
)
def test_tables_that_do_not_fit_the_data_are_refused(tables: dict[str, TableConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        resolve_tables(tables, DATASET)
