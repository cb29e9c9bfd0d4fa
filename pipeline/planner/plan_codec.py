"""Read and write plan files. Refuse a plan made for other tables or hardware.

A file contains every field of every ParameterSharding, the choices, the loads, the cost, and a
fingerprint of the job and hardware that the plan was made for. An outdated plan, or a plan for
another job, is refused with the lines that differ, before memory is allocated.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from pipeline.planner.plan_record import (
    COMMAND,
    DAMAGE,
    FORMAT_VERSION,
    MAX_LINES,
    Fingerprint,
    PlanRecord,
    TableChoice,
    description_fields,
    differing_libraries,
    differing_lines,
    find_plan_file,
    read_content,
    sha256_of,
    to_json,
)
from pipeline.runtime.errors import PlanError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage

SPEC = "sharding_spec"  # the field of ParameterSharding that is encoded separately
logger = get_logger(__name__)


def write_plan(path: str, record: PlanRecord) -> None:
    """Write the plan atomically. The same plan gives the same bytes."""
    storage.publish_text(path, encode_record(record))


def _choice_json(choice: TableChoice) -> dict[str, Any]:
    content = asdict(choice)
    if choice.tiers is None:  # as in plans of earlier releases
        del content["tiers"]
    return content


def encode_record(record: PlanRecord) -> str:
    content = {
        "format_version": FORMAT_VERSION,
        "planner": record.planner,
        "hardware": record.hardware,
        "objective": asdict(record.objective),
        "torchrec_objective": record.torchrec_objective and asdict(record.torchrec_objective),
        "fingerprint_sha256": sha256_of(record.fingerprint),
        "fingerprint": record.fingerprint,
        "usable_hbm_bytes": record.usable_hbm_bytes,
        "usable_ddr_bytes": record.usable_ddr_bytes,
        "usable_ssd_bytes": record.usable_ssd_bytes,
        "dense_bytes": record.dense_bytes,
        "tables": [_choice_json(choice) for choice in record.tables],
        "ranks": [asdict(load) for load in record.ranks],
        "plan": encode_plan(record.plan),
    }
    return to_json(content) + "\n"


def load_plan(path: str, expected: Fingerprint, command: str) -> PlanRecord:
    """Return the plan in `path`. Errors show `command`, which makes a new plan.

    Raises PlanError if there is no plan, the plan is damaged, or its fingerprint is not `expected`.
    """
    found = find_plan_file(path, command)
    record = read_plan(found, command)
    if lines := differing_lines(record.fingerprint, expected):
        shown = "".join(f"\n  {line}" for line in lines[:MAX_LINES])
        more = f"\n  and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
        raise PlanError(f"plan file {found} was made for another job:{shown}{more}\nmake a new one: {command}")
    if libraries := differing_libraries(record.fingerprint, expected):
        logger.warning("plan file %s was made with %s", found, ", ".join(libraries))
    return record


def read_plan(path: str, command: str = COMMAND) -> PlanRecord:
    """Return the plan in `path` without checking its fingerprint. Raises PlanError if the plan is not valid."""
    content = read_content(path, command)
    try:
        record = _decode_content(content)
        _check_shards(record)
    except DAMAGE as error:
        raise PlanError(f"plan file {path} is damaged: {str(error)[:500]}; make it again: {command}") from error
    return record


def encode_plan(plan: ShardingPlan) -> dict[str, Any]:
    """Return the plan as JSON values: module path -> table -> every field of its ParameterSharding."""
    encoded: dict[str, Any] = {}
    for path, module_plan in plan.plan.items():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan)
        encoded[path] = {table: _encode_sharding(sharding) for table, sharding in module_plan.items()}
    return encoded


def decode_plan(encoded: dict[str, Any]) -> ShardingPlan:
    """Return the plan from its JSON values. Raises PlanError if a field does not exist in this TorchRec."""
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan({table: _decode_sharding(raw) for table, raw in tables.items()})
            for path, tables in encoded.items()
        }
    )


def _encode_sharding(sharding: ParameterSharding) -> dict[str, Any]:
    encoded = {field.name: _encode(getattr(sharding, field.name)) for field in fields(sharding) if field.name != SPEC}
    spec = sharding.sharding_spec
    assert spec is None or isinstance(spec, EnumerableShardingSpec), (
        f"TorchRec's planners give no {type(spec).__name__}"
    )
    encoded[SPEC] = spec and [
        {"offsets": list(shard.shard_offsets), "sizes": list(shard.shard_sizes), "placement": str(shard.placement)}
        for shard in spec.shards
    ]
    return encoded


def _decode_sharding(raw: dict[str, Any]) -> ParameterSharding:
    shards = raw.get(SPEC)
    fields_without_shards = {name: value for name, value in raw.items() if name != SPEC}
    sharding: ParameterSharding = _decode(fields_without_shards, ParameterSharding)
    if shards is not None:
        sharding.sharding_spec = EnumerableShardingSpec(
            [ShardMetadata(shard["offsets"], shard["sizes"], shard["placement"]) for shard in shards]
        )
    return sharding


def _encode(value: Any) -> Any:
    """Encode dataclasses as the fields that differ from the default, tuples field by field, enums by name."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        defaults = {field.name: field.default for field in fields(value)}
        return {name: _encode(getattr(value, name)) for name in defaults if getattr(value, name) != defaults[name]}
    if hasattr(value, "_fields"):
        return {name: _encode(getattr(value, name)) for name in value._fields}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    raise PlanError(f"a plan file cannot hold {type(value).__name__}: {value!r}")


def _decode(value: Any, hint: Any) -> Any:
    """Return the value of type `hint` from which `_encode` made `value`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if origin in (typing.Union, types.UnionType):
        return _decode(value, next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_decode(item, kind) for item, kind in zip(value, kinds, strict=True))
    if origin is list:
        return [_decode(item, arguments[0]) for item in value]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint[value]
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint)
        if unknown := sorted(value.keys() - hints.keys()):
            raise PlanError(f"{hint.__name__} has no field {', '.join(unknown)} in this version of TorchRec")
        return hint(**{name: _decode(item, hints[name]) for name, item in value.items()})
    return value


def decode_record(text: str) -> PlanRecord:
    """Return the record that was encoded."""
    return _decode_content(json.loads(text))


def _decode_content(content: dict[str, Any]) -> PlanRecord:
    return PlanRecord(plan=decode_plan(content["plan"]), **description_fields(content))


def _check_shards(record: PlanRecord) -> None:
    """Raise PlanError unless each table of the fingerprint is planned once and its shards have all rows."""
    described, world_size = record.fingerprint["tables"], record.fingerprint["topology"]["world_size"]
    planned = {
        (path, table): sharding for path, tables in record.plan.plan.items() for table, sharding in tables.items()
    }
    if planned.keys() != {(table["module"], name) for name, table in described.items()}:
        raise PlanError("its plan and its fingerprint name different tables")
    for (_, name), sharding in planned.items():
        ranks = sharding.ranks or []
        if not ranks or not all(0 <= rank < world_size for rank in ranks):
            raise PlanError(f"table {name!r} is on ranks {ranks} of {world_size}")
        spec = sharding.sharding_spec
        if (spec is None) != (sharding.sharding_type == "data_parallel"):
            raise PlanError(
                f"table {name!r} is {sharding.sharding_type} {'without' if spec is None else 'with'} shards"
            )
        if spec is not None:
            shape = (described[name]["num_embeddings"], described[name]["embedding_dim"])
            _check_tiling(name, shape, spec.shards, ranks)


def _check_tiling(name: str, shape: tuple[int, int], shards: list[ShardMetadata], ranks: list[int]) -> None:
    """Check that column blocks are adjacent, and that each block is split into rows from top to bottom."""
    if [shard.placement and shard.placement.rank() for shard in shards] != ranks:
        raise PlanError(f"table {name!r} names ranks {ranks} that its shards are not on")
    blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shard in shards:
        (row, column), (num_rows, num_columns) = shard.shard_offsets, shard.shard_sizes
        blocks.setdefault((column, num_columns), []).append((row, num_rows))
    whole = _tiles(sorted(blocks), shape[1]) and all(_tiles(sorted(rows), shape[0]) for rows in blocks.values())
    if not whole:
        raise PlanError(f"the shards of table {name!r} miss or repeat parts of its {shape[0]} x {shape[1]}")


def _tiles(pieces: list[tuple[int, int]], length: int) -> bool:
    """Return whether pieces (offset, size) cover 0..length without gap or overlap."""
    end = 0
    for offset, size in pieces:
        if size and offset != end:
            return False
        end += size
    return end == length
