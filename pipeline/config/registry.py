"""Find components by kind and name: kinds of the core (BUILT_IN), kinds of extras, and verbs.

A file registers what it defines. No other file needs to change:

    @register("model", "my_model")
    @dataclass
    class MyModelConfig(ModelConfig): ...

Components come from four places: packages of the core (BUILT_IN), extras in pipeline/extras,
installed packages with the entry-point group `torchrec_pipeline.components`, and
`plugins=[my_package]` on the command line. The `__init__.py` of an extra imports nothing.
COMPONENTS = {kind: module} names its modules that register components, and
FUNCTIONS = {name: "module:function"} names the functions that it offers to the core (from_extra).
A saved job names a kind, never an import path, so reading a checkpoint imports nothing that it names.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from pipeline.runtime.errors import ConfigError, did_you_mean

ENTRY_POINTS = "torchrec_pipeline.components"
EXTRAS = Path(__file__).resolve().parents[1] / "extras"
# Kind -> the package or module of the core that registers its components. None: only extras and
# plugins do.
BUILT_IN: dict[str, str | None] = {
    "generator": None,
    "model": "pipeline.models",
    "task": "pipeline.models.tasks",
    "metric": "pipeline.models.metrics",
    "loss": None,
    "format": "pipeline.data.raw.formats",
    "optimizer": "pipeline.config.optimizers",
    "compression": "pipeline.embeddings.compression",
    "hook": "pipeline.training.hooks",
    "tracker": None,
    "index": None,
    "transform": None,
    "device": "pipeline.devices",
    "stream": None,
    "observer": None,
    "router": None,
}

T = TypeVar("T")
_components: dict[str, dict[str, Any]] = {}
_loaded: set[str] = set()


def register(kind: str, name: str) -> Callable[[T], T]:
    """Return a decorator that registers a class or function as component `name` of `kind`. Raises
    ConfigError if another component has that name, or `kind` is unknown."""
    if kind not in (kinds := [*BUILT_IN, "verb"]):
        raise ConfigError(f"register({kind!r}, {name!r}): kinds are {', '.join(kinds)}{did_you_mean(kind, kinds)}")

    def remember(component: T) -> T:
        known = _components.setdefault(kind, {})
        if kind == "model" and getattr(component, "kind", None) != name:
            raise ConfigError(
                f'{_origin(component)} is registered as model {name!r}: give it the field `kind: str = "{name}"`'
            )
        if name in known and (old := _origin(known[name])) != (new := _origin(component)):
            # A plugin may be imported before the core's own component.
            if new.startswith((f"{BUILT_IN.get(kind)}.", "pipeline.extras.")):
                old, new = new, old
            raise ConfigError(f"{new} registers {kind} {name!r}, which is {old}; give it another name")
        known[name] = component
        return component

    return remember


def components(kind: str) -> Mapping[str, Any]:
    """Return name -> component from the core, extras, installed packages and loaded plugins."""
    _load(BUILT_IN.get(kind))
    for extra in _extras():
        _load(getattr(extra, "COMPONENTS", {}).get(kind))
    _load_entry_points()
    return MappingProxyType(_components.setdefault(kind, {}))


def components_of(module: str) -> list[Any]:
    """Return the registered components that a module defines."""
    known = (each for kind in _components.values() for each in kind.values())
    return [each for each in known if each.__module__ == module]


def find(kind: str, name: str, key: str = "") -> Any:
    """Return the component of `kind` called `name`. `key` is the config key to name in an error.
    Raises ConfigError if there is none; the message suggests the nearest name and how to load a
    plugin."""
    known = components(kind)
    if name not in known:
        raise ConfigError(
            f"{key or kind}={name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}; "
            f"to use your own, set plugins=[<its package>]"
        )
    return known[name]


FEATURE = ":"  # of a metric's name: gauc:user measures within the values of the feature `user`


def find_metric(name: str, key: str) -> Any:
    """Return the class of a metric by its name, which may end in a feature. Raises ConfigError as find."""
    return find("metric", name.partition(FEATURE)[0], key)


def load_plugins(packages: Iterable[str]) -> None:
    """Import packages with their modules, or single modules. Their components are then registered.
    Raises ConfigError if one of them cannot be imported."""
    for name in packages:
        if name in _loaded:
            continue
        if "/" in name or name.startswith(".") or name.endswith(".py"):
            folder, _, module = name.removesuffix(".py").rpartition("/")
            raise ConfigError(
                f"plugins: {name!r} is a path, not the name of a module: PYTHONPATH={folder or '.'}, plugins=[{module.lstrip('.')}]"
            )
        try:
            _import_all(name)
        except ImportError as error:
            raise ConfigError(
                f"plugins: cannot import {name!r} ({error}); install it, or put its folder into PYTHONPATH"
            ) from error
        _loaded.add(name)


def missing_plugins(packages: Iterable[str]) -> list[str]:
    """Return the packages that are not imported. They are looked up by name, because a saved job
    must not import anything."""
    _load_entry_points()
    return [name for name in packages if name not in sys.modules]


@lru_cache(maxsize=1)
def _extras() -> list[ModuleType]:
    """Return the installed extras. This imports the packages but none of their modules."""
    return [importlib.import_module(f"pipeline.extras.{each.name}") for each in pkgutil.iter_modules([str(EXTRAS)])]


def from_extra(name: str, key: str) -> Any:
    """Return the function that an extra offers to the core as `name`. `key` is the setting that
    needs it. Raises ConfigError if no installed extra has it."""
    found = if_installed(name)
    if found is None:
        raise ConfigError(f"{key} needs an extra that is not installed: nothing in pipeline/extras offers {name!r}")
    return found


def if_installed(name: str) -> Any:
    """Return the function that an extra offers to the core as `name`, None if no installed extra has it."""
    found = next((place for extra in _extras() if (place := getattr(extra, "FUNCTIONS", {}).get(name))), None)
    if found is None:
        return None
    module, _, function = found.partition(":")
    return attrgetter(function)(importlib.import_module(module))


def _load(package: str | None) -> None:
    """Import all modules of a package of the core, once."""
    if package is None or package in _loaded:
        return
    _loaded.add(package)  # before the import, because its modules may look components up
    _import_all(package)


def _import_all(name: str) -> None:
    """Import a module, or a package with its modules, except subpackages and names that begin with
    an underscore."""
    for module in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", [])):
        if not module.ispkg and not module.name.startswith("_"):
            importlib.import_module(f"{name}.{module.name}")


def _load_entry_points() -> None:
    if ENTRY_POINTS not in _loaded:
        _loaded.add(ENTRY_POINTS)
        for entry in entry_points(group=ENTRY_POINTS):
            entry.load()


def _origin(component: Any) -> str:
    return f"{component.__module__}.{component.__qualname__}"


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
