"""Write the files of an artifact from an opened step, and certify them against the trained model."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.registry import from_extra
from pipeline.config.serving import AUTO
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger, progress
from pipeline.serving.artifact.certificate import check, costs, excesses, refusal
from pipeline.serving.artifact.certification_sample import Sample, read_sample
from pipeline.serving.artifact.kept_rows import KeptRows
from pipeline.serving.artifact.manifest import Manifest
from pipeline.serving.artifact.package import (
    ArtifactFolder,
    Packed,
    library_versions,
    lookups_of,
    pack_composed,
    pack_layers,
    pack_tables,
    pack_vocabularies,
    schema_of,
)
from pipeline.serving.artifact.precisions import choose_precisions
from pipeline.serving.artifact.prune import kept_alone, prune_tables
from pipeline.serving.artifact.reference import Reference, make_reference
from pipeline.serving.artifact.source import Source, lineage_of, settings_of
from pipeline.serving.artifact.task_quality import measures

logger = get_logger("pipeline.export")


def make_artifact(job: ExportJob, source: Source, at: ArtifactFolder) -> Manifest:
    """Write everything but the manifest. Raises ServingError where a limit of job.parity is passed."""
    if source.has_towers:
        export_towers = from_extra("export_towers", f"the export of model={source.job.model.kind}")
        manifest: Manifest = export_towers(job, source, at, _samples(job, source))
        return manifest
    trained, packed = source.trained, Packed()
    reference = _make_reference(job, source, at)
    precisions = choose_precisions(reference, job.precision, job.tables, job.ne_budget, job.parity)
    kept = prune_tables(trained, job.pruning)
    pack_tables(packed, at, trained, precisions, kept)
    logger.info("layers     %s, by torch.export%s", job.dense, ", then AOTInductor" if job.compiled else "")
    pack_layers(packed, at, trained, job.dense, job.compiled)
    if trained.composed is not None:
        pack_composed(packed, at, trained.composed)
    pack_vocabularies(
        packed, at, source.dataset, trained.keys, source.data_path, kept_alone(trained, kept), source.new_values
    )
    manifest = Manifest(
        lineage=lineage_of(job, source),
        schema=schema_of(
            source.dataset,
            trained.keys,
            source.job.data.columns,
            source.job.data.synthetic_multi_hot,
            source.new_values,
        ),
        tables=packed.tables,
        features=[(feature.name, feature.table) for feature in trained.features],
        dense=packed.dense,
        files=packed.files,
        vocabularies=packed.vocabularies,
        lookups=lookups_of(source.dataset, source.data_path, source.job.data.synthetic_multi_hot),
        sizes=packed.sizes(trained),
        versions=library_versions(),
        settings=settings_of(job),
        tasks=trained.tasks,
    )
    return _certified(job, reference, manifest, at, kept)


def _samples(job: ExportJob, source: Source) -> dict[str, Sample]:
    """Raises ServingError where there is no row to certify by."""
    data, dataset = source.job.data, source.dataset
    splits = [name for name in job.parity.splits if dataset.splits[name].num_rows]
    if "validation" not in splits:
        raise ServingError(
            f"data set {dataset.name!r} has no validation rows to certify an artifact by: prepare it again with "
            "data.split.validation_fraction above 0"
        )
    samples = {}
    with progress("reading rows to compare scores on", len(splits)) as bar:
        for split in splits:
            samples[split] = read_sample(
                source.data_path, dataset, split, job.parity.max_rows, data.reader, data.synthetic_multi_hot,
                source.trained,
            )  # fmt: skip
            bar.advance(1)
    return samples


def _make_reference(job: ExportJob, source: Source, at: ArtifactFolder) -> Reference:
    samples = _samples(job, source)
    reference = make_reference(source.trained, samples, at.scratch)
    for split, found in reference.qualities.items():
        rows = len(reference.scores[split])
        for target, each in zip(source.trained.targets, found, strict=True):
            name = f", {target.name}" if len(found) > 1 else ""
            numbers = [f"{title} {getattr(each, key):.5f}" for key, title in measures(each.ne, each.auc).items()]
            found_so = ", ".join(numbers) or "labels of one kind, so no NE,"
            logger.info("model      %s%s: %s on %s rows", split, name, found_so, f"{rows:,}")
    return reference


def _certified(
    job: ExportJob,
    reference: Reference,
    manifest: Manifest,
    at: ArtifactFolder,
    kept: list[KeptRows | None],
) -> Manifest:
    """The manifest with its certificate. Raises ServingError where a limit is passed."""
    certificate = costs(reference, kept, job.parity)
    found = check(reference, manifest, at.path)
    certificate["splits"] = {split: parity.as_dict() for split, parity in found.items()}
    for split, parity in found.items():
        titles = measures(parity.ne_delta, parity.auc_delta)
        deltas = "".join(f"{title} {getattr(parity, f'{key}_delta'):+.6f}, " for key, title in titles.items())
        logger.info(
            "artifact   %s: %sscores differ by %.2g at most, %.2g on average",
            split, deltas, parity.max_score_difference, parity.mean_score_difference,
        )  # fmt: skip
    if lines := excesses(found, job.parity):
        ways = ["precision=auto finds the smallest mix within ne_budget"] if job.precision != AUTO else []
        ways += ["prune less"] if job.pruning.kind != "none" else []
        ways += ["dense=fp32"] if job.dense != "fp32" else []
        raise ServingError(refusal(lines, certificate, ways, job.precision))
    return replace(manifest, certificate=certificate)
