"""Read the settings of a registered component into its dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pipeline.runtime.errors import ConfigError, did_you_mean

Settings = TypeVar("Settings")


def read_settings(kind: type[Settings], values: Mapping[str, Any], key: str, owner: str) -> Settings:
    """Return `values` as an instance of `kind`. `key` and `owner` (the setting that chose the
    component) are for errors.

    Raises:
        ConfigError: an unknown key, or a value of a wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"unknown key '{key}.{name}' of {owner}, which takes {', '.join(known)}{did_you_mean(str(name), known)}"
            )
    try:
        read: Settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values))  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}.{error.full_key} of {owner}: {str(error).splitlines()[0]}") from None
    return read
