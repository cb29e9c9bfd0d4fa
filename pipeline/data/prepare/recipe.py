"""Define what each task of a preparation receives, and commit the files that a task writes.

A task is a function of a Recipe and an item. All files of a task appear in the staging folder at
once. So a task may run twice, even at the same time, and a restart skips finished tasks.
"""

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
from typing import Protocol

import duckdb
import pyarrow as pa

from pipeline.config.data import DataConfig
from pipeline.config.registry import from_extra
from pipeline.data.prepare.base_vocabulary import BaseVocabulary
from pipeline.data.prepare.encode import Features, features_of
from pipeline.data.prepare.identity import recipe_of
from pipeline.data.prepare.resources import Resources
from pipeline.data.prepare.vocabulary import open_engine
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import Layout, layout_of, with_group
from pipeline.runtime.storage import storage

MARK = "done.json"  # the last file of a task's folder: the task's result and the sizes of its files
Json = dict[str, object]


def _ignore(_: float) -> None:
    """Ignore progress, because nothing shows it."""


class RowJoins(Protocol):
    """Adds columns of other tables to rows (data.joins).

    layout: the rows of the source, which lack these columns. sources: the files of the tables. key:
    a hash of them and of the settings.
    """

    layout: Layout
    sources: Sequence[Source]
    key: str

    def features(self, features: Features) -> Features:
        """Return the features with the columns that are stored once."""

    def check(self, names: Sequence[str], schema: pa.Schema | None, path: str) -> None:
        """Raise DataError if the columns of a source do not fit the tables."""

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Return parsed rows with the columns that each row may see."""


@dataclass(frozen=True)
class Recipe:
    """The input of all tasks.

    `resources` belong to one task; all workers see their staging folder. `key` names everything
    that the results depend on, so a restart with other settings reuses no results. `scratch` is a
    folder of each worker's own machine. A task may call `advance` with the part of its size that is
    done.
    """

    config: DataConfig
    sources: Sequence[Source]
    layout: Layout
    features: Features
    resources: Resources
    key: str
    base: BaseVocabulary | None = None
    scratch: str | None = None
    plugins: list[str] = field(default_factory=list)
    advance: Callable[[float], None] = _ignore
    joins: RowJoins | None = None

    def path(self, *names: str) -> str:
        return storage.join(self.resources.staging, *names)


def make_recipe(
    config: DataConfig,
    sources: Sequence[Source],
    resources: Resources,
    base: BaseVocabulary | None = None,
    scratch: str | None = None,
    plugins: Sequence[str] = (),
) -> Recipe:
    """Return the recipe. Raises DataError if data.feature_ids names no categorical column, or `base` does not fit."""
    layout = with_group(layout_of(config), config.group_column)
    features = features_of(config, layout)
    joins: RowJoins | None = from_extra("join_tables", "data.joins")(config, layout) if config.joins else None
    if joins is not None:
        layout, features = joins.layout, joins.features(features)
    if base is not None:
        base.check(features)
    names = [(each.name, each.size_bytes, each.digest, each.split) for each in sources]
    described = [recipe_of(config, base), names, *([joins.key] if joins else [])]
    text = json.dumps(described, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Recipe(config, sources, layout, features, resources, key, base, scratch, list(plugins), joins=joins)


@contextmanager
def scratch_folder(recipe: Recipe) -> Iterator[str]:
    """Create a folder on the local disk, and remove it at the end of the context."""
    staging = recipe.resources.staging
    parent = recipe.scratch or (staging if storage.is_local(staging) else None)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=parent) as folder:
        yield folder


@contextmanager
def task_engine(recipe: Recipe, scratch: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB within the memory of a task; it spills into `scratch`."""
    resources = recipe.resources
    spill = os.path.join(scratch, "spill")
    with closing(open_engine(spill, resources.engine_bytes, resources.engine_threads)) as engine:
        yield engine


def once(recipe: Recipe, path: str, write: Callable[[str], Json]) -> Json:
    """Return the result of `write`, which gets a local folder for the files of `path`.

    `write` is not called if an earlier attempt has finished. All attempts of a task write the same
    bytes, so the first attempt's files stay.
    """
    done = finished(path)
    if done is not None:
        return done
    if storage.is_local(path):
        attempt = f"{path}.attempt-{uuid.uuid4().hex[:8]}"
        os.makedirs(attempt)
    else:
        attempt = tempfile.mkdtemp(prefix="prepare-", dir=recipe.scratch)
    try:
        result = write(attempt)
        names = sorted(os.listdir(attempt))
        sizes = {name: os.path.getsize(os.path.join(attempt, name)) for name in names}
        text = json.dumps({"sizes": sizes, "result": result})
        if storage.is_local(path):
            _commit_local(attempt, path, text)
        else:
            for name in names:
                storage.upload_file(os.path.join(attempt, name), storage.join(path, name))
            storage.publish_text(storage.join(path, MARK), text)
    finally:
        shutil.rmtree(attempt, ignore_errors=True)
    return result


def finished(path: str) -> Json | None:
    """Return the result of the task that wrote `path`.

    Return None if the task has not finished, or if a power failure kept the mark of its end but
    lost some bytes.
    """
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
    storage.publish_text(os.path.join(attempt, MARK), text)  # the last file: all others are there
    try:
        storage.rename(attempt, path)
    except OSError:
        if finished(path) is not None:
            return  # another attempt was first
        shutil.rmtree(path, ignore_errors=True)  # it lost bytes
        storage.rename(attempt, path)


def fetch(path: str, scratch: str) -> str:
    """Return a local path of the file: `path` itself, or the path of a copy in `scratch`."""
    if storage.is_local(path):
        return path
    local = os.path.join(scratch, uuid.uuid4().hex)
    with storage.open_file(path, "rb") as source, open(local, "wb") as copy:
        shutil.copyfileobj(source, copy, storage.CHUNK_BYTES)
    return local
