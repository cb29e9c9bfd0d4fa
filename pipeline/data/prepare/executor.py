"""Run the tasks of a preparation in this process, or by another executor (engine=ray)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from pipeline.data.prepare.parallel import map_ordered
from pipeline.data.prepare.recipe import Recipe, finished
from pipeline.data.prepare.resources import engine_errors
from pipeline.runtime.logs import progress
from pipeline.runtime.process.processes import LOCK, only_one_run

Item = TypeVar("Item")
Result = TypeVar("Result")


class Executor(Protocol):
    """Runs tasks.

    `in_order`: an item is started only after the results of all earlier items were yielded.
    """

    in_order: bool

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which tasks run."""

    def map(
        self,
        description: str,
        task: Callable[[Recipe, Item], Result],
        items: Iterable[Item],
        sizes: Sequence[float],
        at_once: int = 1,
    ) -> Iterator[Result]:
        """Yield the result of each item, in the items' order; a task may run more than once.

        `sizes` are the sizes of the items on a progress bar. `at_once` is the number of tasks that
        fit the memory of this process; an executor that starts other processes ignores it.
        """


class LocalExecutor:
    """Run tasks in this process: one after another, or in `at_once` threads."""

    in_order = True

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @contextmanager
    def running(self) -> Iterator[None]:
        """Prevent other processes from using the folder. After a failure only finished tasks keep their files."""
        staging = self._recipe.resources.staging
        os.makedirs(staging, exist_ok=True)
        with only_one_run(staging, "preparing"):
            try:
                yield
            except BaseException:
                with suppress(OSError, ValueError):  # report the failure itself
                    _remove_unfinished(staging)
                raise

    def map(
        self,
        description: str,
        task: Callable[[Recipe, Item], Result],
        items: Iterable[Item],
        sizes: Sequence[float],
        at_once: int = 1,
    ) -> Iterator[Result]:
        with progress(description, sum(sizes)) as bar:

            def run(item_of_size: tuple[Item, float]) -> Result:
                item, size = item_of_size
                done = 0.0

                def advance(part: float) -> None:
                    nonlocal done
                    done += part
                    bar.advance(part)

                result = run_task(task, replace(self._recipe, advance=advance), item)
                bar.advance(size - done)
                return result

            pairs = zip(items, sizes, strict=True)
            yield from map(run, pairs) if at_once == 1 else map_ordered(run, pairs, at_once)


def run_task(task: Callable[[Recipe, Item], Result], recipe: Recipe, item: Item) -> Result:
    with engine_errors(recipe.resources):
        return task(recipe, item)


def _remove_unfinished(staging: str) -> None:
    """Remove everything except the folders of finished tasks. If there is none, remove `staging` too."""
    paths = [os.path.join(staging, name) for name in os.listdir(staging) if name != LOCK]
    results = {path: finished(path) for path in paths}
    # A source without rows is an error; there is nothing of it to reuse.
    kept = [path for path, done in results.items() if done is not None and done.get("num_source_rows", 1)]
    for path in [path for path in paths if path not in kept] if kept else [staging]:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.remove(path)
