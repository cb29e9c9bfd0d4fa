from __future__ import annotations

import json
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    DataType,
    EmbeddingModuleShardingPlan,
    KeyValueParams,
    MultiPassPrefetchConfig,
    ParameterSharding,
    ShardingPlan,
)

from pipeline.config.planner import PlannerConfig
from pipeline.config.tables import SHARDING_TYPES, ConstraintConfig
from pipeline.config.training import CommsConfig
from pipeline.embeddings.table import Table
from pipeline.planner import plan_record
from pipeline.planner.plan_codec import (
    decode_plan,
    encode_plan,
    encode_record,
    load_plan,
    read_plan,
    write_plan,
)
from pipeline.planner.plan_record import PlanRecord, find_plan_file
from pipeline.planner.planner import make_plan
from pipeline.planner.request import TableOptimizer
from pipeline.runtime.errors import PlanError
from pipeline.sharding.torchrec.sharding import make_sharders
from tests.planner.problems import TinyModel, make_tables, on, request
from tests.support.messages import mentions, names

CONFIG = PlannerConfig(kind="torchrec", plan_file="unused.json")
COMMAND = "python -m pipeline plan experiment=e"


def through_json(plan: ShardingPlan) -> ShardingPlan:
    return decode_plan(json.loads(json.dumps(encode_plan(plan))))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_hand_made_sharding_survives_the_file(device: str) -> None:
    makers = {
        "t0": data_parallel(),
        "t1": table_wise(rank=3),
        "t2": row_wise(),
        "t3": column_wise(ranks=[0, 3]),
        "t4": table_row_wise(host_index=1),
        "t5": grid_shard(host_indexes=[0, 1]),
    }
    collection = TinyModel(make_tables([101] * 6, 256)).collection
    module_plan = construct_module_sharding_plan(
        collection, makers, make_sharders(CommsConfig())[0], local_size=2, world_size=4, device_type=device
    )
    plan = ShardingPlan({"sparse.tables": module_plan})
    assert through_json(plan).plan == plan.plan
    assert isinstance(through_json(plan).plan["sparse.tables"], EmbeddingModuleShardingPlan)


@pytest.mark.parametrize("kind", SHARDING_TYPES)
def test_every_sharding_type_of_the_planner_survives_the_file(kind: str, tmp_path: Path) -> None:
    tables = make_tables([1001, 70_001], 256, sharding=ConstraintConfig([kind], min_partition=128))
    record = make_plan(CONFIG, request(tables, on("h100_80gb", 16), "sgd"))
    assert {choice.sharding_type for choice in record.tables} == {kind}
    write_plan(str(tmp_path / "plan.json"), record)
    assert read_plan(str(tmp_path / "plan.json")) == record


def test_every_field_survives_the_file() -> None:
    sharding = ParameterSharding(
        sharding_type="table_wise",
        compute_kernel="fused_uvm_caching",
        ranks=[1],
        sharding_spec=EnumerableShardingSpec([ShardMetadata([0, 0], [10, 4], "rank:1/cuda:1")]),
        cache_params=CacheParams(
            CacheAlgorithm.LFU,
            0.3,
            1.5,
            DataType.FP16,
            True,
            multipass_prefetch_config=MultiPassPrefetchConfig(num_passes=3),
        ),
        enforce_hbm=True,
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.FATAL,
        output_dtype=DataType.BF16,
        key_value_params=KeyValueParams(ssd_storage_directory="/ssd", ps_hosts=(("::1", 2000), ("::2", 2001))),
    )
    assert all(getattr(sharding, field.name) is not None for field in fields(sharding))
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"t": sharding})})
    assert through_json(plan).plan == plan.plan
    assert encode_plan(plan)[""]["t"].keys() == {field.name for field in fields(ParameterSharding)}


def test_what_a_file_cannot_hold_is_refused() -> None:
    stats = EmbeddingOffloadStats.__new__(EmbeddingOffloadStats)
    sharding = ParameterSharding("table_wise", "fused_uvm_caching", [0], cache_params=CacheParams(stats=stats))
    with pytest.raises(PlanError):
        encode_plan(ShardingPlan({"": EmbeddingModuleShardingPlan({"t": sharding})}))
    raw = {"": {"t": {"sharding_type": "table_wise", "compute_kernel": "fused", "from_the_future": 1}}}
    with pytest.raises(PlanError, match=names("from_the_future")):
        decode_plan(raw)


TABLES = make_tables([500, 40_000, 901], 32, [1, 3, 2])


def planned(tables: list[Table] = TABLES, optimizer: str = "rowwise_adagrad", batch_size: int = 64) -> PlanRecord:
    return make_plan(CONFIG, request(tables, on("cpu", 2, ddr_cap_gb=1.0), optimizer, batch_size=batch_size))


def test_a_plan_comes_back_from_its_file_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "plans" / "a.json")
    record = planned()
    write_plan(path, record)
    assert read_plan(path) == record
    assert encode_record(read_plan(path)) == encode_record(record) == Path(path).read_text()
    assert load_plan(path, record.fingerprint, COMMAND) == record
    content = json.loads(Path(path).read_text())
    assert content["objective"]["lower_bound_ms"] is None and content["objective"]["gap"] is None
    assert len(content["ranks"]) == 2 and len(content["tables"]) == 3


def changed(index: int, **changes: Any) -> list[Table]:
    return [replace(table, **changes) if position == index else table for position, table in enumerate(TABLES)]


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            {"tables": changed(1, num_embeddings=40_001)},
            "tables.t1.num_embeddings: 40000 in the plan, 40001 in this job",
        ),
        (
            {"tables": changed(1, pooling_factors=[3.0000001])},
            "tables.t1.pooling_factors: [3.0] in the plan, [3.0000001]",
        ),
        ({"tables": changed(0, feature_names=["g"])}, 'tables.t0.feature_names: ["f0"] in the plan, ["g"] in this job'),
        ({"tables": changed(2, pooling="mean")}, 'tables.t2.pooling: "sum" in the plan, "mean" in this job'),
        (
            {"tables": changed(2, sharding=ConstraintConfig(["row_wise"]))},
            'tables.t2.sharding.sharding_types: [] in the plan, ["row_wise"] in this job',
        ),
        ({"tables": TABLES[:2]}, "tables.t2.num_embeddings: 901 in the plan, nothing in this job"),
        ({"optimizer": "adagrad"}, 'sparse_optimizer.name: "rowwise_adagrad" in the plan, "adagrad" in this job'),
        ({"batch_size": 65}, "batch_size: 64 in the plan, 65 in this job"),
    ],
)
def test_a_plan_for_another_job_is_refused_with_the_differing_line(
    tmp_path: Path, other: dict[str, Any], line: str
) -> None:
    path = str(tmp_path / "plan.json")
    write_plan(path, planned())
    with pytest.raises(PlanError) as caught:
        load_plan(path, planned(**other).fingerprint, COMMAND)
    assert line in str(caught.value)
    assert mentions(str(caught.value), f"{path}")
    assert mentions(str(caught.value), f"{COMMAND}")


def test_a_plan_for_other_hardware_is_refused_to_the_byte(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    hardware = on("h100_80gb", 8)
    write_plan(path, make_plan(CONFIG, request(TABLES, hardware)))
    by_a_byte = request(TABLES, replace(hardware, hbm_cap_bytes=hardware.hbm_cap_bytes - 1))
    with pytest.raises(PlanError, match=names("topology.hbm_cap_bytes 84825604096 84825604095")):
        make_plan(PlannerConfig(kind="file", plan_file=path), by_a_byte)
    with pytest.raises(PlanError, match=names("pipeline plan world_size=2")):
        make_plan(PlannerConfig(kind="file", plan_file=path), request(TABLES, on("cpu", 2)))
    relabelled = request(TABLES, replace(hardware, name="my_h100"))
    assert len(make_plan(PlannerConfig(kind="file", plan_file=path), relabelled).tables) == 3


def test_a_plan_that_no_longer_fits_beside_the_dense_part_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    asked = request(TABLES, on("cpu", 2, ddr_cap_gb=0.06))
    write_plan(path, make_plan(CONFIG, asked))
    larger = replace(asked, model=TinyModel(TABLES, num_dense=1450))
    with pytest.raises(PlanError):
        make_plan(PlannerConfig(kind="file", plan_file=path), larger)


def test_another_library_version_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Plans for a cluster are made on laptops, with the CPU builds."""
    path, record = str(tmp_path / "plan.json"), planned()
    elsewhere = {**record.fingerprint, "libraries": {**record.fingerprint["libraries"], "torchrec": "0.1.0"}}
    write_plan(path, replace(record, fingerprint=elsewhere))
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        assert load_plan(path, record.fingerprint, COMMAND).plan == record.plan
    assert mentions(caplog.text, "0.1.0")


def damage(text: str, how: str) -> str:
    content = json.loads(text)
    shards = next(table for table in content["plan"]["sparse.tables"].values() if table["sharding_spec"])
    if how == "cut":
        return text[: len(text) // 2]
    if how == "not json":
        return "table_wise"
    if how == "no plan":
        return "[]"
    if how == "version":
        content["format_version"] = 99
    if how == "rows":
        content["fingerprint"]["tables"]["t0"]["num_embeddings"] = 501
    if how == "shard":
        shards["sharding_spec"][0]["sizes"][0] -= 1
    if how == "overlap":
        shards["sharding_spec"].append(shards["sharding_spec"][0])
        shards["ranks"].append(shards["ranks"][0])
    if how == "rank":
        shards["ranks"] = [7]
    if how == "placement":
        shards["sharding_spec"][0]["placement"] = "rank:1/cpu" if shards["ranks"] == [0] else "rank:0/cpu"
    if how == "table":
        del content["plan"]["sparse.tables"]["t1"]
    if how == "field":
        del content["usable_hbm_bytes"]
    return json.dumps(content)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("cut", ""),
        ("not json", ""),
        ("no plan", ""),
        ("version", "format_version 99"),
        ("rows", ""),
        ("shard", "shard"),
        ("overlap", "overlap"),
        ("rank", "[7]"),
        ("placement", ""),
        ("table", "tables"),
        ("field", "usable_hbm_bytes"),
    ],
)
def test_a_damaged_file_is_refused_before_sharding(tmp_path: Path, how: str, text: str) -> None:
    tables = [replace(table, sharding=ConstraintConfig(["table_wise"])) for table in TABLES]
    path = tmp_path / "plan.json"
    path.write_text(damage(encode_record(planned(tables)), how))
    with pytest.raises(PlanError, match=names(text)) as caught:
        read_plan(str(path), COMMAND)
    assert str(path) in str(caught.value) and COMMAND in str(caught.value)


def test_a_plan_file_is_looked_for_here_then_in_the_checkout_then_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sharding_plans/a.json"
    monkeypatch.chdir(tmp_path)
    checkout, package = tmp_path / "checkout", tmp_path / "checkout" / "pipeline"
    for folder in (checkout, package):
        (folder / "sharding_plans").mkdir(parents=True)
    monkeypatch.setattr(plan_record, "PACKAGE", package)
    with pytest.raises(PlanError, match=names(f"{name} {package}/{name} {COMMAND}")):
        find_plan_file(name, COMMAND)
    (package / name).touch()
    assert find_plan_file(name, COMMAND) == str(package / name)
    (checkout / "setup.cfg").touch()
    with pytest.raises(PlanError, match=names(f"{name} {checkout}/sharding_plans/a.json")):
        find_plan_file(name, COMMAND)
    (checkout / "sharding_plans" / "a.json").touch()
    assert find_plan_file(name, COMMAND) == str(checkout / "sharding_plans" / "a.json")
    (tmp_path / "sharding_plans").mkdir()
    (tmp_path / name).touch()
    assert find_plan_file(name, COMMAND) == name
    with pytest.raises(PlanError, match=names("/absent/a.json")):
        find_plan_file("/absent/a.json", COMMAND)


def test_a_plan_for_this_machine_is_none_of_the_plans_that_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that `make train` has left in a checkout is for the folder that it is in."""
    name = "sharding_plans/a.autox2.json"
    monkeypatch.setattr(plan_record, "PACKAGE", tmp_path)
    (tmp_path / "sharding_plans").mkdir()
    (tmp_path / name).touch()
    with pytest.raises(PlanError, match=names(name)):
        find_plan_file(name, COMMAND)
    monkeypatch.chdir(tmp_path)
    assert find_plan_file(name, COMMAND) == name


def test_weight_decay_is_part_of_what_a_plan_is_for() -> None:
    asked = request(TABLES, on("h100_80gb", 2), TableOptimizer("rowwise_adagrad", 0.1))
    assert make_plan(CONFIG, asked).fingerprint["sparse_optimizer"] == {"name": "rowwise_adagrad", "weight_decay": 0.1}
