"""What every task of a preparation by many workers is given, and where it writes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import duckdb

from pipeline.config.data import DataConfig
from pipeline.data.prepare.encode import Features, features_of
from pipeline.data.prepare.identity import recipe_of
from pipeline.data.prepare.resources import Resources
from pipeline.data.prepare.vocabulary import open_engine
from pipeline.data.raw.layout import Layout, layout_of, with_group
from pipeline.data.raw.source import Source
from pipeline.runtime.storage import atomic, storage

MARK = "task.json"  # the last file of a task's folder: what the task returned, and the sizes of its files
ATTEMPT = ".attempt-"
Json = dict[str, object]


@dataclass(frozen=True)
class Recipe:
    """`resources` are those of one task; their staging folder is seen by all workers. `key` names what the results of a split
    depend on, so that a restart with other settings takes nothing over. `scratch`: a folder of each worker's own machine.
    """

    config: DataConfig
    layout: Layout
    features: Features
    resources: Resources
    key: str
    scratch: str | None = None
    plugins: list[str] = field(default_factory=list)

    def path(self, *names: str) -> str:
        return storage.join(self.resources.staging, *names)


def make_recipe(
    config: DataConfig,
    sources: Sequence[Source],
    resources: Resources,
    scratch: str | None = None,
    plugins: Sequence[str] = (),
) -> Recipe:
    """Raises DataError where data.feature_ids names no categorical column."""
    layout = with_group(layout_of(config), config.group_column)
    features = features_of(config, layout)
    return Recipe(config, layout, features, resources, key_of(config, sources), scratch, list(plugins))


def key_of(config: DataConfig, sources: Sequence[Source]) -> str:
    """Of all that the results of tasks depend on, beside the staged files themselves."""
    parts = [recipe_of(config), [(each.name, each.size_bytes, each.digest, each.split) for each in sources]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


@contextmanager
def scratch_folder(recipe: Recipe) -> Iterator[str]:
    """A fresh folder of this machine, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="prepare-", dir=recipe.scratch) as folder:
        yield folder


@contextmanager
def task_engine(recipe: Recipe, scratch: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """A DuckDB within the memory of a task, which spills into `scratch`."""
    resources = recipe.resources
    with closing(
        open_engine(os.path.join(scratch, "spill"), resources.engine_bytes, resources.engine_threads)
    ) as engine:
        yield engine


def once(recipe: Recipe, path: str, write: Callable[[str], Json]) -> Json:
    """What `write` returned, who is given a local folder for the files of `path`; not called where an earlier attempt is whole.

    The folder appears with all its files or not at all. Attempts of one task write the same bytes, so whichever is first
    stays: a task may run twice, also at the same time, and has an effect once.
    """
    done = finished(path)
    if done is not None:
        return done
    if storage.is_local(path):
        attempt = f"{path}{ATTEMPT}{uuid.uuid4().hex[:8]}"
        os.makedirs(attempt)
    else:
        attempt = tempfile.mkdtemp(prefix="prepare-", dir=recipe.scratch)
    try:
        result = write(attempt)
        sizes = {name: os.path.getsize(os.path.join(attempt, name)) for name in sorted(os.listdir(attempt))}
        text = json.dumps({"sizes": sizes, "result": result})
        _commit_local(attempt, path, text) if storage.is_local(path) else _commit_remote(
            attempt, path, text, list(sizes)
        )
    finally:
        shutil.rmtree(attempt, ignore_errors=True)
    return result


def finished(path: str) -> Json | None:
    """What the task of this folder returned; None where none has ended, or a machine that lost power kept the mark and not
    the bytes."""
    mark = storage.join(path, MARK)
    if not storage.is_file(mark):
        return None
    found = json.loads(storage.read_text(mark))
    if storage.is_local(path):
        for name, size in found["sizes"].items():
            file = os.path.join(path, name)
            if not os.path.exists(file) or os.path.getsize(file) != size:
                return None
    result: Json = found["result"]
    return result


def _commit_local(attempt: str, path: str, text: str) -> None:
    atomic.finish_marked_folder(attempt, MARK, text)
    try:
        os.rename(attempt, path)
    except OSError:
        if finished(path) is not None:
            return  # another attempt was first
        shutil.rmtree(path, ignore_errors=True)  # it lost bytes
        os.rename(attempt, path)


def _commit_remote(attempt: str, path: str, text: str, names: list[str]) -> None:
    for name in names:
        storage.upload_file(os.path.join(attempt, name), storage.join(path, name))
    storage.publish_text(storage.join(path, MARK), text)


def fetch(path: str, scratch: str) -> str:
    """A local path of the file: itself, or a copy in `scratch`."""
    if storage.is_local(path):
        return path
    local = os.path.join(scratch, uuid.uuid4().hex)
    with storage.open_file(path, "rb") as source, open(local, "wb") as copy:
        shutil.copyfileobj(source, copy, storage.CHUNK_BYTES)
    return local
