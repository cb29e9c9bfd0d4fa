"""Describe a checkpoint folder without a process group: its steps, whether they are intact, and
their content."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from pipeline.checkpoint.chains import chain_of, open_tensors
from pipeline.checkpoint.owners import check_file
from pipeline.checkpoint.retention import measured_metric, metric_of
from pipeline.checkpoint.steps import file_path, is_link, read_manifest, step_path
from pipeline.checkpoint.tables import describe_dtype, inventory_of_step
from pipeline.checkpoint.tensors import StepTensors
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import damage, size_problem
from pipeline.runtime.storage.manifest import MANIFEST

METRICS = ("ne", "auc", "gauc", "logloss", "calibration", "mse", "r2", "recall_at_10", "mrr")


@dataclass(frozen=True)
class StepSummary:
    """A step in short.

    `problem` is empty if nothing is known to be wrong; `metrics` were measured at this step.
    """

    step: int
    age_s: float | None  # None for an object store, which is not queried
    size_bytes: int = 0
    world_size: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    base: int | None = None  # the full step that it builds on; None: the step is full


def summarize_step(folder: str, step: int) -> StepSummary:
    """Summarize a step by its manifest and the sizes of its files. verify_step reads every byte."""
    path = step_path(folder, step)
    manifest_path = storage.join(path, MANIFEST)
    age = time.time() - os.path.getmtime(manifest_path) if os.path.exists(manifest_path) else None
    try:
        manifest = read_manifest(path)
        size = sum(int(entry["size_bytes"]) for entry in manifest["files"].values())
        found = (size_problem(file_path(path, manifest, name), entry) for name, entry in manifest["files"].items())
        problem = next((text for text in found if text), "")
        names = [name for metric in METRICS for name in manifest.get("metrics") or {} if metric_of(name) == metric]
        metrics = {name: value for name in names if (value := measured_metric(manifest, name)) is not None}
        base = int(manifest["chain"]["base"]) if is_link(manifest) else None
        return StepSummary(step, age, size, int(manifest["world_size"]), metrics, problem, base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return StepSummary(step, age, problem=str(error) or repr(error))


def verify_step(folder: str, step: int) -> str:
    """Return "" for a step that check_step finds intact, otherwise the first problem."""
    try:
        check_step(folder, step)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error) or repr(error)
    return ""


def check_step(folder: str, step: int) -> None:
    """Read every byte of a step and of all steps that it builds on.

    Raises:
        DamagedError: a file differs from its manifest.
        ForeignFileError: another save, step or rank wrote it.
        CheckpointError: .metadata contains more than tensors.
    """
    path = step_path(folder, step)
    for where, manifest in chain_of(path, read_manifest(path)):
        for name, entry in sorted(manifest["files"].items()):
            if problem := damage(file_path(where, manifest, name), entry):
                raise DamagedError(problem)
            check_file(where, manifest, name)
    open_tensors(path)


def describe_step(step: int, manifest: dict[str, Any], tensors: StepTensors) -> list[str]:
    """Return lines about a step: its origin, its plan, and each table with rows, dim, dtype,
    sharding and state."""
    config, plan = manifest.get("config", {}), manifest.get("plan", {})
    data = config.get("data", {})
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    kinds = {table["name"]: table["sharding_type"] for table in plan.get("tables", [])}
    inventory = inventory_of_step(tensors)
    layers = sum(1 for key in inventory.layers if key.startswith("model."))
    lines = [
        f"step {step} of {config.get('name', 'no name')}, saved by {manifest['world_size']} rank(s)",
        f"  plan        {plan.get('planner', 'none')} for {plan.get('hardware', 'no hardware')}",
        f"  config      sha256 {digest[:16]} ({config.get('model', {}).get('kind', 'no model')}, "
        f"{config.get('optimizer', {}).get('sparse', {}).get('name', 'no optimizer')})",
        f"  data set    {data.get('name', 'none')} at {data.get('path', 'nowhere')}, "
        f"sha256 {str(manifest.get('data_order', {}).get('dataset', ''))[:16]}",
        f"  tables      {len(inventory.tables)}, and {layers} dense tensors",
        f"  {'table':<20} {'rows':>14} {'dim':>5} {'dtype':<5} {'sharding':<18} state",
    ]
    for name, table in inventory.tables.items():
        states = ", ".join(
            f"{state} {'a row' if table.is_row_wise(state) else 'an element'} ({describe_dtype(stored.dtype)})"
            for state, stored in sorted(table.states.items())
        )
        lines.append(
            f"  {name:<20} {table.rows:>14,} {table.dim:>5} {describe_dtype(table.dtype):<5} "
            f"{kinds.get(name, 'unknown'):<18} {states or 'none'}"
        )
    return lines
