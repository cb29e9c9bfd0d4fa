"""A finished run without a training: files that a registry takes for a step, its vocabularies and its config."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.retraining.ledger import PROMOTED, Record
from pipeline.retraining.promotion import Candidate, FinishedRun
from pipeline.retraining.registry import Pointer
from pipeline.runtime.storage.checksums import checksums_of
from pipeline.runtime.storage.manifest import seal_manifest
from pipeline.runtime.storage.signature import Purpose
from tests.support.datasets import described_dataset


def finished(folder: Path, content: bytes = b"weights" * 1000) -> FinishedRun:
    step, data = folder / "checkpoints" / "step_00000007", folder / "data"
    for made in (step, data):
        made.mkdir(parents=True)
    dataset = described_dataset({"cat_0": 10})
    (data / "dataset.json").write_text(dataset.to_json())
    (step / "__0_0.distcp").write_bytes(content)
    (step / ".metadata").write_bytes(b"metadata")
    files = {name: checksums_of(str(step / name)) for name in ("__0_0.distcp", ".metadata")}
    config = {"checkpoint": {}, "data": {"path": str(data)}}
    (folder / "config.yaml").write_text(json.dumps(config))  # YAML as well
    manifest = {
        "format_version": 2,
        "step": 7,
        "attempt": "",
        "files": files,
        "config": config,
        "data_order": {"dataset": dataset.fingerprint()},
    }
    (step / "manifest.json").write_text(seal_manifest(manifest, Purpose.STEP))
    return FinishedRun(str(folder), str(step), str(data), manifest)


def candidate(run: FinishedRun, window: str, parent: str, expected: Pointer | None) -> Candidate:
    record = Record(PROMOTED, window, parent=parent, metrics={"challenger_ne": 0.7, "champion_ne": 0.8})
    return Candidate(run, f"{window}|{parent}", record, expected, {})
