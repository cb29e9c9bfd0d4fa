"""Find components by kind and name: the kinds of BUILT_IN, those that only extras have, and verbs.

A file registers what it defines, and nothing else has to know of it:

    @register("model", "my_model")
    @dataclass
    class MyModelConfig(ModelConfig): ...

Components come from four places: the packages of the core (BUILT_IN), the extras in pipeline/extras, installed packages that
name theirs in the entry-point group `torchrec_pipeline.components`, and `plugins=[my_package]` on the command line. The
`__init__.py` of an extra imports nothing. COMPONENTS = {kind: module} says which of its modules register components, and
FUNCTIONS = {name: "module:function"} which functions it gives to the core (from_extra).
A saved job names a kind, never an import path: nothing that a checkpoint says is imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from pipeline.runtime.errors import ConfigError, did_you_mean

ENTRY_POINTS = "torchrec_pipeline.components"
EXTRAS = Path(__file__).resolve().parents[1] / "extras"
# Kind -> the package, or module, of the core that registers components of it; None: only extras and plugins do.
BUILT_IN: dict[str, str | None] = {
    "generator": None,
    "model": "pipeline.models",
    "task": "pipeline.models.tasks",
    "metric": "pipeline.models.metrics",
    "format": "pipeline.data.raw.formats",
    "optimizer": "pipeline.config.optimizers",
    "compression": "pipeline.embeddings.compression",
    "hook": "pipeline.training.hooks",
    "tracker": None,
    "index": None,
    "transform": None,
    "device": "pipeline.devices",
    "stream": None,
}

T = TypeVar("T")
_components: dict[str, dict[str, Any]] = {}
_loaded: set[str] = set()


def register(kind: str, name: str) -> Callable[[T], T]:
    """A decorator that makes a class or function known as `name` among the components of `kind`.

    Raises:
        ConfigError: another component has that name, or nothing looks for components of that kind.
    """
    if kind not in (kinds := [*BUILT_IN, "verb"]):
        raise ConfigError(f"register({kind!r}, {name!r}): kinds are {', '.join(kinds)}{did_you_mean(kind, kinds)}")

    def remember(component: T) -> T:
        known = _components.setdefault(kind, {})
        if kind == "model" and getattr(component, "kind", None) != name:
            raise ConfigError(
                f'{_origin(component)} is registered as model {name!r}: give it the field `kind: str = "{name}"`'
            )
        if name in known and (old := _origin(known[name])) != (new := _origin(component)):
            if new.startswith(
                (f"{BUILT_IN.get(kind)}.", "pipeline.extras.")
            ):  # a plugin may be imported before this release's own
                old, new = new, old
            raise ConfigError(f"{new} registers {kind} {name!r}, which is {old}; give it another name")
        known[name] = component
        return component

    return remember


def components(kind: str) -> Mapping[str, Any]:
    """Name -> component, of this release, of installed packages and of the plugins that were loaded."""
    _load(BUILT_IN.get(kind))
    for extra in _extras():
        _load(getattr(extra, "COMPONENTS", {}).get(kind))
    _load_entry_points()
    return MappingProxyType(_components.setdefault(kind, {}))


def find(kind: str, name: str, key: str = "") -> Any:
    """The component of `kind` called `name`; `key` is the config key that names it, for the error.

    Raises:
        ConfigError: there is none, with the nearest name and how a plugin is given.
    """
    known = components(kind)
    if name not in known:
        raise ConfigError(
            f"{key or kind}={name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}; "
            f"one of your own is given by plugins=[<its package>]"
        )
    return known[name]


def load_plugins(packages: Iterable[str]) -> None:
    """Import packages, with the modules that lie in them, or single modules; what they register is then known.

    Raises:
        ConfigError: one of them cannot be imported.
    """
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
    """Those of `packages` that nobody has imported: looked up by name, for a saved job must not import what it names."""
    _load_entry_points()
    return [name for name in packages if name not in sys.modules]


@lru_cache(maxsize=1)
def _extras() -> list[ModuleType]:
    """The extras that are installed; importing one imports none of its modules."""
    return [importlib.import_module(f"pipeline.extras.{each.name}") for each in pkgutil.iter_modules([str(EXTRAS)])]


def from_extra(name: str, key: str) -> Any:
    """The function that an extra gives to the core as `name`; `key` is the setting that asks for it, for the error.

    Raises:
        ConfigError: no extra that is installed has it.
    """
    found = if_installed(name)
    if found is None:
        raise ConfigError(f"{key} needs an extra that is not installed: nothing in pipeline/extras gives {name!r}")
    return found


def if_installed(name: str) -> Any:
    """Return the function that an extra gives to the core as `name`, or None if no installed extra gives it."""
    found = next((place for extra in _extras() if (place := getattr(extra, "FUNCTIONS", {}).get(name))), None)
    if found is None:
        return None
    module, _, function = found.partition(":")
    return attrgetter(function)(importlib.import_module(module))


def _load(package: str | None) -> None:
    """Import all modules of a package of this release, once."""
    if package is None or package in _loaded:
        return
    _loaded.add(package)  # first, for its modules may look components up
    _import_all(package)


def _import_all(name: str) -> None:
    """A module, or a package and the modules in it; not those of its subpackages, nor what begins with an underscore."""
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
