"""conf/ shows every knob of every job with its default value, and nothing that is no knob."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from pipeline.cli.compose import config_folders
from pipeline.cli.verbs import import_verbs
from pipeline.config.columns import LabelConfig, NegativeSamplingConfig, SequenceConfig
from pipeline.config.data import BaseVocabularyConfig, BucketsConfig
from pipeline.config.generated import SyntheticConfig
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import components
from pipeline.config.tables import CompressionConfig, ConstraintConfig, InitConfig, TableConfig, TiersConfig
from pipeline.config.training import WarmStartConfig
from pipeline.embeddings.tables import LAST_RESORT
from pipeline.extras.sweep.config import KnobConfig

CONF = config_folders()
import_verbs()  # each registers its job
JOBS = {name: job for job, name in CONFIG_NAMES.items() if job.__module__.startswith("pipeline.")}
# What a verb's YAML gives in place of the dataclass's default.
OTHERWISE = {
    "name": {name: "${data.name}_${model.kind}" for name, job in JOBS.items() if issubclass(job, TrainJob)},
    "world_size": "${oc.decode:${oc.env:WORLD_SIZE,1}}",
    "planner.gap_tolerance": {"plan": 0.0, "rehearse": 0.0},
    "beside": "history",  # of the example of a sequence
    "low": 0.005,  # of the example of a knob, as are the two that follow
    "high": 0.2,
    "log": {"": True},
    "hardware.ddr_gb_per_s": 20.0,
    "hardware.inter_host_gb_per_s": 12.5,
}
NOT_IN_YAML = {"plugins"}  # must be given on the command line, for they are loaded before any YAML is read
# Sections that are absent by default, and the file and keys that show them.
OPTIONAL: list[tuple[type, str, tuple[str, ...]]] = [
    (WarmStartConfig, "warm_start/from_run", ()),
    (BaseVocabularyConfig, "vocabularies/extend", ()),
    (SyntheticConfig, "data/quickstart", ("synthetic",)),
    (SequenceConfig, "data/histories", ("columns", "sequence", "history_dwell")),
    (LabelConfig, "data/conversions", ("columns", "labels", "click")),
    (NegativeSamplingConfig, "data/conversions_sampled", ("negative_sampling",)),
    (BucketsConfig, "data/open_bandit_buckets", ("buckets", "user-item_affinity_*")),
    (TableConfig, "tables/all_settings", ("default",)),
    (CompressionConfig, "tables/all_settings", ("default", "compression")),
    (TiersConfig, "tables/all_settings", ("default", "tiers")),
    (KnobConfig, "sweep/lr_dim", ("params", "optimizer.sparse.lr")),
]


def load(name: str) -> dict[str, Any]:
    """A YAML file's values with those of its defaults list, without any schema."""
    file = next(path for folder in CONF if (path := folder / f"{name}.yaml").is_file())
    own = yaml.safe_load(file.read_text()) or {}
    values: dict[str, Any] = {}
    for entry in own.pop("defaults", []):
        if isinstance(entry, dict):
            for group, option in entry.items():
                if group not in ("experiment", "early_stop", "debug"):  # they set values of other groups
                    merge(values, {group: load(f"{group}/{option}") if option else None})
        elif entry not in ("_self_", "job") and not entry.endswith("_schema"):
            folder = name.rpartition("/")[0]
            merge(values, load(f"{folder}/{entry}" if folder else entry))
    return merge(values, own)


def merge(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            merge(values[key], value)
        else:
            values[key] = value
    return values


def differences(kind: type, shown: dict[str, Any], verb: str = "", key: str = "") -> list[str]:
    """What a dataclass has and `shown` has not, or otherwise, or the reverse."""
    hints, found = get_type_hints(kind), []
    fields = {field.name: field for field in dataclasses.fields(kind)}
    found += [f"{key}{name} is no field of {kind.__name__}" for name in shown.keys() - fields.keys()]
    for name, field in fields.items():
        full = f"{key}{name}"
        if name in NOT_IN_YAML:
            continue
        if name not in shown:
            found.append(f"{full} is not shown")
            continue
        if dataclasses.is_dataclass(hints[name]) and isinstance(shown[name], dict):
            config = components("model")[shown[name]["kind"]] if name == "model" else hints[name]
            found += differences(config, shown[name], verb, f"{full}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        other = OTHERWISE.get(full, default)
        other = other.get(verb, default) if isinstance(other, dict) and other else other
        if name != "tables" and shown[name] != other:
            found.append(f"{full}={shown[name]!r}, and the dataclass has {other!r}")
    return found


def config_classes(kind: Any, above: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield every dataclass that is reachable from a type."""
    if kind in above:
        return
    if dataclasses.is_dataclass(kind):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from config_classes(hint, (*above, kind))
    for part in get_args(kind):
        yield from config_classes(part, above)


@pytest.mark.parametrize("verb", JOBS)
def test_a_verbs_yaml_shows_every_knob_of_its_job_with_its_default(verb: str) -> None:
    assert differences(JOBS[verb], load(verb), verb) == []


@pytest.mark.parametrize(
    "kind", [kind for kind, config in components("model").items() if config.__module__.startswith("pipeline.")]
)
def test_a_models_yaml_shows_every_knob_of_the_model(kind: str) -> None:
    assert differences(components("model")[kind], load(f"model/{kind}")) == []


@pytest.mark.parametrize("kind", components("generator"))
def test_a_generators_data_set_shows_every_knob_of_the_generator(kind: str) -> None:
    shown = load(f"data/{kind}")["generator"]
    assert shown.pop("kind") == kind
    assert differences(components("generator")[kind], shown) == []


@pytest.mark.parametrize(("kind", "file", "keys"), OPTIONAL, ids=[kind.__name__ for kind, _, _ in OPTIONAL])
def test_sections_that_are_absent_by_default_are_shown_by_an_option(
    kind: type, file: str, keys: tuple[str, ...]
) -> None:
    shown = load(file)
    for key in keys:
        shown = shown[key]
    if kind is WarmStartConfig:
        shown["run"] = None if shown["run"] == "???" else shown["run"]  # its option asks for it
    if kind is TableConfig:
        shown = {
            name: getattr(TableConfig(), name) if name in dataclasses.asdict(LAST_RESORT) else value
            for name, value in shown.items()
        }
    assert differences(kind, shown) == []


def test_tables_default_shows_what_a_table_gets_that_says_nothing() -> None:
    shown = load("tables/from_data")["default"]
    given = {name: value for name, value in dataclasses.asdict(LAST_RESORT).items() if value not in (None, [])}
    assert shown == given
    assert differences(InitConfig, shown["init"]) == differences(ConstraintConfig, shown["sharding"]) == []


def test_every_section_of_every_job_is_shown_somewhere() -> None:
    sections = {section for job in JOBS.values() for section in config_classes(job)}
    shown = {kind for kind, _, _ in OPTIONAL} | {InitConfig, ConstraintConfig} | set(JOBS.values())
    for job in JOBS.values():
        for section in config_classes(job):
            shown |= {hint for hint in get_type_hints(section).values() if dataclasses.is_dataclass(hint)}
    assert sections - shown == set()


def test_every_optional_section_is_among_those_that_an_option_shows() -> None:
    optional = {
        part
        for job in JOBS.values()
        for section in config_classes(job)
        for hint in get_type_hints(section).values()
        if NoneType in get_args(hint)
        for part in get_args(hint)
        if dataclasses.is_dataclass(part)
    }
    assert optional - {InitConfig, ConstraintConfig} <= {kind for kind, _, _ in OPTIONAL}
