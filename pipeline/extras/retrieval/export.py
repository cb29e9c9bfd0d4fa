"""Export a two-tower: both programs, the vectors of its items and their index, with a certificate."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.registry import from_extra
from pipeline.config.serving import AUTO, RetrievalConfig
from pipeline.extras.retrieval.catalogue import Catalogue, make_catalogue
from pipeline.extras.retrieval.certificate import (
    SPLIT,
    Measured,
    Towers,
    certify_index,
    compare,
    excesses,
    measure,
)
from pipeline.extras.retrieval.index import ItemIndex, index_class, index_kind
from pipeline.extras.retrieval.retriever import COLUMN
from pipeline.extras.retrieval.tower import load_tower
from pipeline.extras.retrieval.tower_layers import TowerLayers, as_trained, towers_of
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.export import ExportSummary, ending, title
from pipeline.serving.artifact.manifest import (
    DENSE_FILE,
    ITEM_INDEX,
    ITEM_PROGRAM,
    ITEM_VALUES,
    ITEM_VECTORS,
    Manifest,
    RetrievalParts,
)
from pipeline.serving.artifact.plan import ExportPlan, PlannedProgram, given_precisions, plan_export
from pipeline.serving.artifact.reference import Sample, fp32_lookup, read_samples
from pipeline.serving.artifact.trained_step import TrainedStep
from pipeline.serving.artifact.writer import ArtifactWriter
from pipeline.serving.scoring.artifact_files import ArtifactFiles, load_parts

logger = get_logger("pipeline.export")


def write_retriever(job: ExportJob, step: TrainedStep, writer: ArtifactWriter) -> Manifest:
    """Write the files of a two-tower's artifact, and certify them.

    Raises:
        ServingError: the artifact exceeds a limit of job.retrieval.
    """
    samples = read_samples(job, step)
    if job.precision == AUTO:
        raise ServingError("precision=auto uses NE, which a two-tower does not have: set precision=int8, fp16 or fp32")
    parts = _parts(job, step)
    features = {tower: parts.features_of(tower) for tower in ("user", "item")}
    towers = towers_of(step, features)
    plan = _plan(job, step, parts, towers)
    writer.write_tables(plan)
    writer.write_composed(plan)
    writer.write_vocabularies(plan)
    logger.info("towers     %s, by torch.export%s", job.dense, ", then AOTInductor (user)" if job.compiled else "")
    writer.write_programs(plan)
    onnx = from_extra("add_onnx_towers", "onnx=true")(plan, features, writer) if job.onnx else None
    tower = load_tower(ArtifactFiles(writer.path, writer.manifest(plan), verify=True), "item", "mapped")
    catalogue = make_catalogue(
        tower, parts, step.dataset, step.data_path, job.retrieval.catalogue, plan.kept_of.get(parts.item_feature)
    )
    kind = index_kind(job.retrieval.index, len(catalogue.ids))
    parts = replace(parts, num_items=len(catalogue.ids), index=kind)
    index = _write_items(writer, catalogue, kind, job.retrieval)
    draft = writer.manifest(replace(plan, retrieval=parts))
    reference = _trained_towers(step, samples, writer.scratch, parts, towers)
    lookup, user = load_parts(writer.path, draft)
    item = ArtifactFiles(writer.path, draft, verify=True).program(ITEM_PROGRAM)
    served = Towers(step, parts, lambda batch: lookup.pooled(*batch.ids), user, item)
    certificate = _certificate(job, samples, reference, served, index, catalogue)
    if lines := excesses(certificate, job.retrieval):
        hint = "; use a higher precision, or raise the limit" if job.precision != "fp32" else ""
        raise ServingError(
            f"nothing is written, because the artifact differs too much from the model: {'; '.join(lines)}{hint}"
        )
    if onnx is not None:
        measured = (replace(served, **onnx), served)
        recall_at = list(step.job.model.recall_at)  # type: ignore[attr-defined]
        compared = {
            split: compare(*(measure(each, sample, recall_at) for each in measured))
            for split, sample in samples.items()
        }
        certificate |= from_extra("certify_onnx_towers", "onnx=true")(compared)
    return replace(draft, certificate=certificate)


def _plan(job: ExportJob, step: TrainedStep, parts: RetrievalParts, towers: dict[str, TowerLayers]) -> ExportPlan:
    programs = [
        PlannedProgram(file, towers[tower], towers[tower].num_dense, towers[tower].pooled_dim, parts.dim)
        for tower, file in (("user", DENSE_FILE), ("item", ITEM_PROGRAM))
    ]
    plan = plan_export(job, step, given_precisions(job, step))
    return replace(plan, programs=tuple(programs), tasks=[], retrieval=parts)


def _parts(job: ExportJob, step: TrainedStep) -> RetrievalParts:
    model, keys = step.job.model, step.keys
    user, item = list(model.user_features), list(model.item_features)  # type: ignore[attr-defined]
    return RetrievalParts(
        item_feature=item[0],
        user_features=[key for key in keys if key in user],
        item_features=[key for key in keys if key in item],
        dim=_dim_of(step),
        num_items=0,
        index="",
        search=job.retrieval.search,
    )


def _dim_of(step: TrainedStep) -> int:
    import torch

    layers = TowerLayers(step.model.eval(), "user", step.keys, step.model_dims, step.num_dense)
    return int(layers(torch.zeros(2, step.num_dense), torch.zeros(2, sum(step.model_dims))).shape[1])


def _write_items(writer: ArtifactWriter, catalogue: Catalogue, kind: str, config: RetrievalConfig) -> ItemIndex:
    writer.add_bytes(ITEM_VECTORS, catalogue.vectors.astype("<f4").tobytes())
    writer.add_arrow(ITEM_VALUES, pa.table({COLUMN: catalogue.values}))
    logger.info("items      %s, index %s", f"{len(catalogue.ids):,}", kind)
    index = index_class(kind).build(catalogue.vectors, config)
    if index.has_file:
        staged = os.path.join(writer.scratch, ITEM_INDEX)
        index.write(staged)
        writer.add_file(ITEM_INDEX, staged)
    return index


def _trained_towers(
    step: TrainedStep, samples: dict[str, Sample], scratch: str, parts: RetrievalParts, towers: dict[str, TowerLayers]
) -> Towers:
    """Return the model's towers, which compute vectors as the trainer's evaluation does."""
    lookup = fp32_lookup(step, samples, scratch)
    programs = [as_trained(towers[tower], parts.dim, step) for tower in ("user", "item")]
    return Towers(step, parts, lambda batch: lookup.pooled(*batch.ids), *programs)


def _certificate(
    job: ExportJob,
    samples: dict[str, Sample],
    reference: Towers,
    served: Towers,
    index: ItemIndex,
    catalogue: Catalogue,
) -> dict[str, Any]:
    recall_at = list(served.trained.job.model.recall_at)  # type: ignore[attr-defined]
    splits, of_artifact = {}, {}
    for split, sample in samples.items():
        of_artifact[split] = measure(served, sample, recall_at)
        splits[split] = about = compare(measure(reference, sample, recall_at), of_artifact[split])
        for name, before in about["model"].items():
            logger.info("%-10s %s %.5f, of the model %.5f", split, name, about["artifact"][name], before)
    found: Measured = of_artifact[SPLIT]
    about_index = certify_index(index, catalogue.vectors, catalogue.ids, found, recall_at)
    return {
        "model_precision": served.trained.precision,
        "splits": splits,
        "index": {
            "kind": index_kind(job.retrieval.index, len(catalogue.ids)),
            "items": len(catalogue.ids),
            **about_index,
        },
        "limits": {name: asdict(job.retrieval)[name] for name in ("max_recall_decrease", "min_index_recall")},
    }


def describe(summary: ExportSummary) -> str:
    """Return lines that describe the export of a two-tower."""
    sizes, index, lines = summary.sizes, summary.certificate["index"], [title(summary)]
    for split, about in summary.certificate["splits"].items():
        numbers = ", ".join(
            f"{name} {value:.5f} ({value - about['model'][name]:+.5f})" for name, value in about["artifact"].items()
        )
        lines.append(
            f"{split:<12}{numbers} of {about['num_clicked']:,} clicks among {about['catalogue_items']:,} items"
        )
    lines.append(
        f"index       {index['kind']} of {index['items']:,} items finds {index['recall']:.4f} of the {index['k']} best that exact search "
        f"finds, for {index['queries']:,} users of validation"
    )
    lines.append(
        f"tables      {show_size(sizes['tables_before'])} -> {show_size(sizes['tables_after'])}; layers "
        f"{show_size(sizes['layers_before'])} -> {show_size(sizes['layers_after'])}, items {show_size(sizes['items'])}"
    )
    if "onnx" in summary.certificate:
        lines += from_extra("describe_onnx", "the artifact's dense.onnx")(summary.certificate["onnx"])
    return "\n".join([*lines, *ending(summary)])
