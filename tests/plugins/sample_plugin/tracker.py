"""A tracker in one file: it appends each line to a text file of the run folder, across resumes."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.registry import register
from pipeline.extras.monitoring.trackers.tracker import Tracker


@register("tracker", "text_file")
class TextFile(Tracker):
    def begin(self) -> None:
        begun = self.begun_run("text_file")
        self._path = Path(self.job.run_dir) / "tracked.txt"
        self._say(f"goes on with {begun}" if begun else f"begins {self.project}")
        self.remember_run("text_file", self.project)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._say(f"{kind} {step} {len(values)}")

    def end(self) -> None:
        self._say("ends")

    def _say(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")
