"""What a job's tables may ask for."""

from __future__ import annotations

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig
from pipeline.config.jobs.train import PlanJob
from pipeline.config.tables import TableConfig, expand_patterns
from pipeline.embeddings.tables import resolve_tables
from pipeline.runtime.errors import ConfigError
from tests.support.datasets import described_dataset
from tests.support.messages import names


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("tables.cat_3.sharding.compute_kernels=[key_value]", "fused_uvm_caching"),
        ("tables.cat_3.sharding.compute_kernels=[fused, key_value]", "fused_uvm_caching"),
        ("hardware.ssd_cap_gb=1000", "Leave it 0"),
    ],
)
def test_a_kernel_that_fbgemm_lacks_is_refused_by_name(override: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"FBGEMM has no .*kernel.*FBGEMM/issues/5666.*{hint}"):
        load_config(PlanJob, ["experiment=quickstart", "hardware=h200", override])


def table(rows: int | None = None, **values: object) -> TableConfig:
    return TableConfig(num_embeddings=rows, **values)


FEATURES = [f"cat_{index}" for index in range(4)] + ["user"]


def test_a_tables_own_entry_goes_before_a_pattern_and_a_pattern_before_default() -> None:
    tables = {
        "default": table(embedding_dim=8, pooling="mean"),
        "cat_*": table(100, embedding_dim=16),
        "cat_[01]": table(data_type="fp16"),
        "cat_1": table(7),
    }
    expanded = expand_patterns(tables, FEATURES)
    assert sorted(expanded) == ["cat_0", "cat_1", "cat_2", "cat_3", "default"]
    assert expanded["cat_0"] == table(100, embedding_dim=16, data_type="fp16")
    assert expanded["cat_1"] == table(7, embedding_dim=16, data_type="fp16")
    assert expanded["cat_2"] == table(100, embedding_dim=16)
    resolved = {each.name: each for each in resolve_tables(tables, described_dataset(dict.fromkeys(FEATURES, 5)))}
    assert (resolved["cat_1"].embedding_dim, resolved["cat_1"].pooling) == (16, "mean")
    assert (resolved["user"].embedding_dim, resolved["user"].num_embeddings) == (8, 5)


def test_a_pattern_fits_tables_and_not_the_features_that_share_one() -> None:
    shared = table(9, feature_names=["cat_0", "cat_1"])
    expanded = expand_patterns({"cats": shared, "cat_?": table(50), "cats*": table(pooling="mean")}, FEATURES)
    assert expanded == {
        "cats": table(9, feature_names=["cat_0", "cat_1"], pooling="mean"),
        "cat_2": table(50),
        "cat_3": table(50),
    }


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"cat_*": table(5), "*_2": table(6)}, "cat_2 tables.cat_* tables.*_2 num_embeddings 5 6"),
        ({"cta_*": table(5)}, "tables.cta_* 'cat_"),
        ({"cat_*": table(feature_names=["cat_1"])}, "tables.cat_*.feature_names"),
    ],
)
def test_patterns_that_contradict_each_other_or_fit_nothing_are_refused(
    tables: dict[str, TableConfig], words: str
) -> None:
    with pytest.raises(ConfigError, match=names(words)):
        expand_patterns(tables, FEATURES)


def test_patterns_that_agree_or_are_settled_by_the_tables_own_entry_are_fine() -> None:
    tables = {"cat_*": table(5), "*_2": table(6), "cat_2": table(7), "*_1": table(5)}
    assert expand_patterns(tables, FEATURES)["cat_2"] == table(7)


def test_a_pattern_is_a_key_of_the_command_line() -> None:
    job = load_config(
        PlanJob, ["experiment=quickstart", "tables.cat_*.embedding_dim=8", "data.feature_ids.cat_*.min_frequency=3"]
    )
    assert job.tables["cat_*"] == table(embedding_dim=8)
    assert {ids.min_frequency for ids in job.data.feature_ids.values()} == {3} and len(job.data.feature_ids) == 26


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_tables", "rows"), [("rmc1", 5, 100_000), ("rmc2", 40, 2_000_000), ("rmc3", 10, 800_000)]
)
def test_the_patterns_of_rmc_give_every_table_its_rows(name: str, num_tables: int, rows: int) -> None:
    job = load_config(PlanJob, [f"experiment={name}"])
    features = [f"cat_{index}" for index in range(num_tables)]
    assert job.data.columns.sparse == features and len(set(job.data.columns.dense)) == len(job.data.columns.dense)
    expanded = expand_patterns(job.tables, features)
    assert expanded == {"default": table(embedding_dim=32), **dict.fromkeys(features, table(rows))}


def test_a_range_of_columns_that_runs_backwards_is_refused() -> None:
    assert ColumnsConfig(dense=["a", "int_{8..10}_x"]).dense == ["a", "int_8_x", "int_9_x", "int_10_x"]
    with pytest.raises(ConfigError, match=names("int_{3..1}")):
        ColumnsConfig(dense=["int_{3..1}"])
