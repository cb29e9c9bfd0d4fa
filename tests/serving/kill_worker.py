"""An export that is killed where STAGE says:  python -m tests.serving.kill_worker STAGE OVERRIDE ..."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.runtime.storage import atomic, storage
from pipeline.serving.artifact import certificate, reference, writer
from pipeline.serving.artifact import export as verb
from tests.faults.kill_worker import arm

# Stage: whose function, its name, before or after which of its calls.
STAGES: dict[str, tuple[Any, str, str, int]] = {
    "before the folder": (atomic, "remove_abandoned", "before", 1),
    "after the folder": (writer, "ArtifactWriter", "before", 1),
    "before the reference": (reference, "make_reference", "before", 1),
    "in the reference": (reference, "write_rows", "after", 3),
    "before the tables": (writer.ArtifactWriter, "write_tables", "before", 1),
    "in a table": (writer.ChecksummedWriter, "write", "after", 40),
    "after the tables": (writer.ArtifactWriter, "write_tables", "after", 1),
    "in the layers": (writer, "program_bytes", "before", 1),
    "in the vocabularies": (writer, "index_values", "after", 5),
    "before the check": (certificate, "load_parts", "before", 1),
    "after the check": (certificate, "load_parts", "after", 1),
    "before the manifest": (storage, "publish_text", "before", 1),
    "after the manifest": (storage, "publish_text", "after", 1),
    "before the rename": (atomic.os.path, "lexists", "after", 1),
    "after the rename": (atomic.os, "rename", "after", 1),
}
COMMITTED = ("after the rename",)


def run(overrides: list[str], stage: str) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    arm(*STAGES[stage])
    verb.export(load_config(ExportJob, overrides))


if __name__ == "__main__":
    run(sys.argv[2:], sys.argv[1])
