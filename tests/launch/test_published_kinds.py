"""Manifests hold against what the projects of other kinds publish themselves: models of their APIs, and their definitions.

KUBE_CRDS=/folder pytest -m campaign tests/launch/test_published_kinds.py

The packages kubeflow-trainer-api and kubeflow-training hold models that are generated from the APIs. KUBE_CRDS is a folder with
CustomResourceDefinitions as their projects publish them, JobSet's, Volcano's, Kubeflow's, KubeRay's and the Prometheus Operator's.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launch.render import render
from tests.launch.api_server import left_out
from tests.launch.manifests import OTHERS, Manifest, read
from tests.launch.test_kubernetes import FULL, PLACE
from tests.launch.test_ray import JOB

TRAIN = ["--no-check-data", "--", "experiment=mlperf_dlrmv2", "data.path=/data"]
KINDS = ("jobset", "trainjob", "pytorchjob", "volcano", "rayjob", "servicemonitor")
PLAIN = ["-j", "2x8", "--gpu", "8", "--max-retries", "2"]


@cache
def _rendered(kind: str) -> tuple[Manifest, ...]:
    """Of one kind, with few options and with all."""
    if kind == "rayjob":
        texts = [
            render("kubernetes", ["prepare", *PLACE, "-j", j, "--max-retries", "2", "--", *JOB]) for j in ("1x1", "3x1")
        ]
    elif kind == "servicemonitor":
        served = [
            "serve",
            *PLACE,
            "--monitor",
            "--scrape-s",
            "5",
            "--label",
            "release=prom",
            "--",
            "artifact=/registry/clicks",
        ]
        texts = [render("serving", served)]
    else:
        texts = [render("kubernetes", ["train", *PLACE, *flags, "--kind", kind, *TRAIN]) for flags in (PLAIN, FULL)]
    return tuple(each for text in texts for each in read(text) if (_group(each), each["kind"]) in OTHERS)


def _group(manifest: Manifest) -> str:
    return str(manifest["apiVersion"].partition("/")[0])


TRAINER = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_models_of_kubeflow_trainer_know_every_key(kind: str) -> None:
    """A key that they do not know would not come back."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    for manifest in _rendered(kind):
        model = getattr(models, TRAINER[manifest["kind"]])
        assert left_out(manifest, model.from_dict(manifest).to_dict()) == []
        manifest = {**manifest, "spec": {**manifest["spec"], "suspended": True}}
        assert left_out(manifest, model.from_dict(manifest).to_dict()) == [".spec.suspended"]
    assert {each["kind"] for each in _rendered(kind)} == (
        {"JobSet"} if kind == "jobset" else {"TrainJob", "TrainingRuntime"}
    )


def test_the_models_of_the_training_operator_know_every_key() -> None:
    pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is not installed")
    for manifest in _rendered("pytorchjob"):
        assert list(_unknown(manifest, "KubeflowOrgV1PyTorchJob")) == []
        manifest = {**manifest, "spec": {**manifest["spec"], "runPolicy": {"backofLimit": 1}}}
        assert list(_unknown(manifest, "KubeflowOrgV1PyTorchJob")) == [".spec.runPolicy.backofLimit"]


def _unknown(value: Any, type_name: str, path: str = "") -> Iterator[str]:
    """Paths of keys that the class does not have; Kubernetes' own classes are left to its schemas."""
    inner = (
        type_name[type_name.find("(") + 1 : -1] if type_name.startswith(("list[", "dict(", "list(", "dict[")) else ""
    )
    if type_name.startswith("dict"):
        for key, each in value.items():
            yield from _unknown(each, inner.partition(",")[2].strip(), f"{path}.{key}")
    elif type_name.startswith("KubeflowOrg"):
        made = getattr(importlib.import_module("kubeflow.training.models"), type_name)
        types = {made.attribute_map[name]: each for name, each in made.openapi_types.items()}
        for key, each in value.items():
            if key in types:
                yield from _unknown(each, types[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"


def _definitions() -> dict[tuple[str, str, str], dict[str, Any]]:
    """(group, kind, version) -> the published schema."""
    folder = os.environ.get("KUBE_CRDS")
    if not folder:
        pytest.skip("KUBE_CRDS names no folder with published CustomResourceDefinitions")
    found = {}
    for file in sorted(Path(folder).glob("*.yaml")):
        spec = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            found[spec["group"], spec["names"]["kind"], version["name"]] = version["schema"]["openAPIV3Schema"]
    return found


def _strict(schema: Any) -> Any:
    """As JSON schema that lets no unknown key through, as a server does with fieldValidation=Strict. Rules in CEL are left out."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {
        key: value for key, value in schema.items() if not key.startswith("x-") and key not in ("description", "format")
    }
    for key in ("properties", "additionalProperties", "items"):
        if isinstance(kept.get(key), dict):
            kept[key] = (
                {name: _strict(each) for name, each in kept[key].items()} if key == "properties" else _strict(kept[key])
            )
    if "properties" in kept and not schema.get("x-kubernetes-preserve-unknown-fields"):
        kept.setdefault("additionalProperties", False)
    if schema.get("nullable"):
        kept["type"] = [kept["type"], "null"]
    return kept


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_published_definitions_take_what_is_rendered_and_refuse_what_is_misspelt(kind: str) -> None:
    definitions = _definitions()
    assert _rendered(kind)
    for manifest in _rendered(kind):
        schema = definitions.get((_group(manifest), manifest["kind"], manifest["apiVersion"].partition("/")[2]))
        if schema is None:
            pytest.skip(f"KUBE_CRDS has no definition of {manifest['apiVersion']} {manifest['kind']}")
        strict = {**_strict(schema)}
        strict["properties"]["metadata"] = {"type": "object"}
        validator = jsonschema.Draft202012Validator(strict)
        errors = [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(manifest)]
        assert errors == []
        assert not validator.is_valid({**manifest, "spec": {**manifest["spec"], "suspendd": True}})
        print(f"{manifest['apiVersion']} {manifest['kind']}: the published definition takes it")


@pytest.mark.campaign
def test_our_own_schemas_have_no_key_that_the_published_ones_do_not_have() -> None:
    definitions, seen = _definitions(), 0
    for (group, kind), own in OTHERS.items():
        version = own["properties"]["apiVersion"]["enum"][0].partition("/")[2]
        if (schema := definitions.get((group, kind, version))) is not None:
            seen += 1
            assert list(_beyond(own["properties"]["spec"], schema["properties"]["spec"], kind)) == []
    assert seen, "KUBE_CRDS has none of the kinds"


def _beyond(own: Any, published: Any, path: str) -> Iterator[str]:
    for name, each in own.get("properties", {}).items():
        if isinstance(values := published.get("additionalProperties"), dict):
            yield from _beyond(each, values, f"{path}.{name}")
        elif name in published.get("properties", {}):
            yield from _beyond(each, published["properties"][name], f"{path}.{name}")
        elif not published.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{name}"
    if isinstance(own.get("items"), dict) and "items" in published:
        yield from _beyond(own["items"], published["items"], f"{path}[]")
