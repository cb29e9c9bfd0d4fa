"""An artifact's card follows its schema, has the numbers that were measured, and says what is not known."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeline.config.serving import CardConfig
from pipeline.data.dataset import load_dataset
from pipeline.extras.model_card.card import json_schema, read_card
from pipeline.extras.model_card.cli.card import show_card
from pipeline.extras.model_card.config import ShowCardJob
from pipeline.extras.model_card.markdown import UNKNOWN, sections, to_markdown
from pipeline.extras.model_card.show import card_of_artifact
from pipeline.extras.model_card.write import card_of
from pipeline.extras.pages.registry_page import render_registry
from pipeline.extras.publish.publish import publish
from pipeline.retraining.ledger import Ledger
from pipeline.retraining.promotion import files_of_artifact
from pipeline.retraining.registry import Registry
from pipeline.runtime.errors import ConfigError, DamagedError
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.artifact.manifest import CARD_FILES, read_manifest
from pipeline.serving.scoring.load import find_folder
from tests.extras.publish.test_deltas import export_step, job_of


@pytest.fixture(scope="module")
def card(small_artifact: ExportSummary) -> dict[str, Any]:
    return json.loads(Path(small_artifact.artifact, "card.json").read_text())


def test_a_card_follows_its_schema_and_a_changed_one_does_not(card: dict[str, Any]) -> None:
    schema = json_schema()
    jsonschema.validate(card, schema)
    changed: list[dict[str, Any]] = [{"license": 7}, {"metrics": [{"name": "ne"}]}, {"limits": None}]
    for values in changed:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**card, **values}, schema)
        with pytest.raises(DamagedError, match="is not a model card"):
            read_card(json.dumps({**card, **values}), "card.json")
    with pytest.raises(DamagedError, match="format 9"):
        read_card(json.dumps({**card, "format_version": 9}), "card.json")


def test_a_card_has_the_numbers_of_the_certificate_and_of_the_data_set(
    card: dict[str, Any], small_artifact: ExportSummary, prepared_clicks: str
) -> None:
    found = {(each["split"], each["name"]): each for each in card["metrics"]}
    for split, parity in small_artifact.parity.items():
        for name in ("ne", "auc"):
            metric = found[split, name]
            assert metric["value"] == pytest.approx(parity[name], rel=1e-6)
            assert metric["low"] < metric["value"] < metric["high"] < metric["low"] + 0.2
        assert card["parity"][split]["max_score_difference"] == parity["max_score_difference"]
    dataset = load_dataset(prepared_clicks)
    assert card["data"]["sha256"] == dataset.fingerprint()
    assert [each["sha256"] for each in card["data"]["sources"]] == [each["sha256"] for each in dataset.sources]
    assert {split: each["rows"] for split, each in card["data"]["splits"].items()} == {
        split: each.num_rows for split, each in dataset.splits.items()
    }
    assert card["artifact"] == small_artifact.version
    assert any("share one row" in line for line in card["limits"])
    compared = next(each for each in sections(read_card(json.dumps(card), "card.json")) if "compared" in each.title)
    assert compared.rows[0][1] == f"{small_artifact.parity['train']['rows']:,.0f}"


def test_a_value_that_is_not_known_is_said_to_be_not_known(card: dict[str, Any]) -> None:
    assert [card["license"], card["contact"], card["intended_use"], card["data"]["window"]] == [None] * 4
    text = to_markdown(read_card(json.dumps(card), "card.json"))
    for name in ("licence", "contact", "intended use", "window"):
        assert f"| {name} | {UNKNOWN} |" in text
    assert "The time of the training rows is not known." in text


def test_an_artifact_of_an_earlier_release_has_a_card_of_its_manifest(small_artifact: ExportSummary) -> None:
    manifest = read_manifest(small_artifact.artifact)
    earlier = replace(manifest, files={name: each for name, each in manifest.files.items() if name not in CARD_FILES})
    assert set(manifest.files) - set(earlier.files) == set(CARD_FILES)
    assert earlier.version == manifest.version  # scores do not depend on the card
    found = card_of(earlier, CardConfig(license="a|b <i>"))
    assert (found.model, found.labels, found.data.sources, found.data.splits) == (None, None, None, None)
    text = to_markdown(found)
    assert "| licence | a\\|b &lt;i> |" in text and "The source files are not known." in text


def test_a_registrys_page_and_the_verb_show_the_card(small_artifact: ExportSummary, tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    lineage = {"window": "dt=2026-11-20", "parent": None, "metrics": {"challenger_ne": 0.81234}}
    version = registry.publish("v000001", files_of_artifact(small_artifact.artifact), lineage)
    registry.promote(version, None)
    page = render_registry(registry, Ledger(registry.path))
    assert "<h2>Model cards</h2>" in page and "<details><summary>v000001</summary>" in page
    text = show_card(ShowCardJob(artifact=registry.path))
    for part in ("v000001 (champion)", "dt=2026-11-20", "0.8123", "No delta was published"):
        assert part in page and part in text
    with pytest.raises(ConfigError, match="artifact="):
        ShowCardJob()

    stored = Path(str(version.artifact), "card.json")
    stored.write_text(stored.read_text().replace("dlrm", "dcn3"))
    assert "card.json" in registry.verify(version)[0]
    with pytest.raises(DamagedError, match=r"card\.json"):
        show_card(ShowCardJob(artifact=registry.path))
    assert "<summary>v000001</summary>" not in render_registry(registry, Ledger(registry.path))


@pytest.mark.long
def test_a_card_has_slices_and_calibration_and_says_by_which_delta_it_is_older(small_run: Path, tmp_path: Path) -> None:
    words = ["card.license=MIT", "card.slices=[cat_0,int_1*cat_0]", "card.limits=[not for prices]", "card.window=May"]
    with pytest.raises(ConfigError, match="'cat_99' is not a feature"):
        export_step(small_run, 10, tmp_path / "wrong", "card.slices=[cat_99]")
    artifact = export_step(small_run, 10, tmp_path / "artifact", "calibration.kind=platt", *words)
    card = card_of_artifact(artifact)
    assert (card.license, card.data.window, card.limits[-1]) == ("MIT", "May", "not for prices")
    assert card.since is not None and card.since.newest_delta == 0
    rows = {each.slice: each.rows for each in card.metrics if (each.name, each.split) == ("ne", "validation")}
    of_values = [count for part, count in rows.items() if part is not None and part.startswith("cat_0=")]
    assert len(of_values) > 1 and sum(of_values) == rows[None] == 300
    assert any(part is not None and part.startswith("int_1*cat_0=") for part in rows)
    eces = {each.name: each for each in card.metrics if each.split == "validation" and each.name.startswith("ece")}
    for each in eces.values():
        assert each.low is not None and each.value is not None and each.low <= each.value
    assert len(eces) == 2 and "platt" in card.calibration

    publish(job_of(artifact), find_folder)
    later = card_of_artifact(artifact)
    assert later.since is not None and (later.since.newest_delta, later.since.delta_step) == (1, 30)
    assert "older than what serves by 1 deltas" in to_markdown(later)
    jsonschema.validate(json.loads(later.to_json()), json_schema())
    shutil.rmtree(artifact)
