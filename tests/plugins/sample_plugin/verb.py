"""Count the rows of a file:  python -m pipeline count_lines plugins=[tests.plugins.sample_plugin] source=rows.jsonrows"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.verb import verb


@dataclass
class CountJob:
    source: str = "???"


def count(job: CountJob) -> int:
    return len(Path(job.source).read_text().splitlines())


main = verb("count_lines", CountJob, describe=lambda lines: f"{lines} lines")(count)
