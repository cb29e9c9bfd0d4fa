"""Erase a value from an artifact and its deltas: no vocabulary names it, its row holds the numbers of the unknown
value's row, a retriever does not find it, and no feature table has it.

Every other byte that scores depend on stays. The artifact's version changes, so its deltas, each of which names the
version and the SHA-256 of the one before, get new manifests. The certificate keeps what was measured at the export;
lineage.erased says how many values were erased since, and lineage.erased_versions which versions the artifact had.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.serving import RetrievalConfig
from pipeline.extras.erase.folders import EraseError, Rewritten
from pipeline.extras.erase.plain_files import without_value
from pipeline.extras.erase.scan import holds
from pipeline.extras.erase.steps import check_alone
from pipeline.extras.erase.target import Target
from pipeline.extras.feature_tables.export import sorted_by_hash
from pipeline.extras.feature_tables.tables import stored_batch
from pipeline.extras.retrieval.index import index_class
from pipeline.extras.serving_log.replay import ERASED_VERSIONS
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import committed_names
from pipeline.runtime.storage.checksums import FileEntry, VerifiedFile, checksums_of, write_blocks
from pipeline.runtime.storage.manifest import MANIFEST, check_still_signed, open_manifest, seal_manifest, sealed_digest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact.deltas import (
    FORMAT_VERSION,
    NAME,
    VALUES_FILE,
    NewIds,
    read_delta,
    values_from_bytes,
    values_to_bytes,
)
from pipeline.serving.artifact.manifest import (
    ITEM_INDEX,
    ITEM_VALUES,
    ITEM_VECTORS,
    Manifest,
    TableFiles,
    read_manifest,
)
from pipeline.serving.artifact.quantize import row_bytes
from pipeline.serving.artifact.writer import write_arrow
from pipeline.serving.scoring.artifact_files import ArtifactFiles

LINEAGE = "erased"
POSITION = re.compile(r"__\d+$")


def erase_from_artifact(target: Target, folder: Rewritten, below: str = "", deltas: str = "deltas") -> bool:
    """Erase the value from the artifact in the folder `below`, and from its deltas. Return whether it had the value."""
    path = os.path.join(folder.path, below)
    manifest = read_manifest(path)
    files = ArtifactFiles(path, manifest, verify=True)
    entries = dict(manifest.files)
    was_in_tables = _erase_from_feature_tables(target, folder, below, files, entries)
    row_id, unknown = _erase_from_model(target, folder, below, deltas, files, entries)
    if row_id is None and not was_in_tables:
        return False
    lineage = {
        **manifest.lineage, LINEAGE: int(manifest.lineage.get(LINEAGE, 0)) + 1,
        ERASED_VERSIONS: [*manifest.lineage.get(ERASED_VERSIONS, []), manifest.version],
    }  # fmt: skip
    after = replace(manifest, files=entries, lineage=lineage)
    if manifest.retrieval is not None and row_id is not None:
        after = _without_item(target, folder, below, files, after)
    check_still_signed(os.path.join(path, MANIFEST))
    storage.publish_text(os.path.join(folder.staged, below, MANIFEST), after.to_text())
    _erase_from_deltas(target, folder, below, deltas, manifest, after, row_id, unknown)
    return True


def _erase_from_model(
    target: Target, folder: Rewritten, below: str, deltas: str, files: ArtifactFiles, entries: dict[str, FileEntry]
) -> tuple[int | None, dict[int, bytes]]:
    """Erase the value from vocabularies and tables. Return its row, None if it has none, and for each table in which it
    had one the row of unknown values."""
    manifest = files.manifest
    features = {each.name: each for each in manifest.schema.features}
    if target.feature not in features or features[target.feature].hash_size is not None:
        return None, {}  # of hashed ids the model's step or data set, if given, says why
    names = {
        name for name, each in features.items() if target.feature in (name, each.sequence and each.sequence.shares)
    }
    row_id, emptied = None, {}
    for name in sorted(names):
        file = manifest.vocabularies[name]
        vocabulary = files.vocabulary(file)
        at = pc.index(vocabulary["value"], target.value).as_py()
        if at >= 0:
            row_id = int(vocabulary["id"][at].as_py())
            emptied[file] = (vocabulary, at)
    new_values = _added(os.path.join(folder.path, below), folder, deltas, manifest, target)
    row_id = new_values.get(target.feature, row_id)
    if row_id is None:
        return None, {}
    for file, (vocabulary, at) in emptied.items():
        left = pa.concat_tables([vocabulary.slice(0, at), vocabulary.slice(at + 1)])
        if not left.num_rows:  # a vocabulary is never empty
            left = pa.table(
                [pa.array([row_id], pa.int32()), pa.array([target.tombstone(row_id)])], names=["id", "value"]
            )
        entries[file] = write_arrow(folder.new(os.path.join(below, file)), left)
    tables = {
        number: _checked(target, files, number, names)
        for name, number in manifest.features
        if _whole(name, manifest) in names
    }
    unknown = {
        number: _erase_row(target, folder, below, files, table, row_id, entries) for number, table in tables.items()
    }
    return row_id, unknown


def _erase_from_feature_tables(
    target: Target, folder: Rewritten, below: str, files: ArtifactFiles, entries: dict[str, FileEntry]
) -> bool:
    """Remove the rows of the value, and the value from other columns of its feature. Return whether a table had it."""
    found = False
    for key, file in files.manifest.feature_tables.items():
        stored = pa.Table.from_batches([stored_batch(files, key, file)])
        columns = {target.feature, *target.sharing}.intersection(stored.column_names)
        if not any(holds(target, name, stored[name]) for name in columns):
            continue
        table = stored.filter(pc.not_equal(stored[key], target.value)) if key == target.feature else stored
        if not table.num_rows:  # a feature table is never empty
            table = sorted_by_hash(key, pa.array([target.tombstone(0)], pa.large_string()), pa.table({}))
            nothing = [pa.nulls(1, field.type) for field in stored.schema][2:]
            table = pa.table([*table.columns, *nothing], names=stored.column_names)
        for name in columns - {key}:
            table = without_value(target, table, name)
        entries[file] = write_arrow(folder.new(os.path.join(below, file)), table.combine_chunks(), is_mapped=True)
        found = True
    return found


def _whole(feature: str, manifest: Manifest) -> str:
    """Return the feature itself, or the sequence of which `feature` is a position (embeddings/table.py)."""
    return feature if feature in manifest.vocabularies else POSITION.sub("", feature)


def _checked(target: Target, files: ArtifactFiles, number: int, names: set[str]) -> TableFiles:
    table = files.manifest.tables[number]
    others = {_whole(name, files.manifest) for name, own in files.manifest.features if own == number} - names
    composed = files.composed()
    compressed = composed is not None and any(
        each.compression is not None and names & set(each.feature_names) for each in composed.tables
    )
    check_alone(table.name, others, compressed, target.feature)
    return table


def _erase_row(
    target: Target, folder: Rewritten, below: str, files: ArtifactFiles, table: TableFiles, row_id: int,
    entries: dict[str, FileEntry],
) -> bytes:  # fmt: skip
    """Overwrite the row by the row of unknown values. Return the row of unknown values."""
    size = row_bytes(table.dim, table.precision)
    served = files.table(table, verified=True)
    position = row_id if served.kept is None else int(served.kept.remap(np.array([row_id]))[0])
    with VerifiedFile(served.path, files.manifest.files[table.file]) as file:
        unknown = file.read(size)
        if not position:
            return bytes(unknown)
        file.seek(position * size)
        target.add_row(bytes(file.read(size)), bytes(unknown))
    content = np.fromfile(served.path, np.uint8).reshape(-1, size)
    content[position] = np.frombuffer(unknown, np.uint8)
    entries[table.file] = write_blocks(
        folder.new(os.path.join(below, table.file)), np.array_split(content, 1 + content.nbytes // (64 << 20))
    )
    return bytes(unknown)


def _without_item(target: Target, folder: Rewritten, below: str, files: ArtifactFiles, manifest: Manifest) -> Manifest:
    """Remove the item from the catalogue of a retriever, and build its index again."""
    parts = manifest.retrieval
    assert parts is not None
    items = files.vocabulary(ITEM_VALUES) if parts.item_feature == target.feature else None
    at = -1 if items is None else pc.index(items["item"], target.value).as_py()
    if items is None or at < 0:
        return manifest
    if parts.num_items == 1:
        raise EraseError("the value is the only item of a retriever: remove the artifact")
    vectors = np.frombuffer(files.content(ITEM_VECTORS), "<f4").reshape(-1, parts.dim)
    target.add_row(vectors[at].tobytes(), b"")
    vectors = np.delete(vectors, at, axis=0)
    entries = dict(manifest.files)
    entries[ITEM_VECTORS] = write_blocks(folder.new(os.path.join(below, ITEM_VECTORS)), [vectors.tobytes()])
    left = pa.concat_tables([items.slice(0, at), items.slice(at + 1)])
    entries[ITEM_VALUES] = write_arrow(folder.new(os.path.join(below, ITEM_VALUES)), left)
    if ITEM_INDEX in entries:
        known = {
            key: value
            for key, value in manifest.settings.get("retrieval", {}).items()
            if hasattr(RetrievalConfig(), key)
        }
        index = index_class(parts.index).build(vectors, replace(RetrievalConfig(), **known))
        index.write(path := folder.new(os.path.join(below, ITEM_INDEX)))
        entries[ITEM_INDEX] = checksums_of(path)
    return replace(manifest, files=entries, retrieval=replace(parts, num_items=len(vectors)))


def _added(path: str, folder: Rewritten, deltas: str, manifest: Manifest, target: Target) -> dict[str, int]:
    """Return feature -> id of the value, if a delta has given it an id."""
    found = {}
    at = os.path.join(folder.path, deltas)
    for name in committed_names(at, NAME) if os.path.isdir(at) else []:
        delta = read_delta(at, path, manifest, int(name))
        values = values_from_bytes(delta.content(VALUES_FILE), manifest) if VALUES_FILE in delta.files else {}
        for feature, (first, texts) in values.items():
            if feature == target.feature and target.value in texts:
                found[feature] = first + texts.index(target.value)
    return found


def _erase_from_deltas(
    target: Target, folder: Rewritten, below: str, deltas: str, before: Manifest, after: Manifest, row_id: int | None,
    unknown: dict[int, bytes],
) -> None:  # fmt: skip
    """Rewrite the chain of deltas: rows of the value get the unknown row of the artifact. row_id None: no row has it."""
    at = os.path.join(folder.path, deltas)
    if not os.path.isdir(at):
        return
    digest = sealed_digest(os.path.join(folder.staged, below, MANIFEST))
    for name in committed_names(at, NAME):
        delta = read_delta(at, os.path.join(folder.path, below), before, int(name))
        values = open_manifest(os.path.join(delta.path, MANIFEST), Purpose.DELTA, FORMAT_VERSION)
        files: dict[str, Any] = values["files"]
        for change in delta.tables:
            ids = np.frombuffer(delta.content(change.ids), "<u8")
            if change.table not in unknown or not len(own := np.flatnonzero(ids == row_id)):
                continue
            rows = np.frombuffer(delta.content(change.values), np.uint8).reshape(len(ids), -1).copy()
            target.add_row(rows[own[0]].tobytes(), unknown[change.table])
            rows[own] = np.frombuffer(unknown[change.table], np.uint8)
            files[change.values] = write_blocks(folder.new(os.path.join(deltas, name, change.values)), [rows.tobytes()])
        if VALUES_FILE in files and row_id is not None:
            added = values_from_bytes(delta.content(VALUES_FILE), before)
            tombstone = target.tombstone(row_id)
            kept = {
                feature: NewIds(
                    first, [tombstone if feature == target.feature and text == target.value else text for text in texts]
                )
                for feature, (first, texts) in added.items()
            }
            files[VALUES_FILE] = write_blocks(
                folder.new(os.path.join(deltas, name, VALUES_FILE)), [values_to_bytes(kept)]
            )
        values |= {"base_version": after.version, "previous_sha256": digest}
        check_still_signed(os.path.join(delta.path, MANIFEST))
        output = os.path.join(folder.staged, deltas, name, MANIFEST)
        storage.publish_text(output, seal_manifest(values, Purpose.DELTA))
        digest = sealed_digest(output)
