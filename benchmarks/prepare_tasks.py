"""Prepare the same rows in one process by the embedded engine and by the tasks of many machines:  python -m benchmarks.prepare_tasks --source 'rows/*'

Rows are in Criteo's format. Prints CPU-seconds of both, those of each step of the tasks, and the ratio, in alternating rounds: what
the tasks do is compared without a cluster, and on a machine that does other things too. Both data sets must have equal bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.config.data import DataConfig
from pipeline.data.dataset import Dataset
from pipeline.data.prepare.distributed.engine import Item, Result, SerialEngine
from pipeline.data.prepare.distributed.prepare import prepare_distributed
from pipeline.data.prepare.distributed.recipe import Recipe, make_recipe
from pipeline.data.prepare.prepare import prepare_dataset
from pipeline.data.prepare.resources import Resources
from pipeline.data.raw.source import Source, find_sources


class TimedEngine(SerialEngine):
    """Keeps the CPU-seconds of each step."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.steps: dict[str, float] = {}

    def map(
        self,
        description: str,
        task: Callable[[Recipe, Item], Result],
        items: Sequence[Item],
        sizes: Sequence[float] | None = None,
    ) -> list[Result]:
        began = time.process_time()
        found = super().map(description, task, items, sizes)
        self.steps[description] = time.process_time() - began
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--partitions", type=int, default=2)
    typed = parser.parse_args()
    sources = find_sources(typed.source)
    for number in range(typed.rounds):
        with tempfile.TemporaryDirectory() as top:
            embedded, dataset = _embedded(Path(top), sources)
            tasks, steps, other = _tasks(Path(top), sources, typed.partitions)
            assert dataset.to_json() == other.to_json()
        named = ", ".join(f"{name} {seconds:.2f}" for name, seconds in steps.items())
        print(
            f"round {number + 1}: {dataset.accepted_rows:,} rows, CPU-seconds: embedded {embedded:.2f}, tasks {tasks:.2f} ({named}); "
            f"rows a CPU-second {embedded / tasks:.3f} of the embedded engine's", flush=True,
        )  # fmt: skip


def _embedded(top: Path, sources: list[Source]) -> tuple[float, Dataset]:
    began = time.process_time()
    dataset, _ = prepare_dataset(_config(top / "embedded"), sources, Resources(2 << 30, 1, str(top / "e.staging")))
    return time.process_time() - began, dataset


def _tasks(top: Path, sources: list[Source], partitions: int) -> tuple[float, dict[str, float], Dataset]:
    began = time.process_time()
    recipe = make_recipe(_config(top / "tasks"), sources, Resources(2 << 30, 1, str(top / "t.staging")))
    engine = TimedEngine(recipe)
    dataset, _ = prepare_distributed(recipe, sources, engine, partitions)
    return time.process_time() - began, engine.steps, dataset


def _config(path: Path) -> DataConfig:
    return DataConfig(name="quickstart", path=str(path), format="criteo_tsv")


if __name__ == "__main__":
    main()
