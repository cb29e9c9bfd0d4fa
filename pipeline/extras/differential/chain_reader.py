"""Read a chain of steps as one step: layers come from the newest link, and tables from the base with the changed rows of
each link written over them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from pipeline.checkpoint.chains import Manifest, chain_of
from pipeline.checkpoint.changes import Rows
from pipeline.checkpoint.metadata import TensorsOnlyReader
from pipeline.checkpoint.steps import step_name
from pipeline.checkpoint.tensors import StepTensors
from pipeline.extras.differential.links import LinkChanges, is_change
from pipeline.runtime.errors import CheckpointError, DamagedError
from pipeline.runtime.storage import storage


class _ChainFiles(FileSystem):
    """The files of several steps, addressed by <folder of the step>/<file>."""

    def __init__(self, readers: dict[str, TensorsOnlyReader]) -> None:
        self._readers = readers

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        where = Path(path)
        with self._readers[where.parent.name].fs.create_stream(where.name, mode) as stream:
            yield stream


class ChainReader(TensorsOnlyReader):
    """Reads a link like a full step. Raises the errors of TensorsOnlyReader."""

    def __init__(self, chain: list[tuple[str, Manifest]]) -> None:
        super().__init__(*chain[-1])
        self._readers = [TensorsOnlyReader(*one) for one in chain]
        self._changes: list[LinkChanges] = []
        self.fs = _ChainFiles({_folder(reader): reader for reader in self._readers})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the chain as one step: tables from its base, everything else from
        its newest link. Raises DamagedError if a link changes a table that the base does not hold."""
        if self._metadata is None:
            parts = [reader.read_metadata() for reader in self._readers]
            self._changes = [LinkChanges(StepTensors(reader.step_path, reader)) for reader in self._readers[1:]]
            base, newest = parts[0], parts[-1]
            layers = {key: entry for key, entry in newest.state_dict_metadata.items() if not is_change(key)}
            tables = {key: entry for key, entry in base.state_dict_metadata.items() if key not in layers}
            owners = {**dict.fromkeys(tables, 0), **dict.fromkeys(layers, -1)}
            if unknown := sorted({key for changes in self._changes for key in changes.keys} - tables.keys()):
                raise DamagedError(f"{self.step_path} changes {unknown[0]}, which its base does not hold")
            storage_data = {
                index: replace(place, relative_path=f"{_folder(self._readers[owner])}/{place.relative_path}")
                for owner in (0, -1)
                for index, place in parts[owner].storage_data.items()
                if owners.get(index.fqn) == owner
            }
            merged = Metadata({**tables, **layers}, storage_data=storage_data, storage_meta=StorageMeta())
            self._metadata = merged
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def overlay(self, key: str, offsets: Sequence[int], values: torch.Tensor, with_sampled: bool = True) -> None:
        self._readers[0].overlay(key, offsets, values, with_sampled)
        try:
            for changes in self._changes:
                changes.overlay(key, offsets, values)
        except DamagedError:
            raise
        # if an object store does not answer, it is unknown whether the step is damaged
        except CheckpointError as error:
            raise (DamagedError(str(error)) if storage.is_local(self.step_path) else error) from None


def _folder(reader: TensorsOnlyReader) -> str:
    return step_name(reader.manifest["step"])


def rows_changed_since(path: str, manifest: Manifest, save_id: str) -> dict[str, Rows] | None:
    """Return key of weights -> rows that may differ from the step that `save_id` wrote. None if the
    step at `path` does not build on that step, because then any row may differ. Raises DamagedError
    as chain_of does."""
    chain = chain_of(path, manifest)
    before = [number for number, (_, one) in enumerate(chain) if save_id and one.get("save_id") == save_id]
    if not before:
        return None
    found: dict[str, list[Rows]] = {}
    for where, one in chain[before[0] + 1 :]:
        changes = LinkChanges(StepTensors(where, TensorsOnlyReader(where, one)))
        for key in changes.keys:
            found.setdefault(key, []).extend(rows for rows, _ in changes.changed_rows(key))
    return {key: np.unique(np.concatenate(rows)) for key, rows in found.items()}
