"""Define an artifact's manifest, and convert it to manifest.json and back.

{
  "sha256": of all that follows, so that a changed manifest is refused, not read
  "format_version": 1
  "version": hash of the files' checksums and of all that says how to read them: equal for equal scores
  "lineage": run, name, step, hashes of config and data set, version of this code
  "schema": the raw columns and their transforms
  "tables", "features": rows, dims, precisions, pooling, files; which feature looks up which table
  "dense": precision of the layers, and their files
  "lookups": number of lookups of each feature, and the shares of its most frequent ids
  "tasks": labels by name, kind and width; absent if there is one binary label
  "retrieval": towers, items and their index; only of a two-tower, whose dense.pt2 gives users' vectors
  "feature_tables": raw column of ids -> file with raw columns by id; absent if there are none
  "sizes", "versions", "certificate", "settings"
  "files": name -> size_bytes and CRC-32 by block, as in a checkpoint
}
"""

from __future__ import annotations

import calendar
import hashlib
import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from pipeline.config.columns import LABEL_KINDS, MAX_BUCKETS
from pipeline.config.serving import DENSE_PRECISIONS, PRECISIONS
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.block_sums import ALGORITHMS, FileEntry
from pipeline.runtime.storage.manifest import MANIFEST, open_manifest, seal_manifest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact.quantize import WORD_BITS, fits, row_bytes
from pipeline.serving.artifact.raw_schema import RawSchema, schema_problem
from pipeline.serving.artifact.task_quality import ServedTask

FORMAT_VERSION = 1
DENSE_FILE, COMPILED_FILE, COMPOSED_FILE = "dense.pt2", "dense.compiled.pt2", "composed.bin"
CALIBRATION_FILE = "calibration.json"
CARD_FILES = ("card.json", "card.md")  # for people: scores do not depend on them
ITEM_PROGRAM, ITEM_VECTORS, ITEM_VALUES, ITEM_INDEX = "item.pt2", "items.vectors", "items.arrow", "items.index"
FILE_NAME = re.compile(
    r"(tables|vocabulary|features)/[0-9]{5}\.(rows|kept|arrow)|dense(\.compiled)?\.pt2|dense\.onnx|composed\.bin|calibration\.json|card\.(json|md)|item\.(pt2|onnx)|items\.(vectors|arrow|index)"
)
UNFINISHED = ".export-"  # what the folders begin with that exports write in
MAX_MANIFEST_BYTES = 64 << 20
MAX_DIM, MAX_ROWS, MAX_TABLES = 1 << 16, 1 << 40, 1 << 16


class ArtifactError(DamagedError):
    """An artifact cannot be used. The message gives the reason and the fix."""


@dataclass(frozen=True)
class TableFiles:
    """The files of one table. `kept` names the file of KeptRows; None if all rows are stored."""

    name: str
    rows: int
    stored_rows: int
    dim: int
    precision: str
    pooling: str
    file: str
    kept: str | None = None

    @property
    def size_bytes(self) -> int:
        return self.stored_rows * row_bytes(self.dim, self.precision)


@dataclass(frozen=True)
class RetrievalParts:
    """The parts of a two-tower's artifact in addition to tables and the user's program.

    user_features, item_features: the features of each tower, in the order of the batch.
    item_feature names the item. item.pt2 is the item's program. items.vectors has a row of `dim`
    float32 for each item, items.arrow their raw values, items.index the index if it has a file.
    search: candidates that hnsw keeps.
    """

    item_feature: str
    user_features: list[str]
    item_features: list[str]
    dim: int
    num_items: int
    index: str
    search: int

    def features_of(self, tower: str) -> list[str]:
        return self.user_features if tower == "user" else self.item_features


@dataclass(frozen=True)
class Manifest:
    """`features`: (feature, number of its table) in the order of the batch. `dense`: precision and compiled."""

    lineage: dict[str, Any]
    schema: RawSchema
    tables: list[TableFiles]
    features: list[tuple[str, int]]
    dense: dict[str, Any]
    files: dict[str, FileEntry]
    vocabularies: dict[str, str] = field(default_factory=dict)  # feature -> file
    lookups: dict[str, dict[str, Any]] = field(default_factory=dict)  # see package.lookups_of
    sizes: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    certificate: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    tasks: list[ServedTask] = field(default_factory=list)  # none: one binary label
    retrieval: RetrievalParts | None = None
    feature_tables: dict[str, str] = field(default_factory=dict)  # column of ids -> file
    format_version: int = FORMAT_VERSION

    @cached_property
    def version(self) -> str:
        """Return 16 hex digits of a hash of everything that scores depend on. Cached for the responses."""
        about = self._values()
        content = {key: about[key] for key in ("files", "schema", "tables", "features", "dense", "vocabularies", "format_version")}  # fmt: skip
        # Without the digests of a signed artifact, so that signing does not change the version.
        content["files"] = {
            name: {key: value for key, value in entry.items() if key not in ALGORITHMS}
            for name, entry in about["files"].items()
            if name not in CARD_FILES
        }
        if self.tasks:
            content["tasks"] = about["tasks"]
        if self.retrieval is not None:
            content["retrieval"] = about["retrieval"]
        if self.feature_tables:
            content["feature_tables"] = about["feature_tables"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def exported_at(self) -> float | None:
        """Return the time of the export in seconds since 1970; None if the lineage does not state it."""
        try:
            return calendar.timegm(time.strptime(str(self.lineage.get("exported_at")), "%Y-%m-%dT%H:%M:%SZ"))
        except ValueError:
            return None

    @property
    def columns(self) -> dict[str, str]:
        """Return raw column -> dense, sparse, multi_hot or vector, without labels."""
        return self.schema.columns

    @property
    def size_bytes(self) -> int:
        return sum(int(entry["size_bytes"]) for entry in self.files.values())

    def to_text(self) -> str:
        return seal_manifest({"version": self.version, **self._values()}, Purpose.ARTIFACT)

    def _values(self) -> dict[str, Any]:
        """Return the values of the file. Empty values that earlier releases did not have are left out."""
        values = asdict(self)
        for key in ("tasks", "retrieval", "feature_tables"):
            if not values[key]:
                del values[key]
        for feature in values["schema"]["features"]:
            for key in ("boundaries", "sequence"):
                if feature[key] is None:
                    del feature[key]
            if not feature["weighted"]:
                del feature["weighted"]
        for key in ("dense_columns", "null_values", "transforms", "vectors"):
            if not values["schema"][key]:
                del values["schema"][key]
        return values


def read_manifest(path: str) -> Manifest:
    """Read the manifest of the artifact at `path`.

    Raises ArtifactError: the manifest is missing, was changed, or is of another release.
    """
    file = storage.join(path, MANIFEST)
    if storage.join(path, "").rstrip("/").rpartition("/")[2].startswith(UNFINISHED):
        raise ArtifactError(f"{path} is no artifact: its export was not finished; export again")
    if not storage.is_file(file):
        raise ArtifactError(
            f"{path} is no artifact: it has no {MANIFEST}; make one: python -m pipeline export run=<run>"
        )
    if storage.size_bytes(file) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{file} has more than {MAX_MANIFEST_BYTES} bytes: it is no manifest")
    try:
        values = open_manifest(file, Purpose.ARTIFACT, FORMAT_VERSION)
    except (OSError, DamagedError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{error}; copy or export the artifact again") from None
    try:
        manifest = decode(values)
        problem = _problem(manifest)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        problem = repr(error)[:200]
    if problem:
        raise ArtifactError(f"{file} describes no artifact of this release: {problem[:500]}")
    return manifest


def decode(values: dict[str, Any]) -> Manifest:
    """Return the manifest with these values. Raises ValueError for other keys or types."""
    manifest = msgspec.convert(values, Manifest)  # a ValidationError is a ValueError
    if unknown := _unknown_key(values, {"version": "", **asdict(manifest)}):
        raise ValueError(f"it has the key {unknown[:100]!r}")
    return manifest


def _unknown_key(values: object, known: object) -> str:
    """Return a key at any depth of `values` that is not in `known`; "" if there is none. msgspec ignores such keys."""
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(values, dict) and isinstance(known, dict):
        if unknown := sorted(map(str, values.keys() - known.keys())):
            return unknown[0]
        parts = ((value, known[key]) for key, value in values.items())
    elif isinstance(values, list) and isinstance(known, list | tuple):
        parts = zip(values, known, strict=True)
    return next((found for pair in parts if (found := _unknown_key(*pair))), "")


def _problem(manifest: Manifest) -> str:
    """Return "" or why the manifest is invalid. Sizes are checked before memory is allocated for them."""
    if wrong := [name for name in manifest.files if not FILE_NAME.fullmatch(name)]:
        return f"a file is called {wrong[0]!r}"
    if not len(manifest.tables) <= MAX_TABLES:
        return f"{len(manifest.tables)} tables"
    for table in manifest.tables:
        if table.precision not in PRECISIONS or table.pooling not in ("sum", "mean"):
            return f"table {table.name!r} is {table.precision}, pooled by {table.pooling}"
        if not (0 < table.dim <= MAX_DIM and 0 < table.stored_rows <= table.rows <= MAX_ROWS):
            return f"table {table.name!r} has {table.stored_rows} of {table.rows} rows of {table.dim}"
        if not fits(table.dim, table.precision) or _size(manifest, table.file) != table.size_bytes:
            return f"the file of table {table.name!r} has {_size(manifest, table.file)} bytes"
        if (table.kept is None) != (table.stored_rows == table.rows):
            return f"table {table.name!r} has {table.stored_rows} of {table.rows} rows, and its list of kept rows is {table.kept}"
        if table.kept is not None and _size(manifest, table.kept) != -(-table.rows // WORD_BITS) * 8:
            return f"the list of kept rows of table {table.name!r} has {_size(manifest, table.kept)} bytes"
    if problem := schema_problem(manifest.schema, manifest.lookups):
        return problem
    if any(not 0 <= table < len(manifest.tables) for _, table in manifest.features):
        return "a feature looks up a table that there is not"
    for task in manifest.tasks:
        if task.kind not in LABEL_KINDS or not 0 < task.width < MAX_BUCKETS:
            return f"task {task.name!r} is {task.kind}, of {task.width} numbers"
    if manifest.dense["precision"] not in DENSE_PRECISIONS or DENSE_FILE not in manifest.files:
        return f"layers of {manifest.dense['precision']} in {sorted(manifest.files)[:3]}"
    if lacking := [feature.name for feature in manifest.schema.features if feature.hash_size is None and manifest.vocabularies.get(feature.name) not in manifest.files]:  # fmt: skip
        return f"feature {lacking[0]!r} has no vocabulary"
    if lost := [name for name, file in manifest.feature_tables.items() if file not in manifest.files]:
        return f"the feature table of {lost[0]!r} has no file"
    return "" if manifest.retrieval is None else _retrieval_problem(manifest, manifest.retrieval)


def _retrieval_problem(manifest: Manifest, parts: RetrievalParts) -> str:
    known = {feature.name for feature in manifest.schema.features}
    towers = [*parts.user_features, *parts.item_features]
    if set(towers) != known or parts.item_feature not in parts.item_features:
        return f"its towers read {sorted(towers)[:3]}, and its features are {sorted(known)[:3]}"
    if manifest.tasks:
        return "it scores labels and retrieves items"
    if not (0 < parts.dim <= MAX_DIM and 0 < parts.num_items <= MAX_ROWS and 0 < parts.search <= MAX_ROWS):
        return f"it has {parts.num_items} items of {parts.dim} columns"
    if _size(manifest, ITEM_VECTORS) != 4 * parts.dim * parts.num_items:
        return f"the file of its items' vectors has {_size(manifest, ITEM_VECTORS)} bytes"
    if lacking := [name for name in (ITEM_PROGRAM, ITEM_VALUES) if name not in manifest.files]:
        return f"it has no {lacking[0]}"
    return ""


def _size(manifest: Manifest, name: str) -> int:
    return int(manifest.files[name]["size_bytes"]) if name in manifest.files else -1
