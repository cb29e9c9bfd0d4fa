"""Turn a checkpoint into an artifact that scores raw rows:  python -m pipeline.export run=runs/quickstart precision=int8

Tables in fp32, fp16, int8, int4 or int2, one by one too (tables.cat_3=fp16), or precision=auto for the smallest mix within
ne_budget; rows left out by pruning.kind=untrained or frequency; layers in fp32, bf16 or int8 (dense=bf16), and compiled
ahead of time (compiled=true). What it costs in quality is measured and stands in the artifact; past parity.max_ne_increase
and the like nothing is written.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline import __version__, storage
from pipeline.config import ExportJob, TrainJob, run_verb
from pipeline.garbage import none_while_importing
from pipeline.logs import get_logger
from pipeline.run_checkpoints import config_of, folder_of
from pipeline.serving.config import AUTO

if TYPE_CHECKING:
    from pipeline.data.dataset import Dataset
    from pipeline.serving.attempt import Attempt
    from pipeline.serving.kept_rows import KeptRows
    from pipeline.serving.manifest import Manifest
    from pipeline.serving.reference import Reference
    from pipeline.serving.trained_model import TrainedModel

logger = get_logger("pipeline.export")
OF_NO_INTEREST = ("run", "step", "output", "data_path")  # to whether two exports of a step are the same


@dataclass
class ExportSummary:
    """`parity` is what the artifact's certificate says, by split: scores, NE and AUC beside the trained model's."""

    run: str
    step: int
    artifact: str
    version: str
    certificate: dict[str, Any]
    sizes: dict[str, Any]
    already_exported: bool = False
    seconds: float = 0.0
    parity: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Source:
    """The step that is exported, and the data set that it was trained on."""

    job: TrainJob
    step: int
    manifest: dict[str, Any]
    trained: TrainedModel
    dataset: Dataset
    data_path: str


def export(job: ExportJob) -> ExportSummary:
    """Write the artifact, or find that it is there already.

    Raises:
        ValueError: the run, step or data set is not there, or damaged; another artifact has the output's place; or the
            artifact's scores lie further from the model's than job.parity allows, with the numbers.
    """
    with none_while_importing():  # here, for a typo in the command line must fail before torch is loaded
        from pipeline.serving.attempt import attempt

    started = time.monotonic()
    source = _open_source(job)
    output = job.output or default_output(job, source.step)
    if storage.exists(output):
        return _already_there(job, source, output)
    logger.info("step %d of %s: %s", source.step, job.run, _describe_tables(source.trained))
    with attempt(output) as at:
        manifest = _make(job, source, at)
        at.commit(manifest.to_text())
    return _summary(job, source.step, output, manifest, time.monotonic() - started)


def default_output(job: ExportJob, step: int) -> str:
    """<run>/artifacts/step_00000300.int8, with a hash of what else was asked for, where anything was."""
    asked, usual = settings_of(job), settings_of(ExportJob(run=job.run, precision=job.precision))
    digest = "" if asked == usual else f".{_hash(asked)[:8]}"
    return f"{job.run.rstrip('/')}/artifacts/step_{step:08d}.{job.precision}{digest}"


def settings_of(job: ExportJob) -> dict[str, Any]:
    """What of a job decides on the artifact's bytes."""
    return {key: value for key, value in asdict(job).items() if key not in OF_NO_INTEREST}


def _hash(content: Any) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _open_source(job: ExportJob) -> _Source:
    from pipeline.checkpoint.survey import open_step
    from pipeline.checkpoint.vocabularies import trained_dataset
    from pipeline.embeddings.config import resolve_tables
    from pipeline.embeddings.physical import physical_tables
    from pipeline.models.build import build_model
    from pipeline.models.model_config import used_tables
    from pipeline.serving.trained_model import load_trained

    trained_job = config_of(job.run)
    if trained_job is None:
        raise ValueError(f"{job.run} is no run folder: it has no config.yaml; run=<the run_dir of a training>")
    step, manifest, tensors = open_step(folder_of(job.run), job.step)
    dataset, where = trained_dataset(manifest, job.data_path or trained_job.data.path)
    if dataset is None:
        raise ValueError(
            f"{where}: the artifact needs its vocabularies and validation rows; set data_path=<its folder>"
        )
    tables = used_tables(
        trained_job.model, resolve_tables(trained_job.tables, dataset, trained_job.data.synthetic_multi_hot)
    )
    known = {name for part in physical_tables(tables) for name in (part.name, part.config_name)}
    if unknown := [name for name in job.tables if name not in known]:
        from pipeline.checks import did_you_mean

        near = did_you_mean(unknown[0], sorted(known))
        raise ValueError(f"tables.{unknown[0]}: the run has no such table among {len(tables)}{near}")
    model = build_model(trained_job.model, tables, len(dataset.dense_features), seed=trained_job.trainer.seed)
    is_bf16 = trained_job.trainer.precision == "bf16"
    trained = load_trained(model, tables, dataset.sparse_feature_names, tensors, len(dataset.dense_features), is_bf16)
    return _Source(trained_job, step, manifest, trained, dataset, where)


def _make(job: ExportJob, source: _Source, at: Attempt) -> Manifest:
    """Everything but the commit."""
    from pipeline.serving.manifest import Manifest
    from pipeline.serving.package import (
        Packed,
        library_versions,
        lookups_of,
        pack_composed,
        pack_layers,
        pack_tables,
        pack_vocabularies,
        schema_of,
    )
    from pipeline.serving.precisions import choose_precisions

    trained, packed = source.trained, Packed()
    reference = _make_reference(job, source, at)
    precisions = choose_precisions(reference, job.precision, job.tables, job.ne_budget)
    kept = _prune(job, trained)
    pack_tables(packed, at, trained, precisions, kept)
    logger.info("layers     %s, by torch.export%s", job.dense, ", then AOTInductor" if job.compiled else "")
    pack_layers(packed, at, trained, job.dense, job.compiled)
    if trained.composed is not None:
        pack_composed(packed, at, trained.composed)
    alone = {
        table.feature_names[0]: rows
        for table, rows in zip(trained.tables, kept, strict=True)
        if rows is not None and len(table.feature_names) == 1
    }
    pack_vocabularies(packed, at, source.dataset, trained.keys, source.data_path, alone)
    manifest = Manifest(
        lineage=_lineage(job, source),
        schema=schema_of(
            source.dataset, trained.keys, source.job.data.columns.list_separator, source.job.data.synthetic_multi_hot
        ),
        tables=packed.tables,
        features=[(feature.name, feature.table) for feature in trained.features],
        dense=packed.dense,
        files=packed.files,
        vocabularies=packed.vocabularies,
        lookups=lookups_of(source.dataset, source.job.data.synthetic_multi_hot),
        sizes=packed.sizes(trained),
        versions=library_versions(),
        settings=settings_of(job),
    )
    return _certified(job, reference, manifest, at, kept)


def _make_reference(job: ExportJob, source: _Source, at: Attempt) -> Reference:
    from pipeline.serving.reference import make_reference
    from pipeline.serving.sample import read_sample

    data, dataset = source.job.data, source.dataset
    splits = [name for name in job.parity.splits if dataset.splits[name].num_rows]
    if "validation" not in splits:
        raise ValueError(
            f"data set {dataset.name!r} has no validation rows to certify an artifact by: prepare it again with "
            "data.split.validation_fraction above 0"
        )
    samples = {
        split: read_sample(
            source.data_path,
            dataset,
            split,
            job.parity.max_rows,
            data.reader,
            data.synthetic_multi_hot,
            source.trained.keys,
            source.trained.composed,
        )
        for split in splits
    }
    reference = make_reference(source.trained, samples, at.scratch)
    for split, found in reference.qualities.items():
        rows = len(reference.scores[split])
        logger.info("model      %s: NE %.5f, AUC %.5f on %s rows", split, found.ne, found.auc, f"{rows:,}")
    return reference


def _prune(job: ExportJob, trained: TrainedModel) -> list[KeptRows | None]:
    from pipeline.serving.prune import rows_to_keep

    kept = rows_to_keep(trained.tensors, trained.stored, trained.tables, job.pruning)
    if job.pruning.kind != "none":
        before = sum(stored.rows for stored in trained.stored)
        after = sum(
            stored.rows if rows is None else rows.num_kept for stored, rows in zip(trained.stored, kept, strict=True)
        )
        logger.info(
            "pruning    %s: %s of %s rows stay (%.1f %%)",
            job.pruning.kind,
            f"{after:,}",
            f"{before:,}",
            100 * after / before,
        )
    return kept


def _certified(
    job: ExportJob,
    reference: Reference,
    manifest: Manifest,
    at: Attempt,
    kept: list[KeptRows | None],
) -> Manifest:
    """The manifest with its certificate. Raises ValueError where a limit is passed."""
    from pipeline.serving.certificate import excesses
    from pipeline.serving.certify import check, costs, refusal

    certificate = costs(reference, kept, job.parity)
    found = check(reference, manifest, at.path)
    certificate["splits"] = {split: parity.as_dict() for split, parity in found.items()}
    for split, parity in found.items():
        logger.info(
            "artifact   %s: NE %+.6f, AUC %+.6f, scores differ by %.2g at most, %.2g on average",
            split, parity.ne_delta, parity.auc_delta, parity.max_score_difference, parity.mean_score_difference,
        )  # fmt: skip
    if lines := excesses(found, job.parity):
        ways = ["precision=auto finds the smallest mix within ne_budget"] if job.precision != AUTO else []
        ways += ["prune less"] if job.pruning.kind != "none" else []
        ways += ["dense=fp32"] if job.dense != "fp32" else []
        raise ValueError(refusal(lines, certificate, ways))
    return replace(manifest, certificate=certificate)


def _lineage(job: ExportJob, source: _Source) -> dict[str, Any]:
    hashes = source.manifest.get("hashes", {})
    return {
        "run": job.run,
        "name": source.job.name,
        "step": source.step,
        "config_sha256": hashes.get("config", ""),
        "schema_sha256": hashes.get("schema", ""),
        "dataset": source.dataset.name,
        "dataset_sha256": source.dataset.fingerprint(),
        "code_version": __version__,
        "exported_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _already_there(job: ExportJob, source: _Source, output: str) -> ExportSummary:
    """Raises ValueError where what is there is something else."""
    from pipeline.serving.manifest import read_manifest

    way_out = f"choose another output=<folder>, or remove {output}"
    try:
        manifest = read_manifest(output)
    except ValueError as error:
        raise ValueError(f"{output} is there already, and is no artifact ({error}): {way_out}") from None
    wanted = {**_lineage(job, source), "exported_at": manifest.lineage["exported_at"], "run": manifest.lineage["run"]}
    if manifest.lineage != wanted or manifest.settings != json.loads(json.dumps(settings_of(job))):
        raise ValueError(f"{output} is there already, of another step, run or setting: {way_out}")
    return _summary(job, source.step, output, manifest, 0.0, already_exported=True)


def _summary(
    job: ExportJob, step: int, output: str, manifest: Manifest, seconds: float, already_exported: bool = False
) -> ExportSummary:
    return ExportSummary(
        job.run, step, output, manifest.version, manifest.certificate, manifest.sizes, already_exported, seconds,
        manifest.certificate["splits"],
    )  # fmt: skip


def _describe_tables(trained: TrainedModel) -> str:
    rows = sum(stored.rows for stored in trained.stored)
    return f"{len(trained.tables)} tables with {rows:,} rows, {_size(trained.table_bytes)}"


def _size(size_bytes: int) -> str:
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= length:
            return f"{size_bytes / length:.1f} {unit}"
    return f"{size_bytes} B"


def describe(summary: ExportSummary) -> str:
    sizes, certificate = summary.sizes, summary.certificate
    ratio = sizes["tables_before"] / max(sizes["tables_after"], 1)
    lines = [f"step {summary.step} of {summary.run} as an artifact, version {summary.version}"]
    lines.append(
        f"  {'precision':<11}{'tables':>12}{'NE':>12}{'AUC':>12}{'score, most':>13}{'mean':>11}   on validation"
    )
    for name, one in certificate["precisions"].items():
        lines.append(
            f"  {name:<11}{_size(one['table_bytes']):>12}{one['ne_delta']:>+12.6f}{one['auc_delta']:>+12.6f}"
            f"{one['max_score_difference']:>13.2g}{one['mean_score_difference']:>11.2g}"
        )
    for split, one in certificate["splits"].items():
        lines.append(
            f"{split:<12}NE {one['ne']:.5f} ({one['ne_delta']:+.6f}), AUC {one['auc']:.5f} ({one['auc_delta']:+.6f}), "
            f"scores within {one['max_score_difference']:.2g} of the model's"
        )
    lines.append(
        f"tables      {_size(sizes['tables_before'])} -> {_size(sizes['tables_after'])} ({ratio:.1f}x smaller); layers "
        f"{_size(sizes['layers_before'])} -> {_size(sizes['layers_after'])}, vocabularies {_size(sizes['vocabularies'])}"
    )
    if summary.already_exported:
        lines.append(f"already exported to {summary.artifact}: nothing to do")
    else:
        lines.append(f"written to  {summary.artifact} ({_size(sizes['artifact'])}) in {summary.seconds:.1f} s")
    lines.append(f"next        python -m pipeline.serve artifact={summary.artifact}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_verb(ExportJob, export, __doc__, describe)
