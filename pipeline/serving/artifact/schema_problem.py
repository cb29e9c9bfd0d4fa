"""Check every number of an artifact's schema and lookups before it is used: a checksum says nothing of what they mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.columns import KEEPS, MAX_LENGTH
from pipeline.config.data import DENSE_TRANSFORMS
from pipeline.config.transforms import LIST, NUMBER, TEXT
from pipeline.runtime.errors import ConfigError
from pipeline.serving.artifact.raw_schema import DENSE, MULTI_HOT, SPARSE, RawFeature, RawSchema

KINDS = {NUMBER: DENSE, TEXT: SPARSE, LIST: MULTI_HOT}
MAX_IDS = 1 << 40
MAX_BAG = 10_000  # ids that are drawn from one


def schema_problem(schema: RawSchema, lookups: Mapping[str, Mapping[str, Any]]) -> str:
    """Empty, or what no artifact has."""
    names = [*schema.dense, *(feature.name for feature in schema.features)]
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        return "two columns have one name"
    if schema.dense_transform not in DENSE_TRANSFORMS:
        return f"dense columns are transformed by {schema.dense_transform!r}"
    for feature in schema.features:
        if problem := _feature_problem(feature):
            return problem
    leaders = {each.name for each in schema.features if each.sequence is not None and each.sequence.beside is None}
    for feature in schema.features:
        if feature.sequence is not None and feature.sequence.beside not in (None, *leaders):
            return f"feature {feature.name!r} stands beside {feature.sequence.beside!r}, which is no sequence"
    for name, about in schema.dense_columns.items():
        numbers = [about.get("mean", 0.0), about.get("std", 1.0)]
        if (
            name not in schema.dense
            or about.get("kind") not in DENSE_TRANSFORMS
            or not _are_finite(numbers)
            or numbers[1] <= 0
        ):
            return f"dense column {name!r} is transformed by {about}"
    try:
        made, kinds = schema.derived, schema.model_columns
    except ConfigError as error:
        return f"its transforms are none of this release or of a plugin that is here: {error}"
    if wrong := [name for name, each in made.items() if name in kinds and kinds[name] != KINDS[each.output]]:
        return f"column {wrong[0]!r} is made as another kind than it is read as"
    for name, curve in lookups.items():
        if not _are_lookups(curve):
            return f"the lookups of {name!r} are no curve"
    return ""


def _feature_problem(feature: RawFeature) -> str:
    if not _is_whole(feature.cardinality, 1, MAX_IDS):
        return f"feature {feature.name!r} has {feature.cardinality} ids"
    if not _is_whole(feature.bag_size, 1, MAX_BAG):
        return f"feature {feature.name!r} has bags of {feature.bag_size}"
    if feature.hash_size is not None and not _is_whole(feature.hash_size, 2, feature.cardinality):
        return f"feature {feature.name!r} is hashed to {feature.hash_size} of {feature.cardinality} ids"
    if not _is_whole(feature.hash_seed, -(2**63), 2**64):
        return f"feature {feature.name!r} has the hash seed {feature.hash_seed}"
    if feature.sequence is not None and not (
        feature.multi_hot and _is_whole(feature.sequence.max_length, 1, MAX_LENGTH) and feature.sequence.keep in KEEPS
    ):
        return f"feature {feature.name!r} is the sequence {feature.sequence}"
    if feature.weighted not in (False, True) or (feature.weighted and (not feature.multi_hot or feature.sequence)):
        return f"feature {feature.name!r} has weights and no bags"
    ends = feature.boundaries
    if ends is not None and (not _are_finite(ends) or any(end <= begin for begin, end in itertools.pairwise(ends))):
        return f"feature {feature.name!r} has buckets that are not in order"
    return ""


def _are_lookups(about: Mapping[str, Any]) -> bool:
    ranks, shares = about.get("ranks", []), about.get("shares", [])
    return (
        _are_finite([about.get("per_row", 0.0), about.get("row_zero_share", 0.0), *shares])
        and about.get("per_row", 0.0) >= 0.0
        and len(ranks) == len(shares)
        and all(_is_whole(rank, 0, MAX_IDS) for rank in ranks)
        and all(before < after for before, after in itertools.pairwise(ranks))
        and all(0.0 <= share <= 1.0 + 1e-6 for share in shares)
    )


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_finite(values: Sequence[object]) -> bool:
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )
