"""Decide what to do with each table and dense layer, given the contents of a checkpoint and of a job.

Of vocabularies this module reads only the checksums.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
import yaml

from pipeline.checkpoint.tables import Inventory, StoredTable, describe_dtype
from pipeline.checkpoint.vocabularies import IdSpace, features_of, id_space, trained_dataset
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_from_yaml
from pipeline.config.training import WarmStartConfig
from pipeline.data.dataset import FILE_NAME, Dataset
from pipeline.data.prepare.vocabulary import open_engine
from pipeline.data.raw.layout import feature_names
from pipeline.data.sql import parquet
from pipeline.runtime.errors import CheckpointError, did_you_mean
from pipeline.runtime.storage import storage

MEMORY_BYTES = 512 << 20  # memory of the join, which then spills to disk


@dataclass(frozen=True)
class RowMap:
    """How each row of the new table finds its old row: by equal id, or by equal value in two vocabularies."""

    old: str | None = None
    new: str | None = None

    def pairs(self, first: int, count: int, old_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (old row, new row) for the new rows first..first+count that the old table has,
        sorted by old row. Row 0, the unknown row, stays row 0."""
        if self.old is None or self.new is None:
            rows = np.arange(first, max(first, min(first + count, old_rows)))
            return rows, rows
        with tempfile.TemporaryDirectory() as spill, open_engine(spill, MEMORY_BYTES, 1) as engine:
            found = _run(
                engine,
                f"SELECT old.id AS old_id, new.id AS new_id FROM {parquet(storage.local_path(self.new))} new "
                f"JOIN {parquet(storage.local_path(self.old))} old USING (value) "
                "WHERE new.id >= ? AND new.id < ? AND old.id < ? ORDER BY old_id",
                [max(first, 1), first + count, old_rows],
            )
        unknown = np.zeros(1 if first == 0 and count and old_rows else 0, dtype=np.int64)
        return np.concatenate([unknown, found["old_id"]]), np.concatenate([unknown, found["new_id"]])


def _run(engine: duckdb.DuckDBPyConnection, statement: str, values: list[Any]) -> dict[str, np.ndarray]:
    try:
        return engine.execute(statement, values).fetchnumpy()
    except (duckdb.InvalidInputException, duckdb.BinderException) as error:
        text = str(error).splitlines()[0]
        raise CheckpointError(f"a vocabulary cannot be read ({text}): prepare its data set again") from None


def match_ids(old: IdSpace, new: IdSpace) -> RowMap | str:
    """Return how rows move from the old id space to the new one, or a text that says why they cannot."""
    if old.vocabulary and new.vocabulary:
        same = storage.sha256_of(old.vocabulary) == storage.sha256_of(new.vocabulary)
        return RowMap() if same else RowMap(old.vocabulary, new.vocabulary)
    if old.hashed and new.hashed:
        if old.hashed == new.hashed:
            return RowMap()
        (size, seed), (new_size, new_seed) = old.hashed, new.hashed
        return f"its values were hashed to {size} rows with seed {seed}, and are now to {new_size} with seed {new_seed}"
    if old.hashed or new.hashed:
        then, now = ("by hash" if space.hashed else "by vocabulary" for space in (old, new))
        return f"its ids were given {then}, and are now {now}"
    return old.reason or new.reason


STATE = "optimizer.state."
MODEL = "model.model."  # the model in its task in a step
# Parameters that compose the rows of compressed tables, and the maps of managed collision.
COMPOSER = re.compile(r"\bcomposition\.composers\.([^.]+)__parts\.|\bmanaged_rows\.([^.]+?)(?:__cold)?__managed\.")


@dataclass(frozen=True)
class TableDecision:
    """The decision for a table. If `source` is None, the table gets initial weights. `changes` are:
    grown, shrunk, retyped, renamed, remapped.
    """

    name: str
    source: StoredTable | None
    rows: int
    changes: tuple[str, ...] = ()
    row_map: RowMap = field(default_factory=RowMap)
    with_state: bool = False
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        """Return True if every row of the new table is loaded."""
        return self.source is not None and self.row_map.old is None and self.source.rows >= self.rows


@dataclass(frozen=True)
class Decisions:
    tables: list[TableDecision]
    dropped: list[str]
    layers: list[str]  # keys to load: dense layers, and their optimizer state
    fresh_layers: list[str]


@dataclass(frozen=True)
class NewData:
    """The data of the job: its data set, and the features that each table embeds. A compressed
    table is stored as several parts: `parts` maps a part to its table, and `compression` says
    what the rows of a table's parts mean.
    """

    dataset: Dataset
    path: str
    features: dict[str, list[str]]
    parts: dict[str, str] = field(default_factory=dict)
    compression: dict[str, str] = field(default_factory=dict)
    # Returns whether the layout of a dense parameter of the model depends on the features.
    is_by_feature: Callable[[], Callable[[str], bool]] = lambda: lambda name: True


def decide(
    stored: Inventory, wanted: Inventory, manifest: dict[str, Any], data: NewData, config: WarmStartConfig
) -> Decisions:
    """Decide what to load from the step that `manifest` describes. Raises CheckpointError if a
    policy refuses a table or layer, or `renames` names a missing table."""
    _check_renames(stored, wanted, config, data)
    names = {new: old for old, new in config.renames.items()}
    spaces = _id_spaces(manifest, data, config)
    fresh = _fresh_composed(manifest, data, config, spaces)

    def match(old: str, new: str) -> RowMap | str:
        # the meaning of the parts' rows was compared above
        return RowMap() if new in data.parts else spaces(old, new)

    tables = [
        TableDecision(name, None, table.rows, reason=fresh[data.parts[name]])
        if data.parts.get(name) in fresh
        else _decide_table(table, stored.tables.get(names.get(name, name)), config, match)
        for name, table in wanted.tables.items()
    ]
    taken = {names.get(name, name) for name in wanted.tables}
    dropped = sorted(stored.tables.keys() - taken)
    if dropped and config.dropped_tables == "refuse":
        raise CheckpointError(
            f"{_subject(dropped[0])} is in the checkpoint and not in the job{_way_out('dropped_tables', 'drop')}"
        )
    unknown = _layers_of_other_features(manifest, wanted, data) if config.dense != "fresh" else {}
    layers, fresh_layers = _decide_layers(stored, wanted, config, fresh, unknown)
    return Decisions(tables, dropped, layers, fresh_layers)


def _fresh_composed(
    manifest: dict[str, Any], data: NewData, config: WarmStartConfig, match: Callable[[str, str], RowMap | str]
) -> dict[str, str]:
    """Return the compressed tables that get initial weights, with the reason. Raises
    CheckpointError if the policy is to refuse.
    """
    found = {}
    for name, now in data.compression.items():
        then = manifest.get("compression", {}).get(name)
        if then is None:
            continue  # the checkpoint has an uncompressed table or none: the parts are new tables
        row_map = match(name, name)
        if then != now:
            problem = f"it was {then}, and is now {now}"
        elif isinstance(row_map, str):
            problem = f"the data set has changed, and its ids cannot be matched by value: {row_map}"
        elif row_map.old:
            problem = "its vocabulary has changed, and rows that several ids share cannot follow them to other ids"
        else:
            continue
        if config.composed_tables == "refuse":
            raise CheckpointError(
                f"{_subject(name)} is compressed, and {problem}, which warm_start.composed_tables=refuse forbids; keep "
                "settings and vocabulary, or set warm_start.composed_tables=fresh, or warm_start.ids=keep where ids mean "
                "what they meant"
            )
        found[name] = f"fresh, for {problem}"
    return found


def _check_renames(stored: Inventory, wanted: Inventory, config: WarmStartConfig, data: NewData) -> None:
    for old, new in config.renames.items():
        if new in data.parts:
            raise CheckpointError(
                f"warm_start.renames: {new!r} is a part of the compressed table {data.parts[new]!r}, whose name is part of "
                "what its rows are checked by; keep the table's name, or let it begin afresh under the new one"
            )
        if old not in stored.tables:
            raise CheckpointError(
                f"warm_start.renames: the checkpoint has no table {old!r}{did_you_mean(old, stored.tables)}"
            )
        if new not in wanted.tables:
            raise CheckpointError(f"warm_start.renames: the job has no table {new!r}{did_you_mean(new, wanted.tables)}")


def _id_spaces(manifest: dict[str, Any], data: NewData, config: WarmStartConfig) -> Callable[[str, str], RowMap | str]:
    """Return a function (old table, new table) -> RowMap, or a text that says why rows cannot be matched."""
    same = manifest["data_order"]["dataset"] == data.dataset.fingerprint()
    if config.ids == "keep" or same:
        return lambda old, new: RowMap()
    dataset, where = trained_dataset(manifest, config.data_path or _kept_beside(config.checkpoint))

    def match(old: str, new: str) -> RowMap | str:
        before = IdSpace(reason=where)
        if dataset is not None:
            before = id_space(dataset, where, features_of(manifest["config"], old))
        return match_ids(before, id_space(data.dataset, data.path, data.features[new]))

    return match


def _kept_beside(checkpoint: str | None) -> str | None:
    """Return the vocabularies that a registry's version keeps: <version>/data, next to <version>/checkpoint/<step>."""
    path = storage.join(storage.dirname(storage.dirname(checkpoint.rstrip("/"))), "data") if checkpoint else ""
    return path if checkpoint and storage.is_file(storage.join(path, FILE_NAME)) else None


def _decide_table(
    table: StoredTable,
    source: StoredTable | None,
    config: WarmStartConfig,
    match: Callable[[str, str], RowMap | str],
) -> TableDecision:
    name = table.name
    if source is None:
        if config.new_tables == "refuse":
            raise CheckpointError(f"{_subject(name)} is not in the checkpoint{_way_out('new_tables', 'fresh')}")
        return TableDecision(name, None, table.rows, reason="new")
    changes = [f"renamed from {source.name}"] if source.name != name else []
    for policy, differs, change in (
        ("reshaped_tables", table.dim != source.dim, f"embedding_dim {source.dim} -> {table.dim}"),
        ("grown_tables", table.rows > source.rows, f"grown from {source.rows:,} to {table.rows:,} rows"),
        ("shrunk_tables", table.rows < source.rows, f"shrunk from {source.rows:,} to {table.rows:,} rows"),
        (
            "retyped_tables",
            table.dtype != source.dtype,
            f"{describe_dtype(source.dtype)} -> {describe_dtype(table.dtype)}",
        ),
    ):
        if not differs:
            continue
        chosen = getattr(config, policy)
        if chosen == "refuse":
            raise CheckpointError(
                f"{_subject(name)}: {change}, which warm_start.{policy}=refuse forbids; set another policy, "
                "or give it the shape that the checkpoint has"
            )
        if chosen == "fresh":
            return TableDecision(name, None, table.rows, reason=f"fresh, for it is {change}")
        changes.append(change)
    row_map = match(source.name, name)
    if isinstance(row_map, str):
        raise CheckpointError(
            f"{_subject(name)}: the data set has changed, and its rows cannot be matched by value: {row_map}. Set "
            "warm_start.data_path=<where that data set lies now>, or warm_start.ids=keep where ids mean what they meant"
        )
    if row_map.old:
        changes.append("rows matched by value")
    with_state = config.optimizer == "keep" and _same_state(source, table)
    return TableDecision(name, source, table.rows, tuple(changes), row_map, with_state)


def _same_state(source: StoredTable, table: StoredTable) -> bool:
    """Return True if the step has optimizer state to load. Raises CheckpointError if another optimizer made it."""
    then, now = ({state: stored.is_row_wise(state) for state in stored.states} for stored in (source, table))
    if then != now:
        raise CheckpointError(
            f"{_subject(table.name)}: the checkpoint has optimizer state {_kinds(then)}, the job's optimizer keeps "
            f"{_kinds(now)}; train with the same optimizer.sparse.name, or set warm_start.optimizer=reset"
        )
    return bool(now)


def _kinds(states: dict[str, bool]) -> str:
    named = (f"{state} ({'a value a row' if row_wise else 'a value an element'})" for state, row_wise in states.items())
    return ", ".join(named) or "none"


def _layers_of_other_features(manifest: dict[str, Any], wanted: Inventory, data: NewData) -> dict[str, str]:
    """Return the layers that cannot be loaded, with the reason. The layout of these layers depends
    on the features that the model reads, and the checkpoint has other features or another order.
    If such a layer had an equal shape, it would apply the weights of one feature to another
    feature.
    """
    used = {*data.dataset.dense_features, *(name for names in data.features.values() for name in names)}
    now = [*data.dataset.dense_features, *data.dataset.sparse_feature_names]
    then = _trained_features(manifest)
    if [name for name in then if name in used] == (now := [name for name in now if name in used]):
        return {}
    is_by_feature = data.is_by_feature()
    moved = next((pair for pair in zip(then, now, strict=False) if pair[0] != pair[1]), (then[-1:], now[-1:]))
    reason = f"it reads the features {', '.join(then[:8])} and the job's are {', '.join(now[:8])} ({moved[0]} is now {moved[1]})"
    keys = (key for key in wanted.layers if key.startswith(MODEL) and composer_of(key) is None)
    return {key: reason for key in keys if is_by_feature(key.removeprefix(MODEL))}


def _trained_features(manifest: dict[str, Any]) -> list[str]:
    """Return the dense and the categorical features, in the order in which the trained layers read them."""
    if found := manifest.get("features"):
        return [*found["dense"], *found["sparse"]]
    job = job_from_yaml(TrainJob, yaml.safe_dump(manifest["config"]))  # a step of an earlier release
    dense, sparse = feature_names(job.data)
    return [*dense, *sparse]


def _decide_layers(
    stored: Inventory,
    wanted: Inventory,
    config: WarmStartConfig,
    fresh_tables: dict[str, str],
    unknown: dict[str, str],
) -> tuple[list[str], list[str]]:
    """Return the keys of the dense part to load, and the keys of layers that stay initialized.
    `unknown`: layers that are not loaded although their shape may fit, with the reason."""
    own = [key for key in wanted.layers if key.startswith("model.")]
    if config.dense == "fresh":
        return [], own
    of_tables = {key for key in own if composer_of(key) in fresh_tables}
    fits = {key for key in own if stored.layers.get(key) == wanted.layers[key]} - of_tables - unknown.keys()
    fresh = [key for key in own if key not in fits]
    # They are as new as the tables that they belong to.
    new = {key for key in fresh if composer_of(key) and key not in stored.layers}
    if (misfits := [key for key in fresh if key not in of_tables | new]) and config.dense == "load":
        key = misfits[0]
        if key in unknown:
            raise CheckpointError(
                f"layer {key.removeprefix('model.')}: in the checkpoint {unknown[key]}; prepare the data set with the features "
                "in the checkpoint's order, or set warm_start.dense=matching to initialize the layers whose layout depends on the features"
            )
        then = f"{list(stored.layers[key][0])}" if key in stored.layers else "none"
        raise CheckpointError(
            f"layer {key.removeprefix('model.')}: the checkpoint has {then}, the job {list(wanted.layers[key][0])}; set "
            "warm_start.dense=matching to load the layers that fit, or warm_start.dense=fresh"
        )
    return [*(key for key in own if key in fits), *_layer_states(stored, wanted, fits, config)], fresh


def composer_of(key: str) -> str | None:
    """Return the compressed table that a dense parameter or map belongs to; None for a layer of the model."""
    found = COMPOSER.search(key)
    return found[1] or found[2] if found else None


def _layer_states(stored: Inventory, wanted: Inventory, fits: set[str], config: WarmStartConfig) -> list[str]:
    if config.optimizer == "reset":
        return []
    kept = []
    for key in wanted.layers:
        if not key.startswith("optimizer."):
            continue
        owner = "model." + key.removeprefix(STATE).rpartition(".")[0]
        if key.startswith(STATE) and owner not in fits:
            continue
        if stored.layers.get(key) != wanted.layers[key]:
            raise CheckpointError(
                f"{key}: the checkpoint has none of that shape, so its optimizer was another; train with the same "
                "optimizer.dense.name, or set warm_start.optimizer=reset"
            )
        kept.append(key)
    return kept


def _subject(name: str) -> str:
    return f"warm start: table {name!r}"


def _way_out(policy: str, allowing: str) -> str:
    return f", which warm_start.{policy}=refuse forbids; set warm_start.{policy}={allowing}, or name it in warm_start.renames"
