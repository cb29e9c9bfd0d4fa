"""An observer of answered requests in one file: it writes a line for each, or fails if `fails` is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.registry import register


@register("observer", "line_for_each")
@dataclass
class LineForEach:
    path: str = "???"
    fails: bool = False

    def make(self, metrics: Any) -> LineForEach:
        return self

    def wants(self, answered: Any) -> bool:
        return bool(answered.rows.num_rows)

    def take(self, answered: Sequence[Any]) -> None:
        if self.fails and answered:
            raise ValueError("no line today")
        with open(self.path, "a", encoding="utf-8") as file:
            for each in answered:
                file.write(f"{each.request_id} {each.scored.version} {each.rows.num_rows}\n")

    def close(self) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("end\n")
