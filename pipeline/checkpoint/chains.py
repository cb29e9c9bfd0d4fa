"""Read chains of steps: a base, which is a full step, and links, which hold the rows changed since the step before.

A link's manifest names the step before it and that step's SHA-256. A changed chain is therefore detected:

    "chain": {"base": 100, "base_bytes": ..., "previous": 250, "previous_sha256": "...", "links": 3, "link_bytes": ...}

links: the number of links up to this one; link_bytes: the bytes of the links before it. Readers see a
chain as one step: layers come from the newest link, and tables from the base with the changed rows of
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

from pipeline.checkpoint.changes import Rows
from pipeline.checkpoint.links import LinkChanges, is_change
from pipeline.checkpoint.metadata import TensorsOnlyReader
from pipeline.checkpoint.steps import base_of, is_link, list_steps, read_manifest, step_name, step_path
from pipeline.checkpoint.tensors import StepTensors
from pipeline.runtime.errors import CheckpointError, DamagedError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST, sealed_digest

Manifest = dict[str, Any]


def step_before(path: str, manifest: Manifest) -> str:
    """Return the path of the step that the link at `path` builds on. Raises DamagedError if that
    step is missing, or it is not the step that the link was written for."""
    chain, step = manifest["chain"], int(manifest["step"])
    previous = int(chain["previous"])
    if not chain["base"] <= previous < step:
        raise DamagedError(
            f"{path} names step {previous} as the one before it, of a chain that begins at {chain['base']}"
        )
    before = step_path(storage.dirname(path), previous)
    if sealed_digest(storage.join(before, MANIFEST)) != chain["previous_sha256"]:
        raise DamagedError(f"{path} was written for another step {previous} than the one that is there")
    return before


def chain_of(path: str, manifest: Manifest) -> list[tuple[str, Manifest]]:
    """Return (path, manifest) of a step and of all steps that it builds on, the base first. Raises
    DamagedError if a step of the chain is missing, or its manifest was changed."""
    chain = [(path, manifest)]
    while is_link(chain[0][1]):
        before = step_before(*chain[0])
        chain.insert(0, (before, read_manifest(before)))
    if int(chain[0][1]["step"]) != base_of(manifest):
        raise DamagedError(f"{path} names step {base_of(manifest)} as its base, and its chain begins at {chain[0][0]}")
    return chain


def link_after(path: str, most_links: int, most_bytes: float) -> Manifest | None:
    """Return the chain entry for the manifest of a link after the step at `path`; None if a base is
    due. A base is due after `most_links` links, or if the links hold more than `most_bytes` times
    the base's bytes. Raises DamagedError."""
    manifest = read_manifest(path)
    size = sum(int(entry["size_bytes"]) for entry in manifest["files"].values())
    if is_link(manifest):
        before = manifest["chain"]
        base, base_bytes, links = before["base"], before["base_bytes"], before["links"]
        link_bytes = before["link_bytes"] + size
    else:
        base, base_bytes, links, link_bytes = manifest["step"], size, 0, 0
    if links >= most_links or link_bytes > most_bytes * base_bytes:
        return None
    return {
        "base": base,
        "base_bytes": base_bytes,
        "previous": manifest["step"],
        "previous_sha256": sealed_digest(storage.join(path, MANIFEST)),
        "links": links + 1,
        "link_bytes": link_bytes,
    }


def open_reader(path: str, manifest: Manifest | None = None) -> TensorsOnlyReader:
    """Return a reader of the step at `path` with all steps that it builds on. Raises DamagedError
    as chain_of does."""
    manifest = manifest or read_manifest(path)
    return ChainReader(chain_of(path, manifest)) if is_link(manifest) else TensorsOnlyReader(path, manifest)


def open_tensors(path: str, manifest: Manifest | None = None) -> StepTensors:
    """Open the tensors of a step or chain. Raises DamagedError as chain_of, CheckpointError as
    StepTensors."""
    return StepTensors(path, open_reader(path, manifest))


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


def open_step(folder: str, step: int | None) -> tuple[int, dict[str, Any], StepTensors]:
    """Step `step`, None the newest one whose manifest and .metadata can be read: its number,
    manifest and tensors. Raises CheckpointError if there is no such step, or it cannot be read."""
    steps = list_steps(folder)
    if not steps:
        raise CheckpointError(f"{folder} holds no checkpoint; train first: python -m pipeline train run_dir=... ...")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise CheckpointError(
            f"there is no step {chosen} in {folder}; there are steps {', '.join(map(str, steps)) or 'none'}"
        )
    path = step_path(folder, chosen)
    try:
        return chosen, read_manifest(path), open_tensors(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint {path} cannot be used: {error}; there are steps {steps}") from None
