"""Copy an artifact and change one part of it."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from pipeline.data.read.value_index import index_values
from pipeline.extras.score_calibration.calibration import Calibration
from pipeline.extras.score_calibration.curves import Curve, Curves
from pipeline.runtime.storage.checksums import write_blocks
from pipeline.serving.artifact.manifest import CALIBRATION_FILE, DENSE_FILE, read_manifest
from pipeline.serving.artifact.quantize import dequantize_rows, quantize_rows, row_bytes
from pipeline.serving.artifact.writer import write_arrow
from pipeline.serving.scoring.artifact_files import ArtifactFiles
from pipeline.serving.scoring.dense_program import load_program


class Planted:
    """A copy of `artifact` in `folder`, changed by one of the methods, which return the name of the changed part."""

    def __init__(self, artifact: Path, folder: Path, seed: int) -> None:
        shutil.copytree(artifact, folder)
        self.folder, self.draw = folder, np.random.default_rng(seed)
        self.manifest = read_manifest(str(artifact))
        self.files = ArtifactFiles(str(artifact), self.manifest, verify=True)
        features = self.manifest.features
        self.feature, self.number = features[int(self.draw.integers(len(features)))]
        self.table = self.manifest.tables[self.number]

    def move_all_rows_a_little(self) -> None:
        """Move all numbers of all tables by about a fiftieth of their spread, as a training would."""
        own = self.feature, self.number, self.table
        for number, table in enumerate(self.manifest.tables):
            self.number, self.table = number, table
            rows = self.floats()
            noise = torch.from_numpy(self.draw.normal(0, 0.02, rows.shape).astype(np.float32)) * rows.std()
            self.write_rows(rows + noise, self.table.precision)
        self.feature, self.number, self.table = own

    def table_rows(self) -> str:
        rows = self.floats()
        chosen = torch.from_numpy(self.draw.random(len(rows)) < 0.5)
        noise = torch.from_numpy(self.draw.normal(0, 1, rows.shape).astype(np.float32)) * rows.std()
        self.write_rows(torch.where(chosen[:, None], rows + noise, rows), self.table.precision)
        return f"rows of {self.feature}"

    def one_row(self, row: int) -> None:
        rows = self.floats()
        rows[row] += 3 * rows.std() * torch.from_numpy(self.draw.choice([-1.0, 1.0], rows.shape[1]).astype(np.float32))
        self.write_rows(rows, self.table.precision)

    def quantizer(self) -> str:
        self.write_rows(self.floats(), "int2")
        return f"quantizer of {self.feature}"

    def vocabulary(self) -> str:
        """Exchange the ids of values: most are exchanged, and the rows stay."""
        file = self.manifest.vocabularies[self.feature]
        known = self.files.vocabulary(file).sort_by("id")
        values = known["value"].to_pylist()
        moved = np.flatnonzero(self.draw.random(len(values)) < 0.6)
        for at, other in zip(moved, self.draw.permutation(moved), strict=True):
            values[at] = known["value"][int(other)].as_py()
        ids = known["id"].to_numpy()
        os.remove(self.folder / file)
        assert ids.tolist() == list(range(1, len(ids) + 1))
        self.seal(file, write_arrow(str(self.folder / file), index_values([(1, values)])))
        return f"vocabulary of {self.feature}"

    def layer(self) -> str:
        """Change one tensor of the layers, in the archive."""
        content = (self.folder / DENSE_FILE).read_bytes()
        program = load_program(content, DENSE_FILE)
        wide = [number for number, each in enumerate(program.constants) if each.dim() > 1 and each.is_floating_point()]
        number = wide[int(self.draw.integers(len(wide)))]
        wanted = program.constants[number].contiguous().numpy().tobytes()
        new = program.constants[number] * (
            1 + 0.5 * torch.from_numpy(self.draw.normal(0, 1, program.constants[number].shape)).float()
        )
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
            for member in old.infolist():
                own = old.read(member)
                archive.writestr(member, new.numpy().tobytes() if own[: len(wanted)] == wanted else own)
        os.remove(self.folder / DENSE_FILE)
        self.seal(DENSE_FILE, write_blocks(str(self.folder / DENSE_FILE), [out.getvalue()]))
        return f"layers of {program.sources[number].rpartition('.')[0]}"

    def calibration(self) -> str:
        """Add a calibration: a line over the logits, whose slope and height are drawn."""
        sign, slope = float(self.draw.choice([-1.0, 1.0])), float(self.draw.uniform(0.7, 1.3))
        line = Curves(Curve([0.0], [sign * float(self.draw.uniform(0.5, 1.5))], slope), {})
        content = Calibration("platt", None, [line], self.manifest.schema).to_bytes()
        self.seal(CALIBRATION_FILE, write_blocks(str(self.folder / CALIBRATION_FILE), [content]))
        return "calibration"

    def floats(self) -> torch.Tensor:
        size = row_bytes(self.table.dim, self.table.precision)
        rows = torch.from_numpy(np.fromfile(self.folder / self.table.file, np.uint8).reshape(-1, size))
        return dequantize_rows(rows, self.table.dim, self.table.precision)

    def write_rows(self, rows: torch.Tensor, precision: str) -> None:
        os.remove(self.folder / self.table.file)
        entry = write_blocks(str(self.folder / self.table.file), [quantize_rows(rows, precision).contiguous().numpy()])
        tables = list(self.manifest.tables)
        tables[self.number] = replace(self.table, precision=precision)
        self.seal(self.table.file, entry, tables=tables)

    def seal(self, name: str, entry: dict[str, object], **values: object) -> None:
        self.manifest = replace(self.manifest, files={**self.manifest.files, name: entry}, **values)  # type: ignore[arg-type]
        (self.folder / "manifest.json").write_text(self.manifest.to_text())


def with_flipped_labels(rows: pa.Table, label: str, column: str, value: str) -> pa.Table:
    """Exchange the labels of a slice."""
    labels = rows[label].to_numpy().astype(np.float64)
    own = np.array([str(each) == value for each in rows[column].to_pylist()])
    labels[own] = 1 - labels[own]
    return rows.set_column(rows.column_names.index(label), label, pa.array(labels))
