"""A stream of generated windows, faults to plant in it, and a job whose model trains in a second."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from pipeline.cli.command_line import load_config
from pipeline.config.generated import SyntheticConfig
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.data.generate.synthetic import write_source
from pipeline.data.raw.formats.criteo_tsv import NUM_DENSE
from pipeline.data.raw.source import TEACHER_SUFFIX

BATCH = 128
FILE = "clicks.tsv"
# The fewer clicks, the more rows it takes to tell a calibration; windows of 30,000 rows want as many clicks as non-clicks.
LABEL_RATE = 0.5
JOB_WORDS = [
    "experiment=quickstart",
    "hardware=cpu",
    f"trainer.global_batch_size={BATCH}",
    "trainer.evaluate_batch_size=1024",
    "tables.default.embedding_dim=4",
    "model.dense_arch_layer_sizes=[16,4]",
    "model.over_arch_layer_sizes=[16,1]",
    "optimizer.sparse.lr=0.2",
    "optimizer.dense.lr=0.01",
    "data.ids.min_frequency=50",
    "data.rows_per_row_group=1024",
    "threads=1",
    "windows.lateness_hours=0",
]


def window_name(number: int) -> str:
    return f"dt=2026-11-{number:02d}"


def write_window(
    source: Path, number: int, rows: int, *, drift: float = 0.0, churn: float = 0.0, draw: int = 0, whole: bool = True
) -> Path:
    """Window `number` of a stream; another `draw` has other rows of the same kind. whole=False leaves _SUCCESS out."""
    folder = source / window_name(number)
    folder.mkdir(parents=True, exist_ok=True)
    config = SyntheticConfig(
        num_rows=rows,
        window=number + 1000 * draw if not drift else number,
        drift=drift,
        churn=churn,
        positive_rate=LABEL_RATE,
    )
    write_source(config, str(folder / FILE), 1)
    os.remove(folder / (FILE + TEACHER_SUFFIX))
    if whole:
        (folder / "_SUCCESS").touch()
    return folder


def job(folder: Path, *overrides: str, source: Path | None = None) -> RetrainJob:
    """Everything below `folder`, but for a source elsewhere."""
    places = [
        f"source={source or folder / 'source'}",
        f"run_dir={folder / 'work'}",
        f"registry.path={folder / 'registry'}",
    ]
    words = [*places, *JOB_WORDS, *overrides]
    return load_config(RetrainJob, words)


def plant(fault: str, folder: Path, earlier: Path, seed: int = 0) -> None:
    """Change the window in `folder`; `earlier` is one of the windows before it.

    flipped labels: of 10 % of the rows. zeroed N: column N (label excluded) is empty, a count 0. stale: the rows of
    `earlier`; stale shuffled: in another order. half: every other row is missing.
    """
    random = np.random.default_rng(seed)
    path = folder / FILE
    lines = path.read_text().splitlines()
    kind, _, detail = fault.partition(" ")
    if kind == "flipped":
        chosen = random.random(len(lines)) < 0.1
        lines = [
            ("1" if line[0] == "0" else "0") + line[1:] if flip else line
            for line, flip in zip(lines, chosen, strict=True)
        ]
    elif kind == "zeroed":
        lines = [_zeroed(line, int(detail)) for line in lines]
    elif kind == "stale":
        lines = (earlier / FILE).read_text().splitlines()
        if detail == "shuffled":
            lines = [lines[index] for index in random.permutation(len(lines))]
    elif kind == "half":
        lines = lines[::2]
    else:
        raise AssertionError(fault)
    path.write_text("\n".join(lines) + "\n")


def _zeroed(line: str, column: int) -> str:
    cells = line.split("\t")
    cells[1 + column] = "0" if column < NUM_DENSE else ""
    return "\t".join(cells)
