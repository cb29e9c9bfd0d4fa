"""Find verbs: the files of pipeline/cli, of pipeline/extras/NAME/cli, and the registry of plugins.

A file is a verb if it defines `main`. Its name is the verb's name. The list of verbs shows the first sentence of its
docstring, up to a colon and two spaces. An extra adds a verb with the file pipeline/extras/NAME/cli/VERB.py: the core
finds the file by its place, imports it only to run it, and works without the folder. An installed package or a plugin
registers its verbs instead (kind "verb" of pipeline/config/registry.py). Both make their `main` with pipeline/cli/verb.py.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from pipeline.config.registry import components, load_plugins
from pipeline.runtime.errors import ConfigError, did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
DEFINES_MAIN = re.compile(r"^(main = |def main\()", re.MULTILINE)
FIRST_SENTENCE = re.compile(r'"*(.*?)(:  |"*\n|"*$)')

# Verb -> the extra that has it, so that the error names the extra if it is not installed.
VERBS_OF_EXTRAS = {
    "calibrate": "calibration",
    "canary": "canary",
    "card": "model_card",
    "check_nodes": "nodes",
    "checkpoints": "checkpoints",
    "completion": "completion",
    "diagnose": "diagnose",
    "doctor": "doctor",
    "erase": "erase",
    "explain": "explain_versions",
    "init": "project",
    "join_labels": "serving_log",
    "precompile": "precompile",
    "publish": "publish",
    "rehearse": "shadow",
    "report": "runs",
    "runs": "runs",
    "select_features": "select_features",
    "semantic_ids": "semantic_ids",
    "skew": "serving_log",
    "sweep": "sweep",
}


def find_verb(name: str, plugins: list[str]) -> Callable[[], None]:
    """Import the verb `name` and return its main. Plugins are imported only for a verb of a plugin.
    Raises ConfigError if there is no such verb, or a plugin cannot be imported."""
    if file := _verb_files().get(name):
        module = ".".join(["pipeline", *file.relative_to(PACKAGE).with_suffix("").parts])
        return importlib.import_module(module).main
    known = list_verbs(plugins)
    if name not in known and name in VERBS_OF_EXTRAS:
        raise ConfigError(f"the verb {name!r} is in pipeline/extras/{VERBS_OF_EXTRAS[name]}, which is not installed")
    if name not in known:
        listed = ", ".join(known)
        raise ConfigError(f"there is no verb {name!r}{did_you_mean(name, known)}; there are {listed}")
    return components("verb")[name]


def list_verbs(plugins: list[str]) -> dict[str, str]:
    """Return name -> description, sorted, of our verbs and the verbs of extras, packages and
    `plugins`."""
    found = {name: _first_sentence(file.read_text()) for name, file in _verb_files().items()}
    load_plugins(plugins)
    for name, main in components("verb").items():
        found.setdefault(name, _first_sentence(main.verb.doc))
    return dict(sorted(found.items()))


def import_verbs() -> dict[str, str]:
    """Import the verbs of this package and its extras, so that the registry contains them. Return
    list_verbs([])."""
    for name in _verb_files():
        find_verb(name, [])
    return list_verbs([])


def _verb_files() -> dict[str, Path]:
    files = [*sorted(PACKAGE.glob("cli/*.py")), *sorted(PACKAGE.glob("extras/*/cli/*.py"))]
    return {file.stem: file for file in files if DEFINES_MAIN.search(file.read_text())}


def _first_sentence(doc: str) -> str:
    match = FIRST_SENTENCE.match(doc.strip())
    assert match is not None
    return match[1].strip()
