"""Say in one line what is wrong inside the YAML files of conf/, or of a user's own, where Hydra says it in many."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from hydra.errors import MissingConfigException

from pipeline.config.registry import components
from pipeline.runtime.errors import did_you_mean


def explain_composition(error: Exception, job_type: type, groups: dict[str, list[str]]) -> str:
    """One line for what is wrong inside the YAML files."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        file = str(error).splitlines()[0].split(": Could not find")[0]
        options = groups.get(group, [])
        return f"{file}: there is no {error.missing_cfg_file!r}{did_you_mean(option, options)}"
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if match := re.search(r"Key '(\w+)' not in '(\w+)'", text):
        says = text.split(" full_key:")[0]
        if match[1] == "experiment":
            return (
                "experiment=<option>: the first line of its file is not `# @package _global_`, so its keys are put under "
                "`experiment`, which a job does not have; write that line"
            )
        if says.startswith("In 'experiment/") and match[2] in [kind.__name__ for kind in components("model").values()]:
            return f"{says}: that experiment sets the sizes of another model; choose an experiment for this one"
        return f"{says}{_near_field_of(match[1], match[2], job_type)}"
    if match := re.search(r"(.*)Key (\S+) \((?:bool|int|float)\) is incompatible with \(str\)", text):
        where = match[1].replace("KeyValidationError raised while composing config: ", "")
        return f"{where}a name is text: write it in quotes, '{match[2].lower()}' or as the data spells it"
    if match := re.search(r"Could not override '([\w/]+)'", text):
        return f"{text}{did_you_mean(match[1], groups)}"
    return re.split(r" (?:full_key:|reference_type=|object_type=)", text)[0]


def _near_field_of(name: str, class_name: str, job_type: type) -> str:
    for kind in [*config_classes(job_type), *components("model").values()]:
        if kind.__name__ == class_name:
            return did_you_mean(name, [field.name for field in dataclasses.fields(kind)])
    return ""


def config_classes(kind: Any, above: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Every dataclass that is reachable from a type; one may hold another of its own."""
    if kind in above:
        return
    if dataclasses.is_dataclass(kind):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from config_classes(hint, (*above, kind))
    for part in get_args(kind):
        yield from config_classes(part, above)
