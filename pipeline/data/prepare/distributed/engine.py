"""An engine calls the tasks of a preparation; here the one that calls them one after another in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pipeline.data.prepare.distributed.recipe import Recipe
from pipeline.data.prepare.errors import engine_errors
from pipeline.runtime.logs import progress

Item = TypeVar("Item")
Result = TypeVar("Result")


class Engine(Protocol):
    """`num_tasks`: how many tasks run side by side."""

    num_tasks: int

    def map(
        self,
        description: str,
        task: Callable[[Recipe, Item], Result],
        items: Sequence[Item],
        sizes: Sequence[float] | None = None,
    ) -> list[Result]:
        """Of each item, in their order; a task may run more than once. `sizes` are for the progress bar."""


class SerialEngine:
    """Each task in turn, in this process: what the others are compared with."""

    num_tasks = 1

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def map(
        self,
        description: str,
        task: Callable[[Recipe, Item], Result],
        items: Sequence[Item],
        sizes: Sequence[float] | None = None,
    ) -> list[Result]:
        results = []
        with progress(description, sum(sizes or [1.0] * len(items))) as bar:
            for number, item in enumerate(items):
                results.append(run_task(task, self._recipe, item))
                bar.advance(1.0 if sizes is None else sizes[number])
        return results


def run_task(task: Callable[[Recipe, Item], Result], recipe: Recipe, item: Item) -> Result:
    with engine_errors(recipe.resources):
        return task(recipe, item)
