"""Open steps and chains of steps: a base, which is a full step, and links, which hold the rows changed since the step before.

A link's manifest names the step before it and that step's SHA-256. A changed chain is therefore detected:

    "chain": {"base": 100, "base_bytes": ..., "previous": 250, "previous_sha256": "...", "links": 3, "link_bytes": ...}

links: the number of links up to this one; link_bytes: the bytes of the links before it. The extra `differential`
writes links and reads a chain as one step.
"""

from __future__ import annotations

from typing import Any

from pipeline.checkpoint.metadata import TensorsOnlyReader
from pipeline.checkpoint.steps import base_of, is_link, list_steps, read_manifest, step_path
from pipeline.checkpoint.tensors import StepTensors
from pipeline.config.registry import from_extra
from pipeline.runtime.errors import CheckpointError, DamagedError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST, sealed_digest

Manifest = dict[str, Any]


def step_before(path: str, manifest: Manifest) -> str:
    """Return the path of the step that the link at `path` builds on. Raises DamagedError if that
    step is missing, or if the link was written for another step.
    """
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


def open_reader(path: str, manifest: Manifest | None = None) -> TensorsOnlyReader:
    """Return a reader of the step at `path` with all steps that it builds on. Raises DamagedError
    as chain_of does."""
    manifest = manifest or read_manifest(path)
    if not is_link(manifest):
        return TensorsOnlyReader(path, manifest)
    reader: TensorsOnlyReader = from_extra("chain_reader", f"{path}, a step of changed rows,")(chain_of(path, manifest))
    return reader


def open_tensors(path: str, manifest: Manifest | None = None) -> StepTensors:
    """Open the tensors of a step or chain. Raises DamagedError as chain_of does, and
    CheckpointError as StepTensors does.
    """
    return StepTensors(path, open_reader(path, manifest))


def open_step(folder: str, step: int | None) -> tuple[int, dict[str, Any], StepTensors]:
    """Return the number, manifest and tensors of step `step`, or of the newest step whose manifest
    and .metadata can be read if `step` is None. Raises CheckpointError if no such step can be
    read.
    """
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
