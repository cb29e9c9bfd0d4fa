"""Erase a value from the steps of a run: its row gets the numbers of the unknown value's row, its optimizer state 0.

Only these bytes of a step's files change. Manifests get new checksums, and name the rewritten data set. In a chain of
differential steps each manifest names the SHA-256 of the one before, so all steps of a folder are replaced together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pipeline.checkpoint.chains import open_tensors
from pipeline.checkpoint.metadata import TensorsOnlyReader
from pipeline.checkpoint.owners import HEADER_BYTES
from pipeline.checkpoint.steps import is_link, is_packed, list_steps, read_manifest, step_name, step_path
from pipeline.checkpoint.tables import StoredTable, inventory_of_step
from pipeline.checkpoint.tensors import StepTensors
from pipeline.checkpoint.vocabularies import features_of as features_of_table
from pipeline.config.tables import entry_name
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.read.endless import FILE, Known, from_bytes, to_bytes
from pipeline.extras.differential.links import is_change
from pipeline.extras.differential.packed import PackedFile, PackedWriter
from pipeline.extras.erase.datasets import features_of, id_of
from pipeline.extras.erase.folders import EraseError, Rewritten
from pipeline.extras.erase.target import Target
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import ChecksummedWriter, FileEntry, VerifiedFile, write_blocks
from pipeline.runtime.storage.manifest import MANIFEST, check_still_signed, seal_manifest, sealed_digest
from pipeline.runtime.storage.signature import Purpose

BLOCK_BYTES, HOLE_BYTES = 8 << 20, 4 << 10
REPLICA = re.compile(r"replica_\d+\.")
Patches = dict[str, list[tuple[int, bytes]]]  # file -> (offset in the uncompressed file, new bytes)


def erase_from_steps(
    target: Target, folder: Rewritten, data: Mapping[str, str], known: Mapping[str, Dataset], below: str = ""
) -> list[int]:
    """Erase the value from all steps in the folder `below`. Return the steps that had a row of it.

    data: fingerprint -> folder of a data set, as it was before. known: fingerprint before -> data set after.
    """
    path = os.path.join(folder.path, below)
    digests: dict[int, str] = {}
    changed: list[int] = []
    for step in list_steps(path):
        where = step_path(path, step)
        manifest = read_manifest(where)
        fingerprint = manifest["data_order"]["dataset"]
        name, files = os.path.join(below, step_name(step)), dict(manifest["files"])
        has_row = False
        if fingerprint in data:
            has_row = _erase_rows(target, folder, name, manifest, data[fingerprint])
        elif fingerprint not in {each.fingerprint() for each in known.values()}:
            raise EraseError(
                f"{where} was trained on a data set (fingerprint {fingerprint[:12]}) that is in none of the given folders, "
                "so the row of the value is unknown: add the data set's folder to folders, or remove the step"
            )
        new = known.get(fingerprint)
        if new is not None:
            manifest["data_order"]["dataset"] = new.fingerprint()
        if is_link(manifest) and (previous := int(manifest["chain"]["previous"])) in digests:
            manifest["chain"]["previous_sha256"] = digests[previous]
        if manifest["files"] != files or new is not None or (is_link(manifest) and previous in digests):
            check_still_signed(os.path.join(where, MANIFEST))
            output = os.path.join(folder.staged, name, MANIFEST)
            storage.publish_text(output, seal_manifest(manifest, Purpose.STEP))
            digests[step] = sealed_digest(output)
        changed += [step] if has_row else []
    return changed


def _erase_rows(target: Target, folder: Rewritten, name: str, manifest: dict[str, Any], data: str) -> bool:
    """Rewrite the files of one step. Update the manifest's entries."""
    where, dataset = os.path.join(folder.path, name), load_dataset(data)
    features = features_of(dataset, target.feature)
    if not features:
        return False
    own = next(each for each in features if each.name == target.feature)
    row_id, known = id_of(data, own, target.value), _stream_values(where, manifest)
    added = known.values.get(target.feature, []) if known else []
    if row_id is None and target.value in added:
        row_id = own.cardinality + added.index(target.value)
    waits = known is not None and target.value in known.waiting.get(target.feature, [])  # it has no row yet
    if known is not None and (row_id is not None or waits):
        tombstone = target.tombstone(-1 if row_id is None else row_id)
        values = {key: [tombstone if key == target.feature and each == target.value else each for each in texts]
                  for key, texts in known.values.items()}  # fmt: skip
        waiting = {key: [each for each in texts if key != target.feature or each != target.value]
                   for key, texts in known.waiting.items()}  # fmt: skip
        manifest["files"][FILE] = write_blocks(folder.new(os.path.join(name, FILE)), [to_bytes(Known(values, waiting))])
    if row_id is None:
        return False
    patches = _patches(target, where, manifest, {each.name for each in features}, row_id)
    for file, own_patches in patches.items():
        entry = manifest["files"][file]
        source, output = os.path.join(where, file), folder.new(os.path.join(name, file))
        write = _write_packed if is_packed(manifest) else _write
        manifest["files"][file] = write(source, entry, output, own_patches)
    return bool(patches)


def _stream_values(where: str, manifest: dict[str, Any]) -> Known | None:
    if FILE not in manifest["files"]:
        return None
    with VerifiedFile(os.path.join(where, FILE), manifest["files"][FILE]) as file:
        return from_bytes(file.read())


def _patches(target: Target, where: str, manifest: dict[str, Any], names: set[str], row_id: int) -> Patches:
    """Return the bytes to replace in the files of one step."""
    whole = open_tensors(where, manifest)
    own = StepTensors(where, TensorsOnlyReader(where, manifest)) if is_link(manifest) else whole
    patches: Patches = {}
    for table in inventory_of_step(whole).tables.values():
        of_table = set(features_of_table(manifest["config"], table.name))
        if not of_table & names or row_id >= table.rows:
            continue
        check_alone(table.name, of_table - names, is_compressed(manifest["config"], table.name), target.feature)
        for key, (rows, after) in _targets(whole, table, row_id).items():
            for stored in own.entries:
                if is_change(stored):
                    _patch_link(target, own, stored, key, rows, after, patches)
                elif REPLICA.sub("", stored, count=1) == key:
                    _patch_chunks(target, own, stored, rows, after, patches)
    return patches


def check_alone(table: str, others: Iterable[str], compressed: bool, feature: str) -> None:
    """Raise EraseError if the rows of a table belong to more than one value."""
    if compressed:
        raise EraseError(
            f"table {table!r} of {feature!r} is compressed: several values share its parts, and resetting a part would "
            "change the scores of other values. Remove the value from the raw rows, prepare and train again"
        )
    if others := sorted(others):
        raise EraseError(
            f"the rows of table {table!r} also belong to values of {', '.join(others)}, which share the row: resetting it "
            "would change the scores of other values. Remove the value from the raw rows, prepare and train again"
        )


def is_compressed(config: dict[str, Any], table: str) -> bool:
    tables = config.get("tables", {})
    section = tables.get(entry_name(table)) or tables.get("default") or {}
    return section.get("compression") is not None


def _targets(tensors: StepTensors, table: StoredTable, row_id: int) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Return key -> (rows to replace, their new values [1, dim] or [1])."""
    found = {table.key: ([row_id], tensors.read(table.key, [0, 0], [1, table.dim]))}
    for name, state in table.states.items():
        if not table.is_row_wise(name):
            if tuple(state.shape) == (table.rows, table.dim):
                found[state.key] = [row_id], torch.zeros(1, table.dim, dtype=state.dtype)
            continue
        pieces = [each for each in table.pieces if each.row <= row_id < each.row + each.num_rows]
        rows = sorted({each.state_offset + row_id - each.row for each in pieces})
        if state.shape[0] >= table.rows:
            found[state.key] = rows, torch.zeros(1, dtype=state.dtype)
    return found


def _patch_chunks(
    target: Target, tensors: StepTensors, key: str, rows: list[int], after: torch.Tensor, patches: Patches
) -> None:
    """Add the patches of a tensor that the step stores completely. Rows that were never trained are not stored."""
    for chunk in tensors.chunks(key):
        for row in rows:
            at = row - chunk.offsets[0]
            if not 0 <= at < chunk.sizes[0]:
                continue
            if len(chunk.sizes) > 1 and not tensors.held_rows(key, [row, chunk.offsets[1]], [1, chunk.sizes[1]])[0]:
                continue
            file, begin = tensors.place_of(chunk)
            new = after if len(chunk.sizes) == 1 else after[:, chunk.offsets[1] : chunk.offsets[1] + chunk.sizes[1]]
            before = tensors.read(key, [row, *chunk.offsets[1:]], [1, *chunk.sizes[1:]])
            _add(target, patches, file, begin + at * len(_bytes(new)), before, new)


def _patch_link(
    target: Target, tensors: StepTensors, stored: str, key: str, rows: list[int], after: torch.Tensor, patches: Patches
) -> None:
    """Add the patches of the changed rows that a link stores (extras/differential/links.py)."""
    parts = stored.split("/", 5)
    if len(parts) != 6 or parts[5] != key:
        return
    (count,) = tensors.shape(rows_key := f"changed/{parts[1]}/rows")
    changed = tensors.read(rows_key, [0], [count]).numpy().astype(np.int64) + int(parts[3])
    for at in np.flatnonzero(np.isin(changed, rows)).tolist():
        shape, first = tensors.shape(stored), int(parts[4])
        new = after if len(shape) == 1 else after[:, first : first + shape[1]]
        before = tensors.read(stored, [at, *[0] * (len(shape) - 1)], [1, *shape[1:]])
        for chunk in tensors.chunks(stored):
            if chunk.offsets[0] <= at < chunk.offsets[0] + chunk.sizes[0]:
                file, begin = tensors.place_of(chunk)
                _add(target, patches, file, begin + (at - chunk.offsets[0]) * len(_bytes(new)), before, new)


def _add(target: Target, patches: Patches, file: str, offset: int, before: torch.Tensor, after: torch.Tensor) -> None:
    target.add_row(_bytes(before), _bytes(after))
    patches.setdefault(file, []).append((offset, _bytes(after)))


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _blocks(file: Any, patches: list[tuple[int, bytes]], begin: int = 0) -> Iterator[bytearray]:
    """Yield the bytes of `file` from `begin` on, with the patches."""
    file.seek(begin)
    while block := bytearray(file.read(BLOCK_BYTES)):
        for offset, new in patches:
            low, high = max(offset, begin), min(offset + len(new), begin + len(block))
            if low < high:
                block[low - begin : high - begin] = new[low - offset : high - offset]
        yield block
        begin += len(block)


def _write(source: str, entry: FileEntry, output: str, patches: list[tuple[int, bytes]]) -> FileEntry:
    """Write a file with holes where it is zero: a step of tables in tiers has holes for untrained rows."""
    with VerifiedFile(source, entry) as file, ChecksummedWriter(output) as writer:
        for block in _blocks(file, patches):
            has_values = np.logical_or.reduce(_groups(block), axis=1)
            changes = np.flatnonzero(np.diff(has_values)) + 1
            ends = [*(changes * HOLE_BYTES).tolist(), len(block)]
            for begin, end in zip([0, *ends[:-1]], ends, strict=True):
                if has_values[begin // HOLE_BYTES]:
                    writer.write(memoryview(block)[begin:end])
                else:
                    writer.write_zeros(end - begin)
        writer.close()
        return writer.entry()


def _groups(block: bytearray) -> np.ndarray:
    """Return the bytes as rows of HOLE_BYTES. The last row may have added zeros."""
    return np.frombuffer(block + bytes(-len(block) % HOLE_BYTES), np.uint8).reshape(-1, HOLE_BYTES)


def _write_packed(source: str, entry: FileEntry, output: str, patches: list[tuple[int, bytes]]) -> FileEntry:
    with VerifiedFile(source, entry) as file, ChecksummedWriter(output) as writer:
        writer.write(file.read(HEADER_BYTES))
        packed = PackedWriter(writer)
        for block in _blocks(PackedFile(file, int(entry["size_bytes"]), source), patches, HEADER_BYTES):
            packed.write(block)
        packed.finish()
        writer.close()
        return writer.entry()
