"""An artifact whose checksums were made anew after its content was changed is one line of error: checksums vouch for no meaning."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage.checksums import checksums_of
from pipeline.runtime.storage.manifest import SEAL, read_sealed, seal_manifest
from pipeline.runtime.storage.signature import Purpose, requiring, signing
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.artifact.manifest import ArtifactError
from pipeline.serving.artifact.writer import write_bytes
from pipeline.serving.scoring.predictor import Predictor
from tests.runtime.test_signature import make_keys
from tests.support.examples import SEED
from tests.support.messages import names

Change = Callable[[dict[str, Any]], object]


def _set(*keys: Any) -> Change:
    """Of nested dicts and lists; the last is the value."""
    *path, last, value = keys

    def change(values: Any) -> None:
        for key in path:
            values = values[key]
        values[last] = value

    return change


def _first_file(key: str, value: object) -> Change:
    return lambda values: values["files"]["dense.pt2"].__setitem__(key, value)


CHANGES: dict[str, Change] = {
    "bags of 10^12": _set("schema", "features", 0, "bag_size", 10**12),
    "bags of -1": _set("schema", "features", 0, "bag_size", -1),
    "bags of true": _set("schema", "features", 0, "bag_size", True),
    "12 dense columns for 13": lambda values: values["schema"]["dense"].pop(),
    "14 dense columns for 13": lambda values: values["schema"]["dense"].append("more"),
    "25 features for 26": lambda values: (values["schema"]["features"].pop(), values["features"].pop()),
    "another table": _set("features", 3, 1, 99),
    "hashed to nothing": _set("schema", "features", 0, "hash_size", 0),
    "no ids": _set("schema", "features", 2, "cardinality", 0),
    "fewer ids than the vocabulary": _set("schema", "features", 20, "cardinality", 2),
    "buckets out of order": _set("schema", "features", 0, "boundaries", [1.0, 1.0]),
    "a transform by nothing": _set("schema", "dense_transform", "sqrt"),
    "std 0": _set("schema", "dense_columns", {"int_0": {"kind": "standardize", "mean": 0.0, "std": 0.0}}),
    "blocks of 0 bytes": _first_file("block_bytes", 0),
    "blocks of text": _first_file("block_bytes", "8"),
    "too few checksums": _first_file("crc32", []),
    "a negative size": _first_file("size_bytes", -1),
    "no files": _set("files", []),
    "lookups out of order": lambda values: next(iter(values["lookups"].values())).update(ranks=[3, 2], shares=[0.1, 0.2]),
    "endless lookups": lambda values: next(iter(values["lookups"].values())).update(per_row=1e999),
    "a lineage that is a list": _set("lineage", []),
    "a dim of text": _set("tables", 3, "dim", "8"),
    "a table's name that is a number": _set("tables", 3, "name", 3),
    "null values that are a text": _set("schema", "null_values", "x"),
    "a separator that is a number": _set("schema", "list_separator", 5),
    "a vocabulary that is a list": _set("vocabularies", "cat_0", []),
    "a transform that is a list": _set("schema", "transforms", [[]]),
    "columns that are lists": _set("schema", "dense_columns", {"int_0": []}),
    "two columns of one name": _set("schema", "dense", 0, "cat_0"),
}  # fmt: skip


@pytest.fixture
def artifact(small_artifact: ExportSummary, tmp_path: Path) -> Path:
    """Links to the files, which tests replace and never write."""
    return Path(shutil.copytree(small_artifact.artifact, tmp_path / "artifact", copy_function=os.link))


def _write(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def _reseal(artifact: Path, change: Change) -> None:
    values = read_sealed(str(artifact / "manifest.json"), None)
    change(values)
    _write(artifact / "manifest.json", seal_manifest(values, Purpose.ARTIFACT).encode())


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_numbers_that_cannot_be_are_one_line(artifact: Path, name: str) -> None:
    _reseal(artifact, CHANGES[name])
    with pytest.raises(ArtifactError):
        Predictor.load(str(artifact))


def test_a_manifest_of_endless_depth_is_one_line(artifact: Path) -> None:
    import hashlib

    text = (artifact / "manifest.json").read_text()
    seal = SEAL.match(text)
    assert seal is not None
    deep = "{" + '\n "deep": ' + "[" * 200_000 + "]" * 200_000 + "," + text[seal.end() :]
    sealed = f'{{\n "sha256": "{hashlib.sha256(deep.encode()).hexdigest()}",{deep[1:]}'
    _write(artifact / "manifest.json", sealed.encode())
    with pytest.raises(DamagedError, match=names("manifest.json cannot be read")):
        Predictor.load(str(artifact))


def _vocabulary(kind: str, table: pa.Table) -> bytes:
    """The bytes of a file whose content is spoilt."""
    ids, values = table["id"].combine_chunks(), table["value"].combine_chunks()
    if kind == "empty":
        table = table.slice(0, 0)
    elif kind == "ids as text":
        table = table.set_column(0, "id", ids.cast(pa.string()))
    elif kind == "ids of 64 bits":
        table = table.set_column(0, "id", ids.cast(pa.int64()))
    elif kind == "a missing id":
        table = table.set_column(0, "id", pa.array([None, *ids.to_pylist()[1:]], ids.type))
    elif kind == "values as lists":
        table = table.set_column(1, "value", pa.array([[each] for each in values.to_pylist()]))
    elif kind == "values in a dictionary":
        table = table.set_column(1, "value", values.dictionary_encode())
    elif kind == "values as numbers":
        table = table.set_column(1, "value", pa.array(range(len(values))))
    elif kind == "a missing value":
        table = table.set_column(1, "value", pa.array([None, *values.to_pylist()[1:]], values.type))
    elif kind == "ids out of range":
        table = table.set_column(0, "id", pa.array([10**6] * len(ids), ids.type))
    elif kind == "one id for all":
        table = table.set_column(0, "id", pa.array([1] * len(ids), ids.type))
    else:
        middle = 0 if kind == "all offsets 0" else 2**30
        last = 0 if kind == "all offsets 0" else values.offset + len(values.buffers()[2])
        offsets = pa.array([0] + [middle] * (len(values) - 1) + [last], pa.int32())
        spoilt = pa.Array.from_buffers(values.type, len(values), [None, offsets.buffers()[1], values.buffers()[2]])
        table = table.set_column(1, "value", spoilt)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    "kind",
    [
        "empty", "ids out of range", "one id for all", "all offsets 0", "offsets out of range", "ids as text",
        "ids of 64 bits", "a missing id", "values as lists", "values in a dictionary", "values as numbers",
        "a missing value",
    ],
)  # fmt: skip
def test_vocabularies_that_cannot_be_are_one_line(artifact: Path, tmp_path: Path, kind: str) -> None:
    values: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())
    name = values["vocabularies"]["cat_20"]
    with pa.ipc.open_file(str(artifact / name)) as file:
        content = _vocabulary(kind, file.read_all())
    _write(artifact / name, content)
    entry = write_bytes(str(tmp_path / "spoilt"), content)
    _reseal(artifact, _set("files", name, entry))
    with pytest.raises(ArtifactError, match="vocabulary"):
        Predictor.load(str(artifact))


def _paths(values: Any, *keys: Any) -> Iterator[tuple[Any, ...]]:
    """Of every value in nested dicts and lists; of long lists the first ones."""
    yield keys
    inner = values.items() if isinstance(values, dict) else enumerate(values[:3]) if isinstance(values, list) else ()
    for key, value in inner:
        yield from _paths(value, *keys, key)


@pytest.mark.campaign
def test_manifests_and_vocabularies_changed_at_random_load_or_are_one_line(artifact: Path, tmp_path: Path) -> None:
    """400 values of a manifest replaced by others, and 200 vocabularies with a few other bytes, all resealed."""
    chance, original = random.Random(8211 + SEED), read_sealed(str(artifact / "manifest.json"), None)
    others = [None, True, -1, 0, 3, 2**63, 10**400, 1.5, "", "x", "../x", [], [[]], ["x"], {}, {"x": 1}, {"x": []}]
    paths, refused = [path for path in _paths(original) if path], 0
    vocabularies = sorted(set(original["vocabularies"].values()))
    for number in range(600):
        values = copy.deepcopy(original)
        if number < 400:
            for _ in range(chance.choice((1, 1, 2))):
                with suppress(LookupError, TypeError):  # another change has taken it away
                    _set(*chance.choice(paths), chance.choice(others))(values)
        else:
            name = chance.choice(vocabularies)
            content = bytearray((artifact / name).read_bytes())
            for _ in range(chance.randrange(1, 4)):
                content[chance.randrange(len(content))] = chance.randrange(256)
            kept, spoilt = (artifact / name).read_bytes(), tmp_path / f"spoilt_{number}"
            values["files"][name] = write_bytes(str(spoilt), bytes(content))
            _write(artifact / name, bytes(content))
        _write(artifact / "manifest.json", seal_manifest(values, Purpose.ARTIFACT).encode())
        try:
            predictor = Predictor.load(str(artifact), memory="mapped")
            assert predictor.version
        except DamagedError:
            refused += 1
        if number >= 400:
            _write(artifact / name, kept)
    assert refused > 300


def test_an_artifact_that_another_key_signed_is_not_loaded_where_a_signature_is_required(
    artifact: Path, tmp_path: Path
) -> None:
    (own, public), (other, _) = make_keys(tmp_path, "own"), make_keys(tmp_path, "other")
    with requiring(public):
        for key in (None, other):
            _sign(artifact, key)
            with pytest.raises(ArtifactError, match="signed"):
                Predictor.load(str(artifact))
        _sign(artifact, own)
        assert Predictor.load(str(artifact)).version
    assert Predictor.load(str(artifact)).version


def _sign(artifact: Path, key: str | None) -> None:
    values = _unsealed(artifact)
    with signing(key):
        values["files"] = {name: checksums_of(str(artifact / name)) for name in values["files"]}
        _write(artifact / "manifest.json", seal_manifest(values, Purpose.ARTIFACT).encode())


def _unsealed(artifact: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())
    return {name: value for name, value in values.items() if name not in ("sha256", "signature")}
