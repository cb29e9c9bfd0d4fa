"""Prepare raw click logs:  python -m pipeline prepare data=criteo_kaggle source=train.txt"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipeline.config.data import SPLITS
from pipeline.config.jobs.prepare import PrepareJob, RayConfig
from pipeline.config.registry import from_extra
from pipeline.config.tables import is_pattern
from pipeline.data.dataset import Dataset
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.prepare.executor import Executor
    from pipeline.data.prepare.recipe import Recipe


@dataclass(frozen=True)
class PrepareSummary:
    path: str
    dataset: Dataset
    already_prepared: bool
    seconds: float
    # about columns that may have been read in an unintended way
    hints: list[str] = field(default_factory=list)


def prepare(job: PrepareJob, constants: Mapping[str, str | None] = MappingProxyType({})) -> PrepareSummary:
    """Prepare. `constants` are the values of columns that a file lacks; None is a missing value.

    Raises DataError if no data set can be made from the source, or job.data.path holds another data
    set.
    """
    # Here, so that a typo in the command fails before pyarrow and DuckDB are imported.
    from pipeline.data.prepare.base_vocabulary import load_base
    from pipeline.data.prepare.executor import LocalExecutor
    from pipeline.data.prepare.given_splits import find_given
    from pipeline.data.prepare.identity import find_prepared
    from pipeline.data.prepare.prepare import prepare_dataset
    from pipeline.data.prepare.recipe import make_recipe
    from pipeline.data.prepare.resources import Resources
    from pipeline.data.raw.layout import with_dense_names
    from pipeline.data.raw.partitions import check_success, with_constants
    from pipeline.data.raw.rows import names_in
    from pipeline.data.raw.source import find_sources

    started = time.monotonic()
    sources = find_given(job.data.split) if job.source is None else find_sources(job.source)
    check_success(sources, job.data.success_file)
    base = None if job.vocabularies is None else load_base(job.vocabularies)
    sources = with_constants(sources, constants)
    if any(map(is_pattern, job.data.columns.dense)):
        job = replace(
            job, data=with_dense_names(job.data, names_in(max(sources, key=lambda each: each.size_bytes), job.data))
        )
    dataset = find_prepared(job.data, sources, base, job.verify_sources)
    if dataset is not None:
        return PrepareSummary(job.data.path, dataset, True, time.monotonic() - started)
    threads = job.threads or (1 if job.engine == "ray" else len(os.sched_getaffinity(0)))
    resources = Resources(int(job.memory_limit_gb * 2**30), threads, staging_folder(job))
    recipe = make_recipe(job.data, sources, resources, base, job.ray.scratch, job.plugins)
    executor = _ray_executor(recipe, job.ray) if job.engine == "ray" else LocalExecutor(recipe)
    dataset, hints = prepare_dataset(recipe, executor)
    return PrepareSummary(job.data.path, dataset, False, time.monotonic() - started, hints)


def _ray_executor(recipe: Recipe, config: RayConfig) -> Executor:
    """Return an executor that runs tasks on Ray. Raises ConfigError if Ray is not installed."""
    try:
        make = from_extra("ray_executor", "engine=ray")
    except ImportError as error:
        raise ConfigError(f"engine=ray needs Ray ({error}): pip install 'torchrec-pipeline[ray]'") from error
    executor: Executor = make(recipe, config)
    return executor


def staging_folder(job: PrepareJob) -> str:
    """Return a folder next to data.path, or in temp_dir; with engine=ray all machines must see it.
    Its name is made from data.path, so a restart finds it.
    """
    from urllib.parse import quote

    from pipeline.runtime.storage import storage
    from pipeline.runtime.storage.private import temporary_folder

    if job.temp_dir is None and (job.engine == "ray" or storage.is_local(job.data.path)):
        return job.data.path.rstrip("/") + ".staging"
    return storage.join(job.temp_dir or temporary_folder(), quote(job.data.path, safe="") + ".staging")


def describe(summary: PrepareSummary) -> str:
    dataset = summary.dataset
    lines = [f"{dataset.name}: {dataset.accepted_rows:,} rows accepted, {dataset.quarantined_rows:,} quarantined"]
    lines += [
        f"  {name:12}{dataset.splits[name].num_rows:>15,} rows{_rate(dataset, name)}{_shared(dataset, name)}"
        for name in SPLITS
    ]
    ids = sum(feature.cardinality for feature in dataset.sparse_features)
    lines.append(
        f"  {len(dataset.dense_features)} dense features, {len(dataset.sparse_features)} sparse with {ids:,} ids"
    )
    if sampling := dataset.negative_sampling:
        lines.append(
            f"  {sampling['dropped_rows']:,} training rows where {sampling['label']} is 0 left out, {sampling['keep']:g} of them kept"
        )
    if dataset.bayes_auc:
        best = ", ".join(f"{name} {value:.4f}" for name, value in dataset.bayes_auc.items())
        lines.append(f"  best possible AUC: {best}")
    if dataset.side_tables:
        lines += from_extra("describe_joins", "data.joins")(dataset)
    if summary.already_prepared:
        lines.append(f"already prepared in {summary.path}: nothing to do")
    else:
        rate = dataset.source_rows / max(summary.seconds, 1e-9)
        lines.append(f"written to {summary.path} in {summary.seconds:.1f} s ({rate:,.0f} rows/s)")
    lines += [f"worth a look: {hint}" for hint in summary.hints]
    return "\n".join(lines)


def _rate(dataset: Dataset, name: str) -> str:
    """Describe the label rate of a split as text; "" if there are no rows, or the main label is not binary."""
    split = dataset.splits[name]
    kind = next(label.kind for label in dataset.all_labels if label.name == dataset.label)
    weighted = "" if split.weighted_rate is None else "weighted "
    return f", {weighted}label rate {split.label_rate:.4f}" if split.num_rows and kind == "binary" else ""


def _shared(dataset: Dataset, split: str) -> str:
    """Describe how many rows of a given split are also in an earlier split."""
    if split not in dataset.shared_rows:
        return ""
    rows, shared = dataset.splits[split].num_rows, dataset.shared_rows[split]
    return f", {shared:,} of them ({shared / rows:.2%}) equal to a row of an earlier split"
