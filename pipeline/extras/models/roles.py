"""Check the features that a model config names by their roles (stdlib only)."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError, check_given, did_you_mean


def check_features(roles: Iterable[tuple[str, str]], tables: list[Table]) -> None:
    """Raise ConfigError unless each (config key, feature) names a feature of the data, and all features differ."""
    known = [feature for table in tables for feature in table.feature_names]
    seen: dict[str, str] = {}
    for key, feature in roles:
        check_given(key, feature)
        if feature not in known:
            listed = ", ".join(known[:30]) + (", ..." if len(known) > 30 else "")
            raise ConfigError(
                f"{key} names {feature!r}, which is no sparse feature of the data set{did_you_mean(feature, known)}; "
                f"it has {listed}"
            )
        if feature in seen:
            raise ConfigError(f"{seen[feature]} and {key} both name {feature!r}; a feature belongs to one side")
        seen[feature] = key
