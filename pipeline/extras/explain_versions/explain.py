"""Rank what makes two versions score the same rows differently: parts of the model, and slices of the rows.

A part's effect is the mean |change of score| when this part alone is taken from the other version, in both directions.
Between two trainings all parts differ. So parts are ranked by effect log2(1 + m / median m), where m is how far the part
itself moved (Pair.moved): a part that moved as far as most counts by its effect, and one that moved farther counts more.
A slice is a value of a feature, or a tenth of a number. Slices are ranked by p log(p / q): p is the slice's share of all
change, q its share of the rows. So a slice comes first if it is both large and moves more than others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.data.quality import log_losses_of_scores, normalized_entropy
from pipeline.data.raw.rows import open_source, parse_block
from pipeline.data.raw.source import find_sources
from pipeline.extras.explain_versions.config import ExplainJob
from pipeline.extras.explain_versions.page import render_explanation
from pipeline.extras.explain_versions.sides import NEW, OLD, Pair, Part, relative_change
from pipeline.planner.explain import print_grid
from pipeline.retraining.registry import Registry, RegistryError
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import to_json
from pipeline.runtime.storage import storage
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.score_files import format_of, layout_of_file
from pipeline.serving.scoring.scorer import as_table

DATA = "data"
BLOCK_BYTES, NUM_PARTS = 1 << 20, 10


@dataclass(frozen=True)
class PartEffect:
    """`mean`: signed change of the mean score; ne: change of NE, None without labels. Both from old to new.
    moved: relative change of the part itself, None for data. weight: what parts are ranked by."""

    part: str
    effect: float
    mean: float
    ne: float | None
    moved: float | None = None
    weight: float = 0.0


@dataclass(frozen=True)
class SliceEffect:
    """`change`: mean score of the slice, new minus old. share: of all change. weight: what slices are ranked by."""

    column: str
    value: str
    rows: int
    share: float
    change: float
    ne: float | None
    weight: float


@dataclass
class Explanation:
    """`parts` and `slices` are ranked. data: slices whose share of rows or label rate changed since source_before."""

    old: str
    new: str
    rows: int
    total: PartEffect
    parts: list[PartEffect] = field(default_factory=list)
    slices: list[SliceEffect] = field(default_factory=list)
    data: list[SliceEffect] = field(default_factory=list)

    def as_json(self) -> str:
        return to_json(asdict(self), indent=1)


def explain(job: ExplainJob) -> Explanation:
    """Explain. Raises ServingError if parts of the versions cannot be swapped, or the rows cannot be read."""
    paths = _artifact_of(job.registry, job.old), _artifact_of(job.registry, job.new)
    rows, labels = read_rows(paths[NEW], job.source, job.label, job.max_rows)
    pair = Pair(paths, rows)
    rows, labels = rows.take(pa.array(pair.kept)), None if labels is None else labels[pair.kept]
    if not rows.num_rows:
        raise ServingError(f"source={job.source} has no row that the versions can score")
    scores = pair.score({}, OLD), pair.score({}, NEW)
    found = Explanation(job.old, job.new, rows.num_rows, _effect("all", *scores, labels))
    found.parts = _weighted([_part(pair, part, scores, labels) for part in pair.parts])
    features = rows.select([name for name in rows.column_names if name != job.label])
    found.slices = list(_slices(features, _first(scores[OLD]), _first(scores[NEW]), labels))
    if job.source_before is not None:
        before, labels_before = read_rows(paths[OLD], job.source_before, job.label, job.max_rows)
        found.data = list(_data_slices(features, labels, before, labels_before))
        found.parts.append(_data_effect(paths, before, labels_before, scores[OLD], labels))
    found.parts.sort(key=lambda each: -each.weight)
    found.slices.sort(key=lambda each: -each.weight)
    found.data.sort(key=lambda each: -each.weight)
    return found


def _artifact_of(registry: str, name: str) -> str:
    """Return the artifact that `name` means: a version of the registry, an artifact, or a run's newest artifact."""
    if registry:
        short = name if len(name) > 6 or not name[1:].isdigit() else f"v{int(name[1:]):06d}"
        version = Registry(registry).version(short)
        if version.artifact is None:
            raise RegistryError(f"{version.name} has no artifact: give old=<artifact> new=<artifact> instead")
        return version.artifact
    if storage.is_file(storage.join(name, "manifest.json")):
        return name
    folder = storage.join(name, "artifacts")
    made = [storage.join(folder, each) for each in storage.list_folder(folder)]
    made = [path for path in made if storage.is_file(storage.join(path, "manifest.json"))]
    if not made:
        raise ServingError(f"{name} is neither an artifact nor a run with one: python -m pipeline export run={name}")
    return max(made, key=lambda path: (read_manifest(path).exported_at or 0.0, path))


def read_rows(artifact: str, source: str, label: str | None, max_rows: int) -> tuple[pa.Table, np.ndarray | None]:
    """Read the first raw rows, with the columns of the artifact, and the labels [rows]."""
    columns = Predictor.load(artifact, memory="mapped", verify=False).columns
    sources, tables, left = find_sources(source), [], max_rows
    for each in sources:
        layout = layout_of_file(each, format_of(sources, columns), columns, [label] if label else [])
        reader, names = open_source(layout, each, BLOCK_BYTES)
        with reader:
            for block in reader.blocks() if left > 0 else ():
                table = as_table(parse_block(layout, names, block).table.unify_dictionaries()).slice(0, left)
                tables.append(table)
                left -= table.num_rows
                if left <= 0:
                    break
    rows = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    if label is None:
        return rows, None
    try:
        labels = pc.cast(pc.cast(rows[label], pa.string()), pa.float64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise ServingError(f"column {label!r} of {source} has no numbers as labels ({str(error)[:100]})") from None
    if not np.isin(labels, (0.0, 1.0)).all():
        raise ServingError(f"column {label!r} of {source} has labels other than 0 and 1: leave label out")
    return rows, labels


def _first(scores: np.ndarray) -> np.ndarray:
    return scores.reshape(len(scores), -1)[:, 0]


def _ne(scores: np.ndarray, labels: np.ndarray | None) -> float | None:
    if labels is None or scores.ndim > 1:
        return None
    value = normalized_entropy(log_losses_of_scores(scores, labels), labels)
    return None if math.isnan(value) else value


def _effect(name: str, old: np.ndarray, new: np.ndarray, labels: np.ndarray | None) -> PartEffect:
    before, after = _ne(old, labels), _ne(new, labels)
    ne = None if before is None or after is None else after - before
    return PartEffect(name, float(np.abs(new - old).mean()), float((new - old).mean()), ne)


def _part(pair: Pair, part: Part, scores: tuple[np.ndarray, np.ndarray], labels: np.ndarray | None) -> PartEffect:
    """Return the mean effect over the contexts."""
    found, changes = [], []
    for context in pair.contexts(part):
        swapped = pair.score({part: 1 - context}, context)
        ends = (scores[OLD], swapped) if context == OLD else (swapped, scores[NEW])
        found.append(_effect(str(part), *ends, labels))
        changes.append(relative_change(*map(torch.from_numpy, ends)))
    ne = [each.ne for each in found if each.ne is not None]
    moved = pair.moved(part)
    return PartEffect(
        str(part), float(np.mean([each.effect for each in found])), float(np.mean([each.mean for each in found])),
        float(np.mean(ne)) if ne else None, float(np.mean(changes)) if moved is None else moved,
    )  # fmt: skip


def _weighted(parts: list[PartEffect]) -> list[PartEffect]:
    """Set the weights. All parts have `moved`."""
    moved = np.array([each.moved for each in parts], np.float64)
    factors = np.log2(1 + moved / max(1e-12, float(np.median(moved)))) if parts else moved
    return [replace(each, weight=each.effect * float(factor)) for each, factor in zip(parts, factors, strict=True)]


def _columns(rows: pa.Table) -> Iterator[tuple[str, np.ndarray, list[str]]]:
    """Yield (column, number of the slice of each row, names of slices)."""
    for name in rows.column_names:
        column = rows[name].combine_chunks()
        if pa.types.is_floating(column.type):
            values = column.to_numpy(zero_copy_only=False)
            edges: list[float] = np.unique(np.nanquantile(values, np.arange(1, NUM_PARTS) / NUM_PARTS)).tolist()
            names = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
            if edges and not np.isnan(edges).any():
                names = [f"below {edges[0]:.4g}", *names, f"from {edges[-1]:.4g}"]
                yield name, np.searchsorted(edges, values, side="right"), names
        elif not pa.types.is_nested(column.type):
            coded = column.cast(pa.string()).fill_null("").dictionary_encode()
            yield name, coded.indices.to_numpy(), coded.dictionary.to_pylist()


def _slices(rows: pa.Table, old: np.ndarray, new: np.ndarray, labels: np.ndarray | None) -> Iterator[SliceEffect]:
    change = new - old
    total = np.abs(change).sum()
    losses = None if labels is None else [log_losses_of_scores(each, labels) for each in (old, new)]
    entropy = (
        None
        if labels is None
        else len(labels) / max(1e-12, float(log_losses_of_scores(np.full(len(labels), labels.mean()), labels).sum()))
    )
    for column, codes, names in _columns(rows):
        counts = np.bincount(codes, minlength=len(names))
        moved = np.bincount(codes, np.abs(change), len(names))
        signed = np.bincount(codes, change, len(names))
        rise = None if losses is None else np.bincount(codes, losses[1] - losses[0], len(names))
        for number in np.flatnonzero(counts):
            p, q = moved[number] / max(total, 1e-12), counts[number] / len(codes)
            ne = None if rise is None or entropy is None else float(rise[number] * entropy / len(codes))
            weight = p * math.log(p / q) if p > 0 else 0.0
            if weight > 0:
                yield SliceEffect(
                    column,
                    names[number],
                    int(counts[number]),
                    float(p),
                    float(signed[number] / counts[number]),
                    ne,
                    weight,
                )


def _data_slices(
    rows: pa.Table, labels: np.ndarray | None, before: pa.Table, labels_before: np.ndarray | None
) -> Iterator[SliceEffect]:
    """Yield the slices of categories by their part of the population stability index of (value, label)."""
    for column, codes, names in _columns(
        rows.select([name for name in rows.column_names if not pa.types.is_floating(rows[name].type)])
    ):
        if column not in before.column_names:
            continue
        texts = before[column].combine_chunks().cast(pa.string()).fill_null("")
        place = {name: number for number, name in enumerate(names)}
        codes_before = np.array([place.setdefault(text, len(place)) for text in texts.to_pylist()], np.int64)
        everything = list(place)
        shares = []
        for own, own_labels in ((codes, labels), (codes_before, labels_before)):
            cells = own * 2 + (0 if own_labels is None else own_labels.astype(np.int64))
            counts = np.bincount(cells, minlength=2 * len(everything)).reshape(-1, 2)
            shares.append((counts, (counts + 0.5) / (counts + 0.5).sum()))
        (counts, now), (_, then) = shares
        stability = ((now - then) * np.log(now / then)).sum(axis=1)
        for number, name in enumerate(everything):
            if not stability[number]:
                continue
            rate = (
                now[number, 1] / now[number].sum() - then[number, 1] / then[number].sum() if labels is not None else 0.0
            )
            yield SliceEffect(
                column, name, int(counts[number].sum()), float(now[number].sum() - then[number].sum()), float(rate), None,
                float(stability[number]),
            )  # fmt: skip


def _data_effect(
    paths: tuple[str, str],
    before: pa.Table,
    labels_before: np.ndarray | None,
    scores: np.ndarray,
    labels: np.ndarray | None,
) -> PartEffect:
    """Return how the old version's mean score and NE differ between the rows of both times."""
    predictor = Predictor.load(paths[OLD], memory="mapped")
    scored = predictor.score(
        before.select([name for name in before.column_names if name in predictor.encoder.schema.columns])
    ).scores
    is_scored = np.isfinite(scored.reshape(len(scored), -1)).all(axis=1)
    own = None if labels_before is None else labels_before[is_scored]
    ne = (_ne(scores, labels), _ne(scored[is_scored].astype(np.float64), own))
    mean = float(scores.mean() - scored[is_scored].mean())
    return PartEffect(DATA, abs(mean), mean, None if None in ne else ne[0] - ne[1], weight=abs(mean))  # type: ignore[operator]


def describe(job: ExplainJob, found: Explanation) -> str:
    """Return the text that the command prints, and write the page and the file."""
    if job.output is not None:
        storage.publish_text(job.output, found.as_json() + "\n")
    if job.html is not None:
        storage.publish_text(job.html, render_explanation(found, job.max_parts))
    total = found.total
    lines = [
        f"scores      {found.rows:,} rows: {found.new} minus {found.old} is {total.mean:+.5f} on average, {total.effect:.5f} in size"
        + ("" if total.ne is None else f"; NE {total.ne:+.5f}")
    ]
    for title, headings, cells in tables_of(found, job.max_parts):
        lines += ["", title, print_grid(headings, [list(row) for row in cells], headings[1:])] if cells else []
    return "\n".join(lines)


def tables_of(found: Explanation, most: int) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Return (title, headings, cells) of each list, best first."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:+.5f}"

    parts: list[tuple[str, ...]] = [
        (
            each.part,
            "" if each.moved is None else f"{each.moved:.1%}",
            f"{each.effect:.5f}",
            number(each.mean),
            number(each.ne),
        )
        for each in islice(found.parts, most)
    ]
    slices: list[tuple[str, ...]] = [
        (
            f"{each.column}: {each.value or '(missing)'}",
            f"{each.rows:,}",
            f"{each.share:.1%}",
            number(each.change),
            number(each.ne),
        )
        for each in islice(found.slices, most)
    ]
    data: list[tuple[str, ...]] = [
        (f"{each.column}: {each.value or '(missing)'}", f"{each.rows:,}", f"{each.share:+.2%}", number(each.change))
        for each in islice(found.data, most)
    ]
    return [
        ("Parts, each swapped alone", ("part", "moved", "mean |change|", "mean change", "NE"), parts),
        ("Slices that move most for their size", ("slice", "rows", "of all change", "mean change", "NE"), slices),
        ("Slices of the data that changed", ("slice", "rows", "share of rows", "label rate"), data),
    ]
