"""Write the reference of every key of every verb, a page a config group:  python docs/write_reference.py"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pipeline
from pipeline.cli.compose import config_folders
from pipeline.cli.reference import Key, keys_of, model_keys
from pipeline.cli.verbs import import_verbs
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.registry import components

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
WRITTEN = "<!-- written by python docs/write_reference.py from the schemas and the comments of conf/ -->"
INDEX = f"""# Reference

{WRITTEN}

- [Commands](commands.md): every command
- [Python](python.md): the commands as functions, for notebooks and scripts
- [Features](features.md): what you can do, with a page and a test for each feature
- [Troubleshooting](troubleshooting.md): messages with their cause and fix
- [Glossary](glossary.md)

The pages below list every key with its type, its default and its meaning. With `-h KEY` a command prints the same
for one key or section: `python -m pipeline train -h trainer.seed`. The options of a group can have
different defaults for a key. If you choose no option, the command uses one of them. The pages show the
defaults of this option.
`--cfg` prints the complete config of a command line. `<name>` stands for a table, a feature or a column, or for a pattern such as `cat_*`.
[Config](../do/config.md) explains how to set options and values.
"""


def render() -> dict[str, str]:
    """Return the text of each page by its path below docs/reference/."""
    import_verbs()
    conf = config_folders()
    trained = keys_of(TrainJob, "train", conf)
    groups: dict[str, list[Key]] = {"job": [key for key in trained if "." not in key.name]}
    for key in trained:
        if "." in key.name and not key.name.startswith("model."):
            groups.setdefault(key.name.partition(".")[0], []).append(key)
    known = {key.name for key in trained}
    of_verbs: dict[str, list[Key]] = {}
    # Sorted by name, because the order in which verbs were imported must not change the pages.
    for job, verb in sorted(CONFIG_NAMES.items(), key=lambda pair: pair[1]):
        if job not in (TrainJob, PlanJob) and _is_ours(job):
            own = [key for key in keys_of(job, verb, conf) if key.name not in known or "." not in key.name]
            of_verbs[verb] = [key for key in own if not key.name.startswith("model.")]
    models = {f"model={kind}": keys for kind, keys in model_keys(conf).items() if _is_ours(components("model")[kind])}
    pages = {f"keys/{name}.md": _page(TITLES.get(name, name), keys) for name, keys in groups.items()}
    pages["keys/model.md"] = _page("model", []) + "".join(
        f"\n## {name}\n\n{_table(keys)}" for name, keys in models.items()
    )
    pages |= {f"verbs/{name}.md": _page(name, keys) for name, keys in of_verbs.items() if keys}
    return {"README.md": INDEX + _lists(list(pages)), PYTHON: _with_names((FOLDER / PYTHON).read_text())} | pages


PYTHON, NAMES = "python.md", "<!-- names: written by python docs/write_reference.py -->\n"


def _with_names(page: str) -> str:
    """Return the page of the API with the signatures of its names."""
    listed = "\n".join(line for name in pipeline.__all__ for line in signatures(name))
    return f"{page.partition(NAMES)[0]}{NAMES}\n```text\n{listed}\n```\n"


def signatures(name: str) -> list[str]:
    """Return the signature of a public function, or of a class with its methods and properties."""
    found = getattr(pipeline, name)
    if not inspect.isclass(found):
        return [f"{name}{_signature(found)}"]
    own = [(member, value) for member, value in vars(found).items() if not member.startswith("_")]
    if not found.__module__.startswith("pipeline.cli.api"):
        return [name]
    lines = [f"{name}{_signature(found)}".removesuffix(" -> None")]
    for member, value in own:
        function = getattr(value, "fget", None) or getattr(value, "func", None)
        if function is not None:
            lines.append(f"    {name}.{member} -> {function.__annotations__['return']}")
        elif inspect.isfunction(value):
            lines.append(f"    {name}.{member}{_signature(value)}".replace("(self, ", "(").replace("(self)", "()"))
    return lines


def _signature(function: Any) -> str:
    """Without the quotes of annotations, which Python has not evaluated."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))


TITLES = {"job": "The job of train and plan"}


def _page(title: str, keys: list[Key]) -> str:
    return f"# {title}\n\n{WRITTEN}\n" + (f"\n{_table(keys)}" if keys else "")


def _lists(paths: list[str]) -> str:
    """The links of the index: first groups of keys, then verbs."""
    heads = {"keys/": "Groups of a training job", "verbs/": "Keys of the other commands"}
    lines = []
    for folder, head in heads.items():
        mine = sorted(path for path in paths if path.startswith(folder))
        links = ", ".join(f"[{Path(path).stem}]({path})" for path in mine)
        lines.append(f"\n## {head}\n\n{links}\n")
    return "".join(lines)


def write() -> None:
    pages = render()
    for folder in ("keys", "verbs"):
        (FOLDER / folder).mkdir(exist_ok=True)
        for file in (FOLDER / folder).glob("*.md"):
            if f"{folder}/{file.name}" not in pages:
                file.unlink()
    for path, text in pages.items():
        (FOLDER / path).write_text(text)


def _is_ours(kind: type) -> bool:
    """And no plugin's, which the process may have loaded."""
    return kind.__module__.startswith("pipeline.")


def _table(keys: list[Key]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = f"`{_cell(key.default)}`" if key.default not in ("", "[") else ""
        lines.append(f"| `{key.name}` | {key.kind} | {default} | {_cell(key.meaning)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    write()
