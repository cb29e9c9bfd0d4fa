"""A generator of raw rows in one file: clicks on a column of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.config.generated import GeneratorConfig
from pipeline.config.registry import register


@register("generator", "counted_rows")
@dataclass
class CountedRows(GeneratorConfig):
    num_rows: int = 10

    def write_source(self, output: str, threads: int | None = None) -> None:
        rows = [f"{number % 2}\t{number}" for number in range(self.num_rows)]
        Path(output).write_text("\n".join(["label\tnumber", *rows, ""]))
