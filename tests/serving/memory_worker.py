"""Export a run in a process of its own, after another to have everything imported, and print the memory that it took."""

from __future__ import annotations

import json
import sys

import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.serving.artifact.export import export
from tests.faults.memory_worker import Peak, resident_bytes


def main(first: str, run: str, output: str) -> None:
    torch.set_num_threads(1)
    words = ["parity.max_rows=2000", "parity.splits=[validation]"]
    export(load_config(ExportJob, [f"run={first}", f"output={output}.first", *words]))
    before, peak = resident_bytes(), Peak()
    peak.start()
    summary = export(load_config(ExportJob, [f"run={run}", f"output={output}", "precision=int8", *words]))
    peak.is_over = True
    peak.join()
    print(json.dumps({"tables": summary.sizes["tables_before"], "grown": peak.highest - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
