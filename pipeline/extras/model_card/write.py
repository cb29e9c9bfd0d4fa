"""Write the model card of an artifact at the end of its export, from the manifest and the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.serving import CardConfig
from pipeline.data.dataset import Dataset
from pipeline.extras.model_card.card import (
    Label,
    Metric,
    ModelCard,
    Source,
    SplitRows,
    TrainingData,
    read_card,
)
from pipeline.extras.model_card.markdown import to_markdown
from pipeline.serving.artifact.manifest import CARD_FILES, Manifest
from pipeline.serving.artifact.raw_schema import ROW_ZERO
from pipeline.serving.artifact.trained_step import TrainedStep
from pipeline.serving.artifact.writer import ArtifactWriter

MAX_NAMED = 5


def describe_artifact(job: ExportJob, step: TrainedStep, manifest: Manifest, writer: ArtifactWriter) -> None:
    """Write card.json and card.md."""
    as_json, as_markdown = CARD_FILES
    card = card_of(manifest, job.card, step)
    text = card.to_json()
    read_card(text, as_json)  # what is written follows the schema
    writer.add_bytes(as_json, text.encode())
    writer.add_bytes(as_markdown, to_markdown(card).encode())


def card_of(manifest: Manifest, config: CardConfig, step: TrainedStep | None = None) -> ModelCard:
    """Return the card. Without the step it has only what the manifest has, for an artifact that was
    exported without a card."""
    lineage, certificate = manifest.lineage, manifest.certificate
    precisions = [table.precision for table in manifest.tables]
    labels = [Label(task.name, task.kind) for task in manifest.tasks] or None
    if step is not None:
        labels = [Label(target.name, target.kind) for target in step.targets]
    return ModelCard(
        name=lineage.get("name"),
        artifact=manifest.version,
        model=None if step is None else step.job.model.kind,
        labels=labels,
        license=config.license,
        contact=config.contact,
        intended_use=config.intended_use,
        data=_data(lineage, config, None if step is None else step.dataset),
        tables={name: precisions.count(name) for name in sorted(set(precisions))},
        num_rows=sum(table.stored_rows for table in manifest.tables),
        size_bytes=manifest.size_bytes,
        layers=manifest.dense["precision"],
        calibration=_calibration(certificate),
        metrics=_metrics(certificate),
        parity=_parity(certificate),
        limits=[*_limits(manifest, config, step), *config.limits],
        lineage={
            **{key: value for key, value in lineage.items() if key not in ("name", "dataset", "dataset_sha256")},
            **({} if step is None else _start(step)),
            "signed": bool(manifest.settings.get("signed")),
            **{f"{name}_version": version for name, version in manifest.versions.items()},
        },
    )


def _start(step: TrainedStep) -> dict[str, str]:
    """Return what the training started from, and the metric by which the step was chosen."""
    start = step.job.warm_start
    origin = "fresh weights" if start is None else str(start.run or start.checkpoint)
    return {"started_from": origin, **({"best_by": step.best_by} if step.best_by else {})}


def _data(lineage: Mapping[str, Any], config: CardConfig, dataset: Dataset | None) -> TrainingData:
    name, digest = lineage.get("dataset"), lineage.get("dataset_sha256")
    if dataset is None:
        return TrainingData(name, digest, config.window, None, None, None)
    sources = [
        Source(str(each["path"]), each.get("num_rows"), each.get("size_bytes"), each.get("sha256"))
        for each in dataset.sources
    ]
    splits = {split: SplitRows(each.num_rows, each.label_rate) for split, each in dataset.splits.items()}
    return TrainingData(name, digest, config.window, sources or None, splits, dataset.quarantined_rows)


def _calibration(certificate: Mapping[str, Any]) -> str:
    if (found := certificate.get("calibration")) is None:
        return "none"
    by = f" by {found['by']}" if found["by"] else ""
    return f"{found['kind']}{by}, fitted on {found['rows']:,} validation rows"


def _metrics(certificate: Mapping[str, Any]) -> list[Metric]:
    found = [Metric(**each) for metrics in certificate.get("measures", {}).values() for each in metrics]
    for label, about in certificate.get("calibration", {}).get("labels", {}).items():
        for split, pair in about["splits"].items():
            rows = certificate["splits"][split]["rows"]
            for name, each in zip(("ece", "ece after calibration"), pair, strict=True):
                interval = each["ece"], each["ece_low"], each["ece_high"]
                found.append(Metric(name, split, label, None, rows, *interval))
    for split, about in certificate.get("splits", {}).items():
        for name, value in about.get("artifact", {}).items():  # recall of a two-tower
            found.append(Metric(name, split, None, None, about["rows"], value, None, None))
    return found


def _parity(certificate: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return split -> the numbers of the certificate that compare the artifact with its model."""
    return {
        split: {
            name: value
            for name, value in about.items()
            if isinstance(value, int | float) and (name == "rows" or name.endswith(("_delta", "_difference")))
        }
        for split, about in certificate.get("splits", {}).items()
    }


def _limits(manifest: Manifest, config: CardConfig, step: TrainedStep | None) -> list[str]:
    """Return the limits that the manifest and the data set state."""
    found = [_window_limit(config)]
    unknown = {name: about[ROW_ZERO] for name, about in manifest.lookups.items() if ROW_ZERO in about}
    if unknown:
        worst = sorted(unknown, key=lambda name: -unknown[name])[:MAX_NAMED]
        shares = ", ".join(f"{name} {100 * unknown[name]:.1f} %" for name in worst)
        found.append(
            f"Values that the vocabularies of {len(unknown)} features do not have share one row per feature. Share of "
            f"such and missing values among the validation rows, highest first: {shares}."
        )
    if hashed := [feature.name for feature in manifest.schema.features if feature.hash_size is not None]:
        found.append(f"Values of {_named(hashed)} are hashed, so different values can share a row.")
    if step is not None:
        found += _admission(step.dataset)
    pruned = sum(table.rows - table.stored_rows for table in manifest.tables)
    if pruned:
        found.append(f"{pruned:,} rows of tables are left out (pruning); their values count as unknown.")
    max_rows = manifest.settings.get("parity", {}).get("max_rows")
    if max_rows is not None:
        found.append(f"The metrics use the first {max_rows:,} rows of a split at most.")
    split = manifest.certificate.get("splits", {}).get("validation", {})
    if "max_score_difference" in split:
        found.append(
            f"On {split['rows']:,} validation rows the artifact's score of a row differs from the trained model's by at "
            f"most {split['max_score_difference']:.2g}, on average by {split['mean_score_difference']:.2g}."
        )
    if manifest.retrieval is None and "calibration" not in manifest.certificate:
        found.append("The scores are not calibrated after the training.")
    return found


def _window_limit(config: CardConfig) -> str:
    if config.window is None:
        return "The time of the training rows is not known."
    return f"The model was trained on the window {config.window}. How good it is on later rows is not known."


def _admission(dataset: Dataset) -> list[str]:
    """Return which values had too few rows to get an id."""
    ids, found = dataset.recipe.get("ids", {}), []
    if (least := ids.get("min_frequency", 1)) > 1:
        found.append(f"A value in fewer than {least:,} training rows has no row of its own.")
    if ids.get("max_size"):
        found.append(f"A feature has rows for its {ids['max_size']:,} most frequent values at most.")
    if own := sorted(dataset.recipe.get("feature_ids", {})):
        found.append(f"{_named(own)} have their own rules (data.feature_ids) for which values get a row.")
    if dataset.negative_sampling:
        keep = dataset.negative_sampling.get("keep")
        found.append(f"The training rows have a share of {keep} of the negative rows (negative sampling).")
    return found


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
