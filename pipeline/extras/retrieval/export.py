"""Write the artifact of a two-tower from an opened step: both programs, the items' vectors and
their index, certified.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

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
from pipeline.serving.artifact.dense_export import export_layers
from pipeline.serving.artifact.export_run import ExportSummary, ending, title
from pipeline.serving.artifact.manifest import DENSE_FILE, Manifest
from pipeline.serving.artifact.package import (
    ArtifactFolder,
    Packed,
    library_versions,
    lookups_of,
    pack_arrow,
    pack_compiled,
    pack_composed,
    pack_program,
    pack_staged,
    pack_tables,
    pack_vocabularies,
    schema_of,
)
from pipeline.serving.artifact.precisions import given_precisions
from pipeline.serving.artifact.prune import kept_alone, prune_tables
from pipeline.serving.artifact.reference import fp32_lookup
from pipeline.serving.artifact.retrieval_parts import (
    ITEM_INDEX,
    ITEM_PROGRAM,
    ITEM_VALUES,
    ITEM_VECTORS,
    RetrievalParts,
)
from pipeline.serving.artifact.source import Source, lineage_of, settings_of
from pipeline.serving.artifact.table_files import write_bytes
from pipeline.serving.scoring.artifact_files import ArtifactFiles, load_parts

if TYPE_CHECKING:
    from pipeline.config.jobs.evaluate import ExportJob
    from pipeline.serving.artifact.certification_sample import Sample

logger = get_logger("pipeline.export")


def make_retrieval(job: ExportJob, source: Source, at: ArtifactFolder, samples: dict[str, Sample]) -> Manifest:
    """Write everything except the manifest.

    Raises ServingError if a limit of job.retrieval is exceeded.
    """
    if job.precision == AUTO:
        raise ServingError("precision=auto uses NE, which a two-tower does not have: set precision=int8, fp16 or fp32")
    trained, packed = source.trained, Packed()
    kept = prune_tables(trained, job.pruning)
    pack_tables(packed, at, trained, given_precisions(trained, job.precision, job.tables), kept)
    if trained.composed is not None:
        pack_composed(packed, at, trained.composed)
    alone = kept_alone(trained, kept)
    pack_vocabularies(packed, at, source.dataset, trained.keys, source.data_path, alone, {})
    parts = _parts(job, source)
    layers = towers_of(trained, {tower: parts.features_of(tower) for tower in ("user", "item")})
    _pack_towers(job, packed, at, layers, parts.dim)
    draft = _manifest(job, source, packed, parts)
    tower = load_tower(ArtifactFiles(at.path, draft, verify=True), "item", "mapped")
    catalogue = make_catalogue(
        tower, parts, source.dataset, source.data_path, job.retrieval.catalogue, alone.get(parts.item_feature)
    )
    kind = index_kind(job.retrieval.index, len(catalogue.ids))
    parts = replace(parts, num_items=len(catalogue.ids), index=kind)
    index = _pack_items(packed, at, catalogue, kind, job.retrieval)
    manifest = _manifest(job, source, packed, parts)
    reference = _trained_towers(source, samples, at, parts, layers)
    lookup, user = load_parts(at.path, manifest)
    item = ArtifactFiles(at.path, manifest, verify=True).program(ITEM_PROGRAM)
    served = Towers(trained, parts, lambda batch: lookup.pooled(*batch.ids), user, item)
    certificate = _certificate(job, source, samples, reference, served, index, catalogue)
    if lines := excesses(certificate, job.retrieval):
        hint = "; use a higher precision, or raise the limit" if job.precision != "fp32" else ""
        raise ServingError(
            f"nothing is written, because the artifact differs too much from the model: {'; '.join(lines)}{hint}"
        )
    return replace(manifest, certificate=certificate)


def _parts(job: ExportJob, source: Source) -> RetrievalParts:
    model, keys = source.job.model, source.trained.keys
    user, item = list(model.user_features), list(model.item_features)  # type: ignore[attr-defined]
    return RetrievalParts(
        item_feature=item[0],
        user_features=[key for key in keys if key in user],
        item_features=[key for key in keys if key in item],
        dim=_dim_of(source),
        num_items=0,
        index="",
        search=job.retrieval.search,
    )


def _dim_of(source: Source) -> int:
    import torch

    trained = source.trained
    keys, dims = trained.keys, trained.model_dims
    layers = TowerLayers(trained.model.eval(), "user", keys, dims, trained.num_dense)
    return int(layers(torch.zeros(2, trained.num_dense), torch.zeros(2, sum(dims))).shape[1])


def _pack_towers(job: ExportJob, packed: Packed, at: ArtifactFolder, layers: dict[str, TowerLayers], dim: int) -> None:
    logger.info("towers     %s, by torch.export%s", job.dense, ", then AOTInductor (user)" if job.compiled else "")
    for tower, name in (("user", DENSE_FILE), ("item", ITEM_PROGRAM)):
        each = layers[tower]
        program = export_layers(each, job.dense, each.num_dense, each.pooled_dim, dim)
        pack_program(packed, at, program, name)
        if tower == "user" and job.compiled:
            pack_compiled(packed, at, program)
    packed.dense = {"precision": job.dense, "compiled": job.compiled}


def _pack_items(
    packed: Packed, at: ArtifactFolder, catalogue: Catalogue, kind: str, config: RetrievalConfig
) -> ItemIndex:
    packed.files[ITEM_VECTORS] = write_bytes(
        os.path.join(at.path, ITEM_VECTORS), catalogue.vectors.astype("<f4").tobytes()
    )
    pack_arrow(packed, at, pa.table({COLUMN: catalogue.values}), ITEM_VALUES)
    logger.info("items      %s, index %s", f"{len(catalogue.ids):,}", kind)
    index = index_class(kind).build(catalogue.vectors, config)
    if index.has_file:
        staged = os.path.join(at.scratch, ITEM_INDEX)
        index.write(staged)
        pack_staged(packed, at, staged, ITEM_INDEX)
    return index


def _manifest(job: ExportJob, source: Source, packed: Packed, parts: RetrievalParts) -> Manifest:
    trained, data = source.trained, source.job.data
    return Manifest(
        lineage=lineage_of(job, source),
        schema=schema_of(source.dataset, trained.keys, data.columns, data.synthetic_multi_hot),
        tables=packed.tables,
        features=[(feature.name, feature.table) for feature in trained.features],
        dense=packed.dense,
        files=packed.files,
        vocabularies=packed.vocabularies,
        lookups=lookups_of(source.dataset, source.data_path, data.synthetic_multi_hot),
        sizes=packed.sizes(trained),
        versions=library_versions(),
        settings=settings_of(job),
        retrieval=parts,
    )


def _trained_towers(
    source: Source,
    samples: dict[str, Sample],
    at: ArtifactFolder,
    parts: RetrievalParts,
    layers: dict[str, TowerLayers],
) -> Towers:
    """Return the towers as they were trained."""
    trained = source.trained
    lookup = fp32_lookup(trained, samples, at.scratch)
    programs = [as_trained(layers[tower], parts.dim, trained.is_bf16) for tower in ("user", "item")]
    return Towers(trained, parts, lambda batch: lookup.pooled(*batch.ids), *programs)


def _certificate(
    job: ExportJob,
    source: Source,
    samples: dict[str, Sample],
    reference: Towers,
    served: Towers,
    index: ItemIndex,
    catalogue: Catalogue,
) -> dict[str, Any]:
    recall_at = list(source.job.model.recall_at)  # type: ignore[attr-defined]
    splits, of_artifact = {}, {}
    for split, sample in samples.items():
        of_artifact[split] = measure(served, sample, recall_at)
        splits[split] = about = compare(measure(reference, sample, recall_at), of_artifact[split])
        for name, before in about["model"].items():
            logger.info("%-10s %s %.5f, of the model %.5f", split, name, about["artifact"][name], before)
    found: Measured = of_artifact[SPLIT]
    about_index = certify_index(index, catalogue.vectors, catalogue.ids, found, recall_at)
    return {
        "model_precision": "bf16" if source.trained.is_bf16 else "fp32",
        "splits": splits,
        "index": {
            "kind": index_kind(job.retrieval.index, len(catalogue.ids)),
            "items": len(catalogue.ids),
            **about_index,
        },
        "limits": {name: asdict(job.retrieval)[name] for name in ("max_recall_decrease", "min_index_recall")},
    }


def describe(summary: ExportSummary) -> str:
    """Describe the export of a two-tower."""
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
    return "\n".join([*lines, *ending(summary)])
