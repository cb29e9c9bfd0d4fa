"""Prepare a window, train a challenger on it and score models.

Every step may be repeated after a kill.

    <run_dir>/work/<window>/<digest of its files>/by-v000003/                its rows with a version's vocabularies
                                                  from-v000003-1a2b3c4d/data, run    the challenger that it makes

Complete results are used again, and a killed step resumes. Only the registry says what is done.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import pipeline
from pipeline.config.data import BaseVocabularyConfig, DataConfig, SplitConfig
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.retraining import GateConfig
from pipeline.config.saved_jobs import load_saved_job
from pipeline.data.dataset import FILE_NAME, load_dataset
from pipeline.data.prepare.base_vocabulary import load_base
from pipeline.data.prepare.encode import features_of
from pipeline.data.prepare.identity import find_prepared
from pipeline.data.prepare.run import prepare
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import find_format, layout_of
from pipeline.data.raw.rows import names_in
from pipeline.data.raw.source import check_unchanged, find_sources
from pipeline.retraining.challenger_job import score_window, train_challenger, train_job
from pipeline.retraining.feature_changes import (
    FeatureChanges,
    LacksColumnError,
    comparable_gate,
    compare,
    only_read,
    source_names,
    view,
)
from pipeline.retraining.gate import Scores
from pipeline.retraining.promotion import FinishedRun, finished_run
from pipeline.retraining.registry import Version
from pipeline.retraining.statistics import WindowStatistics, measure
from pipeline.retraining.windows import Window, extract_rows, file_name, outside_share
from pipeline.retraining.worker_group import WorkerGroup
from pipeline.runtime.errors import CheckpointError, DataError, RetrainingError, did_you_mean
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.serving.artifact.export import ExportSummary, export
from pipeline.serving.artifact.plan import default_output

NOT_TRAINING = ("run_dir", "source", "follow", "stream", "publishing", "registry", "windows", "checks", "gate", "max_catchup", "retry", "strict",
                "memory_limit_gb", "threads", "world_size", "profile", "paths", "logger")  # fmt: skip
NOT_CONFIG = ("run_dir", "source", "follow", "stream", "publishing", "registry", "max_catchup", "retry", "strict", "memory_limit_gb", "threads", "world_size",
              "profile", "paths", "logger")  # fmt: skip
# settings of a window's files
LAYOUT = ("format", "columns", "delimiter", "header", "buckets", "transforms", "group_column")
logger = get_logger("pipeline.retrain")


@dataclass(frozen=True)
class WindowFiles:
    """A window whose files are known: `source` is what prepare reads, `digest` identifies these files.

    `files` are the files with the state (`Source.stamp`) that they had at the start of the window.
    """

    window: Window
    source: str
    digest: str
    folder: str
    files: list[Source]


class WindowRunner:
    """Prepare windows, train challengers and score, below job.run_dir."""

    def __init__(self, job: RetrainJob, group: WorkerGroup) -> None:
        self.job, self._group = job, group
        self._key = hash_of(job, NOT_TRAINING)[:8]

    def place(self, window: Window) -> WindowFiles:
        """Find the window's files. Raises RetrainingError if it has none."""
        source = window.source
        if self.job.windows.kind == "timestamps":
            source = extract_rows(window, self.job.windows, self.job.data, self.folder(window))
        files = find_sources(source)
        named = [[file.name, file.size_bytes, file.digest] for file in files]
        digest, stamps = _hash(named), _hash([*named, *(file.stamp for file in files)])
        # A digest of samples does not notice every change: what was prepared before another is not taken up.
        return WindowFiles(window, source, digest, os.path.join(self.folder(window), stamps), files)

    def folder(self, window: Window) -> str:
        return os.path.join(self.job.run_dir, "work", file_name(window.name))

    def forget(self, window: Window) -> None:
        storage.remove(self.folder(window))

    def by_champion(self, place: WindowFiles, champion: Version) -> str:
        """Prepare the window's rows as the champion reads them, with its vocabularies. Return the folder."""
        return self._under(place, champion.name, champion.data, self.job_of(champion).data, self.job.data)

    def by_challenger(self, place: WindowFiles, name: str, vocabularies: str, champion: Version | None) -> str:
        """Prepare the window's rows as the job reads them, with the vocabularies of a data set. Return the folder."""
        other = self.job_of(champion).data if champion else self.job.data
        return self._under(place, name, vocabularies, self.job.data, other)

    def _under(self, place: WindowFiles, name: str, vocabularies: str, reader: DataConfig, other: DataConfig) -> str:
        target = os.path.join(place.folder, f"by-{name}")
        data, absent = view(reader, other, self.job.data)
        base = BaseVocabularyConfig(vocabularies, frozen=True)
        return self._prepare(place, target, data, target, base, 0.0, absent)

    def job_of(self, champion: Version) -> TrainJob:
        return load_saved_job(TrainJob, champion.config)

    def changes(self, champion: Version) -> FeatureChanges:
        """Return how the features and labels of the job differ from the champion's."""
        return compare(self.job_of(champion), self.job)

    def gate_for(self, champion: Version) -> GateConfig | None:
        """Return the gate on what both models learn and read; None if the champion does not learn the gate's label."""
        return comparable_gate(self.job.gate, self.job_of(champion), self.job)

    def check_added_columns(self, place: WindowFiles, champion: Version) -> None:
        """Raise LacksColumnError if the window lacks a column that the job adds."""
        if find_format(self.job.data.format).columns is not None:
            return
        known = {*source_names(self.job_of(champion).data)}
        added = [name for name in source_names(self.job.data) if name not in known]
        has = {name for file in place.files for name in names_in(file, self.job.data)} if added else set()
        if lacking := [name for name in added if name not in has]:
            raise LacksColumnError(
                f"window {place.window.name} has no column {lacking[0]!r}, which this job adds to what {champion.name}, the "
                f"champion, reads{did_you_mean(lacking[0], has)}: begin with a window that has the column (windows.first=<its time>), "
                "or train the windows before it without the column"
            )

    def challenger_data(self, place: WindowFiles, champion: Version | None) -> str:
        """Prepare the window's rows for training. Vocabularies continue the champion's."""
        decay = self.job.growth.count_decay
        base = BaseVocabularyConfig(champion.data, count_decay=decay) if champion else None
        folder, validation = self.challenger(place, champion), self.job.growth.validation_fraction
        return self._prepare(place, folder, self.job.data, os.path.join(folder, "data"), base, validation)

    def challenger(self, place: WindowFiles, champion: Version | None) -> str:
        return os.path.join(place.folder, f"from-{champion.name if champion else 'scratch'}-{self._key}")

    def _prepare(
        self,
        place: WindowFiles,
        folder: str,
        config: DataConfig,
        target: str,
        base: BaseVocabularyConfig | None,
        validation: float,
        absent: Mapping[str, str | None] = MappingProxyType({}),
    ) -> str:
        """Remove `folder` first if another job or release made its `target`; all below run_dir may be lost.

        Raises:
            SourceChangedError: a file of the window has changed since the window was begun.
        """
        data = replace(config, path=target, split=SplitConfig("row_range", validation, 0.0))
        job = PrepareJob(data, place.source, self.job.memory_limit_gb, self.job.threads, vocabularies=base)
        if is_stale(job):
            logger.warning("%s was prepared by another job or release, and is prepared again", target)
            storage.remove(folder)
        path = prepare(job, absent).path
        check_unchanged(place.files)
        return path

    def check_data_of(self, champion: Version) -> None:
        """Raise UserError if no window can be prepared for the champion, whatever its rows are."""
        data = self.job.data
        load_base(BaseVocabularyConfig(champion.data, frozen=True)).check(features_of(data, layout_of(data)))
        saved = self.job_of(champion).data
        if differing := [name for name in LAYOUT if getattr(data, name) != getattr(saved, name)]:
            raise RetrainingError(
                f"data.{', data.'.join(differing)} of this job differ from the settings of {champion.name}, the champion, and "
                "no row can be read: correct them; data.columns may change (docs/do/change_features.md), if the columns exist"
            )

    def train(self, place: WindowFiles, champion: Version | None) -> FinishedRun:
        """Collective: train the challenger of this window, warm-started from the champion.

        Raises:
            NonFiniteLossError: training on these rows diverged.
            RetrainingError: the job's model differs from the champion's.
        """
        folder = self.challenger(place, champion)
        job = train_job(self.job, os.path.join(folder, "data"), os.path.join(folder, "run"), champion)
        try:
            self._group.run(train_challenger, job)
        except CheckpointError as error:
            # retrain sets these keys itself
            if champion is None or "warm_start." not in str(error):
                raise
            raise RetrainingError(
                f"the job's model cannot continue {champion.name}, the champion: {error}. Instead "
                "of warm_start.*, use growth.dense and growth.reset_optimizer=true; for other "
                "changes restore the job, or give another registry.path, which starts without "
                "versions"
            ) from error
        return finished_run(job.run_dir)

    def score_version(self, version: Version, data: str, gate: GateConfig) -> Scores:
        return self._score(version.config, version.checkpoint, data, gate)

    def score_run(self, run: FinishedRun, data: str, gate: GateConfig) -> Scores:
        return self._score(os.path.join(run.folder, "config.yaml"), run.checkpoint, data, replace(gate, slices={}))

    def _score(self, config: str, checkpoint: str, data: str, gate: GateConfig) -> Scores:
        limits = self.job.trainer.limits()
        propensity = self.job.data.columns.propensity
        return self._group.run(score_window, config, checkpoint, data, gate, self.job.world_size, limits, propensity)

    def export(self, run: FinishedRun, window: str) -> ExportSummary:
        """Export the challenger, which was trained on `window`, and compare the artifact with it.

        Not collective: the other ranks wait.

        Raises:
            RetrainingError: the artifact differs too much from the model, or such a model cannot be exported.
        """
        wanted = self.job.gate.export
        options = {
            item.name: copy.deepcopy(getattr(wanted, item.name)) for item in fields(wanted) if item.name != "enabled"
        }
        job = ExportJob(run.folder, run.manifest["step"], data_path=run.data, **options)
        job.card.window = job.card.window or window
        # Another release does not continue an export that this release has left.
        folder, name = os.path.split(default_output(job, run.manifest["step"]))
        return export(replace(job, output=os.path.join(folder, pipeline.__version__, name)))

    def statistics(
        self,
        place: WindowFiles,
        data: str,
        history: list[tuple[str, WindowStatistics]],
        rejected: dict[str, str],
        champion: Version | None,
    ) -> WindowStatistics:
        """Summarize the window that was prepared in `data`, by the features that the job and the champion read.

        `history` are (name, statistics) of accepted windows, newest first; `rejected` are the sketches
        of rejected windows by name.

        Raises:
            SourceChangedError: a file of the window has changed since the window was begun.
        """
        from pipeline.retraining.row_sketch import RowSketch, sketch_rows

        dataset = only_read(load_dataset(data), self.job.data)
        if champion is not None:
            dataset = only_read(dataset, self.job_of(champion).data)
        found = measure(data, dataset, history[0][1] if history else None)
        sketch = sketch_rows(place.files, self.job.data, self.job.threads or 1)
        share, of = 0.0, ""
        sketches = {name: earlier.sketch for name, earlier in history[: self.job.checks.remember]} | rejected
        for name, earlier in sketches.items():
            common = sketch.share_in(RowSketch.of(earlier))
            share, of = (common, name) if common > share else (share, of)
        outside = outside_share(place.window, self.job.windows, self.job.data)
        check_unchanged(place.files)
        return replace(found, sketch=sketch.text, repeated_share=share, repeated_of=of, outside_share=outside)


def _hash(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def is_stale(job: PrepareJob) -> bool:
    """Return whether the job's output folder has another data set, or a damaged one."""
    if not storage.is_file(storage.join(job.data.path, FILE_NAME)):
        return False
    base = None if job.vocabularies is None else load_base(job.vocabularies)
    try:
        find_prepared(job.data, find_sources(str(job.source)), base)
    except DataError:
        return True
    return False


def hash_of(job: RetrainJob, without: tuple[str, ...]) -> str:
    values: dict[str, Any] = {key: value for key, value in asdict(job).items() if key not in without}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def config_hash(job: RetrainJob) -> str:
    """Return a hash of everything that decides the result of a window."""
    return hash_of(job, NOT_CONFIG)[:16]


def code_version() -> str:
    """Return the release and a hash of the package's sources, which distinguishes two states of a
    checkout.
    """
    root = os.path.dirname(os.path.abspath(pipeline.__file__))
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    digest.update(file.read())
    return f"{pipeline.__version__}+{digest.hexdigest()[:12]}"
