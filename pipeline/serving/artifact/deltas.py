"""Publish and read deltas of an artifact: its layers and the rows that changed, in a chain of folders.

    <deltas>/00000042/manifest.json   base_version, sequence, previous_sha256, step, saved_at, tables, files; sealed
                      00003.ids       rows of table 3, uint64 little-endian, ascending
                      00003.rows      these rows, as the artifact stores rows
                      dense.tensors   all tensors of the layers' program
                      composed.bin, calibration.json   if the artifact has them
    <deltas>/pin.json                 the delta that servers stay at: {"sequence": 41}, and the reason of a gate

<deltas> is versions/vN/deltas in a registry, and <artifact>/deltas for an artifact outside a
registry. Each delta names the SHA-256 of the previous delta, and the first delta names the SHA-256
of the artifact's manifest. So servers apply a delta only to the state that it was made for. A
committed delta is never changed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import torch
from msgspec import Meta

from pipeline.config.registry import from_extra
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.json_values import checked
from pipeline.runtime.storage import signature, storage
from pipeline.runtime.storage.atomic import PublishedFolders, committed_names, published_folders
from pipeline.runtime.storage.checksums import FileEntry, read_verified
from pipeline.runtime.storage.manifest import (
    MANIFEST,
    check_not_removed,
    check_still_signed,
    open_manifest,
    parse_pointer,
    pointer_text,
    sealed_digest,
)
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact.manifest import CALIBRATION_FILE, COMPOSED_FILE, Manifest
from pipeline.serving.artifact.task_quality import Calibration

if TYPE_CHECKING:
    from pipeline.serving.artifact.composed import ComposedTables

FORMAT_VERSION = 1
NAME = re.compile(r"\d{8}")
FOLDER, PIN = "deltas", "pin.json"
LAYERS_FILE, VALUES_FILE = "dense.tensors", "values.json"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int32,
                  torch.int64, torch.bool)
}  # fmt: skip
OF_VERSION = re.compile(r".*/versions/v\d{6,}/artifact")
TABLE_FILE = re.compile(r"\d{5}\.(ids|rows)")
LARGEST = 1e300  # numbers up to it can be added to others
Number = Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]


class NewIds(NamedTuple):
    """New values. The first value has id `first`, and the next values have the following ids."""

    first: int
    values: list[str]


@dataclass(frozen=True)
class TableChange:
    """`rows` changed rows of table number `table`. Their ids and values are in the files `ids` and `values`."""

    table: int
    rows: int
    ids: str
    values: str


@dataclass
class _DeltaValues:
    """The types of the values in a delta's manifest."""

    base_version: str
    sequence: int
    previous_sha256: str
    step: int
    saved_at: Number
    save_id: str
    tables: list[TableChange]
    stats: dict[str, Number | None]
    attempt: str


@dataclass(frozen=True)
class Delta:
    """A delta of the chain. `saved_at`: when its step was saved. `digest`: the SHA-256 that the next delta names."""

    path: str
    sequence: int
    step: int
    saved_at: float
    save_id: str
    tables: list[TableChange]
    files: dict[str, FileEntry]
    stats: dict[str, float]
    digest: str
    below: str = ""

    def content(self, name: str) -> bytes:
        """Return the verified content of a file. Raises DamagedError."""
        return read_verified(storage.join(self.path, self.below, name), self.files[name])

    @property
    def size_bytes(self) -> int:
        return sum(int(entry["size_bytes"]) for entry in self.files.values())


def deltas_folder(artifact: str) -> str:
    """Return the deltas' folder of the artifact at `artifact`. The folder may not exist."""
    artifact = artifact.rstrip("/")
    return storage.join(storage.dirname(artifact) if OF_VERSION.fullmatch(artifact) else artifact, FOLDER)


def delta_folders(folder: str, staging: str = "") -> PublishedFolders:
    return published_folders(folder, NAME, staging=staging)


def name_of(sequence: int) -> str:
    return f"{sequence:08d}"


def newest_sequence(folder: str) -> int:
    """Return the newest delta's number, at most the pinned one; 0 if there is none. Raises OSError, DamagedError."""
    found = {int(name) for name in committed_names(folder, NAME)}
    newest = next(number for number in range(len(found) + 1) if number + 1 not in found)
    if (pinned := pinned_sequence(folder)) is not None:
        return min(newest, pinned)
    if problem := signature.age_problem(folder, newest):
        raise DamagedError(f"the newest delta of {folder} {problem}")
    return newest


def pinned_sequence(folder: str) -> int | None:
    """Return the pinned number, or None. Raises DamagedError if pin() has not written the file."""
    return _read_pin(folder).sequence


@dataclass(frozen=True)
class _Pin:
    """The content of pin.json. `number` increases with every change of a signed pin."""

    sequence: int | None = None
    reason: str = ""
    number: int = 0


def _read_pin(folder: str) -> _Pin:
    path = storage.join(folder, PIN)
    try:
        text = storage.read_text(path)
    except FileNotFoundError:
        check_not_removed(path)
        return _Pin()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path} cannot be read ({error}): pin a sequence again, or remove it") from None
    values = parse_pointer(text, path, Purpose.PIN)
    pinned = checked(values, _Pin, path)
    if "sequence" not in values or (pinned.sequence is not None and pinned.sequence < 0):
        raise DamagedError(f"{path} names sequence {pinned.sequence!r}: pin a sequence again, or remove it")
    return pinned


def pin(folder: str, sequence: int | None, reason: str = "") -> None:
    """Let servers go to delta `sequence` and stay there. None lets servers follow the newest delta again."""
    storage.make_folder(folder)
    content: dict[str, Any] = {"sequence": sequence, **({"reason": reason} if reason else {})}
    path = storage.join(folder, PIN)
    check_still_signed(path)
    if signature.is_signing():
        number = 0
        with suppress(DamagedError):  # a damaged one is replaced
            number = _read_pin(folder).number
        content["number"] = signature.next_number(number)
    storage.publish_text(path, pointer_text(content, Purpose.PIN))


def why_pinned(folder: str) -> str:
    """Return ` (<reason>)`, or an empty text if no reason was given."""
    reason = _read_pin(folder).reason
    return f" ({reason})" if reason else ""


def read_delta(folder: str, artifact: str, manifest: Manifest, sequence: int) -> Delta:
    """Read delta `sequence`. Raises DamagedError if it is damaged, or was made for another artifact or delta."""
    path = storage.join(folder, name_of(sequence))
    values = open_manifest(storage.join(path, MANIFEST), Purpose.DELTA, FORMAT_VERSION)
    found = checked(values, _DeltaValues, storage.join(path, MANIFEST))
    before = storage.join(folder, name_of(sequence - 1)) if sequence > 1 else artifact
    if problem := _problem(values, manifest, sequence):
        raise DamagedError(f"{path} {problem[:500]}")
    if values["previous_sha256"] != sealed_digest(storage.join(before, MANIFEST)):
        raise DamagedError(f"{path} was made for another {'delta' if sequence > 1 else 'artifact'} than {before}")
    signature.accept(folder, sequence)
    stats = {name: math.nan if number is None else number for name, number in found.stats.items()}
    return Delta(
        path, sequence, found.step, found.saved_at, found.save_id, found.tables, values["files"], stats,
        sealed_digest(storage.join(path, MANIFEST)), found.attempt,
    )  # fmt: skip


def _problem(values: dict[str, Any], manifest: Manifest, sequence: int) -> str:
    """Return what does not fit delta `sequence` of the artifact; "" if everything fits."""
    if (values["base_version"], values["sequence"]) != (manifest.version, sequence):
        return (
            f"is delta {values['sequence']} of artifact {values['base_version']}, not {sequence} of {manifest.version}"
        )
    files, wanted = values["files"], {LAYERS_FILE}
    if COMPOSED_FILE in manifest.files:
        wanted.add(COMPOSED_FILE)
    if CALIBRATION_FILE in manifest.files:
        wanted.add(CALIBRATION_FILE)
    if VALUES_FILE in files:
        wanted.add(VALUES_FILE)
    changed = [change["table"] for change in values["tables"]]
    if len(set(map(str, changed))) != len(changed):
        return f"changes a table twice: {str(changed)[:100]}"
    for change in values["tables"]:
        table, rows = change["table"], change["rows"]
        if type(table) is not int or not 0 <= table < len(manifest.tables) or type(rows) is not int or rows < 1:
            return f"changes {str(rows)[:100]} rows of table {str(table)[:100]}"
        names = (
            {change["ids"], change["values"]} if all(type(change[key]) is str for key in ("ids", "values")) else {""}
        )
        if len(names) != 2 or not all(TABLE_FILE.fullmatch(name) and name in files for name in names):
            return f"keeps changes of table {table} in {sorted(map(str, names))}"
        size = manifest.tables[table].size_bytes // manifest.tables[table].stored_rows
        if (files[change["ids"]]["size_bytes"], files[change["values"]]["size_bytes"]) != (8 * rows, size * rows):
            return f"has files of another size than {rows} rows of table {table}"
        wanted |= names
    return "" if wanted == set(files) else f"holds {sorted(files)[:5]}, not {sorted(wanted)[:5]}"


def values_to_bytes(values: Mapping[str, NewIds]) -> bytes:
    return json.dumps({name: [first, own] for name, (first, own) in values.items()}, ensure_ascii=False).encode()


def values_from_bytes(content: bytes, manifest: Manifest) -> dict[str, NewIds]:
    """Return the new values. Raises DamagedError if the content is damaged, or a value has no row."""
    rows = {name: manifest.tables[table].rows for name, table in manifest.features}
    cardinalities = {feature.name: feature.cardinality for feature in manifest.schema.features if not feature.hash_size}
    found = {}
    try:
        for name, (first, values) in json.loads(content).items():
            if type(values) is not list or not all(isinstance(value, str) and value for value in values):
                raise ValueError(f"{name} has values that are no text")
            if len(set(values)) != len(values):
                raise ValueError(f"{name} has a value twice")
            if type(first) is not int or not cardinalities[name] <= first <= first + len(values) <= rows[name]:
                raise ValueError(f"{name} has {len(values)} values from id {first} on, and {rows[name]} rows")
            found[name] = NewIds(first, values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{VALUES_FILE} does not fit the artifact: {str(error)[:200]}") from None
    return found


def tensors_to_bytes(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return a line of JSON with the types and shapes, and after it the numbers of all tensors."""
    about = [{"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape)} for one in tensors]
    numbers = [one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors]
    return b"".join([json.dumps(about).encode(), b"\n", *numbers])


def tensors_from_bytes(content: bytes) -> list[torch.Tensor]:
    """Return the tensors. Raises DamagedError if tensors_to_bytes() has not written the content."""
    line, _, rest = content.partition(b"\n")
    try:
        about = [(DTYPES[one["dtype"]], tuple(one["shape"])) for one in json.loads(line)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"tensors open with no line that describes them: {str(error)[:200]}") from None
    if wrong := [shape for _, shape in about if not all(type(size) is int and size >= 0 for size in shape)]:
        raise DamagedError(f"a tensor has the shape {str(wrong[0])[:100]}")
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in about]
    if sum(sizes) != len(rest):
        raise DamagedError(f"{len(rest)} bytes are no tensors of {sum(sizes)}")
    parts = torch.frombuffer(bytearray(rest), dtype=torch.uint8).split(sizes) if rest else [torch.empty(0)] * len(about)
    return [part.clone().view(dtype).reshape(shape) for part, (dtype, shape) in zip(parts, about, strict=True)]


@dataclass(frozen=True)
class Patch:
    """New rows of a table: `ids` [n] int64 ascending, `rows` [n, row_bytes] uint8 in the format of the table's file."""

    table: int
    ids: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class StagedDelta:
    """A verified delta in memory. It does not serve yet."""

    delta: Delta
    patches: list[Patch]
    constants: list[torch.Tensor]
    composed: ComposedTables | None
    values: dict[str, NewIds] = field(default_factory=dict)  # by feature: those that have ids from now on
    calibration: Calibration | None = None


def stage_delta(artifact: str, manifest: Manifest, sequence: int) -> StagedDelta:
    """Read and verify a delta. Raises DamagedError if it does not follow the artifact, or names missing rows."""
    delta = read_delta(deltas_folder(artifact), artifact, manifest, sequence)
    patches = [_read_patch(delta, change, manifest.tables[change.table].stored_rows) for change in delta.tables]
    constants = tensors_from_bytes(delta.content(LAYERS_FILE))
    composed = None
    if COMPOSED_FILE in delta.files:
        from pipeline.serving.artifact.composed import ComposedTables  # it imports TorchRec

        try:
            composed = ComposedTables.from_bytes(delta.content(COMPOSED_FILE))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise DamagedError(f"{delta.path}: {COMPOSED_FILE} is not of this release ({repr(error)[:200]})") from None
    values = values_from_bytes(delta.content(VALUES_FILE), manifest) if VALUES_FILE in delta.files else {}
    calibration = None
    if CALIBRATION_FILE in delta.files:
        calibration = from_extra("open_calibration", CALIBRATION_FILE)(delta.content(CALIBRATION_FILE), manifest)
    return StagedDelta(delta, patches, constants, composed, values, calibration)


def _read_patch(delta: Delta, change: TableChange, stored_rows: int) -> Patch:
    """Read and check a table's new rows. Ids are compared as unsigned: as int64, an id of 2^63 or more is negative."""
    ids = np.frombuffer(delta.content(change.ids), "<u8")
    if (ids[1:] <= ids[:-1]).any() or int(ids[-1]) >= stored_rows:
        raise DamagedError(
            f"{delta.path}: {change.ids} has ids from {ids.min()} to {ids.max()}, and they must ascend below the "
            f"{stored_rows} rows of table {change.table}; publish the delta again"
        )
    rows = np.frombuffer(bytearray(delta.content(change.values)), np.uint8).reshape(len(ids), -1)
    return Patch(change.table, torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(rows))
