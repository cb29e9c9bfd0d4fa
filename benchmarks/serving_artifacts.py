"""Make artifacts for benchmarks/serving.py: the real format around untrained weights, of any size, in seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.columns import ColumnsConfig
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.data.prepare.encode import dense_values
from pipeline.data.raw.dense_transforms import Transform
from pipeline.data.read.value_index import index_values
from pipeline.embeddings.table import Table
from pipeline.models.build import build_model
from pipeline.models.dlrm import DLRMConfig
from pipeline.runtime.storage.signature import signing
from pipeline.serving.artifact.dense_export import compile_layers, export_layers, program_bytes, take_collection
from pipeline.serving.artifact.manifest import COMPILED_FILE, DENSE_FILE, Manifest, TableFiles
from pipeline.serving.artifact.quantize import dequantize_rows, quantize_rows, row_bytes
from pipeline.serving.artifact.raw_schema import RawFeature, RawSchema
from pipeline.serving.artifact.writer import library_versions, write_bytes, write_rows
from pipeline.serving.scoring.raw_rows import EncodedRows, RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists, Rows, as_table

NUM_DENSE, NUM_FEATURES, DIM = 13, 26, 64
DENSE = [f"int_{i}" for i in range(NUM_DENSE)]
SPARSE = [f"cat_{i}" for i in range(NUM_FEATURES)]
MODEL = DLRMConfig(kind="dlrm", dense_arch_layer_sizes=[512, 256, DIM], over_arch_layer_sizes=[512, 256, 1])
ROWS_A_BLOCK = 1 << 16


@dataclass(frozen=True)
class Shape:
    """`rows` of each of the 26 tables. Another seed gives other weights, and `bias` is added to all logits."""

    rows: int
    seed: int = 0
    bias: float = 0.0

    def tables(self) -> list[Table]:
        return [
            Table(name, self.rows, DIM, [name], "sum", "fp32", InitConfig(), ConstraintConfig(), [1.0])
            for name in SPARSE
        ]


def write_artifact(
    folder: Path, shape: Shape, precision: str, compiled: bool = False, vocabularies: bool = False, dense: str = "fp32"
) -> Path:
    """`vocabularies`: of the numbers from 1 on, in decimal, each its own id; else ids are hashed, for large tables.

    `compiled`: signed too, because unsigned compiled layers are not loaded.
    """
    with signing(_private_key(folder) if compiled else None):
        return _write_artifact(folder, shape, precision, compiled, vocabularies, dense)


def public_key(artifact: str | Path) -> str:
    return f"{artifact}.pub"


def _private_key(folder: Path) -> str:
    """Make a pair of keys next to the artifact."""
    key, private = Ed25519PrivateKey.generate(), Path(f"{folder}.pem")
    private.parent.mkdir(parents=True, exist_ok=True)
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    content = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    Path(public_key(folder)).write_bytes(content)
    return str(private)


def _write_artifact(folder: Path, shape: Shape, precision: str, compiled: bool, vocabularies: bool, dense: str) -> Path:
    for name in ("tables", "vocabulary"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    files, tables = {}, []
    for number, name in enumerate(SPARSE):
        file = f"tables/{number:05d}.rows"
        files[file] = write_rows(str(folder / file), _blocks(shape, number), precision)
        tables.append(TableFiles(name, shape.rows, shape.rows, DIM, precision, "sum", file))
    program = export_layers(layers_of(shape), dense, NUM_DENSE, NUM_FEATURES * DIM)
    files[DENSE_FILE] = write_bytes(str(folder / DENSE_FILE), program_bytes(program))
    if compiled:
        compile_layers(program, str(folder / "staged.pt2"))
        files[COMPILED_FILE] = write_bytes(str(folder / COMPILED_FILE), (folder / "staged.pt2").read_bytes())
        os.remove(folder / "staged.pt2")
    listed = {}
    if vocabularies:
        table = index_values([(1, values_of(shape.rows))])
        for number, name in enumerate(SPARSE):
            listed[name] = file = f"vocabulary/{number:05d}.arrow"
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            files[file] = write_bytes(str(folder / file), sink.getvalue().to_pybytes())
    hash_size = None if vocabularies else shape.rows
    schema = RawSchema(
        DENSE, [RawFeature(name, shape.rows, False, hash_size=hash_size) for name in SPARSE], "log1p", "|"
    )
    manifest = Manifest(
        lineage={},
        schema=schema,
        tables=tables,
        features=[(name, number) for number, name in enumerate(SPARSE)],
        dense={"precision": dense, "compiled": compiled},
        files=files,
        versions=library_versions(),
        vocabularies=listed,
        lookups={name: zipf_lookups(shape.rows) for name in SPARSE},
    )
    (folder / "manifest.json").write_text(manifest.to_text())
    return folder


def values_of(rows: int) -> list[str]:
    return [str(number) for number in range(1, rows)]


def _blocks(shape: Shape, number: int) -> Iterator[torch.Tensor]:
    """One block of random rows, again and again: what rows hold does not matter here."""
    generator = torch.Generator().manual_seed(NUM_FEATURES * shape.seed + number)
    block = torch.randn(min(shape.rows, ROWS_A_BLOCK), DIM, generator=generator) * 0.1
    for first in range(0, shape.rows, ROWS_A_BLOCK):
        yield block[: min(ROWS_A_BLOCK, shape.rows - first)]


def rows_of_table(shape: Shape, number: int) -> torch.Tensor:
    """As the artifact has them, in fp32."""
    return torch.cat([dequantize_rows(quantize_rows(b, "fp32"), DIM, "fp32") for b in _blocks(shape, number)])


def layers_of(shape: Shape) -> nn.Module:
    model = _model(shape)
    take_collection(model, SPARSE)
    return model.eval()


def _model(shape: Shape) -> nn.Module:
    model = build_model(MODEL, shape.tables(), NUM_DENSE, seed=shape.seed)
    *_, last = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    with torch.no_grad():
        last.bias += shape.bias
    return model


def zipf_lookups(rows: int, exponent: float = 1.05) -> dict[str, object]:
    shares = zipf_shares(rows, exponent)
    ranks = np.unique(np.geomspace(1, rows - 1, 200).astype(np.int64))
    return {"per_row": 1.0, "ranks": ranks.tolist(), "shares": shares[ranks - 1].tolist()}


def zipf_shares(rows: int, exponent: float = 1.05) -> np.ndarray:
    weights = np.arange(1, rows, dtype=np.float64) ** -exponent
    return np.cumsum(weights) / weights.sum()


class Eager(nn.Module):
    """The same model as torch and TorchRec run it without an export: fp32 tables in an EmbeddingBagCollection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = _model(shape)
        for name, parameter in list(self.model.named_parameters()):
            if parameter.is_meta:
                number = SPARSE.index(name.split("embedding_bags.")[1].split(".")[0])
                owner, _, leaf = name.rpartition(".")
                rows = nn.Parameter(rows_of_table(shape, number), requires_grad=False)
                setattr(self.model.get_submodule(owner), leaf, rows)

    @torch.no_grad()
    def forward(self, dense: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.model(dense, KeyedJaggedTensor(SPARSE, values, offsets=offsets)).reshape(-1))


class DictEncoder:
    """The least that turns raw values into ids: a dictionary a feature, missing and unknown values 0, and log1p."""

    def __init__(self, shape: Shape) -> None:
        self._ids = [{value: number for number, value in enumerate(values_of(shape.rows), 1)} for _ in SPARSE]

    def encode(self, rows: ColumnLists) -> EncodedRows:
        dense = np.array(rows.columns[:NUM_DENSE], np.float64)
        dense = np.log1p(np.maximum(np.nan_to_num(dense), 0.0)).astype(np.float32).T.copy()
        ids = [
            known.get(value, 0)
            for known, column in zip(self._ids, rows.columns[NUM_DENSE:], strict=True)
            for value in column
        ]
        ends = torch.arange(len(ids) + 1)
        return EncodedRows(torch.from_numpy(dense), torch.tensor(ids), ends, np.arange(rows.num_rows), [])


class IdEncoder(RowEncoder):
    """Takes the categories for ids: hashing would spread hot rows over a table."""

    def __init__(self, schema: RawSchema) -> None:
        super().__init__(schema, {})

    def encode(self, rows: Rows) -> EncodedRows:
        table = as_table(rows).combine_chunks()
        dense = np.stack([dense_values(table[name], Transform("log1p")) for name in DENSE], axis=1)
        ids = np.concatenate([table[name].cast(pa.int64()).fill_null(0).to_numpy() for name in SPARSE])
        offsets = torch.arange(len(ids) + 1)
        return EncodedRows(torch.from_numpy(dense), torch.from_numpy(ids), offsets, np.arange(len(table)), [])


def table_bytes(shape: Shape, precision: str) -> int:
    return NUM_FEATURES * shape.rows * row_bytes(DIM, precision)


COLUMNS = ColumnsConfig(label="", dense=DENSE, sparse=SPARSE)
