"""Measure the drift of served features and scores as Prometheus metrics:  python -m pipeline serve artifact=A observers.drift.reference=reference.json

`python -m pipeline skew artifact=A reference=reference.json` writes the reference. With
observers.drift.labels=<output of join_labels> the metrics have the label rate and the mean score of
the newest labelled rows too. launch/monitoring/serving_alerts.yml has rules.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from prometheus_client import Gauge

from pipeline.config.registry import register
from pipeline.extras.serving_log.drift import SCORE, Counts, Reference, read_reference
from pipeline.extras.serving_log.join import SUMMARY
from pipeline.runtime.errors import check_above, check_at_least, check_within
from pipeline.runtime.logs import get_logger
from pipeline.serving.http.batching import PREFIX, ServerMetrics
from pipeline.serving.http.observers import Answered
from pipeline.serving.scoring.encoded import features_of

logger = get_logger(__name__)


@register("observer", "drift")
@dataclass
class DriftSettings:
    """share: of the requests that are measured. window_rows: after so many rows the earlier ones count
    half. every_s: between two updates of the metrics.
    """

    reference: str = "???"
    labels: str | None = None
    share: float = 0.1
    window_rows: int = 20_000
    every_s: float = 10.0

    def __post_init__(self) -> None:
        check_within("observers.drift.share", self.share, 0.0, 1.0)
        check_at_least("observers.drift.window_rows", self.window_rows, 100)
        check_above("observers.drift.every_s", self.every_s, 0.0)

    def make(self, metrics: ServerMetrics) -> Drift:
        return Drift(self, read_reference(self.reference), metrics)


class Drift:
    """The observer."""

    def __init__(self, settings: DriftSettings, reference: Reference, metrics: ServerMetrics) -> None:
        self._settings, self._reference = settings, reference
        scores = {} if reference.scores is None else {SCORE: reference.scores}
        self._features, self._scores = Counts(reference.features), Counts(scores)
        self._num_rows, self._updated, self._said = 0, 0.0, ""

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", about, labels, registry=metrics.registry)

        self._psi = gauge("feature_psi", "Drift of a feature from the training split", "feature")
        self._score_psi = gauge("score_psi", "Drift of the scores from those of the training split")
        self._rows = gauge("drift_rows", "Rows that the drift is measured on")
        self._is_own = gauge("drift_reference_is_own", "1 if the reference was made by the artifact that serves")
        trained = gauge("training_label_rate", "Share of positives in the training split")
        trained.set(reference.label_rate)
        self._label_rate = gauge("label_rate", "Share of positives in the newest labelled rows")
        self._mean_score = gauge("labelled_mean_score", "Mean score of the newest labelled rows")
        self._labelled = gauge("labelled_rows", "The newest labelled rows")
        self._joined_at = gauge("labels_joined_timestamp_seconds", "When labels were joined last")

    def wants(self, answered: Answered) -> bool:
        has_rows = not answered.model.retrieves and answered.rows.num_rows > 0
        return has_rows and random.random() < self._settings.share

    def take(self, answered: Sequence[Answered]) -> None:
        for _, group in groupby(answered, lambda each: id(each.model)):
            self._count(list(group))
        if self._num_rows >= self._settings.window_rows:
            self._num_rows //= 2
            self._features.fade(0.5)
            self._scores.fade(0.5)
        if time.monotonic() - self._updated >= self._settings.every_s:
            self._updated = time.monotonic()
            self._update()

    def _count(self, group: Sequence[Answered]) -> None:
        """Count the rows of requests that one model answered, all at once: a call for each request would
        hold the interpreter's lock for too long.
        """
        manifest = getattr(group[0].model.scorer, "manifest", None)
        if manifest is None:
            return
        schema = manifest.schema
        features = features_of([span for each in group for span in each.scored.encoded], len(schema.features))
        for number, name in enumerate(schema.dense):
            self._features.add(name, features.dense[:, number])
        for feature, values in zip(schema.features, features.values, strict=True):
            self._features.add(feature.name, values)
        scores = np.concatenate([each.scored.scores.reshape(each.rows.num_rows, -1)[:, 0] for each in group])
        self._scores.add(SCORE, scores[np.isfinite(scores)])
        self._num_rows += len(features.kept)
        self._is_own.set(group[-1].scored.version.partition("+")[0] == self._reference.version.partition("+")[0])

    def _update(self) -> None:
        self._rows.set(self._num_rows)
        for name, psi in self._features.psi().items():
            self._psi.labels(name).set(psi)
        for psi in self._scores.psi().values():
            self._score_psi.set(psi)
        if self._settings.labels is not None:
            self._read_labels(os.path.join(self._settings.labels, SUMMARY))

    def _read_labels(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
            self._joined_at.set(values["joined_at"])
            self._labelled.set(values["recent_rows"])
            if values["recent_rows"]:
                self._label_rate.set(values["label_rate"])
                self._mean_score.set(values["mean_score"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if str(error) != self._said:
                logger.warning("no labels from %s: %s", path, error)
            self._said = str(error)

    def close(self) -> None:
        """Keep nothing."""
